"""How tests compile."""

import functools

import jax

# For programs that only check algebra, or run once: most of the time would be compilation. What
# the optimiser may break is checked with plain ``jax.jit``: at the first steps, on degenerate
# samples, wherever figures are made.
quick_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
