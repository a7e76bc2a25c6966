"""Hierarchical models, most of them centered, as they are first written down.

NUTS runs on the non-centered form of each, from which draws of the centered one are computed.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws, Target
from benchmarks.accuracy.textbook.coordinates import NONCENTERED, in_coordinates, to_arrays

__all__ = [
    "binomial_groups",
    "item_response",
    "nested_effects",
    "poisson_trend",
    "reaction_times",
    "sparse_regression",
    "twelve_lines",
]


def poisson_trend(centered: bool) -> Posterior:
    """Counts of 40 years, log-linear in a cubic trend, with an effect of every year: d = 45."""
    rng = np.random.default_rng(201)
    time = (np.arange(40) - 19.5) / 20
    trend = time[:, None] ** np.arange(1, 4)
    effects = rng.normal(0, 0.25, 40)
    counts = rng.poisson(np.exp(3.9 + trend @ [1.0, -0.6, -0.9] + effects))

    def model(trend: Array, counts: Array, centered: bool = centered) -> None:
        intercept = numpyro.sample("intercept", dist.Uniform(-20, 20))
        slopes = numpyro.sample("slopes", dist.Uniform(-10, 10).expand([3]).to_event(1))
        tau = numpyro.sample("tau", dist.Uniform(0, 5))
        with numpyro.plate("years", 40):
            effects = numpyro.sample("effects", dist.Normal(0, tau if centered else 1))
            log_rate = intercept + trend @ slopes + (effects if centered else tau * effects)
            numpyro.sample("counts", dist.Poisson(jnp.exp(log_rate)), obs=counts)

    def from_nuts(draws: Draws) -> Draws:
        return draws | {"effects": draws["tau"][:, None] * draws["effects"]} if centered else draws

    name = "poisson_trend" if centered else "poisson_trend_noncentered"
    return Posterior(
        Target(
            name, model, (jnp.asarray(trend, jnp.float32), jnp.asarray(counts)),
            nuts_model=lambda trend, counts: model(trend, counts, centered=False),
            from_nuts=from_nuts,
        ),
        float64=True,
    )  # fmt: skip


def reaction_times(centered: bool) -> Posterior:
    """Milliseconds on ten days without sleep, a line for each of 18 people: d = 42."""
    rng = np.random.default_rng(202)
    people, days = np.repeat(np.arange(18), 10), np.tile(np.arange(10), 18)
    factor = np.array([[24.0, 0.0], [1.0, 6.0]])
    lines = np.array([251.0, 10.4]) + rng.normal(size=(18, 2)) @ factor.T
    times = np.round(lines[people, 0] + lines[people, 1] * days + rng.normal(0, 25, 180))

    def model(people: Array, days: Array, times: Array, centered: bool = centered) -> None:
        average = numpyro.sample("average", dist.Normal(0, 1_000).expand([2]).to_event(1))
        scales = numpyro.sample("scales", dist.HalfCauchy(50).expand([2]).to_event(1))
        correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
        noise = numpyro.sample("noise", dist.HalfCauchy(50))
        factor = scales[:, None] * correlation
        with numpyro.plate("people", 18):
            if centered:
                lines = numpyro.sample("lines", dist.MultivariateNormal(average, scale_tril=factor))
            else:
                z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
                lines = average + z @ factor.T
        mean = lines[people, 0] + lines[people, 1] * days
        numpyro.sample("times", dist.Normal(mean, noise), obs=times)

    def from_nuts(draws: Draws) -> Draws:
        if not centered:
            return draws
        factor = draws["scales"][:, :, None] * draws["correlation"]
        deviations = jnp.einsum("nij,npj->npi", factor, draws["z"])
        return draws | {"lines": draws["average"][:, None] + deviations}

    name = "reaction_times" if centered else "reaction_times_noncentered"
    return Posterior(
        Target(
            name, model,
            (jnp.asarray(people), jnp.asarray(days, jnp.float32), jnp.asarray(times, jnp.float32)),
            nuts_model=lambda *data: model(*data, centered=False),
            from_nuts=from_nuts,
        ),
        float64=True,
    )  # fmt: skip


def twelve_lines(centered: bool) -> Posterior:
    """90 points of 12 places, a line with a level and a trend of its own for each: d = 29."""
    rng = np.random.default_rng(22)
    place, weeks = rng.integers(0, 12, 90), rng.uniform(0, 30, 90)
    levels, trends = 60 + rng.normal(0, 8, 12), -0.5 + rng.normal(0, 0.15, 12)
    points = levels[place] + trends[place] * weeks + rng.normal(0, 6, 90)

    def model(place: Array, weeks: Array, points: Array) -> None:
        level = numpyro.sample("level", dist.Normal(50, 50))
        trend = numpyro.sample("trend", dist.Normal(0, 5))
        level_scale = numpyro.sample("level_scale", dist.HalfCauchy(10))
        trend_scale = numpyro.sample("trend_scale", dist.HalfCauchy(1))
        noise = numpyro.sample("noise", dist.HalfCauchy(10))
        of_levels, of_trends = dist.Normal(level, level_scale), dist.Normal(trend, trend_scale)
        standard = dist.Normal(0, 1)
        with numpyro.plate("places", 12):
            levels = numpyro.sample("levels", of_levels if centered else standard)
            trends = numpyro.sample("trends", of_trends if centered else standard)
        if not centered:
            levels, trends = level + level_scale * levels, trend + trend_scale * trends
        mean = levels[place] + trends[place] * weeks
        numpyro.sample("points", dist.Normal(mean, noise), obs=points)

    name = "twelve_lines" if centered else "twelve_lines_noncentered"
    effects = dict.fromkeys(("levels", "trends") if centered else (), NONCENTERED)
    target = in_coordinates(name, model, to_arrays(place, weeks, points), effects)
    return Posterior(target, float64=True)


def item_response() -> Posterior:
    """Answers of 60 pupils to 20 questions, two parameters each, and four scales: d = 104."""
    rng = np.random.default_rng(203)
    ability, easiness = rng.normal(0, 1.2, 60), rng.normal(0.4, 1.1, 20)
    slopes = rng.lognormal(0, 0.4, 20)
    correct = rng.binomial(1, 1 / (1 + np.exp(-slopes * (ability[:, None] + easiness))))

    def model(correct: Array, centered: bool = True) -> None:
        pupils, questions = correct.shape
        sd_ability = numpyro.sample("sd_ability", dist.HalfCauchy(2))
        sd_slope = numpyro.sample("sd_slope", dist.HalfCauchy(2))
        mean = numpyro.sample("mean", dist.Normal(0, 5))
        sd_easiness = numpyro.sample("sd_easiness", dist.HalfCauchy(2))
        standard = dist.Normal(0, 1)
        with numpyro.plate("pupils", pupils, dim=-2):
            ability = numpyro.sample(
                "ability", dist.Normal(0, sd_ability) if centered else standard
            )
        with numpyro.plate("questions", questions, dim=-1):
            if centered:
                slope = numpyro.sample("slope", dist.LogNormal(0, sd_slope))
                easiness = numpyro.sample("easiness", dist.Normal(mean, sd_easiness))
            else:
                ability = sd_ability * ability
                slope = jnp.exp(sd_slope * numpyro.sample("slope", standard))
                easiness = mean + sd_easiness * numpyro.sample("easiness", standard)
        numpyro.sample("correct", dist.Bernoulli(logits=slope * (ability + easiness)), obs=correct)

    def from_nuts(draws: Draws) -> Draws:
        sd = {name: draws[f"sd_{name}"][:, None] for name in ("ability", "slope", "easiness")}
        return draws | {
            "ability": sd["ability"][:, None] * draws["ability"],
            "slope": jnp.exp(sd["slope"] * draws["slope"]),
            "easiness": draws["mean"][:, None] + sd["easiness"] * draws["easiness"],
        }

    return Posterior(
        Target(
            "item_response", model, (jnp.asarray(correct),),
            nuts_model=lambda correct: model(correct, centered=False), from_nuts=from_nuts,
        ),
        float64=True,
    )  # fmt: skip


def binomial_groups() -> Posterior:
    """Seeds that germinated on 100 plots, on temperature in degrees, an effect each: d = 103."""
    rng = np.random.default_rng(204)
    degrees = np.round(rng.uniform(5, 25, 100), 1)
    sown = rng.integers(5, 40, 100)
    logits = -2.5 + 0.15 * degrees + rng.normal(0, 0.5, 100)
    grown = rng.binomial(sown, 1 / (1 + np.exp(-logits)))

    def model(degrees: Array, sown: Array, grown: Array, centered: bool = True) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0, 10))
        slope = numpyro.sample("slope", dist.Normal(0, 10))
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        with numpyro.plate("plots", 100):
            effects = numpyro.sample("effects", dist.Normal(0, tau if centered else 1))
            logits = intercept + slope * degrees + (effects if centered else tau * effects)
            numpyro.sample("grown", dist.Binomial(sown, logits=logits), obs=grown)

    return Posterior(
        Target(
            "binomial_groups", model,
            (jnp.asarray(degrees, jnp.float32), jnp.asarray(sown), jnp.asarray(grown)),
            nuts_model=lambda *data: model(*data, centered=False),
            from_nuts=lambda draws: (
                draws | {"effects": draws["tau"][:, None] * draws["effects"]}
            ),
        ),
        float64=True,
    )  # fmt: skip


def nested_effects() -> Posterior:
    """Scores of 160 pupils in 40 classes of 10 schools, two levels of funnels: d = 54."""
    rng = np.random.default_rng(205)
    school_of = np.repeat(np.arange(10), 4)  # of each class
    class_of = np.repeat(np.arange(40), 4)  # of each pupil
    schools = rng.normal(52, 2.5, 10)
    classes = rng.normal(schools[school_of], 2)
    scores = np.round(rng.normal(classes[class_of], 9))

    def model(school_of: Array, class_of: Array, scores: Array, centered: bool = True) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 100))
        sd_school = numpyro.sample("sd_school", dist.HalfCauchy(5))
        sd_class = numpyro.sample("sd_class", dist.HalfCauchy(5))
        noise = numpyro.sample("noise", dist.HalfCauchy(10))
        standard = dist.Normal(0, 1)
        with numpyro.plate("every_school", 10):
            schools = numpyro.sample(
                "schools", dist.Normal(mean, sd_school) if centered else standard
            )
        if not centered:
            schools = mean + sd_school * schools
        with numpyro.plate("every_class", 40):
            around = dist.Normal(schools[school_of], sd_class) if centered else standard
            classes = numpyro.sample("classes", around)
        if not centered:
            classes = schools[school_of] + sd_class * classes
        numpyro.sample("scores", dist.Normal(classes[class_of], noise), obs=scores)

    def from_nuts(draws: Draws) -> Draws:
        schools = draws["mean"][:, None] + draws["sd_school"][:, None] * draws["schools"]
        classes = schools[:, school_of] + draws["sd_class"][:, None] * draws["classes"]
        return draws | {"schools": schools, "classes": classes}

    return Posterior(
        Target(
            "nested_effects", model,
            (jnp.asarray(school_of), jnp.asarray(class_of), jnp.asarray(scores, jnp.float32)),
            nuts_model=lambda *data: model(*data, centered=False),
            from_nuts=from_nuts,
        ),
        float64=True,
    )  # fmt: skip


def sparse_regression() -> Posterior:
    """Horseshoe regression with 50 weights, of which 5 matter, centered: d = 102."""
    rng = np.random.default_rng(206)
    features = rng.normal(size=(100, 50))
    truth = np.zeros(50)
    truth[:5] = [2.0, -1.5, 1.0, 0.7, -0.5]
    response = features @ truth + rng.normal(size=100)

    def model(features: Array, response: Array, centered: bool = True) -> None:
        overall = numpyro.sample("overall", dist.HalfCauchy(0.1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([50]).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(2))
        prior = dist.Normal(0, overall * local if centered else jnp.ones(50)).to_event(1)
        weights = numpyro.sample("weights", prior)
        if not centered:
            weights = overall * local * weights
        numpyro.sample("response", dist.Normal(features @ weights, noise), obs=response)

    def from_nuts(draws: Draws) -> Draws:
        scales = draws["overall"][:, None] * draws["local"]
        return draws | {"weights": scales * draws["weights"]}

    return Posterior(
        Target(
            "sparse_regression", model,
            (jnp.asarray(features, jnp.float32), jnp.asarray(response, jnp.float32)),
            nuts_model=lambda *data: model(*data, centered=False),
            from_nuts=from_nuts,
        ),
        thinning=1,
        accept=0.99,
        float64=True,
    )  # fmt: skip
