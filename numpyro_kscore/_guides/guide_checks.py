"""Checks of the settings, the model and the data of an automatic guide."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax import random

from numpyro_kscore._guides.row_blocks import find_row_blocks, plate_of
from numpyro_kscore._model.call_checks import check_arguments, check_call, evaluate_observed
from numpyro_kscore._model.dependencies import (
    abstract,
    is_drawn,
    is_enumerated,
    is_latent,
    sources_of,
)
from numpyro_kscore._model.enumeration import check_enumerable
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.layout import num_rows, support_transform
from numpyro_kscore._model.subsampling import subsampled_plates
from numpyro_kscore._model.supports import check_parameters
from numpyro_kscore._model.target import Target
from numpyro_kscore._model.validation import find_latents
from numpyro_kscore._util.checks import check_count, check_positive, is_concrete, is_traced
from numpyro_kscore._util.keys import as_numbers


def check_latents(target: Target, init_loc_fn: Callable[..., Any], asker: str) -> None:
    """Raise for latents no guide can have, at initial values: some priors cannot be drawn from."""
    is_run: list[bool] = []

    def choose(site: dict[str, Any]) -> Any:
        # Strategies for initial values do not say which support has no map.
        if is_drawn(site) and not getattr(site["fn"].support, "is_discrete", False):
            support_transform(site)
        return init_loc_fn(site)

    def run(key: jax.Array) -> None:
        trace = target._replace(key=key).trace_by(choose)
        evaluate_observed(trace)
        is_run.append(True)
        find_latents(trace)
        check_enumerable(trace, asker)

    check_call(asker, (), target.model, target.args, target.kwargs)
    try:
        jax.eval_shape(run, random.key(0))
    except Exception as error:
        if not is_run:
            bound = inspect.signature(target.model).bind(*target.args, **target.kwargs)
            check_arguments(bound, error)
            key = random.key(0)
            check_parameters(lambda: target._replace(key=key).trace_by(init_loc_fn), error)
        raise


def check_placed(target: Target, latents: dict[str, Any], asker: str) -> None:
    """Raise for latents whose values a model draws anew, whatever they are given.

    NumPyro's scan does not find values of the latents inside of it where a handler around it
    changes their names: its own densities, too, are then those of random draws.
    """

    def values(given: dict[str, Any]) -> dict[str, Any]:
        trace = target._replace(key=random.key(0)).trace(given)
        return {name: trace[name]["value"] for name in latents}

    with Hidden():
        sources = sources_of(values, abstract(latents))
    lost = [name for name in latents if name not in sources[name]]
    if lost:
        raise ValueError(
            f"{asker}: expected a model that takes the values of its latents; it draws {lost} "
            "anew. NumPyro's scan does so under a scope: apply the scope inside of the scan's "
            "step, or give its sites other names there"
        )


def check_plates(trace: dict[str, Any], asker: str) -> None:
    """Raise for continuous latents in a plate of which the model sees a part."""
    for name, site in trace.items():
        frames = site["cond_indep_stack"] if is_latent(site) else []
        # A plate inside of a scan is not in the trace.
        if any(frame.size != num_rows(trace, frame) for frame in frames):
            raise ValueError(
                f"{asker}: expected latent sites outside subsampled plates; got '{name}' inside "
                f"one. Say amortize='{frames[-1].name}' (docs/amortize), or subsample observed "
                "sites only"
            )


def check_settings(amortize: Any, hidden_dims: Any, noise_dim: Any, init_scale: Any) -> None:
    """Raise for settings of an automatic guide that are out of range."""
    names = [amortize] if isinstance(amortize, str) else amortize or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"amortize: expected the name of a plate or a sequence of names; got {amortize!r}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"amortize: expected every plate once; got {amortize!r}")
    if not isinstance(hidden_dims, list | tuple | None):
        raise TypeError(f"hidden_dims: expected a tuple of integers; got {hidden_dims!r}")
    for width in hidden_dims or ():
        check_count("hidden_dims", width)
    if noise_dim is not None:
        check_count("noise_dim", noise_dim)
    if init_scale is not None:
        check_positive("init_scale", init_scale)


def check_amortized(
    target: Target, init_loc_fn: Callable[..., Any], plates: tuple[str, ...]
) -> None:
    """Raise for plates that cannot be amortized, as by :func:`find_row_blocks`."""
    subsampled: list[str] = []

    def run(key: jax.Array) -> None:
        trace = target._replace(key=key).trace_by(init_loc_fn)
        discrete = [name for name, site in trace.items() if is_enumerated(site)]
        if discrete:
            raise ValueError(
                f"amortize: expected a model without discrete latents; got {discrete}. Sum them "
                "out of the model by hand (logsumexp in a numpyro.factor)"
            )
        blocks = find_row_blocks(trace, plates)
        rows = {name for block in blocks for name in block.plates}
        subsampled.extend(name for name in subsampled_plates(trace) if name not in rows)
        if len(blocks) and all(plate_of(s, plates) for s in trace.values() if is_latent(s)):
            raise ValueError(
                "amortize: expected latents outside of the amortized plates; got a model without. "
                "Rows without anything in common have posteriors of their own: fit them one by one"
            )

    jax.eval_shape(run, random.key(0))
    if subsampled:
        raise ValueError(
            f"amortize: expected all data of a row in every step; got {subsampled}, which draws "
            "some of its elements and is not a plate of rows. Subsample the rows only"
        )


def check_noise(noise_dim: int, latent_dim: int) -> None:
    """Raise ``ValueError`` for noise of fewer dimensions than the latents."""
    if noise_dim < latent_dim:
        raise ValueError(
            f"noise_dim: expected at least the latent dimension {latent_dim}; got {noise_dim}. "
            "Less noise than latents has no density: leave noise_dim out, or use AutoSemiImplicit"
        )


def check_coordinates(latents: dict[str, jax.Array]) -> None:
    """Raise ``ValueError`` for latents that are all without unconstrained coordinates."""
    if not sum(u.size for u in latents.values()):
        raise ValueError(
            f"model: expected a latent that can vary; got {list(latents)}, whose supports are "
            "single points or whose shapes are empty. Their posterior needs no fit"
        )


def check_names(prefix: str, own: Collection[str], sites: Collection[str]) -> None:
    """Raise ``ValueError`` for sites of a model that are named as those of a guide."""
    shared = [name for name in own if name in sites and name.lstrip("_").startswith(f"{prefix}_")]
    if shared:
        raise ValueError(
            f"prefix: expected one that no site of the model shares with the guide's own; got "
            f"{prefix!r}, and {shared} in both. Choose another prefix, or rename the sites"
        )


def check_set_up(guide: Any, params: Any) -> None:
    """Raise unless a guide has seen its model, and its parameters are given by name."""
    if guide.prototype_trace is None:
        raise RuntimeError(
            f"{type(guide).__name__}: expected a guide that has seen its model; got a new one. "
            "Call svi.init(rng_key, *args) or svi.run(...) first"
        )
    if not isinstance(params, Mapping):
        raise TypeError(
            "params: expected the fitted parameters by name, such as result.params; got "
            f"{type(params).__name__}"
        )


def check_levels(quantiles: Any) -> None:
    """Raise ``ValueError`` for levels of quantiles outside [0, 1], if they are concrete."""
    if is_concrete(quantiles) or isinstance(quantiles, list | tuple):
        given = np.asarray(quantiles)
        if not np.all((given >= 0) & (given <= 1)):
            raise ValueError(f"quantiles: expected levels in [0, 1]; got {quantiles}")


def is_concrete_call(asker: str, given: Any) -> bool:
    """Whether all that a guide is given has values; warns if not, since no start is looked for."""
    if not is_traced(given):
        return True
    warnings.warn(
        f"{asker}: expected a first call outside of jit and vmap, where the search for a start can "
        "run; got traced values. The guide starts from a narrow Gaussian. Call svi.init outside, "
        "or say warm_start=False",
        UserWarning,
        stacklevel=3,
    )
    return False


def warn_of_other_data(asker: str) -> None:
    """Warn that a guide that was set up on some data starts a fit to others."""
    warnings.warn(
        f"{asker}: expected the data that the guide was set up on; got others. The fit starts near "
        "the posterior of the former, in its coordinates, and may not arrive. For other data use a "
        "new guide and SVI, or call guide.forget() before the fit, after which the guide draws "
        "from new results only",
        UserWarning,
        stacklevel=2,
    )


def are_equal(known: Any, given: Any) -> bool:
    """Whether two trees of arguments have the same structure and equal leaves."""
    structure: Any = jax.tree.structure(known)
    if structure != jax.tree.structure(given):
        return False
    pairs = zip(jax.tree.leaves(known), jax.tree.leaves(given), strict=True)
    return all(a is b or _has_equal_numbers(a, b) for a, b in pairs)


def _has_equal_numbers(a: Any, b: Any) -> bool:
    if not (is_concrete(a) and is_concrete(b)):
        # Words, flags and functions are equal if the comparison has the single answer True.
        return (a == b) is True
    if any(isinstance(x, np.ndarray) and x.dtype.kind in "OSU" for x in (a, b)):
        return np.array_equal(a, b)
    return np.array_equal(as_numbers(a), as_numbers(b), equal_nan=True)
