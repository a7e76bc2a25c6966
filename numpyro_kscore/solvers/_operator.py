"""What a solver needs of an operator, and what it returns."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

__all__ = ["Operator", "Solution"]


class Operator(Protocol):
    """The operator K/n as solvers see it: products with (d, n) arrays, and bounds."""

    @property
    def points(self) -> jax.Array: ...
    @property
    def norm_bound(self) -> jax.Array: ...
    @property
    def spectral_bound(self) -> float | None: ...

    def __matmul__(self, v: jax.Array) -> jax.Array: ...

    def laid_out(self, v: jax.Array) -> jax.Array: ...

    def dense(self) -> jax.Array: ...


class Solution(NamedTuple):
    """A filter applied to a vector.

    Attributes:
        values: ``-g(K/n) h'``, shape (d, n): the estimate at the samples, less its base.
        coefficients: c, shape (d, n).
        zeta_weight: a, a scalar.
        steps: products with the Gram operator that were spent.
        residual: relative residual, 0 where the solver is direct.
        spectral_scale: ρ ≥ 1 by which the spectrum was divided to suit the filter.
    """

    values: jax.Array
    coefficients: jax.Array
    zeta_weight: jax.Array
    steps: jax.Array
    residual: jax.Array
    spectral_scale: jax.Array
