"""Simulators of functions as NumPyro programs, with posteriors by importance sampling.

A simulator whose random numbers are sample sites is a model like any other: the guide is over the
random numbers, and every draw of it is a function of the prior's shape.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.stats import norm
from numpyro import handlers
from scipy.special import logsumexp

# points (m, d) -> values (m,), with the random numbers as sample sites
Program = Callable[[Array], Array]

# Effective sample size, as a fraction of the proposals, that a temperature is chosen for, and the
# degrees of freedom of the proposals: tails heavier than those of any posterior here.
SHARE, FREEDOM = 0.05, 5.0
# Time step of the equations and their end. Halving the step moves no value by more than 1e-4.
TIME_STEP, END = 0.1, 16.0


def periodic(points: Array) -> Array:
    """Values of three harmonics of a period between 1 and 2, (m,)."""
    period = numpyro.sample("period", dist.Uniform(1.0, 2.0))
    numbers = jnp.arange(1, 4)
    spread = jnp.broadcast_to(1.0 / numbers, (2, 3))
    weights = numpyro.sample("weights", dist.Normal(0.0, spread).to_event(2))
    angle = 2 * jnp.pi * points[:, :1] * numbers / period
    return jnp.sin(angle) @ weights[0] + jnp.cos(angle) @ weights[1]


def monotone(points: Array) -> Array:
    """Values of an increasing function on (-2, 2), (m,): its log slope is a sum of six cosines."""
    middle = numpyro.sample("middle", dist.Normal())
    spread = jnp.array([1.0, 1.0, 0.75, 0.6, 0.45, 0.4])
    weights = numpyro.sample("weights", dist.Normal(0.0, spread).to_event(1))
    fine = jnp.linspace(-2.0, 2.0, 129)
    slope = jnp.exp(jnp.cos(jnp.pi * jnp.arange(6) * (fine[:, None] + 2) / 4) @ weights - 1.0)
    rises = 0.5 * (slope[1:] + slope[:-1]) * (fine[1] - fine[0])
    heights = jnp.concatenate([jnp.zeros(1), jnp.cumsum(rises)])
    return middle + jnp.interp(points[:, 0], fine, heights - heights[64])


def lotka_volterra(points: Array) -> Array:
    """Log populations at (time, species), (m,): 0 is the prey, 1 the predator.

    Four rates and two initial populations are random, all log-normal; equations by Runge-Kutta.
    """
    rates = numpyro.sample("rates", dist.LogNormal(jnp.zeros(4), 0.25).to_event(1))
    start = numpyro.sample("start", dist.Normal(jnp.zeros(2), 0.4).to_event(1))

    def change(state: Array) -> Array:
        prey, predator = jnp.exp(state)
        return jnp.stack([rates[0] - rates[1] * predator, rates[3] * prey - rates[2]])

    def step(state: Array, _: None) -> tuple[Array, Array]:
        first = change(state)
        second = change(state + TIME_STEP / 2 * first)
        third = change(state + TIME_STEP / 2 * second)
        fourth = change(state + TIME_STEP * third)
        state = state + TIME_STEP / 6 * (first + 2 * second + 2 * third + fourth)
        return state, state

    _, path = lax.scan(step, start, None, length=round(END / TIME_STEP))
    path = jnp.concatenate([start[None], path])
    times = TIME_STEP * jnp.arange(len(path))
    species = [jnp.interp(points[:, 0], times, path[:, i]) for i in range(2)]
    return jnp.where(points[:, 1] < 0.5, *species)


PROGRAMS: dict[str, Program] = {
    "periodic": periodic,
    "monotone": monotone,
    "lotka-volterra": lotka_volterra,
}


def sampler(program: Program) -> Callable[[Array, Array], Array]:
    """The program as a function ``(key, points) -> values`` of one draw."""

    def draw(key: Array, points: Array) -> Array:
        # Blocked, so that a model may call it without the program's sites becoming the model's.
        with handlers.block():
            return handlers.seed(program, key)(points)

    return draw


def count_numbers(program: Program, points: Array) -> int:
    """The number of random numbers that the program draws."""
    trace = handlers.trace(handlers.seed(program, random.key(0))).get_trace(points)
    return sum(int(np.size(s["value"])) for s in trace.values() if s["type"] == "sample")


def from_numbers(program: Program, numbers: Array, points: Array) -> Array:
    """Values of the program driven by standard normal numbers (d,), through inverse CDFs, (m,)."""
    used = 0

    def value(site: dict) -> Array | None:
        nonlocal used
        if site["type"] != "sample":
            return None
        shape = site["fn"].shape()
        size = int(np.prod(shape, dtype=int))
        part = numbers[used : used + size].reshape(shape)
        used += size
        base = site["fn"]
        while isinstance(base, dist.Independent):
            base = base.base_dist
        return base.icdf(norm.cdf(part))

    with handlers.block():
        return handlers.substitute(handlers.seed(program, random.key(0)), substitute_fn=value)(
            points
        )


class Weighted(NamedTuple):
    """A posterior by importance sampling.

    Attributes:
        draws: functions of the posterior on the grid, (S, m).
        efficiency: effective sample size as a fraction of the proposals.
    """

    draws: np.ndarray
    efficiency: float


def importance_posterior(
    program: Program,
    x: Array,
    y: Array,
    noise: float,
    grid: Array,
    num_draws: int = 4000,
    num_proposals: int = 20_000,
    num_rounds: int = 12,
) -> Weighted:
    """Draws of the exact posterior of a program with normal noise, by importance sampling.

    The first proposals are the prior; those of a next round are a t distribution with the moments
    of the last one, whose likelihood is tempered until enough proposals count.

    Args:
        program: the simulator.
        x: inputs of the data, (N, d).
        y: targets, (N,).
        noise: their standard deviation.
        grid: inputs to draw functions at, (m, d).
        num_draws: S.
        num_proposals: proposals of a round.
        num_rounds: rounds; the last has the full likelihood.

    Raises:
        RuntimeError: if fewer than 5 % of the last proposals count.
    """
    rng, dim = np.random.default_rng(0), count_numbers(program, x)

    @jax.jit
    def errors(numbers: Array) -> Array:
        values = lax.map(lambda z: from_numbers(program, z, x), numbers, batch_size=2000)
        return -0.5 * jnp.sum(jnp.square((values - y) / noise), axis=1)

    unit = rng.normal(size=(num_proposals, dim))
    numbers, log_proposal = unit, -0.5 * np.sum(unit**2, axis=1)
    weights = np.full(num_proposals, 1 / num_proposals)
    for _ in range(num_rounds):
        prior = -0.5 * np.sum(numbers**2, axis=1)
        likelihood = np.asarray(errors(jnp.asarray(numbers, jnp.float32)), float)
        likelihood = np.where(np.isfinite(likelihood), likelihood, -np.inf)
        weights = _tempered(likelihood, prior - log_proposal)
        mean = weights @ numbers
        apart = numbers - mean
        factor = np.linalg.cholesky(1.1 * (weights[:, None] * apart).T @ apart)
        last, numbers_of_last = _weights(likelihood, prior - log_proposal), numbers
        stretch = np.sqrt(rng.chisquare(FREEDOM, (num_proposals, 1)) / FREEDOM)
        unit = rng.normal(size=(num_proposals, dim)) / stretch
        numbers = mean + unit @ factor.T
        log_proposal = -(FREEDOM + dim) / 2 * np.log1p(np.sum(unit**2, axis=1) / FREEDOM)
    efficiency = 1 / np.sum(last**2) / num_proposals
    if efficiency < SHARE:
        raise RuntimeError(
            f"importance_posterior: expected 5 % of the proposals to count; got {efficiency:.1%}. "
            "Take more rounds"
        )
    chosen = jnp.asarray(numbers_of_last[rng.choice(num_proposals, num_draws, p=last)], jnp.float32)
    draws = jax.jit(jax.vmap(lambda z: from_numbers(program, z, grid)))(chosen)
    return Weighted(np.asarray(draws), float(efficiency))


def _weights(log_likelihood: np.ndarray, log_ratio: np.ndarray, power: float = 1.0) -> np.ndarray:
    log_weights = power * log_likelihood + log_ratio
    return np.exp(log_weights - logsumexp(log_weights))


def _tempered(log_likelihood: np.ndarray, log_ratio: np.ndarray) -> np.ndarray:
    """Weights with the highest power of the likelihood, up to 1, at which enough of them count."""
    enough = lambda power: (  # noqa: E731
        1 / np.sum(_weights(log_likelihood, log_ratio, power) ** 2) > SHARE * len(log_ratio)
    )
    low, high = 0.0, 1.0
    if enough(high):
        return _weights(log_likelihood, log_ratio)
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if enough(middle) else (low, middle)
    return _weights(log_likelihood, log_ratio, low)
