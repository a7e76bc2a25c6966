"""Samples to estimate a score from, and a base score."""

import jax
import jax.numpy as jnp
import numpy as np


def make_data(n, d, m, seed=0, scales=1.0):
    """Skewed, correlated samples off the origin, and new points among and around them."""
    rng = np.random.default_rng(seed)
    mixing = scales * np.eye(d) + 0.4 * np.tril(rng.normal(size=(d, d)), -1)
    shift = np.linspace(1.0, -2.0, d)

    def draw(size):
        z = rng.normal(size=(size, d))
        return (z + 0.3 * z**2) @ mixing.T + shift

    return draw(n), draw(m)


def make_scaled(n, d, seed=0):
    """Samples of the same kind, of different scales."""
    return make_data(n, d, 0, seed, scales=np.linspace(0.5, 1.5, d))[0]


def base_function(x):
    """A score that is neither linear nor fitted; works on NumPy and JAX arrays."""
    xp = jnp if isinstance(x, jax.Array) else np
    return -xp.tanh(x - 0.3) - 0.2 * x
