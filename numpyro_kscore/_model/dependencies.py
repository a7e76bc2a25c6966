"""The sites of a guide, and which of them each one is computed from.

All of this is read off traces without computing a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import Delta, Distribution, MaskedDistribution
from numpyro.ops.provenance import eval_provenance

from numpyro_kscore._model.implicit import Implicit

# The name under which a bare random key (numpyro.prng_key) counts as a source of noise.
KEY = "numpyro.prng_key()"
# Types of sites that are not noise even if a key made their first value: rows that a plate draws,
# parameters and mutable state. Their values are given, so they are not traced back to the key.
GIVEN = ("plate", "param", "mutable")
# Prefix that keeps names of values apart from names of arguments.
VALUE = "value "


@dataclasses.dataclass(frozen=True)
class GuideSite:
    """A sample site of a guide and what it depends on.

    Attributes:
        name: name of the site.
        direct: sites (and ``KEY``) its distribution's parameters are computed from.
        row_plates: plates whose rows those parameters are computed from.
        plates: names of the plates it is in.
        is_latent: whether it is a latent of the model; otherwise it is noise.
        is_drawn: whether it adds noise of its own, which a plain value does not.
        override: the setting ``infer={"implicit": …}``, or None.
        support: latents that its support in the model, and so its coordinates, are computed from.
        is_fixed: whether its distribution is computed from no parameter, state, key or other site.
        is_masked: whether it is under ``.mask(False)``, so that its density counts as 1.
    """

    name: str
    direct: frozenset[str]
    row_plates: frozenset[str]
    plates: frozenset[str]
    is_latent: bool
    is_drawn: bool
    override: bool | None = None
    support: frozenset[str] = frozenset()
    is_fixed: bool = False
    is_masked: bool = False


def trace_guide(
    guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: dict[str, Any], key: Any
) -> dict[str, GuideSite]:
    """The sample sites of a guide and what they depend on, in the order they are drawn.

    ``params`` has its parameters and mutable sites. The result does not depend on the key.
    """
    sites: dict[str, GuideSite] = {}
    plates: set[str] = set()

    def values(key: jax.Array) -> dict[str, Any]:
        trace = handlers.trace(seeded(guide, key, params)).get_trace(*args, **kwargs)
        # No tracer is kept: it would leak.
        sites.update({name: _described(site) for name, site in trace.items() if is_drawn(site)})
        plates.update(name for name, site in trace.items() if site["type"] == "plate")
        return {
            name: site["value"]
            for name, site in trace.items()
            if (name in sites or site["type"] in GIVEN) and site["value"] is not None
        }

    def distributions(given: dict[str, Any]) -> dict[str, list[Any]]:
        substituted = seeded(guide, given.pop(KEY), {**params, **given})
        trace = handlers.trace(substituted).get_trace(*args, **kwargs)
        return {name: _leaves(trace[name]["fn"]) for name in sites}

    drawn = jax.eval_shape(values, key)
    leaf_sources = sources_of(distributions, {KEY: key, **drawn})
    sources = {name: frozenset[str]().union(*leaf_sources[name]) for name in sites}
    return {
        name: dataclasses.replace(
            site,
            direct=sources[name] & ({*sites, KEY} - {name}),
            row_plates=sources[name] & plates,
            is_fixed=not sources[name],
        )
        for name, site in sites.items()
    }


def _leaves(fn: Distribution) -> list[Any]:
    """The arrays of a distribution, and a draw from it.

    A class may hide arrays from JAX, in attributes or closures; its draws still depend on them.
    """
    if isinstance(fn, Implicit):
        # Its density may depend on noise that its draw does not.
        return jax.tree.leaves((fn.value, fn.unconstrained))
    return [*jax.tree.leaves(fn), fn.sample(jax.random.key(0))]


def _described(site: dict[str, Any]) -> GuideSite:
    return GuideSite(
        site["name"],
        frozenset(),
        frozenset(),
        frozenset(frame.name for frame in site["cond_indep_stack"]),
        not site["infer"].get("is_auxiliary", False),
        # A plain value, possibly transformed or reshaped, adds no noise.
        not isinstance(layers(site["fn"])[-1], Implicit | Delta),
        site["infer"].get("implicit"),
        is_masked=any(mask is False for mask in masks(site["fn"])),
    )


def seeded(program: Any, key: jax.Array, data: dict[str, Any]) -> Any:
    """A guide or model with a random key, and values of some of its sites."""
    # New containers, because the program may change nested mutable state in place.
    data = jax.tree.map(lambda leaf: leaf, data)
    return handlers.substitute(handlers.seed(program, key), data=data)


def sources_of(function: Callable[[dict[str, Any]], Any], values: dict[str, Any]) -> Any:
    """The names of the values that each array a function returns is computed from, as its pytree.

    The function takes a dict of values, of which only shapes matter.
    """

    def prefixed(**given: Any) -> Any:
        return function({name.removeprefix(VALUE): value for name, value in given.items()})

    sources = eval_provenance(prefixed, **{VALUE + name: value for name, value in values.items()})
    return jax.tree.map(lambda names: frozenset(n.removeprefix(VALUE) for n in names), sources)


def abstract(values: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of values by name."""
    return {
        name: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
        for name, value in values.items()
    }


def is_drawn(site: dict[str, Any]) -> bool:
    """Whether a site of a trace is a sample site that is not observed."""
    return site["type"] == "sample" and not site["is_observed"]


def is_latent(site: dict[str, Any]) -> bool:
    """Whether a site of a model's trace is drawn and continuous: guides draw those alone."""
    return is_drawn(site) and not site["fn"].support.is_discrete


def is_enumerated(site: dict[str, Any]) -> bool:
    """Whether a site of a model's trace is a discrete latent, whose values are summed over."""
    return is_drawn(site) and site["fn"].support.is_discrete


def layers(fn: Distribution) -> list[Distribution]:
    """A distribution and the distributions it wraps, from the outermost to the innermost."""
    wrapped = [fn]
    while hasattr(wrapped[-1], "base_dist"):
        wrapped.append(wrapped[-1].base_dist)
    return wrapped


def masks(fn: Distribution) -> list[Any]:
    """The masks of a distribution that hide something, False or arrays."""
    found = [layer._mask for layer in layers(fn) if isinstance(layer, MaskedDistribution)]
    return [mask for mask in found if mask is not True]
