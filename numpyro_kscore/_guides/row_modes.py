"""Gaussian approximations of many small independent densities at once, by Newton's method.

A log density of rows (E, k), which is a sum over rows, has a Hessian of blocks (k, k): k products
with it give all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LogDensity = Callable[[jax.Array], jax.Array]

# The search ends at a step of fewer standard deviations than this: Newton's method squares its
# error, so one more step leaves far less.
SHORT = 0.03
MOST_STEPS = 40
# A step is too long if the slope along it turns to less than minus this share of what it was.
OVERSHOOT = 0.5
# Factor of a step that was too long.
SHORTER = 0.25
# Pivots below this count as zero.
SMALLEST_PIVOT = 1e-10


class RowGaussians(NamedTuple):
    """A Gaussian for each row, by its mean and the factors L D Lᵀ of its precision.

    Attributes:
        mean: (E, k).
        lower: L, with ones on its diagonal, (E, k, k).
        pivots: the diagonal of D, positive, (E, k).
    """

    mean: jax.Array
    lower: jax.Array
    pivots: jax.Array

    def push(self, x: jax.Array) -> jax.Array:
        """Standardized numbers (E, k) as those of the rows."""
        z = x / jnp.sqrt(self.pivots)
        for j in range(z.shape[1] - 1, 0, -1):
            # Row j of L times what is known of the solution of Lᵀ z = x.
            z = z.at[:, :j].add(-self.lower[:, j, :j] * z[:, j, None])
        return self.mean + z

    def standardized(self, gradients: jax.Array) -> jax.Array:
        """Gradients in the rows' numbers, (E, k), as those in standardized ones."""
        x = gradients
        for j in range(x.shape[1] - 1):
            x = x.at[:, j + 1 :].add(-self.lower[:, j + 1 :, j] * x[:, j, None])
        return x / jnp.sqrt(self.pivots)

    def solve(self, gradients: jax.Array) -> jax.Array:
        """The inverse precision times gradients (E, k)."""
        x = self.standardized(gradients)
        return self._replace(mean=jnp.zeros_like(self.mean)).push(x)

    @property
    def log_volume(self) -> jax.Array:
        """Logarithm of the determinant of the map from standardized numbers, (E,)."""
        return -0.5 * jnp.sum(jnp.log(self.pivots), axis=1)


def _factorized(mean: jax.Array, precision: jax.Array) -> RowGaussians:
    """Factors of precisions (E, k, k) without LAPACK, with absolute values of negative pivots."""
    dim = precision.shape[1]
    columns, pivots = [], []
    rest = precision
    for j in range(dim):
        pivot = jnp.abs(rest[:, j, j])
        pivot = jnp.where(pivot > SMALLEST_PIVOT, pivot, 1.0)
        column = (rest[:, :, j] / pivot[:, None]).at[:, : j + 1].set(0.0).at[:, j].set(1.0)
        rest = rest - pivot[:, None, None] * column[:, :, None] * column[:, None, :]
        columns.append(column)
        pivots.append(pivot)
    return RowGaussians(mean, jnp.stack(columns, axis=2), jnp.stack(pivots, axis=1))


def hessian_blocks(
    log_density: LogDensity, rows: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Gradient (E, k) and the rows' blocks of the Hessian (E, k, k).

    Weights (E,) scale the rows in the directions of the products; the blocks are multiplied by them
    if rows are independent, and only then.
    """
    gradient = jax.grad(log_density)
    weights = jnp.ones(rows.shape[0], rows.dtype) if weights is None else weights

    def along(direction: jax.Array) -> tuple[jax.Array, jax.Array]:
        tangent = weights[:, None] * direction
        return jax.jvp(gradient, (rows,), (tangent,))

    directions = jnp.eye(rows.shape[1], dtype=rows.dtype)
    slopes, columns = jax.vmap(along, out_axes=(None, 0))(directions)
    return slopes, jnp.moveaxis(columns, 0, 2)


def gaussians_at(log_density: LogDensity, rows: jax.Array) -> tuple[jax.Array, RowGaussians]:
    """Gradient (E, k), and the Gaussians whose means are rows, by the curvature there."""
    slopes, blocks = hessian_blocks(log_density, rows)
    return slopes, _factorized(rows, -blocks)


class _Search(NamedTuple):
    """The best Gaussians so far, and the step (E, k) that is tried next.

    Attributes:
        slope: slope of the log density along the step, at its start, (E,).
        length: length of the step in standard deviations, (E,).
        steps: number of iterations.
    """

    gaussians: RowGaussians
    step: jax.Array
    slope: jax.Array
    length: jax.Array
    steps: jax.Array


def find_row_modes(log_density: LogDensity, start: jax.Array) -> RowGaussians:
    """Gaussians of rows (E, k) near the modes of their densities, within .03 of their widths.

    Newton's steps are shortened where the slope along them turns: only the sum of the densities of
    the rows is known.
    """

    def goes_on(search: _Search) -> jax.Array:
        return (search.steps < MOST_STEPS) & jnp.any(search.length > SHORT)

    def advance(search: _Search) -> _Search:
        slopes, found = gaussians_at(log_density, search.gaussians.mean + search.step)
        step = found.solve(slopes)
        turned = jnp.sum(slopes * search.step, axis=1)
        is_finite = jnp.all(jnp.isfinite(step), axis=1) & jnp.isfinite(turned)
        good = is_finite & (turned >= -OVERSHOOT * search.slope)
        slope = jnp.sum(slopes * step, axis=1)

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(good.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return _Search(
            jax.tree.map(chosen, found, search.gaussians),
            chosen(step, SHORTER * search.step),
            chosen(slope, SHORTER * search.slope),
            chosen(jnp.sqrt(jnp.abs(slope)), search.length),
            search.steps + 1,
        )

    zeros = jnp.zeros(start.shape[0], start.dtype)
    first = _factorized(start, jnp.zeros((*start.shape, start.shape[1]), start.dtype))
    search = _Search(first, jnp.zeros_like(start), zeros, zeros + jnp.inf, jnp.zeros((), int))
    return lax.while_loop(goes_on, advance, search).gaussians
