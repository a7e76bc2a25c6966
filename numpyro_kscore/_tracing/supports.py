"""What unconstrained coordinates of a latent depend on, beside the latent's own value.

Estimates are made in the unconstrained coordinates of the model's supports. With ``x ~
Uniform(0, b)`` that of x is ``logit(x / b)``, and moves with b even where the guide draws x and b
apart; those of an ordered vector are its first number and logarithms of steps, each of two
neighbors, even where the guide draws every number by itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.util import helpful_support_errors

from numpyro_kscore._tracing.dependencies import seeded, sources_of

__all__ = ["free_axes", "support_sources"]


def free_axes(model_site: dict[str, Any]) -> int:
    """How many axes of a latent, from the left, have elements with coordinates of their own.

    A vector of independent numbers has one, whatever its event shape; a simplex none.
    """
    support = model_site["fn"].support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return jnp.ndim(model_site["value"]) - support.event_dim


def support_sources(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    data: dict[str, Any],
    latents: dict[str, Any],
    key: jax.Array,
) -> dict[str, frozenset[str]]:
    """For each latent of a model the others its support is computed from.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        data: values of its parameters, mutable sites and rows of plates.
        latents: their values; only shapes matter.
        key: a random key; no number depends on it.
    """

    def images(given: dict[str, Any]) -> dict[str, jax.Array]:
        substituted = seeded(model, key, {**data, **given})
        trace = handlers.trace(substituted).get_trace(*args, **kwargs)
        return {name: _image_of_zeros(trace[name]) for name in latents}

    shapes = {
        name: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
        for name, value in latents.items()
    }
    return {name: found - {name} for name, found in sources_of(images, shapes).items()}


def _image_of_zeros(site: dict[str, Any]) -> jax.Array:
    """A value in the support that depends on the support alone."""
    with helpful_support_errors(site):
        transform = biject_to(site["fn"].support)
    shape = transform.inverse_shape(jnp.shape(site["value"]))
    return transform(jnp.zeros(shape, jnp.result_type(site["value"])))
