"""Training of networks: careful steps of Adam, and the loss of sliced score matching."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_kscore.sliced._network import Layers, network

__all__ = ["make_adam", "select", "sliced_loss", "take_step", "train"]

Field = Callable[[jax.Array], jax.Array]


def sliced_loss(
    field: Field, x: jax.Array, directions: jax.Array, base_scores: jax.Array | None = None
) -> jax.Array:
    """Score-matching loss by random projections: ``E[½|f|² + f·s0 + vᵀ(∇f)v]``.

    This is the variance-reduced objective of Song, Garg, Shi and Ermon (2019), eq. 8, for a score
    ``s0 + f``, without terms that do not depend on f. Directions with ``E[v vᵀ] = I`` make it
    unbiased.

    Args:
        field: f, (m, d) -> (m, d), each row a function of the same row of its argument.
        x: draws, (m, d).
        directions: v, (p, m, d): p projections for each draw.
        base_scores: s0 at the draws, (m, d); zero if None.

    Returns:
        The mean over draws and projections, a scalar.

    Cost: p derivatives of the field along a direction, forward mode.

    Example::

        from numpyro_kscore.sliced import sliced_loss

        directions = random.rademacher(random.key(1), (4, 200, 2), samples.dtype)
        sliced_loss(lambda x: -x, samples, directions)  # -1.06: -1 on average over samples
    """
    values, along = jax.vmap(lambda v: jax.jvp(field, (x,), (v,)), out_axes=(None, 0))(directions)
    curvature = jnp.mean(jnp.sum(directions * along, axis=2), axis=0)
    energy = 0.5 * values if base_scores is None else 0.5 * values + base_scores
    return jnp.mean(jnp.sum(values * energy, axis=1) + curvature)


def make_adam(asker: str) -> Any:
    """Adam without its step size, which may be traced; ``asker`` is named in the error."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            f"{asker}: expected optax, which trains the network; got none. Install it by "
            "pip install 'numpyro-kscore[examples]'"
        ) from error
    return optax.scale_by_adam()


def train(
    key: jax.Array,
    layers: Layers,
    moments: Any,
    x: jax.Array,
    base_scores: jax.Array | None,
    rates: jax.Array,
    num_projections: int,
    batch_size: int | None,
) -> tuple[Layers, Any, jax.Array]:
    """Steps of Adam on :func:`sliced_loss`; one whose gradient is not finite is skipped.

    Draws, (n, d), and base scores are in the network's coordinates, ``moments`` the state of
    :func:`make_adam`, ``rates`` the learning rates of the k steps. A batch is drawn with
    replacement; without a size it is all draws.

    Returns:
        Weights and biases, moments, and the loss at every step, (k,): NaN where it was skipped.
    """
    adam = make_adam("SlicedScoreMatching")

    def step(carry: Any, inputs: Any) -> tuple[Any, jax.Array]:
        layers, moments = carry
        step_key, rate = inputs
        row_key, direction_key = random.split(step_key)
        batch, base = x, base_scores
        if batch_size is not None:
            rows = random.randint(row_key, (batch_size,), 0, x.shape[0])
            batch = x[rows]
            base = None if base_scores is None else base_scores[rows]
        shape = (num_projections, *batch.shape)
        directions = random.rademacher(direction_key, shape, x.dtype)

        def loss_of(layers: Layers) -> jax.Array:
            return sliced_loss(partial(network, layers), batch, directions, base)

        return take_step(adam, loss_of, layers, moments, rate)

    keys = random.split(key, rates.shape[0])
    (layers, moments), losses = lax.scan(step, (layers, moments), (keys, rates))
    return layers, moments, losses


def take_step(
    adam: Any,
    loss_of: Callable[[Layers], jax.Array],
    layers: Layers,
    moments: Any,
    rate: jax.Array,
) -> tuple[tuple[Layers, Any], jax.Array]:
    """One step of Adam, and the loss before it; no step, and NaN, if a gradient is not finite."""
    loss, gradient = jax.value_and_grad(loss_of)(layers)
    change, new_moments = adam.update(gradient, moments)
    moved = jax.tree.map(lambda w, c: w - rate * c, layers, change)
    sound = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradient)]))
    new = select(sound, (moved, new_moments), (layers, moments))
    return new, jnp.where(sound, loss, jnp.nan)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """The tree ``new`` where the condition holds, ``old`` elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
