"""RealNVP by the recipe of Agrawal and Domke (2024).

"Disentangling impact of capacity, objective, batchsize, estimators, and step-size on flow VI"
advises high capacity, the usual bound, many draws a step, gradients along the paths of draws
(Roeder, Wu and Duvenaud 2017), and a small fixed step size of Adam.

Settings: 10 coupling layers with two hidden layers of 64 rectifiers, 512 draws, Adam with 1e-3,
10 000 steps: more capacity and more draws than usual, though fewer draws than the authors' largest,
which need an accelerator. The flow starts as the identity, and ends with an affine map of each
coordinate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax, random

from benchmarks.accuracy.rivals import coupling
from benchmarks.accuracy.rivals.problem import Outcome, Problem, train

LAYERS, WIDTH, BATCH, STEPS, RATE = 10, 64, 512, 10_000, 1e-3


def loss(params: Any, key: Array, problem: Problem, batch: int) -> Array:
    """Minus the bound; its gradient is along the paths of draws alone."""
    x = sample(params, problem.dim, key, batch)
    own = coupling.log_density(lax.stop_gradient(params), x, jnp.zeros((batch, 0)))
    return (own - problem.log_densities(x)).mean()


def sample(params: Any, dim: int, key: Array, count: int) -> Array:
    """Draws of the flow, (count, dim)."""
    return coupling.push(params, random.normal(key, (count, dim)), jnp.zeros((count, 0)))


def fit(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of a flow that maximizes the bound."""
    steps = max(int(round(share * STEPS)), 1)
    init_key, run_key = random.split(key)
    gradient = partial(jax.grad(loss), problem=problem, batch=BATCH)
    params, _ = train(
        lambda params, extra, key, _: (gradient(params, key), extra),
        coupling.start(init_key, problem.dim, 0, LAYERS, WIDTH), None,
        optax.adam(RATE), run_key, steps,
    )  # fmt: skip
    return Outcome(partial(sample, params, problem.dim), steps, steps * BATCH)
