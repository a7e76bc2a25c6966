"""A few rows of a model of many, with weights, which stand for all of them near its posterior.

Rows whose likelihood varies most over the posterior, such as those of a small group, are taken for
certain, others with a probability that falls with how little theirs does, and a weight of one over
it (Langberg and Schulman 2010; Huggins, Campbell and Broderick 2016).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.primitives import Messenger

from numpyro_kscore._tracing.dependencies import is_drawn
from numpyro_kscore._tracing.program import is_subsampled
from numpyro_kscore._tracing.site_density import site_log_prob, sum_by_row
from numpyro_kscore._tracing.subsampling import with_rows

__all__ = [
    "RowWeights",
    "TallPlate",
    "choose_rows",
    "row_log_likelihoods",
    "tall_plate",
    "weighted_rows",
]

# Rows up to which all of them are taken.
MANY = 16_384
# Part of the rows that is taken whatever their likelihood does at the draws that were looked at.
ANYHOW = 0.25


class TallPlate(NamedTuple):
    """A plate of many rows.

    Attributes:
        model: the model that subsamples it.
        name: its name.
        size: number of its rows.
    """

    model: Callable[..., Any]
    name: str
    size: int


class RowWeights(NamedTuple):
    """Rows that stand for all of a plate's.

    Attributes:
        rows: their indices, (n,), ascending.
        weights: how many rows each stands for, (n,).
    """

    rows: np.ndarray
    weights: np.ndarray


def tall_plate(model: Callable[..., Any], trace: dict[str, Any]) -> TallPlate | None:
    """The plate of many rows that a model subsamples, if it is the only one and has no latents.

    Args:
        model: the model.
        trace: of it.
    """
    plates = [site for site in trace.values() if site["type"] == "plate" and is_subsampled(site)]
    names = [site["name"] for site in plates]
    local = [name for name, site in trace.items() if is_drawn(site) and _is_in(site, names)]
    if len(plates) != 1 or local or plates[0]["args"][0] <= MANY:
        return None
    return TallPlate(model, names[0], plates[0]["args"][0])


def _is_in(site: dict[str, Any], plates: list[str]) -> bool:
    return any(frame.name in plates for frame in site["cond_indep_stack"])


def row_log_likelihoods(trace: dict[str, Any], plate: str) -> Array:
    """Log likelihood of every row of a plate, (rows,): the sum over all that is observed in it.

    Args:
        trace: of a model with all rows.
        plate: name of the plate.
    """
    total: Any = 0.0
    for site in trace.values():
        if site["type"] != "sample" or not _is_in(site, [plate]):
            continue
        frame = next(f for f in site["cond_indep_stack"] if f.name == plate)
        total = total + sum_by_row(site_log_prob(site), [frame.dim])
    return total


def choose_rows(sizes: np.ndarray, count: int) -> RowWeights:
    """Rows in proportion to how much they matter, by systematic sampling.

    Args:
        sizes: how much every row matters, (rows,).
        count: number of rows, about.
    """
    matter = np.nan_to_num(np.asarray(sizes, np.float64), posinf=0.0)
    share = np.full(len(sizes), ANYHOW / len(sizes))
    share += (1 - ANYHOW) * matter / max(matter.sum(), np.finfo(float).tiny)
    chance = np.minimum(1.0, count * share)
    for _ in range(20):
        # Rows that are certain leave room for others.
        is_open = chance < 1.0
        room = count - np.sum(~is_open)
        if not is_open.any() or room <= 0:
            break
        chance[is_open] = np.minimum(1.0, room * share[is_open] / share[is_open].sum())
    steps = np.floor(np.cumsum(chance) + np.random.default_rng(0).random())
    rows = np.flatnonzero(np.diff(steps, prepend=0.0) >= 1.0)
    return RowWeights(rows.astype(np.int32), 1.0 / chance[rows])


class _Weighted(Messenger):
    """Scales the sites of a plate row by row."""

    def __init__(self, fn: Callable[..., Any], plate: str, weights: Array) -> None:
        self.plate, self.weights = plate, weights
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Multiply the scale of a site in the plate."""
        if msg["type"] != "sample":
            return
        for frame in msg["cond_indep_stack"]:
            if frame.name == self.plate:
                weights = self.weights.reshape(-1, *[1] * (-frame.dim - 1))
                msg["scale"] = weights if msg["scale"] is None else msg["scale"] * weights


def weighted_rows(tall: TallPlate, chosen: RowWeights) -> Callable[..., Any]:
    """The model of a tall plate with some rows that stand for all."""
    # The plate itself scales each row by the number of all over the number of these.
    weights = jnp.asarray(chosen.weights * len(chosen.rows) / tall.size, jnp.result_type(float))
    some = with_rows(tall.model, {tall.name: jnp.asarray(chosen.rows)})
    return _Weighted(some, tall.name, weights)
