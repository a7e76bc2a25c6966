"""Two coordinates that bend, among normal ones, rotated so that no axis shows which."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, random

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Target, flat_prior, make_target, ring_log_density

__all__ = ["banana_in_six", "ring_in_ten"]


def ring_in_ten() -> Posterior:
    """A ring of radius 2 and thickness .25, among eight normal coordinates: d = 10."""
    return _among_normals("ring_in_ten", 10, ring_log_density, make_target("ring").exact)


def banana_in_six() -> Posterior:
    """A parabola of thickness .3 over two deviations, among four normal coordinates: d = 6."""

    def log_density(x: Array) -> Array:
        return -0.5 * ((x[0] / 2.0) ** 2 + ((x[1] - x[0] ** 2) / 0.3) ** 2)

    def exact(key: Array, num_draws: int) -> Array:
        x, noise = random.normal(key, (2, num_draws)) * jnp.array([[2.0], [0.3]])
        return jnp.stack([x, x**2 + noise], axis=1)

    return _among_normals("banana_in_six", 6, log_density, exact)


def _among_normals(
    name: str, dim: int, log_density: Callable[[Array], Array], exact: Callable[[Array, int], Array]
) -> Posterior:
    """A density of two coordinates times a standard normal one, rotated at random."""
    rotation, _ = np.linalg.qr(np.random.default_rng(dim).normal(size=(dim, dim)))
    rotation = jnp.asarray(rotation)

    def model() -> None:
        x = numpyro.sample("x", flat_prior(dim))
        y = rotation @ x
        numpyro.factor("bent", log_density(y[:2]) - 0.5 * jnp.sum(y[2:] ** 2))

    def draws(key: Array, num_draws: int) -> Array:
        bent_key, key = random.split(key)
        rest = random.normal(key, (num_draws, dim - 2))
        return jnp.concatenate([exact(bent_key, num_draws), rest], axis=1) @ rotation

    return Posterior(Target(name, model, exact=draws))
