"""The contract of solvers: the operator they need and the solution they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax


class Operator(Protocol):
    """The operator K/n as solvers see it: products with (d, n) arrays, and bounds.

    Example::

        from numpyro_kscore.solvers import Operator


        def residual(gram: Operator, u, h, lam):  # of the equation that Tikhonov() solves
            return gram @ u + lam * u - h
    """

    @property
    def points(self) -> jax.Array:
        """The points, (n, d); solvers use their shape only."""

    @property
    def norm_bound(self) -> jax.Array:
        """A number that no eigenvalue exceeds, which may be traced."""

    @property
    def spectral_bound(self) -> float | None:
        """A number known before the fit that no eigenvalue exceeds, or None."""

    def __matmul__(self, v: jax.Array) -> jax.Array:
        """``K v / n``, (d, n) -> (d, n)."""

    def laid_out(self, v: jax.Array) -> jax.Array:
        """Vectors (..., d, n), their columns on the devices that hold the samples."""

    def dense(self) -> jax.Array:
        """The matrix, (d n, d n), or (n, n) if the kernel is scalar; for :class:`Dense`."""


class Solution(NamedTuple):
    """A filter applied to a vector.

    Attributes:
        values: ``-g(K/n) h'``, shape (d, n): the estimate at the samples, less its base.
        coefficients: c, shape (d, n).
        zeta_weight: a, a scalar.
        steps: steps that were taken, each a product with the Gram operator.
        residual: relative residual, 0 where the solver is direct.
        spectral_scale: ρ ≥ 1 by which the spectrum was divided to suit the filter.

    Example::

        from numpyro_kscore import pytree
        from numpyro_kscore.regularizers import Tikhonov
        from numpyro_kscore.solvers import Krylov, Solution


        @pytree
        class Checked(Krylov):  # the residual of what it returns, at one product more
            def solve(self, gram, h, regularizer) -> Solution:
                solution = super().solve(gram, h, regularizer)
                rest = gram @ solution.values + regularizer.lam * solution.values + h
                residual = jnp.linalg.norm(rest) / jnp.linalg.norm(h)
                return solution._replace(residual=residual, steps=solution.steps + 1)


        score = ScoreEstimator(regularizer=Tikhonov(0.1), solver=Checked(16)).fit(samples)
        score.info.residual < 1e-3  # True
        score.info.steps  # 17
    """

    values: jax.Array
    coefficients: jax.Array
    zeta_weight: jax.Array
    steps: jax.Array
    residual: jax.Array
    spectral_scale: jax.Array


# A solver with its regularizer: the filter of an operator applied to a vector.
ApplyFilter = Callable[[Operator, jax.Array], Solution]
