"""Draws of a guide whose mean and covariance change with some of its latents."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._guides.residual import LocalDensity
from numpyro_kscore._starts.conditional import REACH, Conditional, exponents
from numpyro_kscore._util.linalg import solve_transposed

__all__ = ["push_conditional"]

Frozen = Callable[[str, np.ndarray], jax.Array]


def push_conditional(
    points: jax.Array, local: LocalDensity | None, given: Conditional, frozen: Frozen
) -> tuple[jax.Array, LocalDensity | None]:
    """Coordinates (d,) at points of a Gaussian that changes with drivers, and their local density.

    Args:
        points: what :class:`~numpyro_kscore._starts.conditional.Conditional` pushes, (d,).
        local: the local log density of the points, if it is known.
        given: the Gaussian.
        frozen: a parameter that is not fitted, from its name and value.

    Cost: O(p d²) for p powers of the drivers.
    """
    center, inner = (
        [
            frozen(f"given_{kind}_{name}", value)
            for name, value in zip(gaussian._fields, gaussian, strict=True)
        ]
        for kind, gaussian in (("drivers", given.drivers), ("others", given.others))
    )
    skews, means, logs, rests = (
        frozen(f"given_{name}", getattr(given, name))
        for name in ("skews", "means", "logs", "rests")
    )
    count = given.drivers.mean.shape[0]
    drivers, others = points[:count], points[count:]

    def triangle(values: jax.Array) -> jax.Array:
        return jnp.diag(jnp.exp(values @ logs)) + jnp.tensordot(values, rests, axes=1)

    def push(drivers: jax.Array, others: jax.Array) -> jax.Array:
        values = _features(drivers)
        moved = values @ means + triangle(values) @ others
        stretched = -jnp.expm1(-skews * drivers) / skews
        return jnp.concatenate([center[0] + center[1] @ stretched, inner[0] + inner[1] @ moved])

    def log_volume(drivers: jax.Array) -> jax.Array:
        return jnp.sum(_features(drivers) @ logs) - skews @ drivers

    coordinates = push(drivers, others)[given.place]
    if local is None:
        return coordinates, None
    drivers, others = lax.stop_gradient((drivers, others))
    volume, of_volume = jax.value_and_grad(log_volume)(drivers)
    # The derivative is a block triangle: what others move with drivers is subtracted when the
    # scores of the others are known.
    scores = solve_transposed(
        inner[1], solve_transposed(triangle(_features(drivers)), local.score[count:])
    )
    _, transpose = jax.vjp(lambda u: push(u, others), drivers)
    (added,) = transpose(jnp.concatenate([jnp.zeros(count, scores.dtype), scores]))
    by_points = (local.score[:count] - of_volume - added) * jnp.exp(skews * drivers)
    first = solve_transposed(center[1], by_points)
    volumes = sum(jnp.sum(jnp.log(jnp.diagonal(factor))) for _, factor in (center, inner))
    score = jnp.concatenate([first, scores])[given.place]
    return coordinates, LocalDensity(local.log_density - volumes - volume, score)


def _features(drivers: jax.Array) -> jax.Array:
    """The powers of drivers (k,) that a Gaussian changes with, (p,)."""
    powers = exponents(drivers.shape[0])
    t = REACH * jnp.tanh(drivers / REACH)
    table = [jnp.ones_like(t)]
    for _ in range(np.max(powers)):
        table.append(table[-1] * t)
    return jnp.prod(jnp.stack(table)[powers, np.arange(len(t))], axis=1)
