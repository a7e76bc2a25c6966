"""Piecewise-constant functions as a prior, with their exact posterior."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random


def piece_numbers(key: Array, points: Array) -> Array:
    """Number of the piece that each point is in, (m,), after 1 to 6 uniformly placed jumps."""
    count_key, place_key = random.split(key)
    places = random.uniform(place_key, (6,), minval=-2.0, maxval=2.0)
    # Absent jumps are moved beyond the end.
    there = jnp.arange(6) < random.randint(count_key, (), 1, 7)
    return jnp.sum(points[:, 0, None] > jnp.where(there, places, jnp.inf), axis=1)


def piecewise_function(key: Array, points: Array) -> Array:
    """Values of a piecewise-constant function with standard normal levels, (m,)."""
    jump_key, level_key = random.split(key)
    return random.normal(level_key, (7,))[piece_numbers(jump_key, points)]


def exact_piecewise(
    x: Array,
    y: Array,
    noise: float,
    grid: Array,
    num_draws: int = 2000,
    num_proposals: int = 40_000,
) -> np.ndarray:
    """Draws of the exact posterior under :func:`piecewise_function` on a grid, (S, m).

    Jumps are proposed from the prior and weighted by the likelihood with the levels integrated out;
    given the jumps, the levels are Gaussian.
    """
    keys = random.split(random.key(7), num_proposals)
    both = jnp.concatenate([x, grid])
    pieces = np.asarray(jax.vmap(lambda key: piece_numbers(key, both))(keys))
    n, variance = len(y), noise**2
    one_hot = np.eye(7)[pieces[:, :n]]
    count = one_hot.sum(1)
    total = np.einsum("kip,i->kp", one_hot, np.asarray(y, float))
    # The posterior of levels with a standard normal prior, given their data.
    precision = 1 + count / variance
    mean = total / variance / precision
    log_weight = np.sum(0.5 * precision * mean**2 - 0.5 * np.log(precision), axis=1)
    weight = np.exp(log_weight - log_weight.max())
    rng = np.random.default_rng(0)
    chosen = rng.choice(num_proposals, num_draws, p=weight / weight.sum())
    levels = mean[chosen] + rng.normal(size=(num_draws, 7)) / np.sqrt(precision[chosen])
    return np.take_along_axis(levels, pieces[chosen, n:], axis=1)


def jump_fraction(draws: np.ndarray) -> float:
    """Fraction of the variation of functions (S, m) in the steepest tenth of their increments.

    It is 1 for a piecewise-constant function with few jumps, .26 for independent Gaussian ones.
    """
    increments = np.sort(np.abs(np.diff(draws, axis=1)), axis=1)
    tenth = increments.shape[1] // 10
    return float(np.mean(increments[:, -tenth:].sum(1) / increments.sum(1)))
