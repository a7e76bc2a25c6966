"""The KL gradient at the particles of a step, and the loss whose derivative it is."""

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
from numpyro_kscore._objective.objective_options import ObjectiveOptions
from numpyro_kscore._objective.stateful import STATE


class KLGradient(NamedTuple):
    """The gradient of KL(q || p) at the particles, without the guide's known densities.

    ``direction``, (n, D), is divided by the number of valid particles; ``local_shares``, (b,), are
    the derivatives in the means of the local log densities; ``entropy`` is that of the estimated
    blocks without such a density, in nats; ``states`` of an estimator that keeps one are for the
    next step, by the first latent of each block.
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
    log_weights: jax.Array | None = None,
) -> KLGradient:
    """Compute the KL gradient at the particles, block by block.

    ``drawn`` says at which particles the guide's draw was finite, (n,), and ``draws`` are the
    particles, not differentiated; ``local_scores`` are gradients of local log densities at the
    first m of them, (m, D), and ``log_weights``, (m,), the model's log density less the guide's,
    if divergences are to weigh both sides alike.
    """
    valid = drawn & are_finite(joint.log_density, draws.counted, joint.scores, draws.flat)
    # Copies of valid particles replace the others: shapes stay, and no NaN spreads.
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
            log_weights,
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
    """Indices (n,) of the last valid particle up to each, or else of the first valid one."""
    last_valid = lax.cummax(jnp.where(valid, jnp.arange(valid.shape[0]), -1))
    return jnp.where(last_valid < 0, jnp.argmax(valid), last_valid)


def loss_of(
    draws: Draw, local: jax.Array, joint: LogJoint, kl: KLGradient, params: dict[str, Any]
) -> jax.Array:
    """Estimate the negative ELBO, with the KL gradient as its derivative.

    Neither the score estimate nor the model is differentiated a second time, since their gradients
    are known. Exact densities of the guide are differentiated. ``local`` are the local log
    densities at the first m particles, (m, b).
    """
    weights = kl.valid / jnp.maximum(jnp.sum(kl.valid), 1)
    fitted = {k: params[k] for k in joint.param_gradient}
    moved = (draws.flat, draws.counted, local, fitted)
    weights = weights.astype(kl.direction.dtype)
    few = len(local)
    is_local = kl.valid[:few] & jnp.all(jnp.isfinite(local), axis=1)
    local_weights = is_local / jnp.maximum(jnp.sum(is_local), 1)
    gradient = (
        jnp.where(kl.valid[:, None], kl.direction, 0.0),
        weights,
        local_weights[:, None].astype(local.dtype) * kl.local_shares,
        jax.tree.map(lambda g: -jnp.where(jnp.isfinite(g), g, 0.0), joint.param_gradient),
    )
    gaps = draws.counted - joint.log_density
    if few:
        # Both densities are at the same draws: at the model they cancel, and with them the noise.
        gaps = gaps[:few] + jnp.sum(local, axis=1)
    nelbo = jnp.mean(gaps) - kl.entropy
    nelbo = lax.stop_gradient(jnp.where(jnp.all(kl.valid), nelbo, jnp.nan))
    return _with_gradient(nelbo, moved, gradient)


@jax.custom_jvp
def _with_gradient(value: jax.Array, moved: Any, gradient: Any) -> jax.Array:
    """Return a scalar whose derivative in ``moved`` is ``gradient``, of the same structure."""
    return value


@_with_gradient.defjvp
def _with_gradient_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    value, _, gradient = primals
    # A tangent does not count where the gradient is zero, even if it is NaN.
    products = jax.tree.map(
        lambda g, t: jnp.sum(g * jnp.where(g == 0, 0.0, t)).astype(value.dtype),
        gradient,
        tangents[1],
    )
    return value, sum(jax.tree.leaves(products), jnp.zeros((), value.dtype))
