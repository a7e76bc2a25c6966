"""The operators an estimate can be made with, as a fit sees them."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax

from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.estimators._operators.features import FeatureExpansion
from numpyro_kscore.kernels._gram import Gram
from numpyro_kscore.kernels._pairwise import Expansion
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._operator import Solution
from numpyro_kscore.solvers._spectrum import Solver

__all__ = ["FitOperator", "Full"]


class FitOperator:
    """An operator with the samples it belongs to; arrays over them are in kernel coordinates.

    Attributes:
        gram: the Gram operator whose factor on the kernel counts, where there is one.
    """

    gram: Gram

    @property
    def is_cached(self) -> bool:
        """Whether the weights of pairs are kept, so that halves are solved as one batch."""
        return self.gram.weights is not None

    @property
    def path(self) -> jax.Array:
        """How sums over pairs of samples are computed, a code of ``kernels/_device``: int32."""
        return self.gram.path

    @property
    def solved_rows(self) -> jax.Array | None:
        """Rows of the samples at which a solution has values; None if it has them at all."""
        return None

    def solve(
        self, solver: Solver, regularizer: Regularizer, base_scores: jax.Array | None
    ) -> Solution:
        """The estimate less its base, from base scores (n, d) or None."""
        raise NotImplementedError

    def expansion(
        self,
        points: jax.Array,
        base_scores: jax.Array | None,
        coefficients: jax.Array,
        zeta_weight: jax.Array,
    ) -> Expansion | FeatureExpansion:
        """The estimate less its base as a function: here ``a ζ' + Σ_j K(·, x_j) c_j``.

        Args:
            points: the samples, (n, d).
            base_scores: at the samples, (n, d), or None.
            coefficients: of the solution, one row a point of the expansion.
            zeta_weight: of the solution, a scalar.
        """
        if base_scores is not None:
            # a ζ' + K c with ζ' = ζ + (1/n) K s0 is a ζ + K (c + (a/n) s0).
            coefficients = coefficients + zeta_weight / points.shape[0] * base_scores
        scale = self.gram.scale
        return Expansion(points, scale * coefficients, scale * zeta_weight)

    def restricted(self, rows: slice) -> Self:
        """The operator of some of the samples, where halves of a jackknife have the same one."""
        raise NotImplementedError


@pytree
class Full(FitOperator):
    """The Gram operator ``K/n`` on all samples."""

    gram: Gram

    def solve(
        self, solver: Solver, regularizer: Regularizer, base_scores: jax.Array | None
    ) -> Solution:
        """Apply the filter to h' = ζ'(X) = ζ(X) + (K/n) s0(X): values and coefficients (d, n)."""
        target = self.gram.zeta()
        if base_scores is not None:
            # The filter multiplies errors of the target by up to g(0).
            exact = dataclasses.replace(self.gram, precision="float32")
            target = target + exact @ base_scores.T
        return solver.solve(self.gram, target, regularizer)

    def restricted(self, rows: slice) -> Full:
        return Full(self.gram.restricted(rows))
