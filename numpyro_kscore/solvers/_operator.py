"""The contract of solvers: the operator they need and the solution they return."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

__all__ = ["Operator", "Solution"]


class Operator(Protocol):
    """The operator K/n as solvers see it: products with (d, n) arrays, and bounds.

    Example::

        from numpyro_kscore import pytree
        from numpyro_kscore.regularizers import Tikhonov
        from numpyro_kscore.solvers import Krylov, Operator

        @pytree
        class Telling(Krylov):
            def solve(self, gram: Operator, h, regularizer):
                print(gram.points.shape, (gram @ h).shape)
                return super().solve(gram, h, regularizer)

        score = ScoreEstimator(regularizer=Tikhonov(0.1), solver=Telling(16)).fit(samples)
    """

    @property
    def points(self) -> jax.Array:
        """The points, (n, d); solvers use their shape only."""
        ...

    @property
    def norm_bound(self) -> jax.Array:
        """A number that no eigenvalue exceeds, which may be traced."""
        ...

    @property
    def spectral_bound(self) -> float | None:
        """A number known before the fit that no eigenvalue exceeds, or None."""
        ...

    def __matmul__(self, v: jax.Array) -> jax.Array:
        """``K v / n``, (d, n) -> (d, n)."""
        ...

    def laid_out(self, v: jax.Array) -> jax.Array:
        """Vectors (..., d, n), their columns on the devices that hold the samples."""
        ...

    def dense(self) -> jax.Array:
        """The matrix, (d n, d n), or (n, n) if the kernel is scalar; for :class:`Dense`."""
        ...


class Solution(NamedTuple):
    """A filter applied to a vector.

    Attributes:
        values: ``-g(K/n) h'``, shape (d, n): the estimate at the samples, less its base.
        coefficients: c, shape (d, n).
        zeta_weight: a, a scalar.
        steps: products with the Gram operator that were spent.
        residual: relative residual, 0 where the solver is direct.
        spectral_scale: ρ ≥ 1 by which the spectrum was divided to suit the filter.

    Example::

        from numpyro_kscore import pytree
        from numpyro_kscore.regularizers import Tikhonov
        from numpyro_kscore.solvers import Krylov, Solution

        @pytree
        class Doubting(Krylov):
            def solve(self, gram, h, regularizer) -> Solution:
                solution = super().solve(gram, h, regularizer)
                return solution._replace(residual=2 * solution.residual)

        score = ScoreEstimator(regularizer=Tikhonov(0.1), solver=Doubting(16)).fit(samples)
        score.info.steps  # 16
    """

    values: jax.Array
    coefficients: jax.Array
    zeta_weight: jax.Array
    steps: jax.Array
    residual: jax.Array
    spectral_scale: jax.Array
