"""How XLA is told to compile quickly: read before JAX is imported, so it imports none."""

from importlib.metadata import version

EMITTER = "xla_cpu_use_fusion_emitters"
# XLA can emit fusions in two ways, and the newer takes four times as long to compile. jaxlib 0.11
# has no older one, and a process ends at an option in XLA_FLAGS that it does not know.
HAS_OLDER_EMITTER = tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 11)


def older_emitter(flags):
    """XLA_FLAGS with the older emitter, unless they name one."""
    if not HAS_OLDER_EMITTER or EMITTER in flags:
        return flags
    return f"{flags} --{EMITTER}=false".strip()
