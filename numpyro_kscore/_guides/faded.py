"""Draws of a guide whose correlations fade with the scales of priors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._guides.residual import LocalDensity
from numpyro_kscore._starts.fading import Fading
from numpyro_kscore._tracing.centering import share_and_log_size
from numpyro_kscore._util.linalg import solve_transposed

__all__ = ["push_faded"]

Frozen = Callable[[str, np.ndarray], jax.Array]


def push_faded(
    points: jax.Array, local: LocalDensity | None, fading: Fading, frozen: Frozen
) -> tuple[jax.Array, LocalDensity | None]:
    """Coordinates (d,) at points of a Gaussian with fading correlations, and their local density.

    Args:
        points: what :class:`~numpyro_kscore._starts.fading.Fading` pushes, (d,).
        local: the local log density of the points, if it is known.
        fading: the Gaussian.
        frozen: a parameter that is not fitted, from its name and value.

    Cost: O(d²).
    """
    mean, factor = (
        frozen(f"fading_{name}", value)
        for name, value in zip(fading.gaussian._fields, fading.gaussian, strict=True)
    )
    rates, offsets, degrees, shifts = (
        frozen(f"fading_{name}", getattr(fading, name))
        for name in ("rates", "offsets", "degrees", "shifts")
    )
    own = jnp.diagonal(factor)
    rest = factor - jnp.diag(own)
    count = rates.shape[1]

    def log_sizes(moves: jax.Array) -> jax.Array:
        return share_and_log_size(moves, degrees)[1]

    def sizes_at(drivers: jax.Array) -> jax.Array:
        moves = rates @ (factor[:count, :count] @ drivers)
        return jnp.exp(log_sizes(offsets + moves) - log_sizes(offsets))

    def push(drivers: jax.Array) -> jax.Array:
        sizes = sizes_at(drivers)
        moved = jnp.concatenate([drivers, points[count:]]) + sizes * shifts
        return mean + own * moved + sizes * (rest @ (sizes * moved))

    coordinates = push(points[:count])[fading.place]
    if local is None:
        return coordinates, None
    points = lax.stop_gradient(points)
    sizes = sizes_at(points[:count])
    # The derivative is a lower triangle, but sizes change with the drivers. What they add is
    # subtracted when the scores of the other latents are known.
    triangle = jnp.diag(own) + rest * jnp.outer(sizes, sizes)
    others = solve_transposed(triangle[count:, count:], local.score[count:])
    _, transpose = jax.vjp(push, points[:count])
    (added,) = transpose(jnp.concatenate([jnp.zeros(count, others.dtype), others]))
    drivers = solve_transposed(triangle[:count, :count], local.score[:count] - added)
    score = jnp.concatenate([drivers, others])[fading.place]
    log_volume = jnp.sum(jnp.log(own))
    return coordinates, LocalDensity(local.log_density - log_volume, score)
