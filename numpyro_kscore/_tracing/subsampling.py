"""Models with subsampled plates: at all of their rows, and with less noise from those drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.infer.initialization import init_to_feasible
from numpyro.primitives import Messenger

__all__ = ["Expansion", "center", "replaced", "whole_plates"]


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


class Expansion(NamedTuple):
    """A log density and its gradients, at the particles (leading axis n) or at one point.

    Attributes:
        values: (n,) or a scalar.
        scores: (n, d) or (d,).
        params: gradients in the model's parameters, summed over the particles.
    """

    values: jax.Array
    scores: jax.Array
    params: dict[str, Any]


def center(flat: jax.Array) -> jax.Array:
    """The mean of the finite particles, (d,)."""
    valid = jnp.all(jnp.isfinite(flat), axis=1)
    weight = valid / jnp.maximum(jnp.sum(valid), 1)
    return weight @ jnp.where(valid[:, None], flat, 0.0)


def replaced(
    found: Expansion, moves: jax.Array, of_rows: Expansion, of_all: Expansion
) -> Expansion:
    """Densities with the expansion at a point of the rows drawn replaced by that of all rows.

    Args:
        found: at the particles, with the rows drawn.
        moves: the particles less the point, (n, d).
        of_rows: at the point, with the rows drawn.
        of_all: at the point, with all rows.

    Returns:
        The same as before where an expansion is not finite.
    """
    slope = of_all.scores - of_rows.scores
    level = of_all.values - of_rows.values
    good = jnp.isfinite(level) & jnp.all(jnp.isfinite(slope))

    def corrected(value: jax.Array, change: jax.Array) -> jax.Array:
        return jnp.where(good, value + change, value)

    return Expansion(
        corrected(found.values, level + moves @ slope),
        corrected(found.scores, slope),
        jax.tree.map(
            lambda a, b, c: corrected(a, len(moves) * (c - b)),
            found.params,
            of_rows.params,
            of_all.params,
        ),
    )
