"""Estimates in the span of random features, for any regularizer and solver.

With J(x) the fields of the features at x, one a row, an estimate is ``ŝ = s0 + J(·)ᵀ w``. The
kernel of the features is ``J(x)ᵀ J(y)``, so that

    L̂ J(·)ᵀ w = J(·)ᵀ A w ,  ζ' = J(·)ᵀ h ,  A = E J Jᵀ ,  h = E [div J + J s0]

with expectations over the samples, and ``w = -g(A) h`` (docs/theory). With Tikhonov's filter it is
the finite kernel exponential family of Strathmann et al. (2015).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import random

from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._operators.features import (
    FeatureExpansion,
    FeatureMoments,
    Features,
    Rows,
    add_rows,
    in_tiles,
    no_moments,
)
from numpyro_kscore.estimators._operators.operator_options import RandomFeatures
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._device import MATRIX
from numpyro_kscore.kernels._spectral import draw_frequencies
from numpyro_kscore.solvers._operator import ApplyFilter, Solution


@pytree
class MatrixOperator:
    """A matrix A, (m, m), as :class:`~numpyro_kscore.solvers.Operator`: vectors are (1, m)."""

    matrix: jax.Array
    norm_bound: jax.Array
    spectral_bound: float | None = static(default=None)

    @property
    def points(self) -> jax.Array:
        # An array of one column: solvers ask for its shape.
        return self.matrix[:, :1]

    def __matmul__(self, v: jax.Array) -> jax.Array:
        """``A v``, (1, m) -> (1, m). Cost: O(m²)."""
        return v @ self.matrix

    def laid_out(self, v: jax.Array) -> jax.Array:
        return v

    def dense(self) -> jax.Array:
        return self.matrix


@pytree
class FeatureSpan:
    """The operator of random features, with the samples it is averaged over.

    Attributes:
        features: the features, at unit bandwidth.
        rows: the samples.
        halves: moments of even and odd samples.
        operator_samples: as for :class:`RandomFeatures`.
        normalized: whether the trace of the kernel is one.
    """

    features: Features
    rows: Rows
    halves: FeatureMoments
    operator_samples: int | None = static()
    normalized: bool = static()

    solved_rows = None
    # Two halves as one batch would need the memory of both.
    is_cached = False

    @property
    def path(self) -> jax.Array:
        return jnp.asarray(MATRIX, jnp.int32)

    def operator(self, moments: FeatureMoments) -> MatrixOperator:
        """The operator with the moments of some samples."""
        count, dim = self.features.directions.shape
        # Each whole block of directions is orthonormal: Σ u uᵀ has no larger eigenvalue.
        share = -(-count // dim) / count
        trace = count * self.features.amplitude**2
        bound = share if self.normalized else None
        return MatrixOperator(moments.matrix(self.features), share * trace, bound)

    def solve_coefficients(self, apply: ApplyFilter) -> Solution:
        """The filter applied to h: ``values`` are w, (1, m)."""
        whole = self.halves.over_both()
        return apply(self.operator(whole), whole.targets.values.own.reshape(1, -1))

    def solve(self, apply: ApplyFilter, base_scores: jax.Array | None) -> Solution:
        """The estimate: values at the samples (d, n), coefficients of the features (1, m).

        The base scores are already in the moments.
        """
        solution = self.solve_coefficients(apply)
        w = solution.values.reshape(2, -1)
        values = in_tiles(lambda rows: self.features.field(w, rows), self.rows.points)
        return solution._replace(
            values=values.T,
            coefficients=solution.values,
            zeta_weight=jnp.zeros_like(solution.zeta_weight),
        )

    def expansion(self, rows: Rows, solution: Solution) -> FeatureExpansion:
        return FeatureExpansion(self.features, solution.coefficients.reshape(2, -1))

    def restricted(self, rows: slice) -> FeatureSpan:
        some = jax.tree.map(lambda a: a[rows], self.rows._replace(left_out=None))
        return make_span(self.features, some, self.operator_samples, self.normalized)


def draw_features(options: RandomFeatures, kernel: Kernel, scale: jax.Array, dim: int) -> Features:
    """Features of ``scale`` times a curl-free kernel in d dimensions."""
    key = random.key(0) if options.key is None else options.key
    count = options.num_features // 2
    directions, lengths = draw_frequencies(kernel.profile, key, count, dim, scale.dtype)
    amplitude = jnp.sqrt(scale * kernel.trace(dim).astype(scale.dtype) / count)
    return Features(directions, lengths, amplitude)


def make_span(
    features: Features, rows: Rows, operator_samples: int | None, normalized: bool
) -> FeatureSpan:
    """The operator of samples, averaged over some of them that are evenly spaced."""
    n = rows.points.shape[0]
    stride = 1 if operator_samples is None else -(-n // operator_samples)
    # Odd, so that even and odd samples take turns.
    stride += 1 - stride % 2
    halves = add_rows(no_moments(features), features, rows, None, stride)
    return FeatureSpan(features, rows, halves, operator_samples, normalized)
