"""Compilation in tests."""

import functools

import jax

from support.flags import EMITTER, HAS_OLDER_EMITTER


def _with_options(level, **options):
    options |= {
        "xla_backend_optimization_level": level,
        "xla_llvm_disable_expensive_passes": level == 0,
    }
    return functools.partial(jax.jit, compiler_options=options)


# For programs that only check algebra, or run once, in tests marked ``optimized`` too.
quick_jit = _with_options(0, **({EMITTER: False} if HAS_OLDER_EMITTER else {}))
# As the package compiles its own programs (``numpyro_kscore/_util/compiling.py``), in half the time
# of the next.
package_jit = _with_options(1, **({EMITTER: False} if HAS_OLDER_EMITTER else {}))
# As users compile: for what XLA may break, such as the first steps of an iteration, or degenerate
# samples. Elsewhere tests compile without most optimizations (``conftest.py``).
default_jit = _with_options(3, **({EMITTER: True} if HAS_OLDER_EMITTER else {}))
