"""Why a fit has no finite numbers: draws outside a support, and parameters out of range."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_uniform

from numpyro_kscore._model.dependencies import layers
from numpyro_kscore._model.target import Target
from numpyro_kscore._model.validation import check_sampled, find_latents

# Number of draws of a guide that are examined after a failure.
SUPPORT_DRAWS = 100


def check_guide_sites(
    model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cause: Exception
) -> None:
    """Raise ``ValueError`` from a cause if a guide does not sample what the model does."""
    found: list[ValueError] = []

    def run(key: jax.Array) -> None:
        of_guide = Target(guide, args, kwargs, key=key).trace({})
        try:
            of_model = Target(model, args, kwargs, key=key).trace_by(init_to_uniform)
            check_sampled(find_latents(of_model), of_guide)
        except ValueError as error:
            found.append(error)

    try:
        jax.eval_shape(run, jax.random.key(0))
    except Exception:  # of a guide that cannot run at all: the cause says why
        return
    if found:
        raise found[0] from cause


def check_within_supports(
    model: Any,
    guide: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: dict[str, Any],
    cause: Exception,
) -> None:
    """Raise ``ValueError`` from a cause if a guide draws a latent outside the prior's support.

    Or if, at its draws, a site of the model has a parameter that its distribution does not take.
    """
    supports: dict[str, Any] = {}

    def draw(key: jax.Array) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, jax.Array]]:
        of_guide = Target(guide, args, kwargs, data=params, key=key).trace({})
        drawn = {name: s["value"] for name, s in of_guide.items() if s["type"] == "sample"}
        of_model = Target(model, args, kwargs, data={**params, **drawn}, key=key).trace({})
        found = {}
        for name, value in drawn.items():
            if name in of_model:
                supports[name] = of_model[name]["fn"].support
                found[name] = value, jnp.all(supports[name](value))
        return found, _parameters_within(of_model)

    keys = jax.random.split(jax.random.key(0), SUPPORT_DRAWS)
    # A guide that gives the same value in every draw gives a concrete one, which NumPyro checks.
    with numpyro.validation_enabled(False):
        found, parameters = jax.vmap(draw)(keys)
    for name, (value, within) in found.items():
        outside = 1 - np.mean(within)
        if outside:
            raise ValueError(
                f"guide: expected values of {name!r} within its support, {supports[name]}; got "
                f"{outside:.0%} of the draws outside, with values from {np.min(value):.3g} to "
                f"{np.max(value):.3g}. Map an unconstrained value x there: Implicit(jnp.exp(x), "
                "unconstrained=x) for a positive one, biject_to(support)(x) in general"
            ) from cause
    for place, within in parameters.items():
        outside = 1 - np.mean(within)
        if outside:
            raise ValueError(
                f"model: expected {place}; got another at {outside:.0%} of the guide's draws. Give "
                "the latents it is computed from a support that keeps it in range, such as "
                "HalfNormal for a scale, or map it there, as by jnp.exp"
            ) from cause


def _parameters_within(trace: dict[str, Any]) -> dict[str, jax.Array]:
    """Whether the parameters of each site are what its distribution takes, by their description."""
    found = {}
    for name, site in trace.items():
        fn = layers(site["fn"])[-1] if site["type"] == "sample" else None
        if isinstance(fn, dist.Unit):
            continue  # a factor of the user
        for parameter, constraint in getattr(fn, "arg_constraints", {}).items():
            value = getattr(fn, "__dict__", {}).get(parameter)
            if isinstance(value, jax.Array) and not constraints.is_dependent(constraint):
                place = f"{parameter!r} of {type(fn).__name__} at site {name!r} in {constraint}"
                found[place] = jnp.all(constraint(value))
    return found
