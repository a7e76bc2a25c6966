"""Random features as functions, and their moments over samples.

With ``J(x)`` the m fields of the features at x, one a row, a fit needs ``E J(x) J(x)ᵀ`` and
``E [div J(x) + J(x) s0(x)]``, which one pass over the samples gives. They are held as means, which
rounding does not let drift however many samples there are, for even and odd samples apart: one half
judges fits to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._pairwise import split_rows

# Rows whose features are formed at once.
TILE_ROWS = 2048


@pytree
class Features:
    """Fields ``a u sin(ω·z)`` and ``a u cos(ω·z)`` with u = ω/|ω|.

    They are the gradients of ``a (1 - cos(ω·z))/|ω|`` and ``a sin(ω·z)/|ω|``. Combinations have
    coefficients (2, k): first those of the sines.

    Attributes:
        directions: the unit vectors u, (k, d).
        lengths: |ω|, (k,), in 1/bandwidth.
        amplitude: a, with ``k a²`` the trace of the kernel.
    """

    directions: jax.Array
    lengths: jax.Array
    amplitude: jax.Array

    def waves(self, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``sin(ω·z)`` and ``cos(ω·z)`` at points (m, d) in units of the bandwidth: (m, k)."""
        phases = z @ (self.lengths[:, None] * self.directions).T
        return jnp.sin(phases), jnp.cos(phases)

    def field(self, w: jax.Array, z: jax.Array) -> jax.Array:
        """The combination at z: coefficients (2, k), (m, d) -> (m, d)."""
        sines, cosines = self.waves(z)
        return self.amplitude * ((sines * w[0] + cosines * w[1]) @ self.directions)

    def potential(self, w: jax.Array, z: jax.Array) -> jax.Array:
        """A function with that gradient, (m, d) -> (m,)."""
        phases = z @ (self.lengths[:, None] * self.directions).T
        # 1 - cos as the square of a sine: at low frequencies the difference would cancel.
        half = jnp.sin(0.5 * phases)
        scaled = self.amplitude / self.lengths
        return (2.0 * half * half) @ (scaled * w[0]) + jnp.sin(phases) @ (scaled * w[1])

    def divergence(self, w: jax.Array, z: jax.Array, factor: jax.Array) -> jax.Array:
        """``tr(F Fᵀ ∇f)`` of the combination f, (m, d) -> (m,); F is (d, d)."""
        sines, cosines = self.waves(z)
        scaled = self.amplitude * self.lengths * jnp.sum((self.directions @ factor) ** 2, axis=1)
        return cosines @ (scaled * w[0]) - sines @ (scaled * w[1])


@pytree
class FeatureExpansion:
    """A combination of features as a function: coefficients (2, k), in kernel coordinates."""

    features: Features
    coefficients: jax.Array

    def field(self, kernel: Kernel, y: jax.Array) -> jax.Array:
        """The combination at ``y``: (m, d) -> (m, d)."""
        return in_tiles(lambda rows: self.features.field(self.coefficients, rows), y)

    def potential(self, kernel: Kernel, y: jax.Array) -> jax.Array:
        """A function whose gradient is :meth:`field`: (m, d) -> (m,)."""
        return in_tiles(lambda rows: self.features.potential(self.coefficients, rows), y)

    def divergence(self, kernel: Kernel, y: jax.Array, factor: jax.Array) -> jax.Array:
        """``tr(F Fᵀ ∇f)``: (m, d) -> (m,)."""
        return in_tiles(lambda rows: self.features.divergence(self.coefficients, rows, factor), y)


def in_tiles(fn: Any, y: jax.Array) -> jax.Array:
    """A function of rows applied to some rows after the others."""
    if y.shape[0] <= TILE_ROWS:
        return fn(y)
    blocks = lax.map(fn, split_rows(y, TILE_ROWS))
    return blocks.reshape(-1, *blocks.shape[2:])[: y.shape[0]]


class Rows(NamedTuple):
    """Samples in the coordinates of the kernel.

    Attributes:
        points: (n, d).
        base_scores: s0 at them, (n, d), or None for zero.
        left_out: factors (n,) that turn s0 into s0 fitted without the sample, or None.
    """

    points: jax.Array
    base_scores: jax.Array | None
    left_out: jax.Array | None = None

    def in_units(self, bandwidth: jax.Array) -> Rows:
        """The same in units of a bandwidth."""
        base = None if self.base_scores is None else self.base_scores * bandwidth
        return Rows(self.points / bandwidth, base, self.left_out)


class _Products(NamedTuple):
    """Means of products of sines, of sines with cosines, and of cosines: (k, k)."""

    sines: jax.Array
    mixed: jax.Array
    cosines: jax.Array


class _Targets(NamedTuple):
    """Means of ``div J + J s0``, (2, k), with s0 fitted to the sample and without it."""

    own: jax.Array
    left_out: jax.Array


@pytree
class Mean:
    """Means of arrays over a number of samples."""

    number: jax.Array
    values: Any

    def add(self, sums: Any, number: jax.Array) -> Mean:
        """The means with the sums over ``number`` more samples in them."""
        total = self.number + number
        inverse = 1.0 / jnp.maximum(total, 1)

        def add(mean: jax.Array, sum_: jax.Array) -> jax.Array:
            # A difference from the mean is small: adding it loses no digits of a long stream.
            return mean + (sum_ - number * mean) * inverse.astype(mean.dtype)

        return Mean(total, jax.tree.map(add, self.values, sums))

    def over_both(self) -> Mean:
        """The mean over both halves, which are the first axis."""
        total = jnp.sum(self.number)
        share = self.number[1] / jnp.maximum(total, 1)
        values = jax.tree.map(lambda a: a[0] + share.astype(a.dtype) * (a[1] - a[0]), self.values)
        return Mean(total, values)


