"""The KL gradient at the particles of a step, from the gradients of the guide's blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._model.draws import Draw
from numpyro_kscore._model.joint import LogJoint
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.particles import are_finite
from numpyro_kscore._objective.block_gradient import block_gradient, put_columns
from numpyro_kscore._objective.options import ObjectiveOptions
from numpyro_kscore._objective.stateful import STATE

__all__ = ["KLGradient", "kl_gradient", "nearest_valid"]


class KLGradient(NamedTuple):
    """The gradient of KL(q || p) at the particles, without the guide's known densities.

    Attributes:
        valid: which particles are finite, (n,).
        direction: the gradient over the number of valid particles, (n, D).
        local_shares: the derivatives in the means of the local log densities, (b,).
        entropy: of the blocks that are estimated and have no local log density, in nats.
        states: states of an estimator that keeps one, for the next step, by the first latent of
            each block.
    """

    valid: jax.Array
    direction: jax.Array
    local_shares: jax.Array
    entropy: jax.Array
    states: dict[str, Any]


def kl_gradient(
    settings: ObjectiveOptions,
    layout: Layout,
    drawn: jax.Array,
    draws: Draw,
    joint: LogJoint,
    local_scores: jax.Array,
) -> KLGradient:
    """The KL gradient at the particles, block by block.

    Args:
        settings: estimator and options.
        layout: the layout of a particle.
        drawn: at which particles the guide's draw was finite, (n,).
        draws: the particles, not differentiated.
        joint: the model at the particles.
        local_scores: gradients of local log densities at the first m of them, (m, D).
    """
    valid = drawn & are_finite(joint.log_density, draws.log_density, joint.scores, draws.flat)
    # Copies of valid particles take the places of others: shapes stay, and no NaN spreads.
    source = nearest_valid(valid)
    any_valid = jnp.any(valid)

    def sound(values: jax.Array) -> jax.Array:
        return jnp.where(any_valid, values[source], 0.0)

    particles, scores = sound(draws.flat), sound(joint.scores)
    prior_scores = None if joint.prior_scores is None else sound(joint.prior_scores)
    direction = -scores
    entropy = jnp.zeros((), draws.flat.dtype)
    states = {}
    local_shares: list[jax.Array] = []
    for part in layout.parts:
        if not part.is_implicit:
            continue
        name, state = part.sites[0], None
        if settings.estimator.is_stateful:
            state = jax.tree.map(lambda leaf: leaf[0], draws.mutable[STATE][name])
        block = block_gradient(
            settings,
            part,
            particles,
            scores,
            prior_scores if part.is_pooled else None,
            state,
            draws.model_key[0],
            local_scores,
        )
        if part.has_local:
            local_shares.append(block.local_share)
        else:
            entropy = entropy + block.entropy
        direction = put_columns(direction, part.columns, block.direction)
        if settings.estimator.is_stateful:
            states[name] = block.state
    shares = jnp.asarray(local_shares, direction.dtype)
    count = jnp.maximum(jnp.sum(valid), 1)
    return KLGradient(valid, direction / count, shares, entropy, states)


def nearest_valid(valid: jax.Array) -> jax.Array:
    """For every particle the last valid one up to it, or else the first valid one: indices (n,)."""
    last_valid = lax.cummax(jnp.where(valid, jnp.arange(valid.shape[0]), -1))
    return jnp.where(last_valid < 0, jnp.argmax(valid), last_valid)
