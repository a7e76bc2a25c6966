"""A loss whose gradient is given and not the derivative of its value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["with_gradient"]


@jax.custom_jvp
def with_gradient(value: jax.Array, moved: Any, gradient: Any) -> jax.Array:
    """``value``, whose derivative in ``moved`` is ``gradient`` and nothing else.

    Args:
        value: a scalar.
        moved: a pytree of differentiable arrays.
        gradient: a pytree of the same structure and shapes.
    """
    return value


@with_gradient.defjvp
def _with_gradient_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    value, _, gradient = primals
    # Where the gradient is zero the tangent does not count, even if it is NaN.
    products = jax.tree.map(
        lambda g, t: jnp.sum(g * jnp.where(g == 0, 0.0, t)).astype(value.dtype),
        gradient,
        tangents[1],
    )
    return value, sum(jax.tree.leaves(products), jnp.zeros((), value.dtype))