@pytree
class FeatureMoments:
    """Moments of samples; of two halves of them with an axis of two in front.

    Products of the waves are over the samples of the operator, targets over all samples.
    """

    products: Mean
    targets: Mean

    def matrix(self, features: Features) -> jax.Array:
        """``E J Jᵀ``, (2k, 2k): the operator in the coordinates of the features."""
        sines, mixed, cosines = self.products.values
        inner = features.amplitude**2 * (features.directions @ features.directions.T)
        upper = jnp.concatenate([inner * sines, inner * mixed], axis=1)
        lower = jnp.concatenate([inner * mixed.T, inner * cosines], axis=1)
        return jnp.concatenate([upper, lower])

    def over_both(self) -> FeatureMoments:
        """The moments of all samples from those of the halves."""
        return FeatureMoments(self.products.over_both(), self.targets.over_both())


def no_moments(features: Features) -> FeatureMoments:
    """The moments of two halves without samples."""
    k, dtype = features.lengths.shape[0], features.lengths.dtype
    square, pair = jnp.zeros((2, k, k), dtype), jnp.zeros((2, 2, k), dtype)
    none = jnp.zeros(2, jnp.int32)
    return FeatureMoments(
        Mean(none, _Products(square, square, square)), Mean(none, _Targets(pair, pair))
    )


def add_rows(
    halves: FeatureMoments,
    features: Features,
    rows: Rows,
    wanted: int | None,
    stride: int = 1,
) -> FeatureMoments:
    """The moments of even and odd samples with more samples, in the order they came, in them.

    Only every ``stride``-th row, an odd number, is added to the products, and none once they are
    over as many samples as are wanted; None is all.

    Cost: O(n m d), and O(m²) for each sample of the products.
    """
    starts_odd = jnp.sum(halves.targets.number) % 2 == 1
    targets = _add(halves.targets, rows, starts_odd, lambda *a: _target_sums(features, *a))
    some = Rows(rows.points[::stride], None)

    def with_products(products: Mean) -> Mean:
        return _add(products, some, starts_odd, lambda *a: _product_sums(features, *a))

    if wanted is None:
        return FeatureMoments(with_products(halves.products), targets)
    missing = jnp.sum(halves.products.number) < wanted
    products = lax.cond(missing, with_products, lambda same: same, halves.products)
    return FeatureMoments(products, targets)


def _add(
    means: Mean,
    rows: Rows,
    starts_odd: jax.Array,
    sums: Callable[[Rows, jax.Array], Any],
) -> Mean:
    """The means of both halves with rows (n, …) dealt to them, some rows after the others."""
    n = rows.points.shape[0]
    pairs = jax.tree.map(lambda a: split_rows(a, 2), rows)
    # One on samples, zero on the padding of an odd number.
    masks = split_rows(jnp.ones(n, rows.points.dtype), 2)

    def deal(a: jax.Array) -> jax.Array:
        first, second = a[:, 0], a[:, 1]
        order = [jnp.where(starts_odd, x, y) for x, y in ((second, first), (first, second))]
        return jnp.stack(order)

    size = min(TILE_ROWS, masks.shape[0])

    def one(half: tuple[Mean, Rows, jax.Array]) -> Mean:
        mean, *dealt = half
        tiles = jax.tree.map(lambda a: split_rows(a, size), tuple(dealt))

        def step(mean: Mean, tile: tuple[Rows, jax.Array]) -> tuple[Mean, None]:
            number = jnp.sum(tile[1]).astype(mean.number.dtype)
            return mean.add(sums(*tile), number), None

        return lax.scan(step, mean, tiles)[0]

    return lax.map(one, (means, *jax.tree.map(deal, (pairs, masks))))


def _product_sums(features: Features, rows: Rows, mask: jax.Array) -> _Products:
    sines, cosines = (mask[:, None] * wave for wave in features.waves(rows.points))
    return _Products(sines.T @ sines, sines.T @ cosines, cosines.T @ cosines)


def _target_sums(features: Features, rows: Rows, mask: jax.Array) -> _Targets:
    sines, cosines = features.waves(rows.points)
    columns = [mask[:, None]]
    if rows.base_scores is not None:
        columns.append(rows.base_scores)
        if rows.left_out is not None:
            columns.append(rows.left_out[:, None] * rows.base_scores)
    # All sums as two products: reductions would compute the waves again, each for itself. Base
    # scores of the padding are zero.
    left = jnp.concatenate(columns, axis=1).T
    of_sines, of_cosines = left @ sines, left @ cosines
    stretch = features.lengths
    own = jnp.stack([stretch * of_cosines[0], -stretch * of_sines[0]])
    dim = rows.points.shape[1]

    def with_base(first: int) -> jax.Array:
        part = slice(first, first + dim)
        along = [jnp.sum(features.directions.T * s[part], axis=0) for s in (of_sines, of_cosines)]
        return features.amplitude * (own + jnp.stack(along))

    if rows.base_scores is None:
        return _Targets(features.amplitude * own, features.amplitude * own)
    return _Targets(with_base(1), with_base(1 if rows.left_out is None else 1 + dim))
