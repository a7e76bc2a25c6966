"""Adaptively informed semi-implicit variational inference (Pielok, Bischl and Rügamer 2025).

The chain of unbiased implicit variational inference is replaced by importance sampling: the score
of the marginal is Σ w_i ∇ log q(z | ε_i) / Σ w_i with noises ε_i from a proposal τ(ε | z) and
weights q(z | ε_i) p(ε_i) / τ(ε_i | z). The proposal is a conditional flow that learns along, by the
forward divergence E -log τ(ε | z) over noises and draws of the guide.

This is the method as we understand it from the paper's summary, without its code: the sizes of the
flow and the number of proposals are ours. Settings: the family and steps of
:mod:`benchmarks.accuracy.rivals.family`, at most 100 draws a step, 32 proposals for each, a flow of
4 coupling layers with two hidden layers of 32 rectifiers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from benchmarks.accuracy.rivals import coupling, family
from benchmarks.accuracy.rivals.problem import Outcome, Problem, train
from benchmarks.accuracy.rivals.sivi import drawn
from benchmarks.accuracy.rivals.uivi import path_gradient

BATCH, PROPOSALS, LAYERS, WIDTH = 100, 32, 4, 32


def marginal_score(params: Any, flow: Any, x: Array, key: Array, count: int = PROPOSALS) -> Array:
    """Estimates of ∇ log q(x), (n, dim)."""
    shape = (count, len(x), params["net"][0]["w"].shape[0])
    context = jnp.broadcast_to(x, (count, *x.shape))
    noise = coupling.push(flow, random.normal(key, shape), context)
    prior = -0.5 * (noise**2 + jnp.log(2 * jnp.pi)).sum(-1)
    joint = family.log_given(params, x, noise) + prior
    weights = jax.nn.softmax(joint - coupling.log_density(flow, noise, context), axis=0)
    return (weights[..., None] * family.score_given(params, x, noise)).sum(0)


def fit(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of a semi-implicit Gaussian that follows the estimated gradient of the bound."""
    settings = family.settings_of(problem.dim).shorter(share)
    batch = min(settings.batch, BATCH)
    init_key, flow_key, run_key = random.split(key, 3)
    flow = coupling.start(flow_key, settings.noise_dim, problem.dim, LAYERS, WIDTH)

    def gradient(params: Any, extra: Any, key: Array, _: Array) -> tuple[Any, Any]:
        draw_key, proposal_key = random.split(key)
        noise, _, x = lax.stop_gradient(family.draw(params["q"], draw_key, batch))
        own = marginal_score(params["q"], params["flow"], x, proposal_key)
        change = path_gradient(params["q"], draw_key, batch, own - problem.scores(x))
        learn = jax.grad(lambda flow: -coupling.log_density(flow, noise, x).mean())
        return {"q": change, "flow": learn(params["flow"])}, extra

    params, _ = train(
        gradient, {"q": family.start(init_key, problem.dim, settings), "flow": flow}, None,
        settings.optimizer(), run_key, settings.steps,
    )  # fmt: skip
    return drawn(params["q"], settings.steps, batch)
