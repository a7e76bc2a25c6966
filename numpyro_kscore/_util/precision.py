"""The precision of matrix products where hardware has faster, coarser ones.

GPUs and TPUs multiply float32 matrices by default with ten bits of mantissa, or seven, and add up
in float32. Distances, covariances and values away from the samples lose digits to cancellation
and are computed in full; products of a Krylov space with the Gram operator may be coarse: the error
of one is of the size of a rounding of its entries, and after the filter it was measured far below
the statistical error (docs/performance). On CPU all products are full, and float64 always is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

# JAX's names for mantissas of 23, 10 and 7 bits.
PRECISIONS = ("float32", "tensorfloat32", "bfloat16")

F = TypeVar("F", bound=Callable[..., Any])


def products_in(precision: str) -> Any:
    """A context in which matrix products are traced at a precision."""
    return jax.default_matmul_precision(precision)


def full_precision(fn: F) -> F:
    """``fn`` with all its products in float32, whatever JAX is configured to."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with products_in("float32"):
            return fn(*args, **kwargs)

    return run  # type: ignore[return-value]
