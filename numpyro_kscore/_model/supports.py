"""Check that a guide draws latents within the supports of their priors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_kscore._model.target import Target

# Number of draws of a guide that are examined after a failure.
SUPPORT_DRAWS = 100


def check_within_supports(
    model: Any,
    guide: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: dict[str, Any],
    cause: Exception,
) -> None:
    """Raise ``ValueError`` from a cause if a guide draws a latent outside the prior's support."""
    supports: dict[str, Any] = {}

    def draw(key: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
        of_guide = Target(guide, args, kwargs, data=params, key=key).trace({})
        drawn = {name: s["value"] for name, s in of_guide.items() if s["type"] == "sample"}
        of_model = Target(model, args, kwargs, data={**params, **drawn}, key=key).trace({})
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
