"""Taylor expansions of densities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["Taylor", "taylor"]


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


def taylor(
    value_and_slope: Callable[[Array], tuple[Any, ...]],
    point: Array,
    with_curvature: bool,
    map_directions: Callable[..., Any] = lax.map,
) -> Taylor:
    """The expansion of a function to second order, or to first order.

    Args:
        value_and_slope: from a point (d,) to value, gradient and perhaps gradients in parameters.
        point: where it is expanded, (d,).
        with_curvature: whether the Hessian is computed.
        map_directions: ``(fn, xs) -> ys``; one direction after another by default, where a pass
            over all rows takes memory.

    Cost: d derivatives of ``value_and_slope``.
    """
    if not with_curvature:
        value, slope, *params = value_and_slope(point)
        return Taylor(value, slope, None, *params)

    def along(direction: Array) -> Any:
        found, changes = jax.jvp(value_and_slope, (point,), (direction,))
        return found, changes[1]

    found, curvature = map_directions(along, jnp.eye(len(point), dtype=point.dtype))
    value, slope, *params = jax.tree.map(lambda a: a[0], found)
    return Taylor(value, slope, curvature, *params)
