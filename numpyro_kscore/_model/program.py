"""A guide and a model that run together, and the layout of their latents."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_kscore._model.blocks import Block, check_subsampling, find_blocks
from numpyro_kscore._model.control_variate import ControlVariate
from numpyro_kscore._model.coordinates import LatentCoordinates, announced_coordinates
from numpyro_kscore._model.dependencies import (
    KEY,
    GuideSite,
    abstract,
    is_drawn,
    is_latent,
    seeded,
    sources_of,
    trace_guide,
)
from numpyro_kscore._model.enumeration import check_enumerable
from numpyro_kscore._model.handlers import LocalDensities
from numpyro_kscore._model.implicit import Implicit
from numpyro_kscore._model.layout import (
    Layout,
    Part,
    Site,
    free_axes,
    place_sites,
    support_transform,
    value_at_zero,
)
from numpyro_kscore._model.package_guide import package_guide
from numpyro_kscore._model.subsampling import subsampled_plates
from numpyro_kscore._model.target import Target
from numpyro_kscore._model.validation import (
    check_draws,
    check_observed,
    check_sites,
    check_transformed,
)


class Program(NamedTuple):
    """A guide and a model with their parameters and arguments.

    Attributes:
        params: parameters and mutable sites by name.
        plates: rows of subsampled plates that all particles share.
        coordinates: the coordinates of latents that are not unconstrained values.
        noise: values of the guide's noise sites, if they are given.
        control_variate: where the density of all rows of subsampled plates is known, if it is.
        reference: if the model's density is random, a model of the same parameters without
            randomness that is near it, and is expanded instead.
        outline: a model of the same latents without data, if there is one, for their supports.
    """

    params: dict[str, Any]
    model: Callable[..., Any]
    guide: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plates: dict[str, jax.Array]
    coordinates: tuple[LatentCoordinates, ...] = ()
    noise: dict[str, jax.Array] = {}  # noqa: RUF012
    control_variate: ControlVariate | None = None
    reference: Callable[..., Any] | None = None
    outline: Callable[..., Any] | None = None

    def target(self, layout: Layout, key: jax.Array | None = None) -> Target:
        """The model alone, at coordinates of its latents; ``key`` is for its own draws."""
        shapes = tuple((site.name, site.shape) for site in layout.sites)
        given = self.model, self.args, self.kwargs, shapes, self.coordinates
        return Target(*given, dict(self.params), key)


class Traces(NamedTuple):
    """One run of the guide, and of the model at its draws with a key, and their mutable values."""

    guide: dict[str, Any]
    model: dict[str, Any]
    mutable: dict[str, Any]
    model_key: jax.Array


def objective_program(
    params: dict[str, Any],
    model: Callable[..., Any],
    guide: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Program:
    """The guide and model that an objective sees: of the global latents, if rows are amortized."""
    own = package_guide(guide)
    split = None if own is None else own.marginalized(model)
    if split is None:
        return Program(params, model, guide, args, kwargs, {})
    found = Program(params, split.model, split.guide, args, kwargs, {})
    return found._replace(reference=split.reference, outline=split.outline)


def run_guide(key: jax.Array, program: Program) -> dict[str, Any]:
    """The trace of the guide at given values; the key is split into those of guide and model."""
    data = {**program.params, **program.plates, **program.noise}
    guide = seeded(program.guide, jax.random.split(key)[0], data)
    return handlers.trace(guide).get_trace(*program.args, **program.kwargs)


def trace_both(key: jax.Array, program: Program) -> Traces:
    """Run the guide, and the model at what it draws."""
    args, kwargs = program.args, program.kwargs
    model_key = jax.random.split(key)[1]
    guide_trace = run_guide(key, program)
    mutable = values_of(guide_trace, "mutable")
    # The model runs only for its supports; the likelihood is dead code here, which XLA drops.
    drawn = {n: s for n, s in guide_trace.items() if s["type"] == "plate" or is_drawn(s)}
    supports = program.model if program.outline is None else program.outline
    replayed = handlers.replay(supports, drawn)
    model = seeded(replayed, model_key, {**program.params, **mutable})
    model_trace = handlers.trace(model).get_trace(*args, **kwargs)
    mutable.update(values_of(model_trace, "mutable"))
    return Traces(guide_trace, model_trace, mutable, model_key)


def values_of(trace: dict[str, Any], kind: str) -> dict[str, Any]:
    """Values of the sites of one type."""
    return {name: site["value"] for name, site in trace.items() if site["type"] == kind}


def inspect_program(key: jax.Array, program: Program) -> Layout:
    """Trace guide and model, abstractly: check that they match and lay out their latents."""
    layouts: list[Layout] = []

    def run(key: jax.Array) -> None:
        with LocalDensities():
            traces = trace_both(key, program._replace(outline=None))
        check_enumerable(traces.model, "ImplicitELBO")
        check_sites(traces.model, traces.guide)
        check_observed(traces.model)
        params = {**program.params, **program.plates}
        sites = _sites(traces)
        drawn = trace_guide(program.guide, program.args, program.kwargs, params, key)
        used = {n: site for n, site in drawn.items() if n in sites or not site.is_latent}
        for name, site in sites.items():
            plates = used[name].plates & {frame.name for frame in site.frames}
            used[name] = dataclasses.replace(used[name], plates=plates)
        blocks = find_blocks(used)
        # A single block depends on no other, so the model need not be traced for supports.
        if len(blocks) > 1:
            for name, sources in _support_sources(traces, sites, program, key).items():
                used[name] = dataclasses.replace(used[name], support=sources)
            blocks = find_blocks(used)
        layout = _lay_out(traces, sites, blocks)
        # A model that is random needs a key of its own for each particle.
        is_random = program.reference is not None
        layouts.append(
            layout._replace(
                noise_sites=() if is_random else _noise_sites(traces, drawn),
                row_counts=_row_counts(traces),
                has_factors=any(site.get("is_observed", False) for site in traces.guide.values()),
                has_masked=any(used[name].is_masked for name in sites),
            )
        )

    jax.eval_shape(run, key)
    return layouts[0]


def latent_size(program: Program) -> int:
    """Number of elements of all latent sites of the model, discrete ones included."""
    sizes: list[int] = []

    def run(key: jax.Array) -> None:
        trace = trace_both(key, program).model
        sizes.append(sum(jnp.size(site["value"]) for site in trace.values() if is_drawn(site)))

    jax.eval_shape(run, jax.random.key(0))
    return sizes[0]


def _sites(traces: Traces) -> dict[str, Site]:
    """The places of the latents in a particle, in the order of the model."""
    latents = [name for name, site in traces.model.items() if is_latent(site)]
    sites = place_sites(traces.model, latents, traces.guide)
    free = {name: free_axes(traces.model[name]) for name in sites}
    return {
        name: site._replace(frames=tuple(f for f in site.frames if f.axis < free[name]))
        for name, site in sites.items()
    }


def _support_sources(
    traces: Traces, sites: dict[str, Site], program: Program, key: jax.Array
) -> dict[str, frozenset[str]]:
    """The other latents that the support, and so the coordinates, of each latent depend on.

    With ``x ~ Uniform(0, b)`` the coordinate of x is ``logit(x / b)``, which moves with b even if
    the guide draws x and b independently.
    """
    data = {**program.params, **traces.mutable, **values_of(traces.guide, "plate")}
    target = Target(program.model, program.args, program.kwargs, data=data, key=key)

    def images(given: dict[str, Any]) -> dict[str, jax.Array]:
        trace = target._replace(data={**data, **given}).trace({})
        return {name: value_at_zero(trace[name]) for name in sites}

    latents = {name: traces.model[name]["value"] for name in sites}
    return {name: found - {name} for name, found in sources_of(images, abstract(latents)).items()}


def _lay_out(traces: Traces, sites: dict[str, Site], blocks: tuple[Block, ...]) -> Layout:
    laid_out = (_part(block, sites, traces) for block in blocks)
    # Latents without coordinates have no entropy.
    parts = tuple(part for part in laid_out if part.columns.size)
    shared = {
        frame.name
        for part in parts
        for name in part.sites
        for frame in sites[name].frames
        if part.is_implicit and frame.size != frame.full_size
    }
    # Latents computed from a minibatch are draws of one distribution only if all particles use the
    # same minibatch.
    for block in blocks:
        if block.is_implicit:
            shared |= block.row_plates & set(subsampled_plates(traces.guide))
    names = tuple(values_of(traces.model, "param"))
    found = announced_coordinates(traces.guide)
    transformed = tuple(name for one in found for name in one.transformed)
    check_transformed(transformed, sites)
    return Layout(tuple(sites.values()), parts, names, tuple(sorted(shared)), transformed)


def _noise_sites(traces: Traces, drawn: dict[str, GuideSite]) -> tuple[str, ...]:
    """The guide's noise sites, if nothing else is random in a draw and no parameter is there."""
    noise = tuple(name for name, site in drawn.items() if site.is_drawn)
    is_rest_given = (
        all(drawn[name].is_fixed and not drawn[name].is_latent for name in noise)
        and not any(KEY in site.direct for site in drawn.values())
        and not subsampled_plates(traces.guide)
        # In a scan the distribution is that of one step.
        and all(s["fn"].shape() == jnp.shape(s["value"]) for s in (traces.guide[n] for n in noise))
    )
    return noise if is_rest_given else ()


