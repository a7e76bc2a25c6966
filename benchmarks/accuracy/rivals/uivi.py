"""Unbiased implicit variational inference (Titsias and Ruiz 2019).

Their equations (8) to (10): the gradient of the bound is E (∇ log p(z) - ∇ log q(z))ᵀ ∂z/∂φ, and
the score of the marginal is the mean of the conditional one over the reverse conditional,
∇ log q(z) = E ∇ log q(z | ε') with ε' from q(ε' | z), which is sampled by Hamiltonian Monte Carlo
that starts at the noise z was made of.

Settings: the family and steps of :mod:`benchmarks.accuracy.rivals.family`, at most 100 draws a
step; 5 transitions that are forgotten and 5 that count, of 5 leapfrog steps each; the step size
adapts to nine accepted in ten. The numbers are after the paper, not checked against its code.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from benchmarks.accuracy.rivals import family
from benchmarks.accuracy.rivals.problem import Outcome, Problem, train
from benchmarks.accuracy.rivals.sivi import drawn

BATCH, FORGOTTEN, KEPT, LEAPFROG = 100, 5, 5, 5
ACCEPTANCE, ADAPTATION = 0.9, 0.02


def marginal_score(
    params: Any, x: Array, noise: Array, key: Array, step_size: Array, kept: int = KEPT
) -> tuple[Array, Array]:
    """Estimates of ∇ log q(x), (n, dim), and the mean probability of acceptance."""

    def log_joint(noise: Array) -> Array:
        return family.log_given(params, x, noise) - 0.5 * (noise**2).sum(-1)

    slope = jax.grad(lambda noise: log_joint(noise).sum())

    def leap(state: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], None]:
        noise, momentum, force = state
        momentum = momentum + 0.5 * step_size * force
        noise = noise + step_size * momentum
        force = slope(noise)
        return (noise, momentum + 0.5 * step_size * force, force), None

    def transition(state: tuple[Array, Array], key: Array) -> tuple[Any, tuple[Array, Array]]:
        noise, force = state
        move_key, accept_key = random.split(key)
        momentum = random.normal(move_key, noise.shape)
        (moved, end, pull), _ = lax.scan(leap, (noise, momentum, force), None, length=LEAPFROG)
        energy = log_joint(moved) - log_joint(noise) + 0.5 * (momentum**2 - end**2).sum(-1)
        chance = jnp.where(jnp.isfinite(energy), jnp.exp(jnp.minimum(energy, 0)), 0.0)
        accept = random.uniform(accept_key, chance.shape) < chance
        noise = jnp.where(accept[:, None], moved, noise)
        force = jnp.where(accept[:, None], pull, force)
        return (noise, force), (family.score_given(params, x, noise), chance.mean())

    _, (scores, chances) = lax.scan(
        transition, (noise, slope(noise)), random.split(key, FORGOTTEN + kept)
    )
    return scores[FORGOTTEN:].mean(0), chances.mean()


def path_gradient(params: Any, key: Array, batch: int, difference: Any) -> Any:
    """Gradient of E differenceᵀ z(φ), where the difference of scores is no function of φ."""
    _, pull = jax.vjp(lambda p: family.draw(p, key, batch)[2], params)
    return pull(difference / batch)[0]


def fit(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of a semi-implicit Gaussian that follows the unbiased gradient of the bound."""
    settings = family.settings_of(problem.dim).shorter(share)
    batch = min(settings.batch, BATCH)
    init_key, run_key = random.split(key)

    def gradient(params: Any, log_step: Array, key: Array, _: Array) -> tuple[Any, Array]:
        draw_key, chain_key = random.split(key)
        noise, _, x = family.draw(params, draw_key, batch)
        own, chance = marginal_score(params, x, noise, chain_key, jnp.exp(log_step))
        change = path_gradient(params, draw_key, batch, own - problem.scores(x))
        return change, log_step + ADAPTATION * (chance - ACCEPTANCE)

    params, log_step = train(
        gradient, family.start(init_key, problem.dim, settings), jnp.log(0.1),
        settings.optimizer(), run_key, settings.steps,
    )  # fmt: skip
    return drawn(params, settings.steps, batch, f"step size {float(jnp.exp(log_step)):.2g}")
