"""Differential equations by fixed steps, whose gradients are cheap."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

__all__ = ["runge_kutta"]


def runge_kutta(
    change: Callable[[Array], Array], start: Array, num_times: int, num_steps: int
) -> Array:
    """States at times 0 to ``num_times``, (num_times + 1, k).

    Args:
        change: a state's derivative in time, (k,) to (k,).
        start: the first state, (k,).
        num_times: number of units of time.
        num_steps: steps in each.
    """
    step = 1 / num_steps

    def move(state: Array, _: None) -> tuple[Array, None]:
        first = change(state)
        second = change(state + step / 2 * first)
        third = change(state + step / 2 * second)
        fourth = change(state + step * third)
        return state + step / 6 * (first + 2 * second + 2 * third + fourth), None

    def unit(state: Array, _: None) -> tuple[Array, Array]:
        state, _ = lax.scan(move, state, None, length=num_steps)
        return state, state

    return jnp.concatenate([start[None], lax.scan(unit, start, None, length=num_times)[1]])
