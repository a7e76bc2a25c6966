"""The dependence of a latent's unconstrained coordinates on values other than its own.

Estimates are made in the unconstrained coordinates of the model's supports. With ``x ~
Uniform(0, b)`` the coordinate of x is ``logit(x / b)``, which moves with b even if the guide draws
x and b independently. The coordinates of an ordered vector are its first number and the logarithms
of its steps, each a function of two neighbors, even if the guide draws every number by itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.util import helpful_support_errors

from numpyro_kscore._model.dependencies import seeded, sources_of

__all__ = ["check_within_supports", "free_axes", "support_sources"]

# Draws of a guide that are looked at after a failure.
SUPPORT_DRAWS = 100


def free_axes(model_site: dict[str, Any]) -> int:
    """Number of axes of a latent, from the left, whose elements have coordinates of their own.

    A vector of independent numbers has one, whatever its event shape; a simplex has none.
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
    """For each latent of a model, the other latents its support is computed from.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        data: values of its parameters, mutable sites and rows of plates.
        latents: values of the latents; only shapes matter.
        key: a random key; the result does not depend on it.
    """

    def images(given: dict[str, Any]) -> dict[str, jax.Array]:
        substituted = seeded(model, key, {**data, **given})
        trace = handlers.trace(substituted).get_trace(*args, **kwargs)
        return {name: _image_of_zeros(trace[name]) for name in latents}

    shapes = {
        name: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
        for name, value in latents.items()
    }
    return {name: names - {name} for name, names in sources_of(images, shapes).items()}


def check_within_supports(
    model: Any,
    guide: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: dict[str, Any],
    cause: Exception,
) -> None:
    """Raise ``ValueError`` if a guide draws a latent outside the prior's support.

    Args:
        model: the model.
        guide: the guide.
        args: arguments of both.
        kwargs: keyword arguments of both.
        params: parameters of both; those that are missing have their initial values.
        cause: what was raised instead.
    """
    supports: dict[str, Any] = {}

    def draw(key: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
        of_guide = handlers.trace(seeded(guide, key, params)).get_trace(*args, **kwargs)
        drawn = {name: s["value"] for name, s in of_guide.items() if s["type"] == "sample"}
        of_model = handlers.trace(seeded(model, key, {**params, **drawn})).get_trace(
            *args, **kwargs
        )
        found = {}
        for name, value in drawn.items():
            if name in of_model:
                supports[name] = of_model[name]["fn"].support
                found[name] = value, jnp.all(supports[name](value))
        return found

    keys = jax.random.split(jax.random.key(0), SUPPORT_DRAWS)
    # A guide that gives the same value in every draw gives a concrete one, which NumPyro checks.
    with numpyro.validation_enabled(False):
        found = jax.vmap(draw)(keys)
    for name, (value, within) in found.items():
        outside = 1 - np.mean(within)
        if outside:
            raise ValueError(
                f"guide: expected values of {name!r} within its support, {supports[name]}; got "
                f"{outside:.0%} of the draws outside, with values from {np.min(value):.3g} to "
                f"{np.max(value):.3g}. Map an unconstrained value x there: Implicit(jnp.exp(x), "
                "unconstrained=x) for a positive one, biject_to(support)(x) in general"
            ) from cause


def _image_of_zeros(site: dict[str, Any]) -> jax.Array:
    """A value in the support that depends on nothing but the support."""
    with helpful_support_errors(site):
        transform = biject_to(site["fn"].support)
    shape = transform.inverse_shape(jnp.shape(site["value"]))
    return transform(jnp.zeros(shape, jnp.result_type(site["value"])))
