"""A control variate for minibatches: the Taylor expansion of the density of all rows.

The expansion at a point of the density of the rows drawn is replaced by that of all rows, which is
its expectation. Each step can also keep the rows that matter most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_kscore._util.namespace import namespace

# Most dimensions of an expansion to second order.
MOST_CURVED = 128


class Taylor(NamedTuple):
    """The expansion of a function at a point, or values and slopes at several (leading axis n).

    Attributes:
        value: the function there, a scalar or (n,).
        slope: its gradient, (d,) or (n, d).
        curvature: its Hessian, (d, d); None if it is not known.
        params: gradients in the model's parameters, at several points their sum.
    """

    value: Any
    slope: Any
    curvature: Any = None
    params: dict[str, Any] = {}  # noqa: RUF012

    def at(self, moves: Any) -> tuple[Any, Any]:
        """Values (n,) and slopes (n, d) of the expansion at moves from its point, (n, d)."""
        xp = namespace(moves)
        curved = self.curvature is not None
        bends = moves @ self.curvature if curved else xp.zeros_like(moves)
        values = self.value + xp.sum(moves * (self.slope + 0.5 * bends), axis=1)
        return values, self.slope + bends


def taylor(
    value_and_slope: Callable[[Array], tuple[Any, ...]],
    point: Array,
    with_curvature: bool,
    map_directions: Callable[..., Any] = lax.map,
) -> Taylor:
    """The expansion of a function at a point (d,), to second order with curvature, else to first.

    ``value_and_slope`` returns the value, the gradient and perhaps gradients in parameters.
    ``map_directions(fn, xs)`` takes one direction after another by default, where a pass over all
    rows takes memory. A function without second derivatives, as where its gradient is a callback,
    is expanded to first order. Cost: d derivatives of ``value_and_slope``.
    """

    def along(direction: Array) -> Any:
        found, changes = jax.jvp(value_and_slope, (point,), (direction,))
        return found, changes[1]

    if with_curvature:
        try:
            directions = jnp.eye(len(point), dtype=point.dtype)
            found, curvature = map_directions(along, directions)
        except Exception:  # whatever a model does: the first order is enough
            with_curvature = False
    if not with_curvature:
        value, slope, *params = value_and_slope(point)
        return Taylor(value, slope, None, *params)
    value, slope, *params = jax.tree.map(lambda a: a[0], found)
    return Taylor(value, slope, curvature, *params)


class KeptRows(NamedTuple):
    """Rows that every step keeps.

    Attributes:
        batch: arguments and keyword arguments of a batch of these rows, leaves (k, ...).
        shares: part of all rows that are equal to each, (k,); zero for one that is not kept.
    """

    batch: Any
    shares: Array


class ControlVariate(NamedTuple):
    """A point at which the density of all rows is known.

    Attributes:
        point: unconstrained coordinates, (d,).
        of_all: value and gradients there.
        params: parameters of a reference that is expanded instead of the model, see ``Program``.
        rows: table by which rows are drawn, see ``draw_rows``; without it all are equally likely.
        kept: rows that every step adds to its batch from a loader.
    """

    point: jax.Array
    of_all: Taylor
    params: dict[str, Any] = {}  # noqa: RUF012
    rows: jax.Array | None = None
    kept: KeptRows | None = None


def center(flat: jax.Array) -> jax.Array:
    """The mean of the finite particles, (d,)."""
    valid = jnp.all(jnp.isfinite(flat), axis=1)
    weight = valid / jnp.maximum(jnp.sum(valid), 1)
    return weight @ jnp.where(valid[:, None], flat, 0.0)


def controlled(found: Taylor, moves: jax.Array, of_rows: Taylor, of_all: Taylor) -> Taylor:
    """Densities with the expansion at a point of the rows drawn replaced by that of all rows.

    ``moves`` are the particles less the point, (n, d). Where an expansion is not finite, ``found``,
    the densities at the particles, is returned as it is.
    """
    known = of_all.curvature is not None and of_rows.curvature is not None
    curvature = of_all.curvature - of_rows.curvature if known else None
    difference = Taylor(of_all.value - of_rows.value, of_all.slope - of_rows.slope, curvature)
    values, slopes = difference.at(moves)
    good = jnp.isfinite(difference.value) & jnp.all(jnp.isfinite(slopes))

    def corrected(value: jax.Array, change: jax.Array) -> jax.Array:
        return jnp.where(good, value + change, value)

    return Taylor(
        corrected(found.value, values),
        corrected(found.slope, slopes),
        None,
        jax.tree.map(
            lambda a, b, c: corrected(a, len(moves) * (c - b)),
            found.params,
            of_rows.params,
            of_all.params,
        ),
    )


def with_kept_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], kept: KeptRows, size: int
) -> tuple[tuple[Any, ...], dict[str, Any], Array]:
    """Arguments of a model for its batch and the kept rows, and how many rows each stands for.

    The arguments have k rows more. A row of the batch that is also kept has weight zero. ``size``
    is the number of all rows.
    """
    count = len(kept.batch[0])
    drawn = args[:count], {name: kwargs[name] for name in kept.batch[1]}
    pairs = zip(jax.tree.leaves(drawn), jax.tree.leaves(kept.batch), strict=True)
    is_same: Any = kept.shares > 0
    num_drawn = 0
    for one, other in pairs:
        is_same, num_drawn = is_same & _are_equal(one, other), len(one)
    stands_for = jnp.where(jnp.any(is_same, axis=1), 0.0, size / num_drawn)
    weights = jnp.concatenate([stands_for, size * kept.shares])
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), drawn, kept.batch)
    return (*joined[0], *args[count:]), {**kwargs, **joined[1]}, weights


def _are_equal(rows: Array, others: Array) -> Array:
    """Whether rows (n, ...) equal others (k, ...), (n, k)."""
    rows, others = rows.reshape(len(rows), 1, -1), others.reshape(1, len(others), -1)
    are_equal = rows == others
    if jnp.issubdtype(rows.dtype, jnp.inexact):
        are_equal = are_equal | (jnp.isnan(rows) & jnp.isnan(others))
    return jnp.all(are_equal, axis=-1)
