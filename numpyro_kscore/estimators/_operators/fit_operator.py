"""The operators an estimate can be made with, as a fit sees them: of all samples, or of a subset.

The full estimate ``ŝ = s0 - g(L̂) ζ'`` costs O(n² d) a solver step. With a subset S of b samples
``ŝ = s0 - g(L̂_S) ζ'``, where ζ' is still over all samples, takes one pass over n b pairs and
O(b² d) a step (docs/theory). With ``h_S = ζ'(X_S)`` it is ``ŝ = s0 + a ζ' + Σ_(j in S) K(·, x_j)
c_j``, the algebra of the full estimate.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from numpyro_kscore._util.pytree import pytree
from numpyro_kscore._util.sharding import by_rows, divides
from numpyro_kscore.estimators._operators.features import FeatureExpansion, Rows
from numpyro_kscore.kernels import _pairwise as pairwise
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._gram import Gram, is_cached, make_gram
from numpyro_kscore.kernels._pairwise import Expansion
from numpyro_kscore.solvers._operator import ApplyFilter, Solution


class FitOperator(Protocol):
    """An operator with the samples it belongs to; arrays over them are in kernel coordinates."""

    @property
    def is_cached(self) -> bool:
        """Whether the weights of pairs are kept, so that halves are solved as one batch."""

    @property
    def path(self) -> jax.Array:
        """How sums over pairs of samples are computed, a code of ``kernels/_device``: int32."""

    @property
    def solved_rows(self) -> jax.Array | None:
        """Rows of the samples at which a solution has values; None if it has them at all."""

    def solve(self, apply: ApplyFilter, base_scores: jax.Array | None) -> Solution:
        """The estimate less its base, from base scores (n, d) or None."""

    def expansion(self, rows: Rows, solution: Solution) -> Expansion | FeatureExpansion:
        """The estimate less its base as a function, from all samples and a solution."""

    def restricted(self, rows: slice) -> Self:
        """The operator of some of the samples; not for one whose halves have other operators."""


@pytree
class Full:
    """The Gram operator ``K/n``: its estimate is ``a ζ' + Σ_j K(·, x_j) c_j`` over all samples."""

    gram: Gram

    @property
    def is_cached(self) -> bool:
        return self.gram.weights is not None

    @property
    def path(self) -> jax.Array:
        return self.gram.path

    @property
    def solved_rows(self) -> jax.Array | None:
        return None

    def expansion(self, rows: Rows, solution: Solution) -> Expansion:
        coefficients, weight = solution.coefficients, solution.zeta_weight
        if rows.base_scores is not None:
            # a ζ' + K c with ζ' = ζ + (1/n) K s0 is a ζ + K (c + (a/n) s0).
            coefficients = coefficients + weight / rows.points.shape[0] * rows.base_scores
        scale = self.gram.scale
        return Expansion(rows.points, scale * coefficients, scale * weight)

    def solve(self, apply: ApplyFilter, base_scores: jax.Array | None) -> Solution:
        """Apply the filter to h' = ζ'(X) = ζ(X) + (K/n) s0(X): values and coefficients (d, n)."""
        target = self.gram.zeta()
        if base_scores is not None:
            # The filter multiplies errors of the target by up to g(0).
            exact = dataclasses.replace(self.gram, precision="float32")
            target = target + exact @ base_scores.T
        return apply(self.gram, target)

    def restricted(self, rows: slice) -> Self:
        return dataclasses.replace(self, gram=self.gram.restricted(rows))


@pytree
class Subsampled(Full):
    """The operator ``K/b`` of samples at ``rows``, (b,), with all samples, (n, d).

    Coefficients of the expansion outside the subset come from ζ' alone.
    """

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

    def solve(self, apply: ApplyFilter, base_scores: jax.Array | None) -> Solution:
        """The estimate: values at the subset (d, b), coefficients at all samples (d, n)."""
        gram, n = self.gram, self.points.shape[0]
        coefficients = None if base_scores is None else gram.scale / n * base_scores
        expansion = Expansion(self.points, coefficients, gram.scale)
        target = field_by_rows(gram.kernel, expansion, gram.points, gram.sharding).T
        solution = apply(gram, target)
        spread = jnp.zeros_like(self.points.T).at[:, self.rows].set(solution.coefficients)
        return solution._replace(coefficients=spread)

    def restricted(self, rows: slice) -> Self:
        raise NotImplementedError


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
