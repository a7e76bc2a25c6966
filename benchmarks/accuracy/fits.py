"""The result of a method of the comparison, and the clocks that time it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

__all__ = ["Fit", "timed"]


class Fit(NamedTuple):
    """The result of a fit.

    Attributes:
        draws: draws of the guide, as the posterior summarizes them, (n, k).
        seconds: elapsed seconds of fitting, compilation included.
        cpu_seconds: CPU seconds of the same on all cores, without other processes.
        steps: number of optimization steps.
        gradients: number of gradients of the model's density, over all particles.
        ending: why the fit stopped, if the method can tell: the cause, and the doubt after a comma.
        diagnose: computes the verdict of ``diagnose``; None where it does not apply.
    """

    draws: Array
    seconds: float
    cpu_seconds: float
    steps: int
    gradients: float
    ending: str = ""
    diagnose: Callable[[], str] | None = None


def timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result of a computation, elapsed seconds and CPU seconds."""
    start, cpu_start = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(run())
    return result, time.perf_counter() - start, time.process_time() - cpu_start
