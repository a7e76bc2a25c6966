"""One way on a CPU, another elsewhere: loops are cheap on a CPU, and launches elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

__all__ = ["on_cpu_or"]


def on_cpu_or(on_cpu: Callable[..., Any], elsewhere: Callable[..., Any], *args: Any) -> Any:
    """``on_cpu(*args)`` in a program for a CPU, and ``elsewhere(*args)`` in any other.

    Where the CPU is JAX's default the second is not even traced.

    Args:
        on_cpu: function of arrays.
        elsewhere: another one, with results of the same shapes.
        *args: what they are called with.
    """
    if jax.default_backend() == "cpu":
        return on_cpu(*args)
    # The program may be one for the CPU of a machine with a GPU.
    return lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)
