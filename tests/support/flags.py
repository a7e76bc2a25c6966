"""Flags that make XLA compile quickly: read before JAX is imported, so it imports none."""

from importlib.metadata import version

EMITTER = "xla_cpu_use_fusion_emitters"
LIBRARY_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
# XLA can emit fusions in two ways, and the newer takes four times as long to compile. jaxlib 0.11
# has no older one, and a process ends at an option in XLA_FLAGS that it does not know.
HAS_OLDER_EMITTER = tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 11)


# Into how many parts a program is split, for as many cores to compile: each has a cost of its own.
PARTS = "xla_cpu_parallel_codegen_split_count"


def older_emitter(flags):
    """XLA_FLAGS with the older emitter, unless they name one."""
    # Its fusions by YNNPACK are wrong for sums of sums, see numpyro_kscore/_util/compiling.
    return _with_option(_with_option(flags, EMITTER, "false"), LIBRARY_FUSIONS, "")


def in_one_part(flags):
    """XLA_FLAGS for a process on one core: a fifth of the time in which a program compiles."""
    return _with_option(flags, PARTS, "1")


def _with_option(flags, name, value):
    # Both are known where there is an older emitter.
    if not HAS_OLDER_EMITTER or name in flags:
        return flags
    return f"{flags} --{name}={value}".strip()
