"""The expansion of a density at a point, and what replaces that of some rows by that of all."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_kscore._tracing.kept_rows import KeptRows

__all__ = ["MOST_CURVED", "Anchor", "Expansion", "center", "replaced"]

# Most dimensions of an expansion to second order.
MOST_CURVED = 128


class Expansion(NamedTuple):
    """A log density and its gradients, at the particles (leading axis n) or at one point.

    Attributes:
        values: (n,) or a scalar.
        scores: (n, d) or (d,).
        params: gradients in the model's parameters, summed over the particles.
        curvature: the Hessian at one point, (d, d), if it is known.
    """

    values: jax.Array
    scores: jax.Array
    params: dict[str, Any]
    curvature: jax.Array | None = None


class Anchor(NamedTuple):
    """A point at which the density of all rows is known.

    Attributes:
        point: unconstrained coordinates, (d,).
        of_all: value and gradients there.
        params: parameters of a reference that is expanded instead of the model, see ``Program``.
        rows: table by which rows are drawn, see ``draw_rows``; without it all are as likely.
        kept: rows that every step takes besides its batch from a loader.
    """

    point: jax.Array
    of_all: Expansion
    params: dict[str, Any] = {}  # noqa: RUF012
    rows: jax.Array | None = None
    kept: KeptRows | None = None


def center(flat: jax.Array) -> jax.Array:
    """The mean of the finite particles, (d,)."""
    valid = jnp.all(jnp.isfinite(flat), axis=1)
    weight = valid / jnp.maximum(jnp.sum(valid), 1)
    return weight @ jnp.where(valid[:, None], flat, 0.0)


def replaced(
    found: Expansion, moves: jax.Array, of_rows: Expansion, of_all: Expansion
) -> Expansion:
    """Densities with the expansion at a point of the rows drawn replaced by that of all rows.

    Args:
        found: at the particles, with the rows drawn.
        moves: the particles less the point, (n, d).
        of_rows: at the point, with the rows drawn.
        of_all: at the point, with all rows.

    Returns:
        The same as before where an expansion is not finite.
    """
    slope = of_all.scores - of_rows.scores
    level = of_all.values - of_rows.values
    good = jnp.isfinite(level) & jnp.all(jnp.isfinite(slope))
    if of_all.curvature is None or of_rows.curvature is None:
        bends = jnp.zeros_like(moves)
    else:
        bends = moves @ (of_all.curvature - of_rows.curvature)
        good = good & jnp.all(jnp.isfinite(bends))

    def corrected(value: jax.Array, change: jax.Array) -> jax.Array:
        return jnp.where(good, value + change, value)

    return Expansion(
        corrected(found.values, level + jnp.sum(moves * (slope + 0.5 * bends), axis=1)),
        corrected(found.scores, slope + bends),
        jax.tree.map(
            lambda a, b, c: corrected(a, len(moves) * (c - b)),
            found.params,
            of_rows.params,
            of_all.params,
        ),
    )
