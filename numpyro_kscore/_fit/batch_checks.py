"""The check that batches of a loader are calls of the model, which takes each as it is."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from jax import random
from numpyro import handlers
from numpyro.infer import SVI

from numpyro_kscore._fit.svi import Given
from numpyro_kscore._model.dependencies import seeded, sources_of
from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.subsampling import with_rows

__all__ = ["check_batch"]


def check_batch(svi: SVI, given: Given) -> None:
    """Raise unless a batch, with the other arguments of the call, is data of the model as a whole.

    Raises:
        TypeError: if they are no call of the model.
        ValueError: if the model looks up rows of the batch by the indices of a plate.
    """
    _check_signature(svi, given)
    plates = _read_plates(svi, given)
    if plates:
        raise ValueError(
            f"loader: expected a model that takes a batch as it is; got one whose observations "
            f"depend on the indices of the plate {sorted(plates)}, which are rows of all data and "
            "not of the batch. Leave the indices out: numpyro.plate(name, num_rows, "
            "subsample_size=len(batch)), and obs=batch"
        )


def _check_signature(svi: SVI, given: Given) -> None:
    """Raise ``TypeError`` unless a batch and what else is given are a call of the model."""
    try:
        signature = inspect.signature(svi.model)
    except (TypeError, ValueError):
        return
    args, kwargs = given
    try:
        signature.bind(*args, **kwargs, **svi.static_kwargs)
    except TypeError as error:
        raise TypeError(
            f"loader: expected items that are arguments of the model, with those of fit after "
            f"them; got {len(args)} arguments and the keywords {sorted(kwargs)} for "
            f"{signature}: {error}. An item is a tuple of arguments, a dict of keyword arguments, "
            "or one argument"
        ) from None


def _read_plates(svi: SVI, given: Given) -> set[str]:
    """Names of the subsampled plates whose indices observations are computed from."""
    args, kwargs = given
    kwargs = {**kwargs, **svi.static_kwargs}
    drawn: set[str] = set()

    def rows(key: jax.Array) -> dict[str, jax.Array]:
        trace = handlers.trace(seeded(svi.model, key, {})).get_trace(*args, **kwargs)
        plates = [site for site in trace.values() if site["type"] == "plate"]
        drawn.update(p["name"] for p in plates if p["args"][1] not in (None, p["args"][0]))
        return {site["name"]: site["value"] for site in plates if site["name"] in drawn}

    def observations(given: dict[str, jax.Array]) -> list[Any]:
        model = seeded(with_rows(svi.model, given), random.key(0), {})
        trace = handlers.trace(model).get_trace(*args, **kwargs)
        observed = [site for site in trace.values() if site.get("is_observed")]
        return [[site["value"], *jax.tree.leaves(site["fn"])] for site in observed]

    with Hidden():
        shapes = jax.eval_shape(rows, random.key(0))
        if not drawn:
            return set()
        found = jax.tree.leaves(
            sources_of(observations, shapes), is_leaf=lambda x: isinstance(x, frozenset)
        )
    return set(frozenset[str]().union(*found)) & drawn
