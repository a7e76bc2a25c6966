"""Options with which large programs compile in half the time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax

__all__ = ["quick_jit"]

# XLA's newer code generator for fused loops and LLVM's second level of optimization take more than
# half of the time in which a program of hundreds of small loops compiles. It is no faster for them
# (docs/performance).
OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}


@cache
def _options() -> dict[str, Any] | None:
    """The options, where there is a CPU and its compiler knows them; otherwise None."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=OPTIONS).lower().compile()
    except Exception:
        # Which error it is that an unknown option raises has changed, and so have options.
        return None
    return OPTIONS


def quick_jit(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """``jax.jit`` of a function that is called outside of compiled programs only.

    Args:
        fn: the function.
        **kwargs: for ``jax.jit``.
    """
    # At the first call: a device is looked for then, not when a module is imported.
    compiled: list[Callable[..., Any]] = []

    @wraps(fn)
    def call(*args: Any, **kwargs_of_call: Any) -> Any:
        if not compiled:
            compiled.append(jax.jit(fn, compiler_options=_options(), **kwargs))
        return compiled[0](*args, **kwargs_of_call)

    return call
