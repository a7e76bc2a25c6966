"""A model with subsampled plates, at all of their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.infer.initialization import init_to_feasible
from numpyro.primitives import Messenger

__all__ = ["whole_plates"]


class _WholePlates(Messenger):
    """Has every plate draw all of its rows."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give a subsampled plate all of its indices."""
        if msg["type"] == "plate" and msg["value"] is None:
            size = msg["args"][0]
            msg["args"], msg["value"] = (size, None), jnp.arange(size)


def whole_plates(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """The model of all data; the model itself where it is given a batch of them from outside.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    whole = _WholePlates(model)
    try:
        fits = _odd_sites(whole, args, kwargs) <= _odd_sites(model, args, kwargs)
    except (TypeError, ValueError):
        return model
    return whole if fits else model


def _odd_sites(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[str]:
    """Observed sites whose values do not have the shape of their distribution."""
    found = set()

    def run(key: jax.Array) -> None:
        with handlers.block():
            seeded = handlers.substitute(handlers.seed(model, key), substitute_fn=init_to_feasible)
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        for name, site in trace.items():
            is_observed = site["type"] == "sample" and site["is_observed"]
            if is_observed and jnp.shape(site["value"]) != site["fn"].shape():
                found.add(name)

    jax.eval_shape(run, jax.random.key(0))
    return found
