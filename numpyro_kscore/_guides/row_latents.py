"""Draws of the latents in the rows of plates, given all other latents, and their densities.

Given the global latents each row has a posterior of its own, in a few dimensions. Newton's method
finds its mode and curvature; a small network, the same for all rows, maps noise to the correction
that is added to that Gaussian. Its input is how the gradient of a row's log density departs from
that of the Gaussian at a few points, which is zero for a normal posterior: so it need not see data,
and rows may have any number of observations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_kscore._guides.row_blocks import RowBlock, RowTarget, start_of
from numpyro_kscore._guides.row_modes import (
    RowGaussians,
    find_row_modes,
    gaussians_at,
    hessian_blocks,
)
from numpyro_kscore._guides.row_quadrature import FINE, integrate_rows
from numpyro_kscore._transports.network import GATE_RATE, local_log_density

# Distances from the mean at which a network sees gradients, in standard deviations.
PROBES = (-1.5, 1.5)
# Features are squashed to this size: gradients in the tails may be exponentials.
LARGEST_FEATURE = 3.0

# A map from noise (k,) and features (f,) of a row to standardized numbers (k,).
RowMap = Callable[[jax.Array, jax.Array], jax.Array]


class RowDraws(NamedTuple):
    """One draw of all rows.

    Attributes:
        coordinates: unconstrained values by site.
        log_density: log density of each block in unconstrained coordinates, scaled by plates.
        gains: scaled terms of the blocks that turn the log joint density at the draw into that of
            the global latents alone.
    """

    coordinates: dict[str, jax.Array]
    log_density: tuple[jax.Array, ...]
    gains: tuple[jax.Array, ...]


def num_features(dim: int) -> int:
    """The number of features of a row of ``dim`` numbers."""
    return len(PROBES) * dim * dim


def draw_rows(
    conditional: RowTarget,
    blocks: tuple[RowBlock, ...],
    fixed: RowTarget,
    start: dict[str, jax.Array],
    maps: Sequence[RowMap] | None,
    noise: Sequence[jax.Array],
    *,
    integrate: bool = False,
) -> RowDraws:
    """A draw of all rows, given the model of the rows; ``fixed`` is the same, not differentiated.

    The search for modes starts from unconstrained values by site. ``maps`` go from noise and
    features to standardized numbers, by block; without them the draw is the modes, with the density
    of the Gaussians there. Noise is standard normal, (E, k) by block. With ``integrate`` rows are
    integrated out where that can be done, and their draws are not differentiable in what is given.
    """
    coordinates = dict(start)
    densities, gains = [], []
    for number, block in enumerate(blocks):
        others = block.others(coordinates)
        sites = _integrable_sites(fixed, block, others) if integrate else None
        here = conditional.of_block(block, others)
        there = fixed.of_block(block, lax.stop_gradient(others))
        modes = lax.stop_gradient(block.ravel(coordinates))
        gaussians = _laplace(here if sites is None else there, there, modes)
        eps = noise[number]
        if maps is None:
            x = jnp.zeros_like(eps)
            log_density = jnp.sum(-0.5 * x**2 - 0.5 * np.log(2 * np.pi), axis=1)
        else:
            # With the right network the bound is flat in the Gaussians: no derivative is needed.
            fixed_gaussians = jax.tree.map(lax.stop_gradient, gaussians)
            features = _features(there, fixed_gaussians)
            x = jax.vmap(maps[number])(eps, features)
            log_density = jax.vmap(lambda e, f, m=maps[number]: local_log_density(
                lambda noise: m(noise, f), e))(eps, features)  # fmt: skip
        rows = gaussians.push(x)
        coordinates.update(block.unravel(rows))
        densities.append(block.scale * jnp.sum(log_density - gaussians.log_volume))
        if sites is None:
            gains.append(-densities[-1])
            continue
        by_row = conditional.by_row(block, others, sites)
        # The search for a start tolerates errors, and takes thousands of densities of all rows.
        integrals = integrate_rows(by_row, gaussians, coarse=maps is None)
        gain = block.scale * jnp.sum(integrals - by_row(rows))
        if maps is not None:
            # This adds zero, with a derivative that trains the network.
            fixed_by_row = fixed.by_row(block, lax.stop_gradient(others), sites)
            bound = block.scale * jnp.sum(fixed_by_row(rows)) - densities[-1]
            gain += bound - lax.stop_gradient(bound)
        gains.append(gain)
    return RowDraws(coordinates, tuple(densities), tuple(gains))


def _integrable_sites(
    conditional: RowTarget, block: RowBlock, others: dict[str, jax.Array]
) -> tuple[str, ...] | None:
    """The sites whose densities are integrated over rows; None where quadrature cannot do that."""
    if block.columns.shape[1] not in FINE:
        return None
    sites = conditional.row_sites(block, others)
    return None if sites.outside else sites.inside


def residual_map(out: Callable[[jax.Array], jax.Array]) -> RowMap:
    """The residual map by a network's output (2 k,), which shifts and scales the noise."""

    def push(noise: jax.Array, features: jax.Array) -> jax.Array:
        dim = noise.shape[0]
        found = out(jnp.concatenate([noise, features]))
        return noise * jnp.exp(GATE_RATE * found[dim:]) + found[:dim]

    return push


