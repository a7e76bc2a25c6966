"""A guide and a model run together: what they must agree on, and the layout that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import Distribution, MaskedDistribution, biject_to
from numpyro.infer.util import helpful_support_errors, is_identically_one

from numpyro_kscore.distributions import Implicit
from numpyro_kscore.provenance import Block, find_blocks, is_drawn, trace_guide
from numpyro_kscore.structure import Frame, Part, Site, Structure

__all__ = [
    "Program",
    "Traces",
    "find_latents",
    "inspect_program",
    "is_subsampled",
    "trace_both",
    "unconstrain",
    "values_of",
]


class Program(NamedTuple):
    """A guide and a model with their parameters and arguments.

    Attributes:
        params: parameters and mutable sites by name.
        model: the model.
        guide: the guide.
        args: arguments of both.
        kwargs: keyword arguments of both.
        plates: rows of subsampled plates that all particles share.
    """

    params: dict[str, Any]
    model: Callable[..., Any]
    guide: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plates: dict[str, jax.Array]


class Traces(NamedTuple):
    """One run of guide and model.

    Attributes:
        guide: trace of the guide.
        model: trace of the model at the guide's draws.
        mutable: values at mutable sites of both.
        model_key: key the model is seeded with.
    """

    guide: dict[str, Any]
    model: dict[str, Any]
    mutable: dict[str, Any]
    model_key: jax.Array


def trace_both(key: jax.Array, program: Program) -> Traces:
    """Run the guide, and the model at what it draws."""
    # New containers: a guide may change nested mutable state in place.
    params = jax.tree.map(lambda leaf: leaf, program.params)
    args, kwargs = program.args, program.kwargs
    guide_key, model_key = jax.random.split(key)
    seeded_guide = handlers.seed(program.guide, guide_key)
    guide = handlers.substitute(seeded_guide, data={**params, **program.plates})
    guide_trace = handlers.trace(guide).get_trace(*args, **kwargs)
    mutable = values_of(guide_trace, "mutable")
    # The model runs only for its supports; what the likelihood costs here is dead code to XLA.
    drawn = {n: site for n, site in guide_trace.items() if site["type"] in ("sample", "plate")}
    seeded_model = handlers.seed(handlers.replay(program.model, drawn), model_key)
    model = handlers.substitute(seeded_model, data={**params, **mutable})
    model_trace = handlers.trace(model).get_trace(*args, **kwargs)
    mutable.update(values_of(model_trace, "mutable"))
    return Traces(guide_trace, model_trace, mutable, model_key)


def values_of(trace: dict[str, Any], kind: str) -> dict[str, Any]:
    """Values of the sites of one type."""
    return {name: site["value"] for name, site in trace.items() if site["type"] == kind}


def inspect_program(key: jax.Array, program: Program) -> Structure:
    """Trace guide and model, abstractly: check that they match and lay out their latents.

    Raises:
        ValueError: if guide and model do not match, the model has latents this objective cannot
            handle, or a latent is drawn without noise.
    """
    found: list[Structure] = []

    def run(key: jax.Array) -> None:
        traces = trace_both(key, program)
        check_sites(traces.model, traces.guide)
        params = {**program.params, **program.plates}
        sites = trace_guide(program.guide, program.args, program.kwargs, params, key)
        latents = {name for name, site in traces.model.items() if is_drawn(site)}
        used = {n: site for n, site in sites.items() if n in latents or not site.is_latent}
        found.append(_lay_out(traces, find_blocks(used)))

    jax.eval_shape(run, key)
    return found[0]


def _lay_out(traces: Traces, blocks: tuple[Block, ...]) -> Structure:
    sites: list[Site] = []
    start = 0
    for name, site in traces.model.items():
        if not is_drawn(site):
            continue
        with helpful_support_errors(site):
            shape = biject_to(site["fn"].support).inverse_shape(jnp.shape(site["value"]))
        sites.append(Site(name, tuple(shape), start, _frames(traces.guide, name)))
        start += math.prod(shape)
    by_name = {site.name: site for site in sites}
    found = (_part(block, by_name, traces) for block in blocks)
    # Latents of no size have no entropy.
    parts = tuple(part for part in found if part.rows.size)
    shared = {
        frame.name
        for part in parts
        for name in part.sites
        for frame in by_name[name].frames
        if part.is_implicit and frame.size != frame.full_size
    }
    # Latents computed from a minibatch are draws of one distribution only if it is the same one.
    for block in blocks:
        if block.is_implicit:
            shared |= {name for name in block.rows if is_subsampled(traces.guide[name])}
    names = tuple(values_of(traces.model, "param"))
    return Structure(tuple(sites), parts, names, tuple(sorted(shared)))


def _frames(trace: dict[str, Any], name: str) -> tuple[Frame, ...]:
    site = trace[name]
    # Axes from the left are the same for constrained and unconstrained values.
    batch_ndim = jnp.ndim(site["value"]) - len(site["fn"].event_shape)
    return tuple(
        Frame(
            frame.name,
            frame.dim,
            batch_ndim + frame.dim,
            frame.size,
            _full_size(trace, frame),
        )
        for frame in site["cond_indep_stack"]
    )


def _full_size(trace: dict[str, Any], frame: Any) -> int:
    # Plates inside control flow leave no trace, and are not subsampled.
    return trace[frame.name]["args"][0] if frame.name in trace else frame.size


def is_subsampled(plate: dict[str, Any]) -> bool:
    """Whether a plate of a trace draws some of its elements only."""
    size, subsample_size = plate["args"]
    return subsample_size is not None and subsample_size != size


def _part(block: Block, sites: dict[str, Site], traces: Traces) -> Part:
    frames = {frame.name: frame for name in block.sites for frame in sites[name].frames}
    inside = sorted(block.plates, key=lambda name: frames[name].dim)
    plates = {name: frames[name].size for name in inside}
    if block.is_implicit:
        _check_subsampling(block, sites)
    for name in block.sites:
        _check_draws(name, traces.guide[name]["fn"], sites[name])
    rows = np.concatenate([sites[name].coordinates(plates) for name in block.sites], axis=1)
    context = None
    given = [sites[name] for name in block.parents if sites[name].size]
    if given:
        context = np.concatenate([site.coordinates(plates) for site in given], axis=1)
    scale = math.prod(frames[name].full_size / frames[name].size for name in plates)
    return Part(block.sites, block.is_implicit, rows, context, scale, plates)


def _check_draws(name: str, fn: Distribution, site: Site) -> None:
    """Raise for draws without a derivative, and for copies of one draw."""
    if not fn.has_rsample:
        raise ValueError(
            f"guide: expected draws that are differentiable in the parameters; got '{name}' from "
            f"{type(fn).__name__}, which has no reparameterised sampler. Use another distribution"
        )
    masked = False
    while hasattr(fn, "base_dist"):
        masked = masked or isinstance(fn, MaskedDistribution)
        fn = fn.base_dist
    if masked:
        raise ValueError(
            f"guide: expected latent sites without a mask; got '{name}' under one. Drop it, and "
            "mask observed sites only: latents behind no data then follow their prior"
        )
    if isinstance(fn, Implicit) and site.size > jnp.size(fn.value):
        raise ValueError(
            f"guide: expected a number for each of the {site.size} coordinates of '{name}'; got "
            f"Implicit(value) with value of shape {jnp.shape(fn.value)}, which a plate or "
            "sample_shape repeats. Copies have no density: give value the site's shape"
        )


def _check_subsampling(block: Block, sites: dict[str, Site]) -> None:
    """Rows that are left out need an entropy too, which only independence of rows gives."""
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


def find_latents(model_trace: dict[str, Any], asker: str) -> dict[str, Any]:
    """The latent sites of a model, which must be there and continuous.

    Args:
        model_trace: trace of the model.
        asker: the class that needs them, for the message.

    Raises:
        ValueError: naming the sites and what to do.
    """
    latents = {name: site for name, site in model_trace.items() if is_drawn(site)}
    if not latents:
        raise ValueError("model: expected at least one latent sample site; got none")
    discrete = [name for name, site in latents.items() if site["fn"].support.is_discrete]
    if discrete:
        raise ValueError(
            f"{asker}: expected continuous latent sites; got discrete {discrete}. Sum them out "
            "of the model (dist.MixtureSameFamily, or logsumexp in a numpyro.factor), or use "
            "another objective for them"
        )
    return latents


def check_sites(model_trace: dict[str, Any], guide_trace: dict[str, Any]) -> None:
    """Check that the guide draws every latent of the model, and that all are continuous.

    Raises:
        ValueError: naming the sites and what to do.
    """
    latents = find_latents(model_trace, "ImplicitELBO")
    drawn = {
        name
        for name, site in guide_trace.items()
        if is_drawn(site) and not site["infer"].get("is_auxiliary", False)
    }
    missing = [name for name in latents if name not in drawn]
    if missing:
        hint = ""
        others = [n for n in missing if guide_trace.get(n, {}).get("type") == "deterministic"]
        if others:
            hint = f" ({others} are deterministic there: use Implicit(value) sample sites)"
        raise ValueError(
            f"guide: expected a sample site for every latent of the model; got none for "
            f"{missing}{hint}"
        )
    extra = sorted(drawn - set(latents))
    if extra:
        raise ValueError(
            f"guide: expected only the model's latents {sorted(latents)} and auxiliary sites; "
            f"got {extra} besides. Mark noise with infer={{'is_auxiliary': True}}"
        )
    for name, site in latents.items():
        _check_site(site, guide_trace[name], model_trace, guide_trace)


def _check_site(
    model_site: dict[str, Any],
    guide_site: dict[str, Any],
    model_trace: dict[str, Any],
    guide_trace: dict[str, Any],
) -> None:
    name, fn = model_site["name"], model_site["fn"]
    sample_shape = tuple(model_site["kwargs"].get("sample_shape", ()))
    model_shape = sample_shape + tuple(fn.batch_shape) + tuple(fn.event_shape)
    guide_shape = jnp.shape(guide_site["value"])
    if model_shape != guide_shape:
        raise ValueError(
            f"guide: expected shape {model_shape} at site '{name}', as the model has it; "
            f"got {guide_shape}"
        )
    in_model, in_guide = (
        {frame.name: (frame.size, _full_size(trace, frame)) for frame in site["cond_indep_stack"]}
        for site, trace in ((model_site, model_trace), (guide_site, guide_trace))
    )
    for plate, (size, full_size) in in_model.items():
        if size != full_size and in_guide.get(plate) != (size, full_size):
            raise ValueError(
                f"guide: expected '{name}' in plate '{plate}', which draws {size} of {full_size} "
                f"in the model; got it {_described(in_guide.get(plate))}. Write the same plate, "
                "with the same sizes, in the guide"
            )
    for plate, (size, full_size) in in_guide.items():
        if size != full_size and plate not in in_model:
            raise ValueError(
                f"guide: expected '{name}' outside subsampled plates, as the model has it; got it "
                f"in plate '{plate}', which draws {size} of {full_size}"
            )
    expected = math.prod(full_size / size for size, full_size in in_guide.values())
    if not _is_scaled_by(guide_site["scale"], expected):
        raise ValueError(
            f"guide: expected latent sites unscaled but for subsampled plates; got '{name}' under "
            "a scale handler. Remove it: the entropy is that of all latents"
        )


def _described(sizes: tuple[int, int] | None) -> str:
    if sizes is None:
        return "outside that plate"
    return f"in one that draws {sizes[0]} of {sizes[1]}"


def _is_scaled_by(scale: Any, expected: float) -> bool:
    if scale is None or is_identically_one(scale):
        return expected == 1.0
    # Plates multiply plain numbers; an array comes from a handler.
    return isinstance(scale, int | float) and math.isclose(scale, expected, rel_tol=1e-6)


def unconstrain(model_site: dict[str, Any], guide_site: dict[str, Any]) -> jax.Array:
    """The guide's draw in the unconstrained coordinates of the model's support."""
    fn = guide_site["fn"]
    with helpful_support_errors(model_site):
        transform = biject_to(model_site["fn"].support)
    if not isinstance(fn, Implicit) or fn.unconstrained is None:
        return transform.inv(guide_site["value"])
    expected, got = transform.inverse_shape(jnp.shape(fn.value)), jnp.shape(fn.unconstrained)
    if expected != got:
        raise ValueError(
            f"Implicit: expected unconstrained of shape {expected} at site "
            f"'{guide_site['name']}', to match its value; got {got}"
        )
    return fn.unconstrained
