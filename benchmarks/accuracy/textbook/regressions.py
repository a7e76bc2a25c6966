"""Regressions in raw units: outliers, a confounder, choices, many zeros, missing predictors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer.reparam import Reparam

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws, Model, Target, flat_prior
from benchmarks.accuracy.textbook.coordinates import (
    around,
    in_coordinates,
    ratio,
    to_arrays,
    without_coordinates,
)

__all__ = [
    "instrumental",
    "missing_data",
    "multinomial_logit",
    "robust_t",
    "zero_inflated_nb",
]


def _raw_weights(features: np.ndarray) -> np.ndarray:
    """The matrix from weights of standardized features to those of raw ones, intercept first.

    Intercepts and weights of raw features are so correlated that chains of NUTS get stuck.
    """
    center, spread = features.mean(0), features.std(0)
    raw = np.diag(np.concatenate([[1.0], 1 / spread]))
    raw[0, 1:] = -center / spread
    return raw


def _standardized(
    name: str,
    model: Model,
    data: tuple[Array, ...],
    size: int,
    weights_of: Callable[[Array], Draws],
    coordinates: Mapping[str, Reparam] | None = None,
) -> Target:
    """A target that NUTS draws from by weights of standardized features.

    Args:
        name: of the target.
        model: with weights of raw features.
        data: arguments of the model.
        size: number of the weights.
        weights_of: the sites of weights, intercepts among them, that belong to those of
            standardized features (..., size). The map is linear.
        coordinates: of other sites, as in ``in_coordinates``.
    """
    other = handlers.reparam(model, config=dict(coordinates or {}))

    def nuts_model(*data: Array) -> None:
        standard = numpyro.sample("standard", flat_prior(size))
        handlers.condition(other, weights_of(standard))(*data)

    def from_nuts(draws: Draws) -> Draws:
        others = {site: values for site, values in draws.items() if site != "standard"}
        return without_coordinates(others) | weights_of(draws["standard"])

    return Target(name, model, data, nuts_model=nuts_model, from_nuts=from_nuts)


def robust_t() -> Posterior:
    """Dollars of 70 houses on square feet and year built, noise of unknown tails: d = 5."""
    rng = np.random.default_rng(1616)
    year = rng.integers(1920, 2015, 70)
    area = np.round((900 + 9.0 * (year - 1920) + 350 * rng.standard_normal(70)).clip(500))
    price = 40000 + 95.0 * area + 450.0 * (year - 1920) + 14000 * rng.standard_t(2.5, 70)
    price = np.round(price, -2)

    def model(area: Array, year: Array, price: Array) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 1e7))
        of_area = numpyro.sample("of_area", dist.Normal(0.0, 1000.0))
        of_year = numpyro.sample("of_year", dist.Normal(0.0, 10000.0))
        scale = numpyro.sample("scale", dist.HalfCauchy(50000.0))
        freedom = numpyro.sample("freedom", dist.Gamma(2.0, 0.1))
        center = intercept + of_area * area + of_year * year
        numpyro.sample("price", dist.StudentT(freedom, center, scale).to_event(1), obs=price)

    raw = _raw_weights(np.column_stack([area, year]))
    level = np.array([price.mean(), 0.0, 0.0])

    def weights_of(standard: Array) -> Draws:
        weights = (level + 1e4 * standard) @ raw.T
        return dict(zip(("intercept", "of_area", "of_year"), weights.T, strict=True))

    data = to_arrays(area, year.astype(float), price)
    target = _standardized("robust_t", model, data, 3, weights_of, {"scale": ratio(2e4, 0.2)})
    return Posterior(target, accept=0.9, dense_mass=True, float64=True)


def instrumental() -> Posterior:
    """Dollars an hour on years of schooling, with the quarter of birth as instrument: d = 7."""
    rng = np.random.default_rng(1313)
    quarter = rng.integers(1, 5, 300)
    hidden = rng.standard_normal(300)
    schooling = 11 + 0.45 * quarter + 1.4 * hidden + 1.4 * rng.standard_normal(300)
    wage = 8 + 0.5 * schooling + 3.0 * hidden + 3.5 * rng.standard_normal(300)

    def model(quarter: Array, schooling: Array, wage: Array) -> None:
        wage_level = numpyro.sample("wage_level", dist.Normal(0.0, 50.0))
        of_schooling = numpyro.sample("of_schooling", dist.Normal(0.0, 10.0))
        schooling_level = numpyro.sample("schooling_level", dist.Normal(0.0, 50.0))
        of_quarter = numpyro.sample("of_quarter", dist.Normal(0.0, 10.0))
        correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
        scales = numpyro.sample("scales", dist.Exponential(np.array([0.2, 0.5])).to_event(1))
        center = jnp.stack(
            [wage_level + of_schooling * schooling, schooling_level + of_quarter * quarter], axis=-1
        )
        both = dist.MultivariateNormal(center, scale_tril=scales[:, None] * correlation)
        numpyro.sample("both", both.to_event(1), obs=jnp.stack([wage, schooling], axis=-1))

    target = in_coordinates(
        "instrumental", model,
        to_arrays(quarter.astype(float), np.round(schooling, 1), np.round(wage, 2)),
        {"schooling_level": around(11.0, 0.5), "scales": ratio([4.5, 2.0], 0.1)},
    )  # fmt: skip
    return Posterior(target, accept=0.98, dense_mass=True, float64=True)


def multinomial_logit() -> Posterior:
    """Votes of 400 for four parties on age, income, household, schooling, commute: d = 18."""
    rng = np.random.default_rng(1010)
    age = np.round(rng.uniform(18, 85, 400))
    schooling = np.round(np.clip(rng.normal(13, 2.8, 400) - 0.03 * (age - 50), 6, 21))
    income = np.round(np.exp(rng.normal(10.7, 0.45, 400) + 0.07 * (schooling - 13)), -2)
    household = 1 + rng.poisson(1.4, 400)
    commute = np.round(rng.gamma(1.3, 12, 400), 1)
    features = np.stack([age, income, household, schooling, commute], 1)
    standard = (features - features.mean(0)) / features.std(0)
    truth = np.array(
        [
            [0.2, 0.9, -0.5, 0.3, 0.2, 0.0],
            [-0.3, -0.6, 0.8, 0.2, -0.5, 0.4],
            [-1.2, 0.3, 0.4, -0.6, 0.7, -0.3],
        ]
    ).T
    utilities = np.concatenate([np.zeros((400, 1)), truth[0] + standard @ truth[1:]], 1)
    votes = np.argmax(utilities + rng.gumbel(size=utilities.shape), 1)

    def model(features: Array, votes: Array) -> None:
        intercepts = numpyro.sample("intercepts", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
        weights = numpyro.sample("weights", dist.Normal(0.0, 5.0).expand([5, 3]).to_event(2))
        utilities = intercepts + features @ weights
        # The first party is the one that the others are compared with.
        logits = jnp.concatenate([jnp.zeros_like(utilities[:, :1]), utilities], axis=1)
        numpyro.sample("votes", dist.Categorical(logits=logits).to_event(1), obs=votes)

    raw = _raw_weights(features)

    def weights_of(standard: Array) -> Draws:
        weights = jnp.asarray(raw) @ standard.reshape(*standard.shape[:-1], 6, 3)
        return {"intercepts": weights[..., 0, :], "weights": weights[..., 1:, :]}

    data = to_arrays(features, votes)
    target = _standardized("multinomial_logit", model, data, 18, weights_of)
    return Posterior(target, accept=0.9, dense_mass=True, float64=True)


def zero_inflated_nb() -> Posterior:
    """Days of illness of 250, many of them none, on age, body mass, blood pressure: d = 9."""
    rng = np.random.default_rng(1212)
    correlation = np.array([[1, 0.35, 0.65], [0.35, 1, 0.55], [0.65, 0.55, 1]])
    z = rng.standard_normal((250, 3)) @ np.linalg.cholesky(correlation).T
    age, body_mass = np.round(48 + 11 * z[:, 0]), np.round(27 + 4.5 * z[:, 1], 1)
    features = np.stack([age, body_mass, np.round(131 + 16 * z[:, 2])], 1)
    mean = np.exp(1.7 + 0.35 * z[:, 0] - 0.2 * z[:, 1] + 0.3 * z[:, 2])
    never = 1 / (1 + np.exp(0.7 + 0.6 * z[:, 0] + 0.2 * z[:, 2]))
    counts = rng.poisson(mean * rng.gamma(2.5, 1 / 2.5, 250))
    days = counts * (rng.uniform(size=250) > never)

    def model(features: Array, days: Array) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 10.0))
        weights = numpyro.sample("weights", dist.Normal(0.0, 2.5).expand([3]).to_event(1))
        never_intercept = numpyro.sample("never_intercept", dist.Normal(0.0, 10.0))
        never = numpyro.sample("never", dist.Normal(0.0, 2.5).expand([3]).to_event(1))
        concentration = numpyro.sample("concentration", dist.Exponential(1.0))
        counts = dist.ZeroInflatedNegativeBinomial2(
            jnp.exp(intercept + features @ weights), concentration,
            gate_logits=never_intercept + features @ never,
        )  # fmt: skip
        numpyro.sample("days", counts.to_event(1), obs=days)

    raw = _raw_weights(features)

    def weights_of(standard: Array) -> Draws:
        weights = jnp.asarray(raw) @ standard.reshape(*standard.shape[:-1], 4, 2)
        return {
            "intercept": weights[..., 0, 0], "weights": weights[..., 1:, 0],
            "never_intercept": weights[..., 0, 1], "never": weights[..., 1:, 1],
        }  # fmt: skip

    data = to_arrays(features, days)
    target = _standardized("zero_inflated_nb", model, data, 8, weights_of)
    return Posterior(target, accept=0.9, dense_mass=True, float64=True)


def missing_data() -> Posterior:
    """Blood pressure of 80 on age and body mass, 25 of these missing and imputed: d = 32."""
    rng = np.random.default_rng(1414)
    age = np.round(rng.uniform(25, 75, 80))
    mass = 19 + 0.16 * age + 3.2 * rng.standard_normal(80)
    pressure = np.round(70 + 0.45 * age + 1.4 * mass + 9 * rng.standard_normal(80))
    missing = np.sort(rng.choice(80, 25, replace=False))
    mass = np.round(mass, 1)
    mass[missing] = 0.0

    def model(age: Array, mass: Array, missing: Array, pressure: Array) -> None:
        level = numpyro.sample("level", dist.Normal(0.0, 100.0))
        of_age = numpyro.sample("of_age", dist.Normal(0.0, 10.0))
        of_mass = numpyro.sample("of_mass", dist.Normal(0.0, 10.0))
        noise = numpyro.sample("noise", dist.Exponential(0.1))
        mass_level = numpyro.sample("mass_level", dist.Normal(0.0, 100.0))
        mass_of_age = numpyro.sample("mass_of_age", dist.Normal(0.0, 10.0))
        mass_noise = numpyro.sample("mass_noise", dist.Exponential(0.1))
        center = mass_level + mass_of_age * age
        with numpyro.plate("unknown", len(missing)):
            imputed = numpyro.sample("imputed", dist.Normal(center[missing], mass_noise))
        known = jnp.ones(len(age), bool).at[missing].set(False)
        with numpyro.plate("people", len(age)):
            numpyro.sample("mass", dist.Normal(center, mass_noise).mask(known), obs=mass)
            mean = level + of_age * age + of_mass * mass.at[missing].set(imputed)
            numpyro.sample("pressure", dist.Normal(mean, noise), obs=pressure)

    target = in_coordinates(
        "missing_data", model, to_arrays(age, mass, missing, pressure),
        {
            "level": around(60.0, 10.0), "of_age": around(0.5, 0.1), "of_mass": around(1.6, 0.4),
            "noise": ratio(9.0, 0.1),
            "mass_level": around(19.0, 2.0), "mass_of_age": around(0.15, 0.03),
            "mass_noise": ratio(3.3, 0.1), "imputed": around(27.0, 3.0),
        },
    )  # fmt: skip
    return Posterior(target, accept=0.9, dense_mass=True, float64=True)
