"""Simulators of functions as priors, with their exact posteriors."""

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


def periodic_function(key: Array, points: Array) -> Array:
    """Values of three harmonics of a period between 1 and 2 with random coefficients, (m,)."""
    period_key, weight_key = random.split(key)
    period = random.uniform(period_key, (), minval=1.0, maxval=2.0)
    angle = 2 * jnp.pi * points[:, 0, None] * jnp.arange(1, 4) / period
    weights = random.normal(weight_key, (2, 3)) / jnp.arange(1, 4)
    return jnp.sin(angle) @ weights[0] + jnp.cos(angle) @ weights[1]


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


def exact_periodic(
    x: Array, y: Array, noise: float, grid: Array, num_draws: int = 2000, num_periods: int = 1001
) -> np.ndarray:
    """The same under :func:`periodic_function`: given the period, the weights are Gaussian."""
    periods = np.linspace(1.0, 2.0, num_periods)

    def harmonics(points: Array) -> np.ndarray:
        angle = 2 * np.pi * np.asarray(points, float)[:, :1] * np.arange(1, 4)
        angle = angle[None] / periods[:, None, None]
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=2) / np.tile([1, 2, 3], 2)

    at_data, at_grid, target = harmonics(x), harmonics(grid), np.asarray(y, float)
    precision = np.eye(6) + np.einsum("kim,kin->kmn", at_data, at_data) / noise**2
    along = np.einsum("kim,i->km", at_data, target) / noise**2
    mean = np.linalg.solve(precision, along[..., None])[..., 0]
    log_weight = 0.5 * np.sum(along * mean, axis=1) - 0.5 * np.linalg.slogdet(precision)[1]
    weight = np.exp(log_weight - log_weight.max())
    rng = np.random.default_rng(0)
    chosen = rng.choice(num_periods, num_draws, p=weight / weight.sum())
    root = np.linalg.inv(np.linalg.cholesky(precision))
    weights = mean[chosen] + np.einsum("smn,sm->sn", root[chosen], rng.normal(size=(num_draws, 6)))
    return np.einsum("sim,sm->si", at_grid[chosen], weights)


def jump_fraction(draws: np.ndarray) -> float:
    """Fraction of the variation of functions (S, m) in the steepest tenth of their increments.

    It is 1 for a piecewise-constant function with few jumps, .26 for independent Gaussian ones.
    """
    increments = np.sort(np.abs(np.diff(draws, axis=1)), axis=1)
    tenth = increments.shape[1] // 10
    return float(np.mean(increments[:, -tenth:].sum(1) / increments.sum(1)))


SAMPLERS = {"piecewise": piecewise_function, "periodic": periodic_function}
EXACT = {"piecewise": exact_piecewise, "periodic": exact_periodic}
