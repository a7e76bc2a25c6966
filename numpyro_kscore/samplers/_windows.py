"""Windows of Hamiltonian Monte Carlo by BlackJAX: all chains at once, one program for all windows.

Chains are in coordinates whitened by a :class:`Frame`. All have the same random number of steps in
a transition, so that none waits for another, and the same step size, but for a quarter of them,
which takes shorter ones, so that chains also move where the posterior is narrow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.diagnostics._chains import Density, Frame

__all__ = ["WINDOW", "Window", "advance", "check_blackjax"]

# Transitions in a window, and leapfrog steps in a transition at most.
WINDOW, LONGEST = 10, 32
# Mean length of a trajectory, in standard deviations.
LENGTH = 0.8
# Harmonic mean of the acceptance aimed at, with a floor, and how fast log step sizes follow it. It
# falls far where a few chains accept next to nothing, which the mean would hardly show.
ACCEPTANCE, FLOOR, RATE = 0.65, 0.1, 0.5
# The share of transitions with shorter steps, and how much shorter they are at most.
SHARE_SHORT, SHORTEST = 0.25, 0.05
INSTALL = 'Run: pip install "numpyro-kscore[samplers]"'


class Window(NamedTuple):
    """A window of transitions of all chains.

    Attributes:
        draws: in whitened coordinates, (WINDOW, chains, d).
        log_step: logarithm of the step size after it.
        acceptance: probabilities, means over the window, (chains,).
        num_divergent: transitions whose error of the energy was above 1000 or no number.
        num_gradients: of all chains together.
    """

    draws: np.ndarray
    log_step: np.ndarray
    acceptance: np.ndarray
    num_divergent: int
    num_gradients: int


def check_blackjax() -> None:
    """Raise ``ImportError`` without BlackJAX."""
    try:
        import blackjax  # noqa: F401
    except ImportError as error:
        raise ImportError(f"refine: expected BlackJAX; got none installed. {INSTALL}") from error


def advance(
    density: Density, frame: Frame, z: np.ndarray, log_step: Any, key: Array, adapts: bool
) -> Window:
    """A window of transitions.

    Args:
        density: the model.
        frame: the coordinates.
        z: where the chains are, in whitened coordinates, (chains, d).
        log_step: logarithm of the step size.
        key: random key.
        adapts: whether the step size follows the acceptance.
    """
    dtype = frame.mean.dtype
    scalars = jnp.asarray([log_step, float(adapts)], dtype)
    found = _compiled(density)(frame, jnp.asarray(z, dtype), *scalars, key)
    draws, log_step, acceptance, num_divergent, num_steps = jax.device_get(found)
    # One more for the first point, where a window begins anew.
    num_gradients = (int(num_steps) + 1) * len(z)
    return Window(draws, log_step, acceptance, int(num_divergent), num_gradients)


@lru_cache(maxsize=4)
def _compiled(density: Density) -> Callable[..., Any]:
    return quick_jit(partial(_advance, density))


@full_precision
def _advance(
    density: Density, frame: Frame, z: Array, log_step: Array, adapts: Array, key: Array
) -> tuple[Array, ...]:
    from blackjax.mcmc import hmc

    log_density = _with_gradient(density, frame)
    kernel = hmc.build_kernel()
    count, dim = z.shape

    def transition(carry: Any, key: Array) -> tuple[Any, tuple[Array, ...]]:
        state, log_step = carry
        length_key, short_key, size_key, *keys = jax.random.split(key, 3 + count)
        step = jnp.exp(log_step)
        is_short = jax.random.uniform(short_key, (count,)) < SHARE_SHORT
        sizes = SHORTEST ** jax.random.uniform(size_key, (count,), z.dtype)
        steps = step * jnp.where(is_short, sizes, 1.0)
        length = 2 * LENGTH * jax.random.uniform(length_key, (), z.dtype)
        num_steps = jnp.clip(jnp.ceil(length / step).astype(int), 1, LONGEST)

        def move(state: Any, key: Array, step: Array) -> tuple[Any, Any]:
            mass = jnp.ones(dim, z.dtype)
            return kernel(key, state, log_density, step, mass, num_steps)

        state, info = jax.vmap(move)(state, jnp.stack(keys), steps)
        probability = info.acceptance_rate
        harmonic = 1 / jnp.mean(1 / jnp.maximum(probability, FLOOR))
        log_step = log_step + adapts * RATE * (harmonic - ACCEPTANCE)
        seen = (state.position, probability, jnp.sum(info.is_divergent), num_steps)
        return (state, log_step), seen

    start = jax.vmap(partial(hmc.init, logdensity_fn=log_density))(z)
    keys = jax.random.split(key, WINDOW)
    (_, log_step), seen = lax.scan(transition, (start, log_step), keys)
    draws, probability, num_divergent, num_steps = seen
    divergent, steps = jnp.sum(num_divergent), jnp.sum(num_steps)
    return draws, log_step, jnp.mean(probability, axis=0), divergent, steps


def _with_gradient(density: Density, frame: Frame) -> Callable[[Array], Array]:
    """The log density at a whitened point (d,), with the gradient in the mode the loss uses."""

    def both(z: Array) -> tuple[Array, Array]:
        value, gradient = density(frame.mean + frame.root @ z)
        gradient = gradient @ frame.root
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
        return jnp.where(finite, value, -jnp.inf), jnp.where(finite, gradient, 0.0)

    @jax.custom_vjp
    def value_at(z: Array) -> Array:
        return both(z)[0]

    value_at.defvjp(both, lambda gradient, g: (g * gradient,))
    return value_at
