"""Distributions with known scores, to measure estimators of scores on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from examples.paper import spiral

__all__ = ["CELLS", "TARGETS", "Target", "along", "root_of"]

# Draws behind the covariance of a target.
COVARIANCE_DRAWS = 100_000


class Target(NamedTuple):
    """A distribution that can be drawn from and whose score is known.

    Attributes:
        draw: ``(key, n) -> (n, d)``.
        log_density: log density of one point, up to a constant.
    """

    draw: Callable[[Array, int], Array]
    log_density: Callable[[Array], Array]


def root_of(target: Target) -> Array:
    """Σ^(1/2) of a target, (d, d) and lower triangular, by many draws: s @ root has no units."""
    many = np.asarray(jax.jit(target.draw, static_argnums=1)(random.key(99), COVARIANCE_DRAWS))
    return jnp.asarray(np.linalg.cholesky(np.cov(many, rowvar=False)), jnp.float32)


def normal(dim: int) -> Target:
    """The standard normal, where the base score is the truth."""
    return Target(lambda key, n: random.normal(key, (n, dim)), lambda x: -0.5 * jnp.sum(x * x))


def correlated(dim: int) -> Target:
    """A normal with standard deviations from 1 to 0.1 along random directions."""
    rotation = np.linalg.qr(np.random.default_rng(1).standard_normal((dim, dim)))[0]
    sd = np.logspace(0, -1, dim)
    root = jnp.asarray((rotation * sd) @ rotation.T)
    precision = jnp.asarray((rotation / sd**2) @ rotation.T)
    return Target(
        lambda key, n: random.normal(key, (n, dim)) @ root.T, lambda x: -0.5 * x @ precision @ x
    )


def banana(dim: int) -> Target:
    """A banana in the first two coordinates, normal in the others."""
    precision = jnp.asarray(np.linalg.inv([[1.0, 0.9], [0.9, 1.0]]))

    def draw(key: Array, n: int) -> Array:
        z = random.normal(key, (n, dim))
        second = 0.9 * z[:, 0] + np.sqrt(0.19) * z[:, 1] - z[:, 0] ** 2 - 1.0
        return z.at[:, 1].set(second)

    def log_density(x: Array) -> Array:
        u = jnp.stack([x[0], x[1] + x[0] ** 2 + 1.0])
        return -0.5 * u @ precision @ u - 0.5 * jnp.sum(x[2:] ** 2)

    return Target(draw, log_density)


def _two_modes(dim: int, half_distance: float, weight: float) -> Target:
    mean = jnp.zeros(dim).at[0].set(half_distance)

    def draw(key: Array, n: int) -> Array:
        first, second = random.split(key)
        signs = 1.0 - 2.0 * random.bernoulli(second, weight, (n, 1))
        return random.normal(first, (n, dim)) + signs * mean

    def log_density(x: Array) -> Array:
        right = np.log1p(-weight) - 0.5 * jnp.sum((x - mean) ** 2)
        left = np.log(weight) - 0.5 * jnp.sum((x + mean) ** 2)
        return jnp.logaddexp(right, left)

    return Target(draw, log_density)


def mixture(dim: int) -> Target:
    """Two normals, four standard deviations apart in the first coordinate."""
    return _two_modes(dim, 2.0, 0.5)


def far_modes(dim: int) -> Target:
    """Two normals, eight standard deviations apart, with weights .3 and .7."""
    return _two_modes(dim, 4.0, 0.3)


def grid(dim: int) -> Target:
    """A mixture of d normals at random corners of the unit cube."""
    corners = jnp.asarray(np.random.default_rng(1).integers(0, 2, (dim, dim)), jnp.float32)

    def draw(key: Array, n: int) -> Array:
        first, second = random.split(key)
        return corners[random.randint(first, (n,), 0, dim)] + random.normal(second, (n, dim))

    def log_density(x: Array) -> Array:
        return jax.nn.logsumexp(-0.5 * jnp.sum((x - corners) ** 2, axis=1))

    return Target(draw, log_density)


def student(dim: int) -> Target:
    """A multivariate Student t distribution with four degrees of freedom."""
    degrees = 4.0

    def draw(key: Array, n: int) -> Array:
        first, second = random.split(key)
        scale = jnp.sqrt(2.0 * random.gamma(second, degrees / 2, (n, 1)) / degrees)
        return random.normal(first, (n, dim)) / scale

    def log_density(x: Array) -> Array:
        return -0.5 * (degrees + dim) * jnp.log1p(jnp.sum(x * x) / degrees)

    return Target(draw, log_density)


def log_gamma(dim: int) -> Target:
    """Independent logarithms of gamma variables of shape 1: the skewness of log variances."""
    return Target(
        lambda key, n: jnp.log(random.gamma(key, 1.0, (n, dim))),
        lambda x: jnp.sum(x - jnp.exp(x)),
    )


def funnel(dim: int) -> Target:
    """A normal coordinate, and others whose log standard deviation is half of it."""

    def draw(key: Array, n: int) -> Array:
        z = random.normal(key, (n, dim))
        return z.at[:, 1:].multiply(jnp.exp(0.5 * z[:, :1]))

    def log_density(x: Array) -> Array:
        others = jnp.sum(x[1:] ** 2) * jnp.exp(-x[0])
        return -0.5 * (x[0] ** 2 + others + (dim - 1) * x[0])

    return Target(draw, log_density)


def two_turns(dim: int) -> Target:
    """A spiral with two turns in the plane."""
    del dim
    return Target(spiral.draw, spiral.log_density)


def ring(dim: int) -> Target:
    """Normals of standard deviation .15 along a circle of unit radius."""
    return along(_circle(np.linspace(0, 2 * np.pi, 400, endpoint=False)), 0.15, dim)


def arc(dim: int) -> Target:
    """Normals of standard deviation .1 along two thirds of a circle of unit radius."""
    return along(_circle(np.linspace(0, 4 / 3 * np.pi, 400)), 0.1, dim)


def curve(dim: int) -> Target:
    """Normals of standard deviation .1 along a closed curve of unit radius in d dimensions."""
    angles = np.linspace(0, 2 * np.pi, 400, endpoint=False)
    waves = [f(k * angles) / k for k in range(1, dim // 2 + 1) for f in (np.cos, np.sin)]
    return along(np.stack(waves, axis=1) / np.sqrt(2), 0.1, dim)


def _circle(angles: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def along(points: np.ndarray, sd: float, dim: int) -> Target:
    """Normals of one standard deviation, with equal weights, at points in the first coordinates."""
    padding = ((0, 0), (0, dim - points.shape[1]))
    centers = jnp.asarray(np.pad(points, padding), jnp.float32)

    def draw(key: Array, n: int) -> Array:
        first, second = random.split(key)
        return random.choice(first, centers, (n,)) + sd * random.normal(second, (n, dim))

    def log_density(x: Array) -> Array:
        return jax.nn.logsumexp(-0.5 * jnp.sum(((x - centers) / sd) ** 2, axis=1))

    return Target(draw, log_density)


TARGETS: dict[str, Callable[[int], Target]] = {
    "normal": normal,
    "correlated": correlated,
    "banana": banana,
    "mixture": mixture,
    "grid": grid,
    "far modes": far_modes,
    "student": student,
    "log gamma": log_gamma,
    "funnel": funnel,
    "spiral": two_turns,
    "ring": ring,
    "arc": arc,
    "curve": curve,
}

# Dimensions in which each is measured.
CELLS = {
    "normal": (2, 8, 32, 128),
    "correlated": (2, 8, 32, 128),
    "banana": (2, 8, 32),
    "mixture": (2, 8, 32),
    "grid": (2, 8, 32, 128),
    "far modes": (2, 8),
    "student": (2, 8, 32),
    "log gamma": (2, 8, 32),
    "funnel": (2, 8),
    "spiral": (2,),
    "ring": (2, 8),
    "arc": (2, 8),
    "curve": (20,),
}