def _laplace(
    here: Callable[[jax.Array], jax.Array],
    there: Callable[[jax.Array], jax.Array],
    start: jax.Array,
) -> RowGaussians:
    """The Gaussians at the modes.

    The search is not differentiated. One more step of Newton's method from its end, at which
    gradients are zero, has the derivative of the mode in what is given.
    """
    near = find_row_modes(there, start)
    modes = near.mean + near.solve(jax.grad(here)(near.mean))
    return gaussians_at(here, modes)[1]


def _features(here: Callable[[jax.Array], jax.Array], gaussians: RowGaussians) -> jax.Array:
    """Departures of gradients near the modes from those of the Gaussians, (E, features)."""
    dim = gaussians.mean.shape[1]
    points = jnp.asarray(np.concatenate([p * np.eye(dim) for p in PROBES]), gaussians.mean.dtype)

    def departure(point: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(point, gaussians.mean.shape)
        found = gaussians.standardized(jax.grad(here)(gaussians.push(x))) + x
        return LARGEST_FEATURE * jnp.tanh(found / LARGEST_FEATURE)

    found = jax.vmap(departure, out_axes=1)(points)
    return found.reshape(found.shape[0], -1)


def row_couplings(conditional: RowTarget, blocks: tuple[RowBlock, ...]) -> list[jax.Array]:
    """The share of other rows in products with the Hessian, by block; 0 if rows are independent."""
    start = start_of(blocks)
    still = jax.tree.map(jnp.zeros_like, start)
    gradient = jax.grad(lambda coordinates: conditional.at(coordinates)[0])
    found = []
    for number, block in enumerate(blocks):
        others = block.others(start)
        log_density = conditional.of_block(block, others)
        weights = random.normal(random.key(number), (len(block.columns),))
        rows = block.ravel(start)
        expected = weights[:, None, None] * hessian_blocks(log_density, rows)[1]
        apart = hessian_blocks(log_density, rows, weights)[1] - expected
        moved = {**still, **block.unravel(jnp.broadcast_to(weights[:, None], rows.shape))}
        changes = jax.jvp(gradient, (start,), (moved,))[1]
        elsewhere = [jnp.ravel(changes[name]) / block.scale for name in others]
        largest = jnp.max(jnp.abs(expected))
        most = jnp.max(jnp.abs(jnp.concatenate([jnp.ravel(apart), *elsewhere])))
        found.append(most / jnp.where(largest > 0, largest, 1.0))
    return found