def _row_counts(traces: Traces) -> tuple[tuple[int, int], ...]:
    """All rows of the model's subsampled plates, and those drawn; empty if the guide has one."""
    if subsampled_plates(traces.guide):
        return ()
    return tuple(site["args"] for site in subsampled_plates(traces.model).values())


def local_log_density_of(trace: dict[str, Any], names: tuple[str, ...]) -> jax.Array | None:
    """The sum of the local log densities of the sites of a block; None if none has one."""
    sites = (trace[name]["fn"] for name in names)
    found = [fn.local_log_density for fn in sites if isinstance(fn, Implicit)]
    given = [value for value in found if value is not None]
    return jnp.sum(jnp.stack(given)) if given else None


def local_scores_of(trace: dict[str, Any], names: tuple[str, ...]) -> jax.Array | None:
    """Gradients of local log densities in all coordinates of sites; None unless all have them."""
    found = [getattr(trace[name]["fn"], "local_score", None) for name in names]
    given = [jnp.ravel(score) for score in found if score is not None]
    return jnp.concatenate(given) if given and len(given) == len(found) else None


def _part(block: Block, sites: dict[str, Site], traces: Traces) -> Part:
    frames = {frame.name: frame for name in block.sites for frame in sites[name].frames}
    inside = sorted(block.plates, key=lambda name: frames[name].dim)
    plates = {name: frames[name].size for name in inside}
    if block.is_implicit:
        check_subsampling(block, sites)
    for name in block.sites:
        check_draws(name, traces.guide[name]["fn"], sites[name])
    columns = np.concatenate([sites[name].coordinates(plates) for name in block.sites], axis=1)
    context = None
    given = [sites[name] for name in block.parents if sites[name].size]
    if given:
        context = np.concatenate([site.coordinates(plates) for site in given], axis=1)
    scale = math.prod(frames[name].full_size / frames[name].size for name in plates)
    is_local = local_log_density_of(traces.guide, block.sites) is not None
    # Row by row, and given other latents, a local density is taken for that of the guide: no
    # kernel sees a conditional distribution as well.
    is_estimated = block.is_implicit and not (is_local and (plates or context is not None))
    # In a scan the distribution is that of one step; rows that stand for others have no weights.
    are_whole = (
        traces.guide[n]["fn"].shape() == jnp.shape(traces.guide[n]["value"]) for n in block.mixed
    )
    has_score = is_local and local_scores_of(traces.guide, block.sites) is not None
    return Part(
        block.sites,
        is_estimated,
        columns,
        context,
        scale,
        plates,
        has_local=is_local,
        has_local_score=has_score,
        mixed=block.mixed if scale == 1 and all(are_whole) else (),
    )


def unconstrain(model_site: dict[str, Any], guide_site: dict[str, Any]) -> jax.Array:
    """The guide's draw in its coordinates, by default those of the model's support."""
    fn = guide_site["fn"]
    transform = support_transform(model_site)
    if not isinstance(fn, Implicit) or fn.unconstrained is None:
        return transform.inv(guide_site["value"])
    expected, got = transform.inverse_shape(jnp.shape(fn.value)), jnp.shape(fn.unconstrained)
    if expected != got:
        raise ValueError(
            f"Implicit: expected unconstrained of shape {expected} at site "
            f"'{guide_site['name']}', to match its value; got {got}"
        )
    return fn.unconstrained
