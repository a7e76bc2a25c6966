"""A weighted sample of a model's rows, which stands for all of them near its posterior.

Rows whose likelihood varies most over the posterior, such as those of a small group, are taken for
certain, others with a probability that falls with how little theirs does, and a weight of one over
it (Langberg and Schulman 2010; Huggins, Campbell and Broderick 2016). Chosen once, they make a
density that is cheap; drawn anew in every step of a fit, one whose noise has mean zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.primitives import Messenger

from numpyro_kscore._model.dependencies import is_drawn
from numpyro_kscore._model.site_density import site_log_prob, sum_by_row
from numpyro_kscore._model.subsampling import subsampled_plates, with_rows

# Most rows of a plate of which all are taken.
MANY = 16_384
# Share of the probability that is uniform over rows, whatever their likelihood at the draws.
ANYHOW = 0.25


class TallPlate(NamedTuple):
    """A plate of many rows: the model that subsamples it, its name and the number of its rows."""

    model: Callable[..., Any]
    name: str
    size: int


class RowWeights(NamedTuple):
    """Indices (n,) of rows that stand for all of a plate's, and how many each stands for, (n,)."""

    rows: Any
    weights: Any


def tall_plate(
    model: Callable[..., Any], trace: dict[str, Any], most: int = MANY
) -> TallPlate | None:
    """The only plate that a model subsamples, if it has more than ``most`` rows and no latents."""
    plates = subsampled_plates(trace)
    names = list(plates)
    local = [name for name, site in trace.items() if is_drawn(site) and _is_in(site, names)]
    if len(plates) != 1 or local or plates[names[0]]["args"][0] <= most:
        return None
    return TallPlate(model, names[0], plates[names[0]]["args"][0])


def _is_in(site: dict[str, Any], plates: list[str]) -> bool:
    return any(frame.name in plates for frame in site["cond_indep_stack"])


def row_log_likelihoods(trace: dict[str, Any], plate: str) -> Array:
    """Log likelihood of all that is observed in each row of a plate, (rows,), by a full trace."""
    total: Any = 0.0
    for site in trace.values():
        if site["type"] != "sample" or not _is_in(site, [plate]):
            continue
        frame = next(f for f in site["cond_indep_stack"] if f.name == plate)
        total = total + sum_by_row(site_log_prob(site), [frame.dim])
    return total


def row_remainders(
    rows_at: Callable[[Array], Array], point: Array, draws: Array, is_curved: bool = True
) -> Array:
    """Size of what an expansion at a point leaves of the log likelihood of every row, (rows,).

    It is the root mean square over draws (n, d). On the line through the point and a draw x, at -x,
    -x/2, 0, x/2 and x, the odd part at x less twice that at x/2 has no linear term, and the even
    part less four times that at x/2 no quadratic one; 3/4 of the third and of the fourth order are
    left. Unless ``is_curved``, the expansion is of first order.

    Cost: four passes over all rows for each draw, and one.
    """
    middle = rows_at(point)

    def add(total: Array, x: Array) -> tuple[Array, None]:
        move = x - point
        ends, halves = ((rows_at(point + t * move), rows_at(point - t * move)) for t in (1.0, 0.5))
        odd = (ends[0] - ends[1]) / 2 - (halves[0] - halves[1])
        even = (ends[0] + ends[1]) / 2 - middle
        if is_curved:
            even = even - 4 * ((halves[0] + halves[1]) / 2 - middle)
        return total + odd**2 + even**2, None

    # Draws go one after another: a pass over all rows takes memory.
    total, _ = lax.scan(add, jnp.zeros_like(middle), draws)
    return jnp.sqrt(total / len(draws))


def row_table(sizes: Array) -> Array:
    """Table for :func:`draw_rows`: cumulative shares of the rows by size, as integers, (rows,)."""
    count = len(sizes)
    matter = jnp.where(jnp.isfinite(sizes), sizes, 0.0)
    share = (1 - ANYHOW) * matter / jnp.maximum(jnp.sum(matter), jnp.finfo(sizes.dtype).tiny)
    # Integers add up exactly, however many rows there are.
    units = jnp.floor((share + ANYHOW / count) * (2**30 - count)).astype(jnp.int32) + 1
    return jnp.cumsum(units)


def draw_rows(key: Array, table: Array, count: int) -> RowWeights:
    """Draw rows in proportion to size, one from each of ``count`` equal strata of their shares.

    A row whose share exceeds a stratum is drawn several times. Sums over the rows drawn, with their
    weights, have the sum over all rows for their expectation. Cost: ``count`` binary searches in a
    table by :func:`row_table`.
    """
    total = table[-1]
    width, rest = total // count, total % count
    places = jnp.arange(count, dtype=table.dtype)
    widths = width + (places < rest)
    inside = jax.random.randint(key, (count,), 0, widths, table.dtype)
    units = places * width + jnp.minimum(places, rest) + inside
    rows = jnp.searchsorted(table, units, side="right").astype(jnp.int32)
    own = table[rows] - jnp.where(rows > 0, table[rows - 1], 0)
    return RowWeights(rows, (total / count) / own)


def choose_rows(sizes: np.ndarray, count: int) -> RowWeights:
    """Choose ``count`` rows in proportion to their sizes (rows,), by systematic sampling."""
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
    rows = np.flatnonzero(np.diff(steps, prepend=0.0) >= 1.0)[:count]
    # Sampling gives one row too few or too many at random, but a program has a fixed number.
    missing = count - len(rows)
    weights = np.pad(1.0 / chance[rows], (0, missing))
    return RowWeights(np.pad(rows, (0, missing)).astype(np.int32), weights)


class _Weighted(Messenger):
    """Scales the sites of a plate row by row."""

    def __init__(self, fn: Callable[..., Any], plate: str, weights: Array) -> None:
        self.plate, self.weights = plate, weights
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        for frame in msg["cond_indep_stack"]:
            if frame.name == self.plate:
                weights = self.weights.reshape(-1, *[1] * (-frame.dim - 1))
                msg["scale"] = weights if msg["scale"] is None else msg["scale"] * weights


def weighted_rows(tall: TallPlate, chosen: RowWeights) -> Callable[..., Any]:
    """The model of a tall plate with some rows that stand for all."""
    # The plate itself scales each row by the number of all over the number of these.
    weights = chosen.weights * (len(chosen.rows) / tall.size)
    some = with_rows(tall.model, {tall.name: jnp.asarray(chosen.rows)})
    return _Weighted(some, tall.name, jnp.asarray(weights, jnp.result_type(float)))
