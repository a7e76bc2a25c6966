"""Posteriors on which the defaults were not tuned: raw units, hierarchies, series, modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.accuracy.harder import (
    bent,
    fields,
    groups,
    many_effects,
    modes,
    regressions,
    series,
)
from benchmarks.accuracy.posterior import Posterior

__all__ = ["HARDER"]

HARDER: dict[str, Callable[[], Posterior]] = {
    "child_scores": regressions.child_scores,
    "earnings": regressions.earnings,
    "mileage": regressions.mileage,
    "collinear": regressions.collinear,
    "wells": regressions.wells,
    "dose_response": regressions.dose_response,
    "survival": regressions.survival,
    "poisson_process": series.poisson_process,
    "poisson_trend": partial(groups.poisson_trend, centered=True),
    "poisson_trend_noncentered": partial(groups.poisson_trend, centered=False),
    "reaction_times": partial(groups.reaction_times, centered=True),
    "reaction_times_noncentered": partial(groups.reaction_times, centered=False),
    "twelve_lines": partial(groups.twelve_lines, centered=True),
    "twelve_lines_noncentered": partial(groups.twelve_lines, centered=False),
    "item_response": groups.item_response,
    "binomial_groups": groups.binomial_groups,
    "nested_effects": groups.nested_effects,
    "sparse_regression": groups.sparse_regression,
    "poll": many_effects.poll,
    "sixty_lines": many_effects.sixty_lines,
    "predators": series.predators,
    "hidden_states": series.hidden_states,
    "autoregression5": series.autoregression5,
    "arma": series.arma,
    "garch": series.garch,
    "volatility": series.volatility,
    "local_level": series.local_level,
    "smooth_counts": fields.smooth_counts,
    "smooth_map": fields.smooth_map,
    "moving_line": fields.moving_line,
    "symmetric_mixture": modes.symmetric_mixture,
    "unequal_modes": modes.unequal_modes,
    "ring_in_ten": bent.ring_in_ten,
    "banana_in_six": bent.banana_in_six,
}
