"""Stein variational gradient descent (Liu and Wang 2016).

Particles follow their equation (8), φ(x) = mean of k(x_j, x) ∇ log p(x_j) + ∇_{x_j} k(x_j, x), with
a Gaussian kernel of bandwidth h² = med²/log n. Draws are particles, taken again and again.

Settings: 500 particles, steps over the running root mean square of gradients with memory .9 as in
the authors' code, 1e-2 in 10 000 steps, or for networks 1e-3 in 2000. Particles start standard
normal, above ten dimensions a tenth as wide. The median is that of a part of the pairs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from jax import Array, random

from benchmarks.accuracy.rivals.ksivi import MEDIAN_ROWS, squared_distances
from benchmarks.accuracy.rivals.problem import Outcome, Problem, train

PARTICLES = 500


def direction(x: Array, scores: Array, squared_width: Array) -> Array:
    """The direction of every particle, (n, dim), for the kernel exp(-r²/h²)."""
    kernel = jnp.exp(-squared_distances(x, x) / squared_width)
    repulsion = 2 / squared_width * (kernel.sum(1)[:, None] * x - kernel @ x)
    return (kernel @ scores + repulsion) / len(x)


def fit(problem: Problem, key: Array, share: float) -> Outcome:
    """Particles where the flow has taken them."""
    rate, steps = (1e-2, 10_000) if problem.dim <= 100 else (1e-3, 2_000)
    steps = max(int(round(share * steps)), 1)
    init_key, run_key = random.split(key)
    width = 1.0 if problem.dim <= 10 else 0.1
    x = width * random.normal(init_key, (PARTICLES, problem.dim))

    def gradient(x: Array, extra: Any, key: Array, _: Array) -> tuple[Array, Any]:
        rows = random.permutation(key, PARTICLES)
        part, other = x[rows[:MEDIAN_ROWS]], x[rows[-MEDIAN_ROWS:]]
        squared_width = jnp.median(squared_distances(part, other)) / jnp.log(PARTICLES)
        return -direction(x, problem.scores(x), squared_width), extra

    x, _ = train(gradient, x, None, optax.rmsprop(rate, decay=0.9), run_key, steps)

    def draw(key: Array, count: int) -> Array:
        order = random.permutation(key, x)
        return jnp.tile(order, (-(-count // PARTICLES), 1))[:count]

    return Outcome(draw, steps, steps * PARTICLES)
