"""A model seen once: its sites, and values of its latents at which its density is finite.

NumPyro's search for such values runs operation by operation, each of which is compiled by itself.
Here all of it is one compiled program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from jax.core import Tracer
from numpyro.distributions import constraints
from numpyro.infer.initialization import (
    init_to_feasible,
    init_to_median,
    init_to_sample,
    init_to_uniform,
)
from numpyro.infer.util import initialize_model

from numpyro_kscore._model.dependencies import is_drawn
from numpyro_kscore._model.handlers import FactorsInScans, Hidden
from numpyro_kscore._model.supports import check_parameters
from numpyro_kscore._model.target import Target
from numpyro_kscore._util.checks import is_concrete
from numpyro_kscore._util.compiling import quick_jit

# Strategies for initial values where NumPyro's default finds none.
OTHERS = (
    init_to_sample,
    init_to_median,
    init_to_uniform(radius=10.0),
    init_to_feasible,
)


class Prototype(NamedTuple):
    """A trace of a model, and unconstrained latents of finite density, ordered as in the model."""

    trace: dict[str, dict[str, Any]]
    latents: dict[str, Array]


def find_prototype(
    rng_key: Array,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    init_loc_fn: Callable[..., Any],
    forward_mode: bool,
) -> Prototype:
    """Run NumPyro's ``initialize_model`` in one compiled program; ``RuntimeError`` if that fails.

    ``ValueError`` says that a loop has no derivative in reverse mode.

    Where no value by NumPyro's default, near the origin, has a finite density, as in raw units far
    from it, other strategies are tried, with 100 attempts each: draws of the prior, its median,
    wider values around the origin, and the origin itself. Values are the same as NumPyro's for the
    key, but for rounding.
    """

    def initialize(key: Array, strategy: Callable[..., Any]) -> Any:
        with Hidden(), FactorsInScans():
            return initialize_model(
                key,
                model,
                init_strategy=strategy,
                dynamic_args=True,
                model_args=args,
                model_kwargs=kwargs,
                forward_mode_differentiation=forward_mode,
            )

    is_default = init_loc_fn is init_to_uniform
    strategies = (init_loc_fn, *OTHERS) if is_default else (init_loc_fn,)
    for strategy in strategies:
        try:
            found = _initialized(partial(initialize, strategy=strategy), rng_key)
        except ValueError as error:
            if "Reverse-mode differentiation" not in str(error):
                raise
            raise ValueError(
                "model: expected operations with reverse-mode derivatives; got a loop of unknown "
                "length. Use lax.scan, or say forward_mode_differentiation=True to the guide, to "
                "ImplicitELBO, and to fit or svi.run"
            ) from error
        if found is not None:
            return found
    # Run operation by operation, NumPyro names the sites whose values are not valid.
    try:
        info = initialize(rng_key, init_loc_fn)
    except (RuntimeError, ValueError) as error:
        target = Target(model, args, kwargs, key=rng_key)
        check_parameters(lambda: target.trace_by(init_loc_fn), error)
        tried = (
            "init_to_uniform, init_to_sample, init_to_median and init_to_feasible"
            if is_default
            else "init_loc_fn"
        )
        advice = _advice_on_data(model, rng_key, args, kwargs) or (
            "Look for a prior that allows what the likelihood cannot take, or give values: "
            "init_loc_fn=init_to_value(values={...})"
        )
        raise RuntimeError(
            f"model: expected initial values at which its density and gradient are finite; got "
            f"none in 100 attempts by {tried} ({error}). {advice}"
        ) from error
    return _prototype(info.model_trace, info.param_info.z)


def _initialized(initialize: Callable[[Array], Any], rng_key: Array) -> Prototype | None:
    """The prototype that NumPyro finds, in one program; None without finite density or supports."""
    seen: list[Any] = []

    def run(key: Array) -> tuple[Any, Any, list[Array]]:
        info = initialize(key)
        found = info.param_info
        # Distributions, plates and names: what is computed is returned, the rest stays as it is.
        seen[:] = jax.tree.flatten(info.model_trace)
        numbers = [found.potential_energy, *jax.tree.leaves(found.z_grad)]
        valid = jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in numbers]))
        return found.z, valid, [leaf for leaf in seen[0] if isinstance(leaf, Tracer)]

    latents, valid, computed = quick_jit(run, runs_once=True)(rng_key)
    values = iter(computed)
    leaves = [next(values) if isinstance(leaf, Tracer) else leaf for leaf in seen[0]]
    trace = jax.tree.unflatten(seen[1], leaves)
    if is_concrete(valid) and not (valid and _have_supports(trace)):
        return None
    return _prototype(trace, latents)


def _prototype(trace: dict[str, dict[str, Any]], latents: dict[str, Array]) -> Prototype:
    # A compiled program returns a dict in alphabetical order; that of the model counts.
    return Prototype(trace, {name: latents[name] for name in trace if name in latents})


def _advice_on_data(model: Any, key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The observed sites at fault, in words; empty without any."""
    try:
        # A model whose parameters are not valid raises, if it is not told to let them pass.
        with Hidden(), numpyro.validation_enabled(False):
            trace = Target(model, args, kwargs, key=key).trace({})
            observed = {n: site for n, site in trace.items() if site.get("is_observed")}
            missing = [n for n, s in observed.items() if not jnp.all(jnp.isfinite(s["value"]))]
            outside = [n for n, s in observed.items() if not jnp.all(s["fn"].support(s["value"]))]
    except Exception:
        return ""
    if missing:
        return f"Observed values of {missing} are not finite: leave them out, or mask them"
    if outside:
        return f"Observed values of {outside} are outside the support of their distribution"
    return ""


def _have_supports(trace: dict[str, Any]) -> bool:
    """Whether supports survived: ``Levy`` and some classes of a user's lose their attributes."""
    try:
        supports = [site["fn"].support for site in trace.values() if is_drawn(site)]
    except (AttributeError, AssertionError):  # the latter of a distribution that is wrapped
        return False
    return all(isinstance(support, constraints.Constraint) for support in supports)
