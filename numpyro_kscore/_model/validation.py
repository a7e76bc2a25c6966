"""Checks that a guide and a model agree, with each other and with a batch of data."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import Distribution
from numpyro.infer import SVI, init_to_uniform
from numpyro.infer.util import is_identically_one

from numpyro_kscore._model.dependencies import (
    is_drawn,
    is_enumerated,
    is_latent,
    layers,
    masks,
    seeded,
    sources_of,
)
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.implicit import Implicit
from numpyro_kscore._model.layout import Site, num_rows
from numpyro_kscore._model.subsampling import subsampled_plates, with_rows
from numpyro_kscore._model.target import Target


def check_svi(svi: Any) -> None:
    """Raise ``TypeError`` unless ``svi`` is NumPyro's ``SVI``, of instances and not classes."""
    if not isinstance(svi, SVI):
        raise TypeError(
            f"svi: expected SVI(model, guide, optim, loss) of numpyro.infer; got a "
            f"{type(svi).__name__}"
        )
    for name, given, call in (("guide", svi.guide, "(model)"), ("loss", svi.loss, "()")):
        if isinstance(given, type):
            raise TypeError(
                f"{name}: expected an instance, {given.__name__}{call}; got the class itself"
            )


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


def call_error(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TypeError | None:
    """The error of a call with these arguments, as far as the signature of a function is known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None


def check_data(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` or warn where a model has neither data nor factors at its arguments.

    An argument that is None is taken for data that were forgotten. Without one the prior may be
    meant, and a warning says that it is fitted.
    """
    drawn: list[str] = []

    def run(key: jax.Array) -> None:
        trace = Target(model, args, kwargs, key=key).trace_by(init_to_uniform)
        if not any(site.get("is_observed", False) for site in trace.values()):
            drawn.extend(name for name, site in trace.items() if is_drawn(site))

    try:
        jax.eval_shape(run, jax.random.key(0))
        bound = inspect.signature(model).bind(*args, **kwargs)
    except Exception:  # of a model that cannot run so, or has no signature: others say why
        return
    if not drawn:
        return
    bound.apply_defaults()
    missing = [
        name
        for name, value in bound.arguments.items()
        if any(leaf is None for leaf in jax.tree.leaves(value, is_leaf=lambda x: x is None))
    ]
    got = f"nothing observed and no factor at these arguments, with {sorted(drawn)} all drawn"
    if missing:
        raise ValueError(
            f"model: expected data; got {got}, where {missing} is None. Pass the data, as in "
            f"fit(svi, key, {missing[0]}=...). To fit the prior itself, use a model without this "
            "argument: lambda: model(...)"
        )
    warnings.warn(
        f"model: expected data; got {got}: the fit is to the prior. If it has data, pass them as "
        "obs=... of a sample site",
        UserWarning,
        stacklevel=3,
    )


def check_batch(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise unless a batch of a loader is, with the other arguments, all data of the model.

    ``TypeError`` says that they are no call of the model, and ``ValueError`` that the model looks
    up rows of the batch by the indices of a plate.
    """
    error = call_error(model, args, kwargs)
    if error is not None:
        raise TypeError(
            f"loader: expected items that are arguments of the model, with those of fit after "
            f"them; got {len(args)} arguments and the keywords {sorted(kwargs)} for "
            f"{inspect.signature(model)}: {error}. An item is a tuple of arguments, a dict of "
            "keyword arguments, or one argument"
        )
    plates = _plates_looked_up(model, args, kwargs)
    if plates:
        raise ValueError(
            f"loader: expected a model that takes a batch as it is; got one whose observations "
            f"depend on the indices of the plate {sorted(plates)}, which are rows of all data and "
            "not of the batch. Leave the indices out: numpyro.plate(name, num_rows, "
            "subsample_size=len(batch)), and obs=batch"
        )


def _plates_looked_up(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> frozenset[str]:
    """Names of the subsampled plates whose indices observations are computed from."""

    def trace_of(program: Callable[..., Any], key: jax.Array) -> dict[str, Any]:
        return handlers.trace(seeded(program, key, {})).get_trace(*args, **kwargs)

    def rows(key: jax.Array) -> dict[str, jax.Array]:
        plates = subsampled_plates(trace_of(model, key))
        return {name: site["value"] for name, site in plates.items()}

    def observations(given: dict[str, jax.Array]) -> list[Any]:
        trace = trace_of(with_rows(model, given), jax.random.key(0))
        observed = [site for site in trace.values() if site.get("is_observed")]
        return [[site["value"], *jax.tree.leaves(site["fn"])] for site in observed]

    with Hidden():
        shapes = jax.eval_shape(rows, jax.random.key(0))
        if not shapes:
            return frozenset()
        found = jax.tree.leaves(
            sources_of(observations, shapes), is_leaf=lambda x: isinstance(x, frozenset)
        )
    return frozenset[str]().union(*found) & shapes.keys()
