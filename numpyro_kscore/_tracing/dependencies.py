"""Which parts of a guide have a density, which can only be sampled, and what depends on what.

A guide draws latents from noise and from each other. Its density is a product of factors
``q(z_b | parents of b)`` over *blocks* b, of two kinds. A site drawn from a distribution whose
parameters depend on other latents alone has a density: it is a block by itself and keeps its exact
entropy. Sites behind which there is noise that is not a latent (an auxiliary site, a bare random
key) have none; those that share such noise are one block, whose conditional score is to be
estimated. Within plates a block is independent from element to element if its noise is drawn
inside them.

Everything here is read off traces without computing a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Any

import jax
from numpyro import handlers
from numpyro.distributions import Delta, Distribution
from numpyro.ops.provenance import eval_provenance

from numpyro_kscore._tracing.implicit import Implicit

__all__ = [
    "Block",
    "GuideSite",
    "find_blocks",
    "is_drawn",
    "layers",
    "seeded",
    "sources_of",
    "trace_guide",
]

# The name under which a bare random key (numpyro.prng_key) counts as a source of noise.
KEY = "numpyro.prng_key()"
# What is no noise although a key may be behind its first value: rows that a plate draws,
# parameters and mutable state. Given, they are not traced back to the key.
GIVEN = ("plate", "param", "mutable")
# Keeps names of values apart from those of arguments.
VALUE = "value "


@dataclasses.dataclass(frozen=True)
class GuideSite:
    """A sample site of a guide, as far as dependencies go.

    Attributes:
        name: of the site.
        direct: sites (and ``KEY``) its distribution's parameters are computed from.
        rows: plates whose rows those parameters are computed from.
        plates: names of the plates it is in.
        is_latent: whether it is a latent of the model; otherwise it is noise.
        is_drawn: whether it adds noise of its own; not for a value given as it is.
        override: what ``infer={"implicit": …}`` says, or None.
        support: latents its support in the model is computed from, and with it its unconstrained
            coordinates.
    """

    name: str
    direct: frozenset[str]
    rows: frozenset[str]
    plates: frozenset[str]
    is_latent: bool
    is_drawn: bool
    override: bool | None = None
    support: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Block:
    """One factor ``q(sites | parents)`` of a guide.

    Attributes:
        sites: names of its latents, in the order of the guide.
        parents: names of the latents it is conditional on.
        plates: plates whose elements are independent of each other given the parents.
        is_implicit: whether its density is unknown.
        rows: plates whose rows its latents, or the noise behind them, are computed from.
    """

    sites: tuple[str, ...]
    parents: tuple[str, ...]
    plates: frozenset[str]
    is_implicit: bool
    rows: frozenset[str]


def trace_guide(
    guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: dict[str, Any], key: Any
) -> dict[str, GuideSite]:
    """The sample sites of a guide and what they depend on, in the order they are drawn.

    Args:
        guide: the guide.
        args: its arguments.
        kwargs: its keyword arguments.
        params: values of its parameters and mutable sites.
        key: a random key; no number depends on it.
    """
    sites: dict[str, GuideSite] = {}
    plates: set[str] = set()

    def values(key: jax.Array) -> dict[str, Any]:
        trace = handlers.trace(seeded(guide, key, params)).get_trace(*args, **kwargs)
        # Nothing traced is kept: it would leak.
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
    found = sources_of(distributions, {KEY: key, **drawn})
    sources = {name: frozenset[str]().union(*found[name]) for name in sites}
    return {
        name: dataclasses.replace(
            site,
            direct=sources[name] & ({*sites, KEY} - {name}),
            rows=sources[name] & plates,
        )
        for name, site in sites.items()
    }


def _leaves(fn: Distribution) -> list[Any]:
    """What a distribution is computed from, and a draw of it.

    A class may hide arrays from JAX, in attributes or closures; its draws depend on them.
    """
    return [*jax.tree.leaves(fn), fn.sample(jax.random.key(0))]


def _described(site: dict[str, Any]) -> GuideSite:
    return GuideSite(
        site["name"],
        frozenset(),
        frozenset(),
        frozenset(frame.name for frame in site["cond_indep_stack"]),
        not site["infer"].get("is_auxiliary", False),
        not _is_given(site["fn"]),
        site["infer"].get("implicit"),
    )


def seeded(program: Any, key: jax.Array, data: dict[str, Any]) -> Any:
    """A guide or model with a random key, and values of some of its sites."""
    # New containers: it may change nested mutable state in place.
    data = jax.tree.map(lambda leaf: leaf, data)
    return handlers.substitute(handlers.seed(program, key), data=data)


def sources_of(function: Callable[[dict[str, Any]], Any], values: dict[str, Any]) -> Any:
    """For each array that a function returns, which of some named values it is computed from.

    Args:
        function: from a dict of values to a pytree of arrays.
        values: arrays by name; only shapes matter.
    """

    def prefixed(**given: Any) -> Any:
        return function({name.removeprefix(VALUE): value for name, value in given.items()})

    found = eval_provenance(prefixed, **{VALUE + name: value for name, value in values.items()})
    return jax.tree.map(lambda sources: frozenset(s.removeprefix(VALUE) for s in sources), found)


def is_drawn(site: dict[str, Any]) -> bool:
    """Whether a site of a trace is a sample site that is not observed."""
    return site["type"] == "sample" and not site["is_observed"]


def layers(fn: Distribution) -> list[Distribution]:
    """A distribution and what it wraps, one in another, the innermost last."""
    found = [fn]
    while hasattr(found[-1], "base_dist"):
        found.append(found[-1].base_dist)
    return found


def _is_given(fn: Distribution) -> bool:
    """Whether a distribution is a value, maybe transformed or rearranged."""
    return isinstance(layers(fn)[-1], Implicit | Delta)


def find_blocks(sites: dict[str, GuideSite]) -> tuple[Block, ...]:
    """The factors of a guide, parents before children.

    Raises:
        ValueError: for a latent without noise of its own, and for a site said to be explicit
            whose density is unknown.
    """
    latents = [name for name, site in sites.items() if site.is_latent]
    hidden = {name: _hidden(name, sites) for name in latents}
    parents = {name: _visible(name, sites) for name in latents}
    implicit = {name for name in latents if hidden[name] or not sites[name].is_drawn}
    for name in latents:
        _check_site(sites[name], hidden[name], parents[name])
        if sites[name].override:
            implicit.add(name)

    # Sites that share noise are one group; so are those that depend on each other in a circle.
    groups = [{name} for name in latents]
    for source in {s for name in latents for s in hidden[name]}:
        groups = _merged(groups, [g for g in groups if any(source in hidden[n] for n in g)])
    # An estimate is one of coordinates, which move with the support; a density that is known is
    # one of the site itself, unless a circle makes it part of an estimate.
    while True:
        for name in implicit:
            parents[name] |= sites[name].support
        groups = _in_order(groups, parents)
        estimated = implicit.union(*(group for group in groups if len(group) > 1))
        if estimated == implicit:
            break
        implicit = estimated
    blocks = []
    for group in groups:
        members = tuple(name for name in latents if name in group)
        is_implicit = bool(implicit & group)
        if is_implicit:
            _check_no_explicit(members, sites)
        plates = frozenset.intersection(
            *(sites[name].plates for name in members),
            *(_plates_of(source, sites) for name in members for source in hidden[name]),
        )
        outside = {p for name in members for p in parents[name]} - set(members)
        ordered = tuple(name for name in latents if name in outside)
        rows = frozenset[str]().union(*(_rows_behind(name, sites) for name in members))
        blocks.append(Block(members, ordered, plates, is_implicit, rows))
    return tuple(blocks)


def _plates_of(source: str, sites: dict[str, GuideSite]) -> frozenset[str]:
    return sites[source].plates if source in sites else frozenset()


def _rows_behind(name: str, sites: dict[str, GuideSite]) -> frozenset[str]:
    noise = [source for source in _hidden(name, sites) if source in sites]
    return sites[name].rows.union(*(sites[source].rows for source in noise))


def _hidden(name: str, sites: dict[str, GuideSite]) -> frozenset[str]:
    """Noise that is no latent, behind a site on paths that pass no latent."""
    return frozenset(s for s in _ancestors(name, sites) if s == KEY or not sites[s].is_latent)


def _visible(name: str, sites: dict[str, GuideSite]) -> frozenset[str]:
    """The latents a site depends on, directly or through noise."""
    return frozenset(s for s in _ancestors(name, sites) if s != KEY and sites[s].is_latent)


def _ancestors(name: str, sites: dict[str, GuideSite]) -> set[str]:
    found: set[str] = set()
    open_ends = list(sites[name].direct)
    while open_ends:
        source = open_ends.pop()
        if source in found:
            continue
        found.add(source)
        if source != KEY and not sites[source].is_latent:
            open_ends.extend(sites[source].direct)
    return found - {name}


def _check_site(site: GuideSite, hidden: frozenset[str], parents: frozenset[str]) -> None:
    if site.override not in (None, True, False):
        raise ValueError(
            f"guide: expected infer={{'implicit': True}} or False at '{site.name}'; got "
            f"{site.override!r}"
        )
    if not site.is_drawn and not hidden:
        if not parents:
            raise ValueError(
                "guide: expected latent sites computed from noise; got a point without any at "
                f"'{site.name}'. A point has no entropy, and the fit would be the posterior's "
                "mode: draw the site from a distribution, or from noise by Implicit(...)"
            )
        raise ValueError(
            f"guide: expected noise behind every latent site; got '{site.name}', which is a "
            f"function of {sorted(parents)} alone and has no density beside them. Give it noise "
            "of its own, or make it numpyro.deterministic in the model"
        )
    if site.override is False and (hidden or not site.is_drawn):
        sources = ", ".join(sorted(hidden))
        raise ValueError(
            f"guide: expected a site with a density where infer={{'implicit': False}} says so; "
            f"got '{site.name}', which depends on the noise {sources} that is no latent. Drop "
            "the setting: its entropy is estimated"
        )


def _check_no_explicit(members: Iterable[str], sites: dict[str, GuideSite]) -> None:
    explicit = [name for name in members if sites[name].override is False]
    if explicit:
        others = [name for name in members if name not in explicit]
        raise ValueError(
            f"guide: expected a site with a density where infer={{'implicit': False}} says so; "
            f"got {explicit}, between sites {others} that share noise. Drop the setting: they "
            "are one block, whose entropy is estimated"
        )


def _merged(groups: list[set[str]], some: list[set[str]]) -> list[set[str]]:
    """The groups, with some of them made one."""
    return [g for g in groups if g not in some] + [set().union(*some)]


def _in_order(groups: list[set[str]], parents: dict[str, frozenset[str]]) -> list[set[str]]:
    """Groups with parents before children; those that depend on each other in a circle are one."""
    while True:
        owner = {name: k for k, group in enumerate(groups) for name in group}
        after = {
            k: {owner[p] for name in group for p in parents[name]} - {k}
            for k, group in enumerate(groups)
        }
        try:
            return [groups[k] for k in TopologicalSorter(after).static_order()]
        except CycleError as error:
            groups = _merged(groups, [groups[k] for k in set(error.args[1])])
