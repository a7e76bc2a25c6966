"""Semi-implicit variational inference (Yin and Zhou 2018).

The bound is their equation (9), with K further noises that all draws of a step share:
E log p(x, z) - log 1/(K+1) [q(z | ε) + Σ q(z | ε_k)]. It is below the evidence for every K, and
gradients are those of the bound itself.

Settings: the family, draws and steps of :mod:`benchmarks.accuracy.rivals.family`, and K = 100 in
all steps, where the authors let K grow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

from benchmarks.accuracy.rivals import family
from benchmarks.accuracy.rivals.problem import Outcome, Problem, train

NUM_NOISES = 100


def surrogate_log_density(params: Any, x: Array, noise: Array, others: Array) -> Array:
    """The logarithm of the mean of q(x | ε) over a draw's own noise and all others, (n,)."""
    own = family.log_given(params, x, noise)
    means = family.apply(params["net"], others)
    spread = family.log_var(params)
    # A product of matrices in place of differences, (n, K, dim).
    a, b = x * jnp.exp(-spread / 2), means * jnp.exp(-spread / 2)
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
    constant = 0.5 * (spread + jnp.log(2 * jnp.pi)).sum()
    every = jnp.concatenate([own[:, None], -0.5 * squares - constant], axis=1)
    return jax.nn.logsumexp(every, axis=1) - jnp.log(every.shape[1])


def loss(
    params: Any, key: Array, problem: Problem, batch: int, num_noises: int = NUM_NOISES
) -> Array:
    """Minus the bound, up to the logarithm of the evidence."""
    draw_key, noise_key = random.split(key)
    noise, _, x = family.draw(params, draw_key, batch)
    others = random.normal(noise_key, (num_noises, noise.shape[1]))
    return (surrogate_log_density(params, x, noise, others) - problem.log_densities(x)).mean()


def fit(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of a semi-implicit Gaussian that maximizes the bound."""
    settings = family.settings_of(problem.dim).shorter(share)
    init_key, run_key = random.split(key)
    params = family.start(init_key, problem.dim, settings)
    gradient = partial(jax.grad(loss), problem=problem, batch=settings.batch)
    params, _ = train(
        lambda params, extra, key, _: (gradient(params, key), extra),
        params, None, settings.optimizer(), run_key, settings.steps,
    )  # fmt: skip
    return drawn(params, settings.steps, settings.batch)


def drawn(params: Any, steps: int, batch: int, said: str = "") -> Outcome:
    """The outcome of a fit of a semi-implicit Gaussian."""

    def draw(key: Array, count: int) -> Array:
        return family.draw(params, key, count)[2]

    return Outcome(draw, steps, steps * batch, said)
