"""The blocks of a guide: which of its parts have a density, and which can only be sampled.

A guide draws latents from noise and from each other. Its density is a product of factors ``q(z_b |
parents of b)`` over *blocks* b, of two kinds. A site drawn from a distribution whose parameters
depend on other latents alone has a density: it is a block by itself and keeps its exact entropy.
Sites computed from noise that is not a latent (an auxiliary site, a bare random key) have none;
those that share such noise form one block, whose conditional score is estimated. Within plates a
block is independent from element to element if its noise is drawn inside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

from numpyro_kscore._model.dependencies import KEY, GuideSite
from numpyro_kscore._model.layout import Site


@dataclasses.dataclass(frozen=True)
class Block:
    """One factor ``q(sites | parents)`` of a guide.

    Attributes:
        sites: names of its latents, in the order of the guide.
        parents: names of the latents it is conditional on.
        plates: plates whose elements are independent of each other given the parents.
        is_implicit: whether its entropy is estimated.
        row_plates: plates whose rows its latents, or the noise behind them, are computed from.
        mixed: sites whose density is that of the block given other noise, of which the block is a
            mixture: its latents, or noise that they are computed from. Empty if it is none.
    """

    sites: tuple[str, ...]
    parents: tuple[str, ...]
    plates: frozenset[str]
    is_implicit: bool
    row_plates: frozenset[str]
    mixed: tuple[str, ...] = ()


def find_blocks(sites: dict[str, GuideSite]) -> tuple[Block, ...]:
    """The factors of a guide, parents before children.

    Raises:
        ValueError: for a latent without noise of its own, and for a site whose density is unknown
            although ``infer={"implicit": False}`` says otherwise.
    """
    latents = [name for name, site in sites.items() if site.is_latent]
    # Noise reaches a site as hidden sources, not through a latent; its parents are latents.
    behind = {name: _ancestors(name, sites) for name in latents}
    hidden = {n: frozenset(s for s in behind[n] if s not in latents) for n in latents}
    parents = {n: frozenset(s for s in behind[n] if s in latents) for n in latents}
    for name in latents:
        _check_site(sites[name], hidden[name], parents[name])
        if sites[name].is_masked:
            _check_masked(name, hidden, sites)
            hidden[name] = frozenset()
    implicit = {n for n in latents if hidden[n] or not (sites[n].is_drawn or sites[n].is_masked)}
    for name in latents:
        if sites[name].override:
            implicit.add(name)

    # Sites that share noise form one group, and so do sites that depend on each other in a circle.
    groups = [{name} for name in latents]
    for source in {s for name in latents for s in hidden[name]}:
        groups = _merged(groups, [g for g in groups if any(source in hidden[n] for n in g)])
    # Estimates are made in unconstrained coordinates, which move with the support. A known density
    # is that of the site itself, which does not, unless a circle makes it part of an estimate.
    while True:
        for name in implicit:
            parents[name] |= sites[name].support
        groups = _in_order(groups, parents)
        estimated = implicit.union(*(group for group in groups if len(group) > 1))
        if estimated == implicit:
            break
        implicit = estimated
    blocks = []
    plates_of = {name: site.plates for name, site in sites.items()}
    for group in groups:
        members = tuple(name for name in latents if name in group)
        is_implicit = bool(implicit & group)
        if is_implicit:
            _check_no_explicit(members, sites)
        plates = frozenset.intersection(
            *(sites[name].plates for name in members),
            *(plates_of.get(source, frozenset()) for name in members for source in hidden[name]),
        )
        outside = {p for name in members for p in parents[name]} - set(members)
        ordered = tuple(name for name in latents if name in outside)
        noise = {source for name in members for source in hidden[name]} - {KEY}
        row_plates = frozenset[str]().union(*(sites[n].row_plates for n in {*members, *noise}))
        mixed = _mixed(members, frozenset[str]().union(*(hidden[n] for n in members)), sites)
        blocks.append(Block(members, ordered, plates, is_implicit, row_plates, mixed))
    return tuple(blocks)


def check_subsampling(block: Block, sites: dict[str, Site]) -> None:
    """Raise unless rows that are not drawn have an entropy, for which rows must be independent."""
    for name in (*block.sites, *block.parents):
        for frame in sites[name].frames:
            if frame.size == frame.full_size or frame.name in block.plates:
                continue
            drawn = f"plate '{frame.name}', which draws {frame.size} of {frame.full_size}"
            if name in block.sites:
                raise ValueError(
                    f"guide: expected latent sites in subsampled plates to have noise of their "
                    f"own in the plate; got '{name}' in {drawn}, computed from noise outside. "
                    "Draw its noise inside the plate"
                )
            raise ValueError(
                f"guide: expected latent sites outside subsampled plates not to depend on those "
                f"inside; got {list(block.sites)}, computed from '{name}' in {drawn}"
            )


def _mixed(
    members: tuple[str, ...], hidden: frozenset[str], sites: dict[str, GuideSite]
) -> tuple[str, ...]:
    """The sites whose density is known given the other hidden noise; empty if there is none."""
    ends = set(members)
    if not any(sites[name].is_drawn for name in members):
        ends = {s for name in members for s in sites[name].direct if s in hidden}
    others = hidden - ends
    are_known = KEY not in ends and all(sites[name].is_drawn for name in ends)
    # Noise that depends on a latent has another distribution at every draw.
    are_noise = all(s in hidden for n in others - {KEY} for s in sites[n].direct)
    is_mixture = others and are_known and are_noise
    return tuple(name for name in sites if name in ends) if is_mixture else ()


def _ancestors(name: str, sites: dict[str, GuideSite]) -> set[str]:
    """Everything a site is computed from, up to the nearest latents."""
    ancestors: set[str] = set()
    open_ends = list(sites[name].direct)
    while open_ends:
        source = open_ends.pop()
        if source in ancestors:
            continue
        ancestors.add(source)
        if source != KEY and not sites[source].is_latent:
            open_ends.extend(sites[source].direct)
    return ancestors - {name}


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
            f"function of {sorted(parents)} alone and has no density given them. Give it noise "
            "of its own, or make it numpyro.deterministic in the model"
        )
    if site.override is False and (hidden or not site.is_drawn):
        sources = ", ".join(sorted(hidden))
        raise ValueError(
            f"guide: expected a site with a density where infer={{'implicit': False}} says so; "
            f"got '{site.name}', which depends on the noise {sources} that is not a latent. Drop "
            "the setting: its entropy is estimated"
        )


def _check_masked(
    name: str, hidden: dict[str, frozenset[str]], sites: dict[str, GuideSite]
) -> None:
    """Raise unless a density of 1 can be taken for that of a latent under ``.mask(False)``."""
    shared = [n for n in hidden if not sites[n].is_masked and hidden[n] & hidden[name]]
    if shared or sites[name].override:
        reason = f"with noise that {shared} share" if shared else "with infer={'implicit': True}"
        raise ValueError(
            f"guide: expected latents under .mask(False) apart from those whose entropy is "
            f"estimated; got '{name}' {reason}. Mask all of them and give their density by "
            "numpyro.factor, or none"
        )


def _check_no_explicit(members: Iterable[str], sites: dict[str, GuideSite]) -> None:
    explicit = [n for n in members if sites[n].override is False or sites[n].is_masked]
    if explicit:
        others = [name for name in members if name not in explicit]
        raise ValueError(
            f"guide: expected a site with a density where infer={{'implicit': False}} or "
            f".mask(False) says so; got {explicit}, between sites {others} that share noise. Drop "
            "the setting: they are one block, whose entropy is estimated"
        )


def _merged(groups: list[set[str]], some: list[set[str]]) -> list[set[str]]:
    """The groups, with some of them merged into one."""
    return [g for g in groups if g not in some] + [set().union(*some)]


def _in_order(groups: list[set[str]], parents: dict[str, frozenset[str]]) -> list[set[str]]:
    """Groups with parents before children; a circle of groups is merged into one."""
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
