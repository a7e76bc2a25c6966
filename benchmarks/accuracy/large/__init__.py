"""Posteriors of hierarchies, fields and series with 124 to 5000 latents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.accuracy.large import crossed, fields, groups, series
from benchmarks.accuracy.large.compared import LargePosterior

__all__ = ["LARGE", "LargePosterior"]

# In the order in which references are drawn: first those that cost least for what they show.
LARGE: dict[str, Callable[[], LargePosterior]] = {
    "crossed_343": partial(crossed.crossed, "crossed_343", 300, 40, 4_000),
    "crossed_1063": partial(crossed.crossed, "crossed_1063", 1_000, 60, 15_000),
    "varying_lines": groups.lines,
    "pupils": groups.pupils,
    "item_responses": crossed.items,
    "volatility_2500": series.volatility,
    "large_poll": crossed.poll,
    "occupancy": groups.occupancy,
    "disease_map": fields.disease_map,
    "splines": fields.splines,
    "microcredit": groups.microcredit,
    "trend": series.trend,
    "cox_process": fields.cox_process,
    "crossed_5000": partial(crossed.crossed, "crossed_5000", 4_500, 497, 100_000),
}
