"""Estimates from very many samples: the divergence term of all, the operator of a few.

The full estimate ``ŝ = s0 - g(L̂) ζ'`` costs O(n² d) a solver step. Most of its noise comes from
ζ'; the operator L̂ only determines how ζ' is smoothed, and its average over a random subset S of b
samples is nearly as good. Here

    ŝ = s0 - g(L̂_S) ζ' ,   ζ' = ζ + L̂ s0 over all n samples,

which is one pass over n b pairs and a Krylov space of the b by b operator, O(b² d) a step. With
``h_S = ζ'(X_S)`` it is ``ŝ = s0 + a ζ' + Σ_(j in S) K(·, x_j) c_j``, the algebra of the full
estimate: the filter is that of the subset's operator, exact as a function of it. Compared with a
fit to the subset alone it has the noise of all samples (docs/performance).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from numpyro_kscore._util.pytree import pytree
from numpyro_kscore._util.sharding import by_rows, divides
from numpyro_kscore.estimators._operators.features import FeatureExpansion
from numpyro_kscore.estimators._operators.fit_operator import FitOperator
from numpyro_kscore.kernels import _pairwise as pairwise
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._gram import Gram, is_cached, make_gram
from numpyro_kscore.kernels._pairwise import Expansion
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._operator import Solution
from numpyro_kscore.solvers._spectrum import Solver

__all__ = ["Subsampled", "field_by_rows", "subsample"]


@pytree
class Subsampled(FitOperator):
    """The operator of a subset, with all samples.

    Coefficients of the expansion outside the subset come from ζ' alone.

    Attributes:
        gram: ``K/b`` on the subset.
        points: all samples, (n, d).
        rows: which of them are the subset, (b,).
    """

    gram: Gram
    points: jax.Array
    rows: jax.Array

    @property
    def path(self) -> jax.Array:
        """The path of the one pass over pairs of the subset and all samples."""
        expansion = Expansion(self.points, self.points, self.gram.scale)
        return pairwise.path(self.gram.kernel, expansion, self.gram.points)

    @property
    def solved_rows(self) -> jax.Array:
        return self.rows

    def solve(
        self, solver: Solver, regularizer: Regularizer, base_scores: jax.Array | None
    ) -> Solution:
        """The estimate: values at the subset (d, b), coefficients at all samples (d, n)."""
        gram, n = self.gram, self.points.shape[0]
        coefficients = None if base_scores is None else gram.scale / n * base_scores
        expansion = Expansion(self.points, coefficients, gram.scale)
        target = field_by_rows(gram.kernel, expansion, gram.points, gram.sharding).T
        solution = solver.solve(gram, target, regularizer)
        spread = jnp.zeros_like(self.points.T).at[:, self.rows].set(solution.coefficients)
        return solution._replace(coefficients=spread)


def field_by_rows(
    kernel: Kernel,
    expansion: Expansion | FeatureExpansion,
    y: jax.Array,
    sharding: NamedSharding | None,
) -> jax.Array:
    """The expansion at ``y``, (m, d) -> (m, d), each device at its own rows."""

    def own(rows: jax.Array, whole: Expansion | FeatureExpansion) -> jax.Array:
        return whole.field(kernel, rows)

    return by_rows(own, sharding, y, expansion)


def subsample(gram: Gram, rows: jax.Array, normalized: bool) -> Subsampled:
    """The operator of samples at ``rows``, (b,), from that of all; NaN for one out of range."""
    points = gram.points.at[rows].get(mode="fill", fill_value=jnp.nan)
    pairs = None
    if is_cached(points.shape[0]):
        pairs = pairwise.squared_distances(points, points, pairwise.cancels(points))
    sharding = gram.sharding if divides(gram.sharding, points.shape[0]) else None
    own = make_gram(
        gram.kernel,
        points,
        pairs,
        gram.scale,
        gram.dim,
        normalized,
        sharding=sharding,
        precision=gram.precision,
    )
    return Subsampled(own, gram.points, rows)
