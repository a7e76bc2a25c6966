"""Hierarchies with about a hundred effects and more, some of whose scales data hardly tell.

They are centered, as they are first written down. NUTS runs on the non-centered form of each.
"""

from __future__ import annotations

import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.textbook.coordinates import NONCENTERED, in_coordinates, to_arrays

__all__ = ["poll", "sixty_lines"]


def poll() -> Posterior:
    """1500 votes by state, age and education, a scale for each kind of effect: d = 98.

    The five levels of education and the 30 crossed cells say little about their scales.
    """
    rng = np.random.default_rng(3)
    state, age, school = (rng.integers(0, count, 1500) for count in (50, 6, 5))
    woman, income = rng.integers(0, 2, 1500), rng.normal(5e4, 1e4, 50)
    logits = (
        -0.3
        + 0.2 * woman
        + rng.normal(0, 0.5, 50)[state]
        + 2e-5 * (income[state] - 5e4)
        + rng.normal(0, 0.3, 6)[age]
        + rng.normal(0, 0.2, 5)[school]
        + rng.normal(0, 0.15, (6, 5))[age, school]
    )
    votes = (rng.random(1500) < 1 / (1 + np.exp(-logits))).astype(int)

    def model(
        state: Array, age: Array, school: Array, woman: Array, income: Array, votes: Array
    ) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2.5))
        of_woman = numpyro.sample("of_woman", dist.Normal(0, 1))
        of_income = numpyro.sample("of_income", dist.Normal(0, 1))
        scales = {
            name: numpyro.sample(f"scale_{name}", dist.HalfNormal(1))
            for name in ("state", "age", "school", "cell")
        }
        with numpyro.plate("states", 50):
            by_state = numpyro.sample("state", dist.Normal(of_income * income, scales["state"]))
        with numpyro.plate("ages", 6):
            by_age = numpyro.sample("age", dist.Normal(0, scales["age"]))
        with numpyro.plate("schools", 5):
            by_school = numpyro.sample("school", dist.Normal(0, scales["school"]))
        with numpyro.plate("cells", 30):
            by_cell = numpyro.sample("cell", dist.Normal(0, scales["cell"]))
        logits = level + of_woman * woman + by_state[state] + by_age[age] + by_school[school]
        logits = logits + by_cell[5 * age + school]
        numpyro.sample("votes", dist.Bernoulli(logits=logits), obs=votes)

    data = to_arrays(state, age, school, woman, income / 1e4, votes)
    effects = dict.fromkeys(("state", "age", "school", "cell"), NONCENTERED)
    return Posterior(in_coordinates("poll", model, data, effects), float64=True)


def sixty_lines() -> Posterior:
    """900 measurements of 60 places by year and income, in raw units: d = 187.

    The scale of the slopes in income is that of their errors.
    """
    rng = np.random.default_rng(6)
    place, year = rng.integers(0, 60, 900), rng.uniform(1990, 2020, 900)
    income = rng.exponential(3e4, 900)
    levels, trends = rng.normal(50, 8, 60), rng.normal(0.4, 0.15, 60)
    slopes = rng.normal(1e-4, 3e-5, 60)
    mean = levels[place] + trends[place] * (year - 2000) + slopes[place] * income
    measured = mean + rng.normal(0, 5, 900)

    def model(place: Array, year: Array, income: Array, measured: Array) -> None:
        average = numpyro.sample("average", dist.Normal(0, 100).expand([3]).to_event(1))
        level_scale = numpyro.sample("level_scale", dist.HalfNormal(20))
        trend_scale = numpyro.sample("trend_scale", dist.HalfNormal(1))
        slope_scale = numpyro.sample("slope_scale", dist.HalfNormal(1))
        noise = numpyro.sample("noise", dist.HalfNormal(20))
        with numpyro.plate("places", 60):
            level = numpyro.sample("level", dist.Normal(average[0], level_scale))
            trend = numpyro.sample("trend", dist.Normal(average[1], trend_scale))
            slope = numpyro.sample("slope", dist.Normal(average[2], slope_scale))
        mean = level[place] + trend[place] * (year - 2000) + slope[place] * income / 1e4
        numpyro.sample("measured", dist.Normal(mean, noise), obs=measured)

    data = to_arrays(place, year, income, measured)
    effects = dict.fromkeys(("level", "trend", "slope"), NONCENTERED)
    return Posterior(in_coordinates("sixty_lines", model, data, effects), float64=True)
