"""Families of distributions with known log densities, for guides and models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random


class Density(NamedTuple):
    """A distribution with its log density and, if it has a sampler, draws.

    Attributes:
        draw: ``(key, n, d) -> (n, d)``; None without a sampler.
        log_density: ``(d,) -> ()``, up to a constant.
    """

    draw: Callable[[Array, int, int], Array] | None
    log_density: Callable[[Array], Array]


def gaussian(scale: float = 1.0, shift: float = 0.0) -> Density:
    """Independent coordinates; the mean has length ``shift`` in any dimension."""

    def draw(key: Array, n: int, d: int) -> Array:
        return shift / d**0.5 + scale * random.normal(key, (n, d))

    def log_density(x: Array) -> Array:
        return -0.5 * jnp.sum(((x - shift / x.size**0.5) / scale) ** 2)

    return Density(draw, log_density)


def student(nu: float) -> Density:
    """Elliptical Student t with identity scale."""

    def draw(key: Array, n: int, d: int) -> Array:
        first, second = random.split(key)
        chi2 = 2 * random.gamma(second, nu / 2, (n, 1))
        return random.normal(first, (n, d)) * jnp.sqrt(nu / chi2)

    return Density(draw, lambda x: -0.5 * (nu + x.size) * jnp.log1p(jnp.sum(x**2) / nu))


def banana(bend: float) -> Density:
    """The second coordinate is bent along the first; the rest are standard normal."""

    def draw(key: Array, n: int, d: int) -> Array:
        x = random.normal(key, (n, d))
        return x.at[:, 1].add(bend * (x[:, 0] ** 2 - 1))

    def log_density(x: Array) -> Array:
        return -0.5 * jnp.sum(x.at[1].add(-bend * (x[0] ** 2 - 1)) ** 2)

    return Density(draw, log_density)


def funnel(rate: float) -> Density:
    """The first coordinate times ``rate`` is the log variance of the others."""

    def draw(key: Array, n: int, d: int) -> Array:
        x = random.normal(key, (n, d))
        return x.at[:, 1:].multiply(jnp.exp(0.5 * rate * x[:, :1]))

    def log_density(x: Array) -> Array:
        rest = jnp.sum(x[1:] ** 2) * jnp.exp(-rate * x[0]) + (x.size - 1) * rate * x[0]
        return -0.5 * (x[0] ** 2 + rest)

    return Density(draw, log_density)


def edges(power: int = 8, scale: float = 1.0) -> Density:
    """Independent coordinates with sharp edges: exp(-|x|^power), scaled to sd ``scale``."""
    # E|x|² is Γ(3/p)/Γ(1/p) under exp(-|x|^p).
    scale *= (math.gamma(1 / power) / math.gamma(3 / power)) ** 0.5

    def draw(key: Array, n: int, d: int) -> Array:
        first, second = random.split(key)
        size = random.gamma(first, 1 / power, (n, d)) ** (1 / power)
        return scale * size * random.rademacher(second, (n, d))

    return Density(draw, lambda x: -jnp.sum((x / scale) ** power))


def skewed(sign: float = 1.0) -> Density:
    """Independent Gumbel coordinates, with one light and one exponential tail."""

    def log_density(x: Array) -> Array:
        return jnp.sum(-sign * x - jnp.exp(-sign * x))

    return Density(lambda key, n, d: sign * random.gumbel(key, (n, d)), log_density)


def mixture(gap: float, scale: float = 1.0) -> Density:
    """Two Gaussians with equal weights, ``gap`` apart in the first coordinate."""

    def draw(key: Array, n: int, d: int) -> Array:
        first, second = random.split(key)
        x = scale * random.normal(first, (n, d))
        return x.at[:, 0].add(0.5 * gap * random.rademacher(second, (n,)))

    def log_density(x: Array) -> Array:
        sides = jnp.stack([x.at[0].add(-0.5 * gap), x.at[0].add(0.5 * gap)])
        return jax.nn.logsumexp(-0.5 * jnp.sum((sides / scale) ** 2, axis=1))

    return Density(draw, log_density)


def logistic(num_data: int = 40) -> Density:
    """The posterior of a logistic regression on simulated data, without a sampler."""

    def log_density(x: Array) -> Array:
        first, second = random.split(random.key(5))
        inputs = random.normal(first, (num_data, x.size))
        signs = random.rademacher(second, (num_data,), x.dtype)
        return -0.5 * jnp.sum((x / 2) ** 2) + jnp.sum(jax.nn.log_sigmoid(signs * (inputs @ x)))

    return Density(None, log_density)
