"""Sums of Gaussian kernels over points, relative to their largest term, in tiles.

With centers ``c_j`` of relative width ``w_j`` and ``u_ij = (y_i - c_j)/w_j``, ``s = |u|²``, a
smoothed density and its first two derivatives are sums of ``k_ij = w_j^-d exp(-s/2)`` times
polynomials::

    ρ_i   ∝ Σ_j k_ij p_0
    ∇ρ_i  ∝ Σ_j k_ij p_1 (c_j - y_i)/w_j²
    tr(A ∇²ρ_i) ∝ Σ_j k_ij (p_2 uᵀAu - p_1 tr A)/w_j²

with ``p = (1, 1, 1)`` for the Gaussian kernel and ``p_k = 1 + k + (d - s)/2`` for its
fourth-order form ``exp(-s/2) (1 + (d - s)/2)``. Logarithms of the largest terms are kept apart, so
that nothing underflows far from the centers. Time is O(m n d), memory O(m n) for few pairs and
O((m + n) d) for many.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore.kernels._pairwise import (
    CACHED_PAIRS,
    TILE_COLUMNS,
    TILE_ROWS,
    along_differences,
    cancels,
    even_size,
    split_rows,
    squared_distances,
)

# Beyond this squared distance a kernel is zero in any precision: polynomials need not grow on.
FAR = 1e5


class Centers(NamedTuple):
    """Centers of kernels, (n, d), and relative widths, (n,), None where all are one."""

    points: jax.Array
    widths: jax.Array | None


class Smoothed(NamedTuple):
    """Sums of kernels at m points, all to be multiplied by ``exp(log_scale)``.

    Attributes:
        log_scale: logarithm of the largest term, (m,).
        total: the sum of the kernels, (m,); may be negative for the fourth-order kernel.
        gradient: its gradient, (m, d).
        curvature: ``tr(A ∇²)`` of it, (m,).
        mass: the sum of the Gaussian kernels, (m,): the total, or what it corrects.
        mass_gradient: its gradient, (m, d).
    """

    log_scale: jax.Array
    total: jax.Array
    gradient: jax.Array
    curvature: jax.Array
    mass: jax.Array
    mass_gradient: jax.Array


class _Columns(NamedTuple):
    """Some centers; those with index -1 are padding."""

    centers: Centers
    indices: jax.Array


def smooth(
    centers: Centers,
    y: jax.Array,
    *,
    fourth_order: bool = False,
    factor: jax.Array | None = None,
    leave_out: bool = False,
) -> Smoothed:
    """Sums of kernels at ``y``, (m, d), in units of the bandwidth, not normalized.

    A is ``factor factorᵀ``, or the identity if the factor, (d, e), is None. With ``leave_out``
    center i is left out at point i, and m is n.
    """
    n, m = centers.points.shape[0], y.shape[0]
    direct = cancels(centers.points) | cancels(y)
    rows, columns = y, _Columns(centers, jnp.arange(n))
    own = jnp.arange(m) if leave_out else jnp.full(m, n)
    if n * m <= CACHED_PAIRS:
        return _terms(rows, own, columns, direct, fourth_order, factor)

    height, width = even_size(m, TILE_ROWS), even_size(n, TILE_COLUMNS)
    tiles = jax.tree.map(lambda a: split_rows(a, width), columns)
    is_padding = jnp.arange(tiles.indices.size).reshape(tiles.indices.shape) >= n
    tiles = tiles._replace(indices=jnp.where(is_padding, -1, tiles.indices))

    def row_block(block: tuple[jax.Array, jax.Array]) -> Smoothed:
        def add(sums: Smoothed, tile: _Columns) -> tuple[Smoothed, None]:
            return _merge(sums, _terms(*block, tile, direct, fourth_order, factor)), None

        first = jax.tree.map(lambda a: a[0], tiles)
        start = _terms(*block, first, direct, fourth_order, factor)
        return lax.scan(add, start, jax.tree.map(lambda a: a[1:], tiles))[0]

    blocks = lax.map(row_block, (split_rows(rows, height), split_rows(own, height)))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:m], blocks)


def _terms(
    y: jax.Array,
    own: jax.Array,
    columns: _Columns,
    direct: jax.Array,
    fourth_order: bool,
    factor: jax.Array | None,
) -> Smoothed:
    """The sums over some centers."""
    (points, widths), indices = columns
    dim = y.shape[1]
    s = squared_distances(y, points, direct)
    quadratic = s
    if factor is not None:
        quadratic = squared_distances(y @ factor, points @ factor, jnp.asarray(True))
    inverse = jnp.ones_like(points[:, 0])
    if widths is not None:
        # The width of padding is zero.
        inverse = 1.0 / jnp.square(jnp.where(indices < 0, 1.0, widths))
        s, quadratic = s * inverse, quadratic * inverse
    # Finite, and far below every other exponent: -inf less -inf is not a number.
    nothing = 0.1 * jnp.finfo(y.dtype).min
    exponent = jnp.maximum(-0.5 * s + 0.5 * dim * jnp.log(inverse), 0.1 * nothing)
    is_out = (indices < 0) | (indices[None, :] == own[:, None])
    exponent = jnp.where(is_out, nothing, exponent)
    # A constant in derivatives: what is taken out of the sums here is put back by their users.
    largest = lax.stop_gradient(jnp.max(exponent, axis=1))
    # Compilers may compute the exponents twice and round differently, by much if they are large.
    exponent = exponent - largest[:, None]
    # Small ones above zero are left, since a bound there would take the derivative away.
    weights = jnp.where(is_out, 0.0, jnp.exp(jnp.where(exponent > 1.0, 0.0, exponent)))

    trace = jnp.asarray(dim, y.dtype) if factor is None else jnp.sum(factor * factor)
    first = second = weights * inverse
    mass = total = jnp.sum(weights, axis=1)
    mass_gradient = gradient = -along_differences(first, y, points)
    if fourth_order:
        common = 0.5 * (dim - jnp.minimum(s, FAR))
        first, second = first * (2.0 + common), second * (3.0 + common)
        total = jnp.sum(weights * (1.0 + common), axis=1)
        gradient = -along_differences(first, y, points)
    curvature = second * jnp.minimum(quadratic, jnp.finfo(y.dtype).max) - first * trace
    return Smoothed(largest, total, gradient, jnp.sum(curvature, axis=1), mass, mass_gradient)


def _merge(a: Smoothed, b: Smoothed) -> Smoothed:
    """The sums over the centers of both."""
    largest = jnp.maximum(a.log_scale, b.log_scale)

    def add(first: jax.Array, second: jax.Array) -> jax.Array:
        scales = jnp.exp(a.log_scale - largest), jnp.exp(b.log_scale - largest)
        in_a, in_b = (scale.reshape(-1, *[1] * (first.ndim - 1)) for scale in scales)
        return in_a * first + in_b * second

    return Smoothed(largest, *map(add, a[1:], b[1:]))
