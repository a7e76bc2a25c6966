"""Short Markov chains from a guide's draws, which leave the model's distribution as it is.

Every chain is Hamiltonian Monte Carlo (Neal 2011) in coordinates whitened by the draws. Its steps
are of random size, down to a tenth of the longest, so that chains also move where the posterior is
narrow. The acceptance rate of all chains together sets the longest step in the first window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision

__all__ = ["ChainState", "Density", "Frame", "Window", "advance", "evaluate"]

# A point (d,) to the model's log density and its gradient (d,).
Density = Callable[[Array], tuple[Array, Array]]

# Transitions in a window, and leapfrog steps in a transition at most.
WINDOW, LONGEST = 10, 24
# Mean length of a trajectory, in standard deviations: a quarter of a Gaussian's period.
LENGTH = 1.6
# Steps are between this fraction of the longest and the longest.
SHORTEST = 0.1
# Acceptance aimed at, and how fast log step sizes follow it.
ACCEPTANCE, RATE = 0.8, 0.5
# Standardized coordinates are cut off here, which gives averages of heavy tails a finite error.
FARTHEST = 10.0


class Frame(NamedTuple):
    """Coordinates of the chains: ``x = mean + root z``.

    Attributes:
        mean: of the draws, (d,).
        root: a factor of their covariance, (d, d).
        sd: their standard deviations, (d,).
    """

    mean: Array
    root: Array
    sd: Array


class ChainState(NamedTuple):
    """Where chains are.

    Attributes:
        point: in whitened coordinates, (n, d).
        value: log density, (n,); -inf where it or its gradient is not finite.
        gradient: of it in whitened coordinates, (n, d).
        log_step: logarithm of the longest leapfrog step, in standard deviations.
    """

    point: Array
    value: Array
    gradient: Array
    log_step: Array


class Window(NamedTuple):
    """Averages over the transitions of a window, chain by chain.

    Attributes:
        first: of the standardized coordinates ``u = (x - mean)/sd``, (n, d).
        second: of their squares, (n, d).
        score: of the model's score v in the same coordinates, (n, d), zero on average under the
            model.
        product: of ``u v + 1``, (n, d), likewise, by Stein's identity.
        acceptance: mean over chains and transitions.
    """

    first: Array
    second: Array
    score: Array
    product: Array
    acceptance: Array


def evaluate(density: Density, frame: Frame, z: Array) -> tuple[Array, Array]:
    """Log density (n,) and its gradient (n, d) at whitened points (n, d)."""
    return _compiled(_evaluate, density)(frame, z)


def advance(
    density: Density,
    frame: Frame,
    state: ChainState,
    key: Array,
    adapts: Array,
    coldness: Array,
) -> tuple[ChainState, Window]:
    """A window of transitions.

    Args:
        density: the model.
        frame: the coordinates.
        state: where the chains are.
        key: random key.
        adapts: whether the step size follows the acceptance, 1 or 0.
        coldness: the power of the density that is left invariant; below 1 it is flatter.

    Cost: up to 240 gradients of each chain.
    """
    return _compiled(_advance, density)(frame, state, key, adapts, coldness)


@lru_cache(maxsize=4)
def _compiled(fn: Callable[..., Any], density: Density) -> Callable[..., Any]:
    return quick_jit(partial(fn, density))


@full_precision
def _evaluate(density: Density, frame: Frame, z: Array) -> tuple[Array, Array]:
    value, gradient = jax.vmap(density)(frame.mean + z @ frame.root.T)
    gradient = gradient @ frame.root
    finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient), axis=1)
    return jnp.where(finite, value, -jnp.inf), jnp.where(finite[:, None], gradient, 0.0)


@full_precision
def _advance(
    density: Density,
    frame: Frame,
    state: ChainState,
    key: Array,
    adapts: Array,
    coldness: Array,
) -> tuple[ChainState, Window]:
    def transition(state: ChainState, key: Array) -> tuple[ChainState, tuple[Array, ...]]:
        state, probability = _transition(density, frame, state, key, coldness)
        change = adapts * RATE * (jnp.mean(probability) - ACCEPTANCE)
        state = state._replace(log_step=state.log_step + change)
        # Rows of norm 1: the mean of u v is minus the square of the norm.
        rows = frame.root / frame.sd[:, None]
        u, v = state.point @ rows.T, state.gradient @ rows.T
        near = jnp.clip(u, -FARTHEST, FARTHEST)
        return state, (near, near**2, v, u * v + jnp.sum(rows**2, axis=1), jnp.mean(probability))

    state, averaged = lax.scan(transition, state, jax.random.split(key, WINDOW))
    return state, Window(*(jnp.mean(a, axis=0) for a in averaged))


def _transition(
    density: Density, frame: Frame, state: ChainState, key: Array, coldness: Array
) -> tuple[ChainState, Array]:
    """One transition, with the same number of steps for all chains, and its acceptance (n,)."""
    n, _ = state.point.shape
    dtype = state.point.dtype
    keys = jax.random.split(key, 4)
    longest = jnp.exp(state.log_step)
    step = longest * SHORTEST ** jax.random.uniform(keys[0], (n, 1), dtype)
    length = LENGTH * jax.random.uniform(keys[1], (), dtype, minval=0.4, maxval=1.6)
    count = jnp.clip(jnp.ceil(2 * length / longest).astype(int), 1, LONGEST)
    momentum = jax.random.normal(keys[2], state.point.shape, dtype)

    def leapfrog(_: Array, place: tuple[Array, ...]) -> tuple[Array, ...]:
        point, momentum, _, gradient = place
        momentum = momentum + 0.5 * step * coldness * gradient
        point = point + step * momentum
        value, gradient = _evaluate(density, frame, point)
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
    return moved, probability
