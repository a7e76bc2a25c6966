"""Checks that a guide and a model agree, and a model with its data."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax import lax
from numpyro.distributions import Distribution
from numpyro.infer.util import is_identically_one

from numpyro_kscore._model.dependencies import (
    is_drawn,
    is_enumerated,
    is_latent,
    layers,
    masks,
)
from numpyro_kscore._model.implicit import Implicit
from numpyro_kscore._model.layout import Site, num_rows


def find_latents(model_trace: dict[str, Any]) -> dict[str, Any]:
    """The continuous latents of a model; raises if there are none, or one is under a mask."""
    latents = {name: site for name, site in model_trace.items() if is_latent(site)}
    if not latents:
        raise ValueError("model: expected at least one continuous latent sample site; got none")
    # A mask of False is NumPyro's way to say that a latent's density is written as a factor.
    masked = [
        name
        for name, site in latents.items()
        if any(mask is not False for mask in masks(site["fn"]))
    ]
    if masked:
        raise ValueError(
            f"model: expected latent sites without a mask, or with .mask(False) where a factor is "
            f"their density; got {masked} under an array of masks, which removes the density of "
            "what it hides, so that nothing would hold those draws. Mask observed sites only; "
            "instead of obs_mask, give what is missing a sample site of its own"
        )
    return latents


def check_sites(model_trace: dict[str, Any], guide_trace: dict[str, Any]) -> None:
    """Check that the guide draws every latent of the model, in the model's shapes and plates."""
    latents = find_latents(model_trace)
    drawn = check_sampled(latents, guide_trace)
    summed = sorted(n for n in drawn if n in model_trace and is_enumerated(model_trace[n]))
    if summed:
        raise ValueError(
            f"guide: expected no draws of discrete latents, which are summed out of the model; got "
            f"{summed}. Leave them out of the guide"
        )
    extra = sorted(drawn - set(latents))
    if extra:
        raise ValueError(
            f"guide: expected only the model's latents {sorted(latents)} and auxiliary sites; "
            f"got {extra} besides. Mark noise with infer={{'is_auxiliary': True}}"
        )
    for name, site in latents.items():
        _check_site(site, guide_trace[name], model_trace, guide_trace)


def check_sampled(latents: Collection[str], guide_trace: dict[str, Any]) -> set[str]:
    """Names of what a guide draws, without auxiliary sites; raises unless all latents are there."""
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
            hint = (
                f" ({others} are deterministic there: use Implicit(value) sample sites, as in "
                "numpyro.sample(name, Implicit(value)))"
            )
        seen = [n for n in missing if guide_trace.get(n, {}).get("is_observed", False)]
        if seen:
            hint += f" ({seen} are observed there: leave obs= out)"
        raise ValueError(
            f"guide: expected a sample site for every latent of the model; got none for "
            f"{missing}{hint}"
        )
    return drawn


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
            f"got {guide_shape}. Under a plate the site's own shape goes into event_dim: "
            "Implicit(value, event_dim=1) for one vector"
        )
    in_model, in_guide = (
        {frame.name: (frame.size, num_rows(trace, frame)) for frame in site["cond_indep_stack"]}
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
    # Plates give plain numbers; an array comes from a scale handler.
    return isinstance(scale, int | float) and math.isclose(scale, expected, rel_tol=1e-6)


def check_draws(name: str, fn: Distribution, site: Site) -> None:
    """Raise for draws without a derivative, and for copies of one draw."""
    if not fn.has_rsample:
        raise ValueError(
            f"guide: expected draws that are differentiable in the parameters; got '{name}' from "
            f"{type(fn).__name__}, which has no reparameterized sampler. Use another distribution"
        )
    if any(mask is not False for mask in masks(fn)):
        raise ValueError(
            f"guide: expected latent sites without a mask, or with .mask(False) where a factor is "
            f"their density; got '{name}' under an array of masks. Drop it, and mask observed "
            "sites only: latents behind no data then follow their prior"
        )
    fn = layers(fn)[-1]
    if isinstance(fn, Implicit) and site.size > jnp.size(fn.value):
        raise ValueError(
            f"guide: expected a number for each of the {site.size} coordinates of '{name}'; got "
            f"Implicit(value) with value of shape {jnp.shape(fn.value)}, which a plate or "
            "sample_shape repeats. Copies have no density: give value the site's shape"
        )


def check_transformed(names: Collection[str], sites: Collection[str]) -> None:
    """Raise for coordinates that a guide gives to latents that the model does not have."""
    unknown = [name for name in names if name not in sites]
    if unknown:
        raise ValueError(
            f"guide: expected its automatic guides to draw latents of the model, {sorted(sites)}, "
            f"under their own names; got {unknown}. Rename sites in the model and the guide alike"
        )


def check_observed(trace: dict[str, Any]) -> None:
    """Raise for observed values that pair with a distribution as rows with columns."""
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"] or site["value"] is None:
            continue
        fn, shape = site["fn"], jnp.shape(site["value"])
        batch = tuple(fn.batch_shape)
        values = shape[: len(shape) - len(fn.event_shape)]
        try:
            together = lax.broadcast_shapes(batch, values)
        except ValueError:
            continue
        if together not in (batch, values):
            raise ValueError(
                f"model: expected observed values of shape {tuple(fn.shape())} at site '{name}', "
                f"that of its distribution; got {shape}. Every value would count for every row, "
                f"{together} in all: reshape one of them"
            )
