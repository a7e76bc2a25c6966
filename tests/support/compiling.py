"""How tests compile."""

import functools

import jax


def _is_known(option, value):
    try:
        jax.jit(lambda x: x + 1).lower(0.0).compile({option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# The newer of XLA's two ways to emit fusions takes four times as long. Where there is no older one
# (jaxlib 0.12), there is no such option either.
if _is_known("xla_cpu_use_fusion_emitters", False):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

# For programs that only check algebra, or run once: most of the time would be compilation. Files of
# which that holds altogether are marked ``quick_compilation``. What the optimizer may break is
# checked with plain ``jax.jit`` in files without that mark: at the first steps, on degenerate
# samples, in fits from end to end.
quick_jit = functools.partial(jax.jit, compiler_options=OPTIONS)
