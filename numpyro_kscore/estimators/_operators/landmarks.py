"""Nyström: estimates in the span of a few landmarks, for any regularizer.

In an orthonormal basis ``K(·, Z) W`` of that span, ``Wᵀ K_ZZ W = 1``, the operator is the matrix
``A = Wᵀ (K_ZX K_XZ / n) W``, and with ``h_Z = ζ'(Z)`` (docs/theory)

    ŝ = s0 + Σ_l K(·, z_l) c_l ,    c = -W g(A) Wᵀ h_Z .

Tikhonov's filter gives the estimator NKEF of Sutherland et al. (2018) and of Zhou, Shi and Zhu
(2020), Example 3.6, whose printed form lacks 1/n and the sign.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from numpyro_kscore._util.linalg import inverse_root
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore._util.sharding import divides, mapped
from numpyro_kscore.estimators._operators.features import Rows
from numpyro_kscore.kernels import _pairwise as pairwise
from numpyro_kscore.kernels._contract import FieldWeights, Kernel
from numpyro_kscore.kernels._device import MATRIX, TILES
from numpyro_kscore.kernels._gram import Gram, make_gram, norm_bound
from numpyro_kscore.kernels._pairwise import Expansion
from numpyro_kscore.solvers._operator import ApplyFilter, Solution

# Number of columns of A that are formed at once.
DENSE_BATCH = 32


@pytree
class Compression:
    """``P L̂ P`` in orthonormal coordinates of the landmarks' span, as solvers see it.

    Its vectors have shape (d, m), one coordinate a row, as those of a :class:`Gram` have (d, n).
    Attributes of the same name mean the same.

    Attributes:
        points: the landmarks, (m, d).
        rows: which of the samples they are, (m,).
        samples: (n, d).
        factor: W, (d m, d m), or (m, m) if the kernel is scalar; columns of zeros where K_ZZ is
            singular to rounding.
        direct: whether squared distances are to be summed from differences.
        weights: weights of all pairs, (m, n), with ``scale`` in them; None where streamed.
        spectral_bound: as that of the operator, whose eigenvalues are no smaller.
        sharding: how samples are divided over devices, evenly; or None.
    """

    points: jax.Array
    rows: jax.Array
    samples: jax.Array
    kernel: Kernel
    scale: jax.Array
    factor: jax.Array
    direct: jax.Array
    weights: FieldWeights | None
    dim: int = static()
    spectral_bound: float | None = static(default=None)
    sharding: NamedSharding | None = static(default=None)

    solved_rows = None

    @property
    def is_cached(self) -> bool:
        return self.weights is not None

    @property
    def path(self) -> jax.Array:
        # Never the GPU's kernel: a product sums over samples and landmarks in one pass.
        return jnp.asarray(MATRIX if self.weights is not None else TILES, jnp.int32)

    @property
    def norm_bound(self) -> jax.Array:
        return norm_bound(self.kernel, self.scale, self.dim)

    def __matmul__(self, v: jax.Array) -> jax.Array:
        """``A v``, (d, m) -> (d, m). Cost: O(n m d) and two products with W."""
        image = self._at_landmarks_of_samples(self.to_coefficients(v))
        return self.to_coordinates(image)

    def laid_out(self, v: jax.Array) -> jax.Array:
        # Whole on every device, as landmarks are.
        return v

    def to_coefficients(self, v: jax.Array) -> jax.Array:
        """``W v``: coordinates of a function of the span to its coefficients, (d, m)."""
        return (v.reshape(-1, self.factor.shape[0]) @ self.factor.T).reshape(v.shape)

    def to_coordinates(self, h: jax.Array) -> jax.Array:
        """``Wᵀ h``: values of a function at the landmarks to coordinates of its projection."""
        return (h.reshape(-1, self.factor.shape[0]) @ self.factor).reshape(h.shape)

    def dense(self) -> jax.Array:
        """A, (d m, d m), or (m, m) if the kernel is scalar. Cost: O(n m² d²), or O(n m²)."""
        size = self.factor.shape[0]
        eye = jnp.eye(size, dtype=self.points.dtype)
        if self.kernel.is_scalar:
            matrix = self @ eye
        else:
            units = eye.reshape(size, *self.points.shape[::-1])
            matrix = lax.map(lambda unit: (self @ unit).ravel(), units, batch_size=DENSE_BATCH)
        return 0.5 * (matrix + matrix.T)

    def restricted(self, rows: slice) -> Compression:
        weights = jax.tree.map(lambda w: w[:, rows], self.weights)
        samples = self.samples[rows]
        sharding = self.sharding if divides(self.sharding, samples.shape[0]) else None
        return dataclasses.replace(self, samples=samples, weights=weights, sharding=sharding)

    def target(self, base_scores: jax.Array | None) -> jax.Array:
        """``h_Z = ζ(Z) + K_ZX s0(X) / n``, (d, m), for base scores (n, d)."""
        if self.sharding is not None:
            return self._on_devices(Compression.target, base_scores, divided=True)
        n = self.samples.shape[0]
        if self.weights is None:
            coefficients = None if base_scores is None else self.scale / n * base_scores
            expansion = Expansion(self.samples, coefficients, self.scale)
            return pairwise.field(self.kernel, expansion, self.points).T
        h = pairwise.along_differences(self.weights.zeta, self.points, self.samples)
        if base_scores is not None:
            h = h + pairwise.product(self.weights, self.points, self.samples, base_scores)
        return h.T / n

    def at_samples(self, coefficients: jax.Array) -> jax.Array:
        """``K_XZ c``, (d, m) -> (d, n)."""
        if self.sharding is not None:
            return self._on_devices(Compression.at_samples, coefficients, mean=False)
        c = coefficients.T
        if self.weights is None:
            expansion = Expansion(self.points, self.scale * c, None)
            return pairwise.field(self.kernel, expansion, self.samples).T
        return pairwise.product(_transposed(self.weights), self.samples, self.points, c).T

    def solve(self, apply: ApplyFilter, base_scores: jax.Array | None) -> Solution:
        """The estimate: values at the samples (d, n) and coefficients at the landmarks (d, m)."""
        solution = apply(self, self.to_coordinates(self.target(base_scores)))
        coefficients = self.to_coefficients(solution.values)
        return solution._replace(
            values=self.at_samples(coefficients),
            coefficients=coefficients,
            zeta_weight=jnp.zeros_like(solution.zeta_weight),
        )

    def expansion(self, rows: Rows, solution: Solution) -> Expansion:
        """``Σ_l K(·, z_l) c_l`` over the landmarks, which hold base scores and ζ' already."""
        return Expansion(rows.points[self.rows], self.scale * solution.coefficients, None)

    def _at_landmarks_of_samples(self, coefficients: jax.Array) -> jax.Array:
        """``K_ZX K_XZ c / n``, (d, m) -> (d, m), in one pass over tiles of the samples."""
        if self.sharding is not None:
            return self._on_devices(Compression._at_landmarks_of_samples, coefficients)
        c, n = coefficients.T, self.samples.shape[0]
        if self.weights is not None:
            values = self.at_samples(coefficients).T
            return pairwise.product(self.weights, self.points, self.samples, values).T / n

        def add(total: jax.Array, tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            part, mask = tile
            s = pairwise.squared_distances(self.points, part, self.direct)
            weights = self.kernel.field_weights(s, self.dim)
            values = mask * pairwise.product(_transposed(weights), part, self.points, c)
            return total + pairwise.product(weights, self.points, part, values), None

        pairs = pairwise.TILE_ROWS * pairwise.TILE_COLUMNS
        rows = max(1, min(n, pairs // self.points.shape[0]))
        mask = jnp.ones((n, 1), c.dtype)
        tiles = (pairwise.split_rows(self.samples, rows), pairwise.split_rows(mask, rows))
        total = lax.scan(add, jnp.zeros_like(c), tiles)[0]
        return (self.scale**2 / n * total).T

    def _on_devices(
        self, method: Any, argument: Any, *, divided: bool = False, mean: bool = True
    ) -> jax.Array:
        """A method on each device's own samples; the results averaged, or side by side."""
        whole, (rows,) = PartitionSpec(), self.sharding.spec  # type: ignore[union-attr]
        columns = PartitionSpec(None, rows)
        one = dataclasses.replace(self, sharding=None)
        layout = dataclasses.replace(
            jax.tree.map(lambda _: whole, one),
            samples=PartitionSpec(rows),
            weights=jax.tree.map(lambda _: columns, one.weights),
        )

        def own(part: Compression, argument: Any) -> jax.Array:
            result = method(part, argument)
            return lax.pmean(result, rows) if mean else result

        specs = (layout, PartitionSpec(rows) if divided else whole)
        out = whole if mean else columns
        return mapped(own, self.sharding, specs, out)(one, argument)  # type: ignore[arg-type]


def compress(gram: Gram, indices: jax.Array) -> Compression:
    """The compression of a Gram operator to landmarks at ``indices``, (m,).

    An index out of range makes the estimate NaN, reported in ``info``.

    Cost: O(m³ d³), or O(m³) if the kernel is scalar, once.
    """
    samples, kernel, scale = gram.points, gram.kernel, gram.scale
    points = samples.at[indices].get(mode="fill", fill_value=jnp.nan)
    n, m = samples.shape[0], points.shape[0]
    direct = pairwise.cancels(samples)
    s = pairwise.squared_distances(points, points, direct)
    square = m * make_gram(kernel, points, s, scale, points.shape[1], False).dense()
    # Directions of the span that rounding cannot tell from zero are left out.
    least = jnp.finfo(square.dtype).eps * jnp.trace(square)
    factor = inverse_root(square, jnp.zeros((), square.dtype), least)
    # Nor may a NaN look like such a direction.
    factor = jnp.where(jnp.isfinite(jnp.trace(square)), factor, jnp.nan)
    weights = None
    if n * m <= pairwise.CACHED_PAIRS:
        s = pairwise.squared_distances(points, samples, direct)
        weights = jax.tree.map(lambda w: scale * w, kernel.field_weights(s, gram.dim))
    return Compression(
        points,
        indices,
        samples,
        kernel,
        scale,
        factor,
        direct,
        weights,
        gram.dim,
        gram.spectral_bound,
        gram.sharding,
    )


def _transposed(weights: FieldWeights) -> FieldWeights:
    """The weights with points and samples exchanged: they are even in r."""
    return jax.tree.map(jnp.transpose, weights)
