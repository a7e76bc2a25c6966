"""Options with which large programs compile in half the time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax
import jax.numpy as jnp

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
    """``jax.jit`` with these options; inside a program that is being traced, without them.

    Args:
        fn: the function.
        **kwargs: for ``jax.jit``.
    """
    # At the first call: a device is looked for then, not when a module is imported.
    compiled: list[Callable[..., Any]] = []
    plain = jax.jit(fn, **kwargs)

    @wraps(fn)
    def call(*args: Any, **kwargs_of_call: Any) -> Any:
        if not _is_outermost():
            return plain(*args, **kwargs_of_call)
        if not compiled:
            compiled.append(jax.jit(fn, compiler_options=_options(), **kwargs))
        return compiled[0](*args, **kwargs_of_call)

    return call


def _is_outermost() -> bool:
    """Whether nothing is being traced here: options are those of a whole program."""
    # Inside of jit a new array is a tracer.
    return not isinstance(jnp.zeros(()), jax.core.Tracer)
