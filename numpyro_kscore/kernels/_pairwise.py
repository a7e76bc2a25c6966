"""Sums over pairs of points as matrix products, in tiles when there are many.

For coefficients ``c`` at points ``x`` and a multiple ``a`` of the divergence term ζ, the field
``f(y) = a ζ(y) + Σ_j K(y, x_j) c_j`` of a curl-free kernel needs, with the inner products
``M_ij = (y_i - x_j)·c_j`` and ``W = outer ∘ M + (a/n) zeta``, three matrix products::

    f_i = y_i Σ_j W_ij - Σ_j W_ij x_j + Σ_j inner_ij c_j

so it costs O(m n d) time and O(m n) memory, never an (m, n, d) array. Potential and divergence
reduce the same way. Points are in units of the bandwidth throughout.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore.kernels._contract import FieldWeights, Kernel
from numpyro_kscore.kernels._device import MATRIX, TILES, field_or, path_or, suits_kernel

# Rows and columns of a tile. Measured on CPU: 512-1024 by 1024-2048 is best, 2048 squared is 3-4
# times and 128 squared twice as slow (docs/performance).
TILE_ROWS = 512
TILE_COLUMNS = 2048
# Beyond this many pairs, whole matrices of weights fall out of cache and tiles win.
CACHED_PAIRS = 4096 * 2048
FEW_DIMENSIONS = 3


class Expansion(NamedTuple):
    """A field ``a ζ + Σ_j K(·, x_j) c_j`` in the coordinates of the kernel.

    An absent part is None, never zeros: XLA on CPU miscompiles a product with a compile-time
    zero matrix inside fusions of this shape.

    Attributes:
        points: the x_j, shape (n, d), in units of the bandwidth.
        coefficients: the c_j, shape (n, d), or None.
        zeta_weight: the scalar a, or None.
    """

    points: jax.Array
    coefficients: jax.Array | None
    zeta_weight: jax.Array | None

    @property
    def zeta_weight_each(self) -> jax.Array | None:
        """The weight of each point in a ζ: a/n."""
        return None if self.zeta_weight is None else self.zeta_weight / self.points.shape[0]

    def field(self, kernel: Kernel, y: jax.Array) -> jax.Array:
        """:func:`field` of this expansion."""
        return field(kernel, self, y)

    def potential(self, kernel: Kernel, y: jax.Array) -> jax.Array:
        """A function whose gradient is :meth:`field`: (m, d) -> (m,). Curl-free kernels only."""
        dim = y.shape[1]
        each = self.zeta_weight_each

        def summand(rows: jax.Array, tile: _Tile, s: jax.Array) -> jax.Array:
            weights = kernel.potential_weights(s, dim)
            terms = [] if each is None else [each * weights.zeta * tile.mask]
            if tile.coefficients is not None:
                terms.append(weights.field * _inner_products(rows, tile.points, tile.coefficients))
            return jnp.sum(_total(terms), axis=1)

        return _sum_over_points(self, y, summand, ())

    def divergence(self, kernel: Kernel, y: jax.Array, factor: jax.Array) -> jax.Array:
        """``tr(F Fᵀ ∇f)`` of the field f: (m, d) -> (m,).

        With F the linear part of the map to these coordinates, (d, e), it is the divergence in
        the original ones.
        """
        dim = y.shape[1]
        each = self.zeta_weight_each
        trace = jnp.sum(factor * factor)

        def summand(rows: jax.Array, tile: _Tile, s: jax.Array) -> jax.Array:
            weights = kernel.divergence_weights(s, dim)
            quadratic = squared_distances(rows @ factor, tile.points @ factor, jnp.asarray(True))
            terms = []
            if each is not None:
                zeta = weights.zeta_along * quadratic + weights.zeta * trace
                terms.append(each * zeta * tile.mask)
            if tile.coefficients is not None:
                mapped = (a @ factor for a in (rows, tile.points, tile.coefficients))
                cross = _inner_products(*mapped)
                terms.append(weights.cross * cross)
                if weights.along is not None and weights.trace is not None:
                    factors = weights.along * quadratic + weights.trace * trace
                    terms.append(factors * _inner_products(rows, tile.points, tile.coefficients))
            return jnp.sum(_total(terms), axis=1)

        return _sum_over_points(self, y, summand, ())


def cancels(points: jax.Array) -> jax.Array:
    """Whether ``|x|² + |y|² - 2 x·y`` would lose too much to rounding at these points.

    The error of the expanded square is about ``eps (R/h)²`` with R the radius of the cloud in
    bandwidths h: clusters far apart in bandwidths need the differences themselves.
    """
    radius_squared = jnp.max(jnp.sum(points * points, axis=-1))
    return radius_squared > 1e-4 / jnp.finfo(points.dtype).eps


def squared_distances(y: jax.Array, x: jax.Array, direct: jax.Array) -> jax.Array:
    """``|y_i - x_j|²``, shape (m, n), never negative.

    With ``direct``, a boolean scalar as :func:`cancels` gives it, squared differences are summed
    one coordinate after another instead of expanding the square, at several times the cost. So
    they are in up to three dimensions, where that costs no more and neighbors are nearer than the
    rounding error of an expanded square.
    """
    if y.shape[1] <= FEW_DIMENSIONS:
        columns = zip(y.T, x.T, strict=True)
        return functools.reduce(jnp.add, (jnp.square(a[:, None] - b[None, :]) for a, b in columns))

    def expanded() -> jax.Array:
        ones = jnp.ones_like(y[:, :1])
        left = jnp.concatenate([-2.0 * y, ones, jnp.sum(y * y, axis=1, keepdims=True)], axis=1)
        x_norms = jnp.sum(x * x, axis=1, keepdims=True)
        right = jnp.concatenate([x, x_norms, jnp.ones_like(x_norms)], axis=1)
        s = jnp.matmul(left, right.T, precision=lax.Precision.HIGHEST)
        # Values below rounding are noise around zero, where Matérn profiles have a kink.
        noise = 4 * jnp.finfo(y.dtype).eps * (left[:, -1:] + x_norms.T)
        # Zero, but with the derivatives of s: its second is not zero where points coincide.
        return jnp.where(s > noise, s, s - lax.stop_gradient(s))

    def differenced() -> jax.Array:
        def add(total: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            column_y, column_x = pair
            return total + jnp.square(column_y[:, None] - column_x[None, :]), None

        start = jnp.square(y[:, 0][:, None] - x[:, 0][None, :])
        return lax.scan(add, start, (y[:, 1:].T, x[:, 1:].T))[0]

    return lax.cond(direct, differenced, expanded)


def nearest_squared(s: jax.Array) -> jax.Array:
    """Squared distance of each point to its nearest other point, from all (n, n): (n,)."""
    return jnp.min(jnp.where(jnp.eye(s.shape[0], dtype=bool), jnp.inf, s), axis=1)


class _Tile(NamedTuple):
    """Some points of the expansion; the mask is 1 on points and 0 on padding."""

    points: jax.Array
    coefficients: jax.Array | None
    mask: jax.Array


Summand = Callable[[jax.Array, _Tile, jax.Array], jax.Array]


def field(kernel: Kernel, expansion: Expansion, y: jax.Array) -> jax.Array:
    """The expansion at ``y``: (m, d) -> (m, d); on a GPU by one kernel where :func:`path` says."""
    if suits_kernel(kernel, expansion, y):
        return field_or(_field_by_xla, kernel, expansion, y, _differences(expansion, y))
    return _field_by_xla(kernel, expansion, y)


def path(kernel: Kernel, expansion: Expansion, y: jax.Array) -> jax.Array:
    """How :func:`field` sums over these pairs, a code of :mod:`._device`: int32, scalar."""
    if suits_kernel(kernel, expansion, y):
        return path_or(_differences(expansion, y))
    whole = expansion.points.shape[0] * y.shape[0] <= CACHED_PAIRS
    return jnp.asarray(MATRIX if whole else TILES, jnp.int32)


def _differences(expansion: Expansion, y: jax.Array) -> jax.Array:
    """Whether more than a few coordinates need squared differences, not an expanded square."""
    if y.shape[1] <= FEW_DIMENSIONS:
        return jnp.asarray(False)
    return cancels(expansion.points) | cancels(y)


def _field_by_xla(kernel: Kernel, expansion: Expansion, y: jax.Array) -> jax.Array:
    dim = y.shape[1]
    each = expansion.zeta_weight_each

    def summand(rows: jax.Array, tile: _Tile, s: jax.Array) -> jax.Array:
        weights = kernel.field_weights(s, dim)
        along = [] if each is None else [each * weights.zeta * tile.mask]
        terms = []
        if tile.coefficients is not None:
            terms.append(weights.inner @ tile.coefficients)
            if weights.outer is not None:
                inner = _inner_products(rows, tile.points, tile.coefficients)
                along.append(weights.outer * inner)
        if along:
            terms.append(along_differences(_total(along), rows, tile.points))
        return _total(terms)

    return _sum_over_points(expansion, y, summand, (dim,))


def product(
    weights: FieldWeights, y: jax.Array, x: jax.Array, coefficients: jax.Array
) -> jax.Array:
    """``Σ_j K(y_i, x_j) c_j`` from the weights of the pairs: coefficients (n, d) -> (m, d)."""
    total = weights.inner @ coefficients
    if weights.outer is None:
        return total
    inner = _inner_products(y, x, coefficients)
    return total + along_differences(weights.outer * inner, y, x)


def _total(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def along_differences(weights: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
    """``Σ_j weights_ij (y_i - x_j)``, shape (m, d), by one product with [x, 1]."""
    sums = weights @ jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
    return y * sums[:, -1:] - sums[:, :-1]


def _inner_products(y: jax.Array, x: jax.Array, coefficients: jax.Array) -> jax.Array:
    """``(y_i - x_j)·c_j``, shape (m, n)."""
    return y @ coefficients.T - jnp.sum(x * coefficients, axis=1)[None, :]


def _sum_over_points(
    expansion: Expansion, y: jax.Array, summand: Summand, trailing: tuple[int, ...]
) -> jax.Array:
    """Σ over tiles of the points of ``summand(rows of y, tile, squared distances)``.

    ``trailing`` is the shape of one row of the result.
    """
    points = expansion.points
    n, m = points.shape[0], y.shape[0]
    direct = cancels(points) | cancels(y)
    whole = _Tile(points, expansion.coefficients, jnp.ones(n, dtype=points.dtype))
    if n * m <= CACHED_PAIRS:
        return summand(y, whole, squared_distances(y, points, direct))

    rows, columns = even_size(m, TILE_ROWS), even_size(n, TILE_COLUMNS)
    tiles: _Tile = jax.tree.map(lambda a: split_rows(a, columns), whole)

    def row_block(block: jax.Array) -> jax.Array:
        def add(total: jax.Array, tile: _Tile) -> tuple[jax.Array, None]:
            s = squared_distances(block, tile.points, direct)
            return total + summand(block, tile, s), None

        start = jnp.zeros((rows, *trailing), y.dtype)
        return lax.scan(add, start, tiles)[0]

    blocks = lax.map(row_block, split_rows(y, rows))
    return blocks.reshape(-1, *trailing)[:m]


def even_size(count: int, most: int) -> int:
    """Size of tiles as equal as possible: 2800 is two of 1400, not 2048 and 752 with padding."""
    return -(-count // -(-count // most))


def split_rows(a: jax.Array, size: int) -> jax.Array:
    """(n, ...) -> (ceil(n/size), size, ...), padded with zeros."""
    count = -(-a.shape[0] // size)
    padding = [(0, count * size - a.shape[0])] + [(0, 0)] * (a.ndim - 1)
    return jnp.pad(a, padding).reshape(count, size, *a.shape[1:])
