"""Why a fit has no finite numbers: draws outside a support, and parameters out of range."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_uniform

from numpyro_kscore._model.target import Target
from numpyro_kscore._model.validation import check_sampled, find_latents

# Number of draws of a guide that are examined after a failure.
SUPPORT_DRAWS = 100
# Parameters that can be compared with what a distribution takes.
NUMBERS = (int, float, np.ndarray, np.generic, jax.Array)


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

    Or if, at its draws, a site of either has a parameter that its distribution does not take.
    """
    supports: dict[str, Any] = {}

    def draw(key: jax.Array) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, Any]]:
        of_guide = Target(guide, args, kwargs, data=params, key=key).trace({})
        drawn = {name: s["value"] for name, s in of_guide.items() if s["type"] == "sample"}
        of_model = Target(model, args, kwargs, data={**params, **drawn}, key=key).trace({})
        found = {}
        for name, value in drawn.items():
            if name in of_model:
                supports[name] = of_model[name]["fn"].support
                found[name] = value, jnp.all(supports[name](value))
        return found, {**_parameters("guide", of_guide), **_parameters("model", of_model)}

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
    _raise_if_outside(parameters, "the guide's draws", cause)


def has_dynamic_support(support: Any) -> bool:
    """Whether a support has bounds that are values of the model, not plain numbers."""
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    bounds = (getattr(support, name, 0.0) for name in ("lower_bound", "upper_bound"))
    return not all(isinstance(bound, int | float) for bound in bounds)


def check_parameters(trace_of: Callable[[], dict[str, Any]], cause: Exception) -> None:
    """Raise ``ValueError`` from a cause if a site has a parameter its distribution does not take.

    NumPyro refuses it where the distribution is made, before there is a site to name. One that was
    told to check itself does so again: then the line of the model is named.
    """
    try:
        with numpyro.validation_enabled(False):
            found = jax.tree.map(np.asarray, _parameters("model", trace_of()))
    except Exception as error:  # of a model that cannot run, or runs with tracers
        if " got invalid " not in str(error):
            return
        lines = traceback.extract_tb(error.__traceback__)
        packages = tuple(f"{package.__path__[0]}{os.sep}" for package in (numpyro, jax))
        last = [line for line in lines if not line.filename.startswith(packages)][-1]
        raise ValueError(
            f"model: expected parameters that distributions take; got others ({error}) in line "
            f"{last.lineno} of {last.filename}: {last.line}"
        ) from cause
    # A parameter that is NaN was computed from values that have no number, as a logarithm may be.
    numbers = {place: seen for place, seen in found.items() if not np.isnan(seen[1])}
    _raise_if_outside(numbers, "the initial values", cause)


def _raise_if_outside(parameters: dict[str, Any], at: str, cause: Exception) -> None:
    for place, (within, least, greatest) in parameters.items():
        outside = 1 - np.mean(within)
        if outside:
            lowest, highest = np.min(least), np.max(greatest)
            got = f"{lowest:.3g}" if lowest == highest else f"{lowest:.3g} to {highest:.3g}"
            raise ValueError(
                f"{place}; got {got}, outside at {outside:.0%} of {at}. Give the latents or data "
                "it is computed from a range that keeps it there, such as HalfNormal for a scale, "
                "or map it there, as by jnp.exp"
            ) from cause


def _parameters(whose: str, trace: dict[str, Any]) -> dict[str, Any]:
    """Whether distributions take their parameters, and the range of these, by a description."""
    found = {}
    sites = {name: site["fn"] for name, site in trace.items() if site["type"] == "sample"}
    for name, fn in ((name, one) for name, whole in sites.items() for one in _parts(whole)):
        for parameter, constraint in fn.arg_constraints.items():
            value = fn.__dict__.get(parameter)
            if isinstance(value, NUMBERS) and not constraints.is_dependent(constraint):
                numbers = jnp.asarray(value)
                if not numbers.size:
                    continue
                place = f"{whose}: expected {parameter!r} of {type(fn).__name__} at site {name!r}"
                seen = jnp.all(constraint(numbers)), jnp.min(numbers), jnp.max(numbers)
                found[f"{place} in {constraint}"] = seen
    return found


def _parts(fn: dist.Distribution) -> Iterator[dist.Distribution]:
    """A distribution and those it is made of; none for a factor of the user."""
    if isinstance(fn, dist.Unit):
        return
    yield fn
    for value in vars(fn).values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, dist.Distribution):
                yield from _parts(one)
