"""Kernel semi-implicit variational inference (Cheng et al. 2024).

The objective is their equation (11), the squared kernel Stein discrepancy as a mean over two
independent sets of draws, E k(x, x') f(x)ᵀ f(x'), f(x) = ∇ log p(x) - ∇ log q(x | ε): the
conditional score is enough, since the kernel's mean is linear in it. Its gradient is taken through
draws, kernel and scores.

Settings are the authors' (:mod:`benchmarks.accuracy.rivals.family`): a Gaussian kernel with
h² = med²/(2 log(n + 1)), two sets a step. The median is that of a part of the pairs, and is no
function of the parameters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, random

from benchmarks.accuracy.rivals import family
from benchmarks.accuracy.rivals.problem import Outcome, Problem, train
from benchmarks.accuracy.rivals.sivi import drawn

MEDIAN_ROWS = 64


def squared_distances(x: Array, y: Array) -> Array:
    """Squared distances of rows, (n, d) and (m, d) -> (n, m)."""
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    return jnp.maximum(squares, 0)


def squared_bandwidth(x: Array, y: Array) -> Array:
    """The squared bandwidth of the median rule."""
    part = squared_distances(x[:MEDIAN_ROWS], y[-MEDIAN_ROWS:])
    return jax.lax.stop_gradient(jnp.median(part)) / (2 * jnp.log(len(x) + 1))


def discrepancy(x: Array, f: Array, y: Array, g: Array, squared_width: Array) -> Array:
    """The mean of k(x, y) f(x)ᵀ g(y) over all pairs."""
    kernel = jnp.exp(-squared_distances(x, y) / (2 * squared_width))
    return (kernel * (f @ g.T)).mean()


def loss(params: Any, key: Array, problem: Problem, batch: int) -> Array:
    """The squared discrepancy of two sets of draws."""

    def side(key: Array) -> tuple[Array, Array]:
        _, unit, x = family.draw(params, key, batch)
        # Minus the conditional score is the residual over its standard deviation.
        return x, problem.scores(x) + unit * jnp.exp(-family.log_var(params) / 2)

    (x, f), (y, g) = map(side, random.split(key))
    return discrepancy(x, f, y, g, squared_bandwidth(x, y))


def fit(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of a semi-implicit Gaussian that minimizes the discrepancy."""
    settings = family.settings_of(problem.dim).shorter(share)
    init_key, run_key = random.split(key)
    gradient = partial(jax.grad(loss), problem=problem, batch=settings.batch)
    optimizer = settings.optimizer()
    if problem.dim > 100:
        # The authors clip gradients for networks.
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    params, _ = train(
        lambda params, extra, key, _: (gradient(params, key), extra),
        family.start(init_key, problem.dim, settings), None, optimizer, run_key, settings.steps,
    )  # fmt: skip
    return drawn(params, settings.steps, 2 * settings.batch)
