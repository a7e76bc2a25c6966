"""Hamiltonian Monte Carlo of many chains at once (Neal 2011), for ``diagnose`` and ``refine``.

Chains are in coordinates whitened by draws. All have the same random number of leapfrog steps in a
transition, so that none waits for another, and each a step size of its own, so that chains also
move where the posterior is narrow. The acceptance of all chains together sets the longest step.

``diagnose`` needs no optional package, which rules out BlackJAX. NumPyro's integrator saves neither
lines nor time (benchmarks/results/2026-11-28-hmc-engines.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_kscore._model.target import Density
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.estimators._base.standardization import whiten_samples

# Transitions in a window.
WINDOW = 10
# A transition with a larger error of the energy has diverged.
DIVERGENT = 1000.0
# How fast log step sizes follow the acceptance.
RATE = 0.5


class Metric(NamedTuple):
    """Coordinates of the chains: ``x = mean + root z``.

    Of draws they are the mean, (d,), a factor of the covariance, (d, d), and deviations, (d,).
    """

    mean: Array
    root: Array
    sd: Array

    def whiten(self, x: Any) -> np.ndarray:
        """Points (n, d) in whitened coordinates, in double precision."""
        mean, root = (np.asarray(a, np.float64) for a in (self.mean, self.root))
        return np.linalg.solve(root, (np.asarray(x, np.float64) - mean).T).T

    def unwhiten(self, z: Any) -> np.ndarray:
        """Whitened points (..., d) in the original coordinates, in double precision."""
        mean, root = (np.asarray(a, np.float64) for a in (self.mean, self.root))
        return mean + np.asarray(z, np.float64) @ root.T


class Schedule(NamedTuple):
    """How steps and trajectories are drawn, and which acceptance the longest step aims at.

    Attributes:
        most_steps: largest number of leapfrog steps in a transition.
        least_path: least number of steps times the longest step, in standard deviations; uniform
            between this and the next.
        most_path: its largest value.
        share_short: probability that a chain takes steps shorter than the longest.
        shortest: their least length, relative to the longest; its logarithm is uniform.
        acceptance: target of the power mean of the acceptance probabilities of all chains.
        power: exponent of that mean: 1 for the arithmetic mean, -1 for the harmonic one, which
            falls far where a few chains accept next to nothing.
        floor: lower limit of the probabilities in it.
    """

    most_steps: int
    least_path: float
    most_path: float
    share_short: float
    shortest: float
    acceptance: float
    power: float
    floor: float


# Trajectories of 1.6 standard deviations on average, a quarter of a Gaussian's period: steps are
# between a tenth of the longest and the longest.
DIAGNOSIS = Schedule(
    most_steps=24,
    least_path=1.28,
    most_path=5.12,
    share_short=1.0,
    shortest=0.1,
    acceptance=0.8,
    power=1.0,
    floor=0.0,
)
# Trajectories of 0.8 standard deviations on average. A quarter of the transitions take shorter
# steps, and the harmonic mean shows chains that accept next to nothing: both are for places where
# the posterior is far narrower than elsewhere.
REFINEMENT = Schedule(
    most_steps=32,
    least_path=0.0,
    most_path=1.6,
    share_short=0.25,
    shortest=0.05,
    acceptance=0.65,
    power=-1.0,
    floor=0.1,
)


class ChainState(NamedTuple):
    """Positions of chains, and their step size.

    Attributes:
        point: in whitened coordinates, (n, d).
        value: log density, (n,); -inf where it or its gradient is not finite.
        gradient: gradient of the log density in whitened coordinates, (n, d).
        log_step: logarithm of the longest leapfrog step, in standard deviations.
    """

    point: Array
    value: Array
    gradient: Array
    log_step: Array


class Window(NamedTuple):
    """Some transitions of all chains, on the device or on the host.

    Attributes:
        draws: in whitened coordinates, (WINDOW, n, d).
        scores: gradients of the log density there, (WINDOW, n, d).
        acceptance: mean probability of acceptance of each chain, (n,).
        num_divergent: transitions whose error of the energy was above 1000 or no number.
        num_steps: leapfrog steps, gradients of each chain.
    """

    draws: Any
    scores: Any
    acceptance: Any
    num_divergent: Any
    num_steps: Any


@jax.jit
def fit_metric(samples: Array) -> Metric:
    """Coordinates whitened by draws (n, d)."""
    coordinates = whiten_samples(samples)
    return Metric(coordinates.mean, coordinates.root(), coordinates.scale)


class ChainProgram(NamedTuple):
    """The transitions of chains that leave a density invariant, in coordinates of a metric."""

    density: Density
    metric: Metric

    def start(self, z: np.ndarray, log_step: Any = None) -> ChainState:
        """Chains at whitened points (n, d).

        The logarithm of the longest step is by default that with the same acceptance in all
        dimensions.
        """
        if log_step is None:
            log_step = -0.25 * np.log(z.shape[1])
        point, log_step = (jnp.asarray(a, self.metric.mean.dtype) for a in (z, log_step))
        return ChainState(point, *self.evaluate(point), log_step)

    def evaluate(self, z: Array) -> tuple[Array, Array]:
        """Log density (n,) and its gradient (n, d) at whitened points (n, d)."""
        return _compiled(_evaluate, self.density)(self.metric, z)

    def advance(
        self, state: ChainState, key: Array, schedule: Schedule, adapts: bool, coldness: float = 1.0
    ) -> tuple[ChainState, Window]:
        """A window of transitions, in which the step size follows the acceptance if it ``adapts``.

        One program serves all schedules. ``coldness`` is the power of the density that is left
        invariant; below 1 it is flatter. Cost: up to ``WINDOW * schedule.most_steps`` gradients of
        each chain.
        """
        numbers = jnp.asarray([adapts, coldness, *schedule], state.point.dtype)
        return _compiled(_advance, self.density)(self.metric, state, key, numbers)


@lru_cache(maxsize=4)
def _compiled(fn: Callable[..., Any], density: Density) -> Callable[..., Any]:
    return quick_jit(partial(fn, density))


@full_precision
def _evaluate(density: Density, metric: Metric, z: Array) -> tuple[Array, Array]:
    value, gradient = jax.vmap(density)(metric.mean + z @ metric.root.T)
    gradient = gradient @ metric.root
    finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient), axis=1)
    return jnp.where(finite, value, -jnp.inf), jnp.where(finite[:, None], gradient, 0.0)


@full_precision
def _advance(
    density: Density, metric: Metric, state: ChainState, key: Array, numbers: Array
) -> tuple[ChainState, Window]:
    adapts, coldness, *settings = numbers
    schedule = Schedule(*settings)
    evaluate = partial(_evaluate, density, metric)

    def transition(state: ChainState, key: Array) -> tuple[ChainState, tuple[Array, ...]]:
        state, probability, is_divergent, count = _transition(
            evaluate, state, key, schedule, coldness
        )
        powers = jnp.maximum(probability, schedule.floor) ** schedule.power
        change = jnp.mean(powers) ** (1 / schedule.power) - schedule.acceptance
        state = state._replace(log_step=state.log_step + adapts * RATE * change)
        return state, (state.point, state.gradient, probability, jnp.sum(is_divergent), count)

    state, seen = lax.scan(transition, state, jax.random.split(key, WINDOW))
    draws, scores, probability, num_divergent, count = seen
    divergent, steps = jnp.sum(num_divergent), jnp.sum(count)
    return state, Window(draws, scores, jnp.mean(probability, axis=0), divergent, steps)


def _transition(
    evaluate: Callable[[Array], tuple[Array, Array]],
    state: ChainState,
    key: Array,
    schedule: Schedule,
    coldness: Array,
) -> tuple[ChainState, Array, Array, Array]:
    """One transition, its acceptance (n,), whether it diverged (n,), and its number of steps."""
    n, dtype = len(state.point), state.point.dtype
    keys = jax.random.split(key, 5)
    longest = jnp.exp(state.log_step)
    shorter = schedule.shortest ** jax.random.uniform(keys[0], (n, 1), dtype)
    is_short = jax.random.uniform(keys[4], (n, 1), dtype) < schedule.share_short
    step = longest * jnp.where(is_short, shorter, 1.0)
    least, most = schedule.least_path, schedule.most_path
    path = jax.random.uniform(keys[1], (), dtype, least, most)
    count = jnp.clip(jnp.ceil(path / longest), 1, schedule.most_steps).astype(int)
    momentum = jax.random.normal(keys[2], state.point.shape, dtype)

    def leapfrog(_: Array, place: tuple[Array, ...]) -> tuple[Array, ...]:
        point, momentum, _, gradient = place
        momentum = momentum + 0.5 * step * coldness * gradient
        point = point + step * momentum
        value, gradient = evaluate(point)
        return point, momentum + 0.5 * step * coldness * gradient, value, gradient

    first = (state.point, momentum, state.value, state.gradient)
    point, last, value, gradient = lax.fori_loop(0, count, leapfrog, first)
    gain = coldness * (value - state.value) + 0.5 * jnp.sum(momentum**2 - last**2, axis=1)
    probability = jnp.where(jnp.isnan(gain), 0.0, jnp.exp(jnp.minimum(gain, 0.0)))
    accept = jax.random.uniform(keys[3], (n,), dtype) < probability
    moved = ChainState(
        jnp.where(accept[:, None], point, state.point),
        jnp.where(accept, value, state.value),
        jnp.where(accept[:, None], gradient, state.gradient),
        state.log_step,
    )
    return moved, probability, ~(gain > -DIVERGENT), count
