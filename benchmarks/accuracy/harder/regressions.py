"""Regressions in the units in which data come: nothing is centered, scaled or decorrelated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.harder.exact import linear_regression
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Target, flat_prior

__all__ = [
    "child_scores",
    "collinear",
    "dose_response",
    "earnings",
    "mileage",
    "survival",
    "wells",
]


def _flat_regression(
    name: str, features: np.ndarray, response: np.ndarray, noise: float
) -> Posterior:
    """Linear regression with flat weights and a half-Cauchy noise; exact draws."""
    x, y = jnp.asarray(features, jnp.float32), jnp.asarray(response, jnp.float32)
    prior = dist.HalfCauchy(noise)

    def model(x: Array, y: Array) -> None:
        weights = numpyro.sample("weights", flat_prior(x.shape[1]))
        scale = numpyro.sample("scale", prior)
        numpyro.sample("y", dist.Normal(x @ weights, scale), obs=y)

    return Posterior(Target(name, model, (x, y), linear_regression(x, y, None, prior)))


def child_scores() -> Posterior:
    """Children's test scores on the mother's IQ, her schooling and their product: 434 rows."""
    rng = np.random.default_rng(101)
    school = rng.binomial(1, 0.79, 434)
    iq = np.round(rng.normal(95 + 6 * school, 15), 1)
    score = np.round(-10 + 50 * school + 1.0 * iq - 0.5 * school * iq + rng.normal(0, 18, 434))
    features = np.column_stack([np.ones(434), school, iq, school * iq])
    return _flat_regression("child_scores", features, score, 2.5)


def earnings() -> Posterior:
    """Yearly earnings in dollars on height in inches, sex, age and age squared: 430 rows."""
    rng = np.random.default_rng(102)
    male = rng.binomial(1, 0.4, 430)
    height = np.round(rng.normal(64.5 + 5.5 * male, 2.7))
    age = rng.integers(18, 80, 430)
    mean = -30_000 + 500 * height + 9_000 * male + 900 * age - 8.5 * age**2
    pay = np.round(mean + rng.normal(0, 17_000, 430), -2)
    features = np.column_stack([np.ones(430), height, male, age, age**2])
    return _flat_regression("earnings", features, pay, 10_000.0)


def mileage() -> Posterior:
    """Miles a gallon on weight in pounds, horsepower, displacement and gears: 32 cars."""
    rng = np.random.default_rng(103)
    pounds = np.round(rng.normal(3_200, 900, 32), -1)
    displacement = np.round(0.11 * pounds - 120 + rng.normal(0, 45, 32))
    power = np.round(40 + 0.45 * displacement + rng.normal(0, 35, 32))
    gears = rng.choice([3, 4, 5], 32)
    miles = 36 - 0.004 * pounds - 0.02 * power + 0.5 * gears + rng.normal(0, 2.5, 32)
    features = np.column_stack([np.ones(32), pounds, power, displacement, gears])
    return _flat_regression("mileage", features, np.round(miles, 1), 5.0)


def collinear() -> Posterior:
    """25 predictors with correlations of .99 and units from .1 to 100: 200 rows, d = 26."""
    rng = np.random.default_rng(104)
    units = np.geomspace(0.1, 100, 25)
    features = rng.normal(size=(200, 1)) + 0.1 * rng.normal(size=(200, 25))
    response = features @ rng.normal(size=25) + 0.5 * rng.normal(size=200)
    x, y = jnp.asarray(features * units, jnp.float32), jnp.asarray(response, jnp.float32)
    prior = dist.HalfNormal(10)

    def model(x: Array, y: Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 1_000).expand([25]).to_event(1))
        scale = numpyro.sample("scale", prior)
        numpyro.sample("y", dist.Normal(x @ weights, scale), obs=y)

    exact = linear_regression(x, y, np.full(25, 1_000.0), prior)
    return Posterior(Target("collinear", model, (x, y), exact))


def wells() -> Posterior:
    """Who changes to a safe well: logistic on meters, arsenic, their product and schooling."""
    rng = np.random.default_rng(105)
    meters = np.round(rng.gamma(1.6, 30, 300), 1)
    arsenic = np.round(0.5 + rng.gamma(1.1, 1.1, 300), 2)
    schooling = rng.choice(17, 300)
    logits = -0.1 - 0.008 * meters + 0.5 * arsenic - 0.001 * meters * arsenic + 0.04 * schooling
    changed = rng.binomial(1, 1 / (1 + np.exp(-logits)))
    x = np.column_stack([np.ones(300), meters, arsenic, meters * arsenic, schooling])

    def model(x: Array, changed: Array) -> None:
        weights = numpyro.sample("weights", flat_prior(5))
        numpyro.sample("changed", dist.Bernoulli(logits=x @ weights), obs=changed)

    arguments = (jnp.asarray(x, jnp.float32), jnp.asarray(changed))
    return Posterior(Target("wells", model, arguments), dense_mass=True, float64=True)


def dose_response() -> Posterior:
    """Response to 1 to 3000 milligrams: bottom, top, half-effect dose, steepness and noise."""
    rng = np.random.default_rng(106)
    # The largest dose keeps the top from a tail so long that NUTS's sd varies by 7 %.
    dose = np.repeat([1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0], 4)
    mean = 220 + 1_150 / (1 + (140 / dose) ** 1.6)
    response = np.round(mean + rng.normal(0, 110, len(dose)))

    def model(dose: Array, response: Array) -> None:
        bottom = numpyro.sample("bottom", dist.Normal(0, 1_000))
        top = numpyro.sample("top", dist.Normal(1_000, 1_000))
        half = numpyro.sample("half", dist.LogNormal(np.log(100.0), 2))
        steepness = numpyro.sample("steepness", dist.LogNormal(0, 0.5))
        noise = numpyro.sample("noise", dist.HalfCauchy(100))
        share = jax.nn.sigmoid(steepness * jnp.log(dose / half))
        mean = bottom + (top - bottom) * share
        numpyro.sample("response", dist.Normal(mean, noise), obs=response)

    arguments = (jnp.asarray(dose, jnp.float32), jnp.asarray(response, jnp.float32))
    return Posterior(Target("dose_response", model, arguments), dense_mass=True, float64=True)


def survival() -> Posterior:
    """Days of survival, Weibull, censored after two years: age, stage and dose of 120 patients."""
    rng = np.random.default_rng(107)
    age = rng.integers(40, 81, 120)
    stage = rng.binomial(1, 0.4, 120)
    dose = rng.choice([50.0, 100.0, 200.0, 300.0], 120)
    scale = np.exp(8.2 - 0.03 * age - 0.6 * stage + 0.002 * dose)
    days = np.ceil(scale * rng.weibull(1.4, 120))
    died = days <= 730
    x = np.column_stack([np.ones(120), age, stage, dose])

    prior = dist.Normal(0, 10).expand([4]).to_event(1)

    def likelihood(weights: Array, x: Array, days: Array, died: Array) -> None:
        shape = numpyro.sample("shape", dist.HalfNormal(3))
        # The log hazard adds up to the log survival for those who died.
        log_time = jnp.log(days) - x @ weights
        log_hazard = jnp.log(shape) - jnp.log(days) + shape * log_time
        numpyro.factor("days", jnp.where(died, log_hazard, 0.0) - jnp.exp(shape * log_time))

    def model(*data: Array) -> None:
        likelihood(numpyro.sample("weights", prior), *data)

    # Chains of NUTS get stuck on the raw predictors; it gets the weights of standardized ones.
    raw = np.diag(np.concatenate([[1.0], 1 / x[:, 1:].std(0)]))
    raw[0, 1:] = -x[:, 1:].mean(0) / x[:, 1:].std(0)

    def nuts_model(*data: Array) -> None:
        weights = raw @ numpyro.sample("standard", flat_prior(4))
        numpyro.factor("weights", prior.log_prob(weights))
        likelihood(weights, *data)

    arguments = (
        jnp.asarray(x, jnp.float32), jnp.asarray(np.minimum(days, 730), jnp.float32),
        jnp.asarray(died),
    )  # fmt: skip
    target = Target(
        "survival", model, arguments, nuts_model=nuts_model,
        from_nuts=lambda draws: draws | {"weights": draws["standard"] @ raw.T},
    )  # fmt: skip
    return Posterior(target, dense_mass=True, float64=True)
