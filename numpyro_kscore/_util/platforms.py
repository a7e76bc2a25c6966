"""The choice between a CPU, where loops are cheap, and other devices, where launches are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def on_cpu_or(on_cpu: Callable[..., Any], elsewhere: Callable[..., Any], *args: Any) -> Any:
    """Call ``on_cpu(*args)`` in a program for a CPU, and ``elsewhere(*args)`` in any other.

    Both map arrays to results of the same shapes. Where the CPU is JAX's default the second is not
    even traced.
    """
    if jax.default_backend() == "cpu":
        return on_cpu(*args)
    # The program may be one for the CPU of a machine with a GPU.
    return lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)
