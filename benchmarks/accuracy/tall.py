"""Posteriors of tens of thousands of rows, which guides are fitted to in minibatches.

Exact samplers and Pathfinder read all rows at every gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Target

__all__ = ["TALL"]

BATCH_SIZE = 500


def _posterior(name: str, model: Callable[..., None], *data: np.ndarray) -> Posterior:
    arrays = tuple(jnp.asarray(a, jnp.float32 if a.dtype.kind == "f" else jnp.int32) for a in data)
    return Posterior(Target(name, model, arrays), thinning=1, accept=0.8, batch_size=BATCH_SIZE)


def tall_clinics() -> Posterior:
    """Missed visits to twenty clinics of very unequal size: 50 000 rows, 30 latents."""
    rng = np.random.default_rng(31)
    features = rng.normal(size=(50_000, 8))
    features[:, 1] = 0.95 * features[:, 0] + 0.3 * features[:, 1]
    clinics = rng.choice(20, size=50_000, p=rng.dirichlet(np.full(20, 0.5)))
    effects = -2.0 + 0.5 * rng.standard_t(4, size=20)
    logits = effects[clinics] + features @ (0.4 * rng.normal(size=8))
    missed = (rng.random(50_000) < 1 / (1 + np.exp(-logits))).astype(int)

    def model(features: Array, clinics: Array, missed: Array, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 5))
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        weights = numpyro.sample("weights", dist.StudentT(3, jnp.zeros(8), 1).to_event(1))
        with numpyro.plate("clinics", 20):
            effects = numpyro.sample("effects", dist.Normal(mean, spread))
        with numpyro.plate("visits", len(missed), subsample_size=batch) as rows:
            logits = effects[clinics[rows]] + features[rows] @ weights
            numpyro.sample("missed", dist.Bernoulli(logits=logits), obs=missed[rows])

    return _posterior("tall_clinics", model, features, clinics, missed)


def tall_claims() -> Posterior:
    """Claims of insured by age in decades, premium in thousands: 80 000 rows, 7 latents."""
    rng = np.random.default_rng(32)
    age, premium = rng.uniform(1.8, 9.0, 80_000), rng.lognormal(-0.9, 0.8, 80_000)
    kinds = rng.choice(4, size=80_000, p=[0.7, 0.2, 0.09, 0.01])
    years = rng.uniform(0.05, 1.0, 80_000)
    rates = np.exp(-3.0 - 0.1 * age + 0.3 * premium + np.array([0, 0.3, -0.2, 0.8])[kinds])
    # Overdispersed, with a concentration of 1.5.
    claims = rng.poisson(years * rates * rng.gamma(1.5, 1 / 1.5, 80_000))

    def model(
        age: Array, premium: Array, kinds: Array, years: Array, claims: Array,
        batch: int | None = None,
    ) -> None:  # fmt: skip
        level = numpyro.sample("level", dist.Normal(0, 10))
        of_age = numpyro.sample("of_age", dist.Normal(0, 1))
        of_premium = numpyro.sample("of_premium", dist.Normal(0, 1))
        of_kind = numpyro.sample("of_kind", dist.Normal(0, 1).expand([3]).to_event(1))
        concentration = numpyro.sample("concentration", dist.Gamma(2, 0.5))
        kind = jnp.concatenate([jnp.zeros(1), of_kind])
        with numpyro.plate("policies", len(claims), subsample_size=batch) as rows:
            rates = level + of_age * age[rows] + of_premium * premium[rows] + kind[kinds[rows]]
            mean = years[rows] * jnp.exp(rates)
            numpyro.sample("claims", dist.NegativeBinomial2(mean, concentration), obs=claims[rows])

    return _posterior("tall_claims", model, age, premium, kinds, years, claims)


def tall_robust() -> Posterior:
    """Regression with outliers on ten correlated features: 60 000 rows, 13 latents."""
    rng = np.random.default_rng(33)
    features = (
        rng.normal(size=(60_000, 10))
        @ np.linalg.cholesky(0.8 * np.ones((10, 10)) + 0.2 * np.eye(10)).T
    )
    outcome = 3.0 + features @ rng.normal(size=10) + 2.0 * rng.standard_t(3, size=60_000)

    def model(features: Array, outcome: Array, batch: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 10))
        weights = numpyro.sample("weights", dist.Normal(0, 3).expand([10]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfCauchy(5))
        freedom = numpyro.sample("freedom", dist.Gamma(2, 0.1))
        with numpyro.plate("rows", len(outcome), subsample_size=batch) as rows:
            center = level + features[rows] @ weights
            numpyro.sample("y", dist.StudentT(freedom, center, scale), obs=outcome[rows])

    return _posterior("tall_robust", model, features, outcome)


def tall_scales() -> Posterior:
    """Location and noise scale of sixteen groups, four of 0 to 3 rows: 40 000 rows, 35 latents."""
    rng = np.random.default_rng(7)
    small = np.array([0, 1, 2, 3, 5, 12, 40])
    large = np.floor(rng.dirichlet(np.full(9, 2.0)) * (40_000 - small.sum())).astype(int)
    sizes = np.concatenate([small, large])
    sizes[-1] += 40_000 - sizes.sum()
    groups = rng.permutation(np.repeat(np.arange(16), sizes))
    centers, log_scales = rng.normal(2, 1, 16), rng.normal(0, 0.6, 16)
    y = centers[groups] + np.exp(log_scales[groups]) * rng.standard_t(4, 40_000)

    def model(groups: Array, y: Array, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 5))
        spread = numpyro.sample("spread", dist.HalfNormal(2))
        spread_of_scales = numpyro.sample("spread_of_scales", dist.HalfNormal(1))
        with numpyro.plate("groups", 16):
            centers = numpyro.sample("centers", dist.Normal(mean, spread))
            log_scales = numpyro.sample("log_scales", dist.Normal(0, spread_of_scales))
        with numpyro.plate("rows", len(y), subsample_size=batch) as rows:
            here = groups[rows]
            fn = dist.StudentT(4, centers[here], jnp.exp(log_scales[here]))
            numpyro.sample("y", fn, obs=y[rows])

    return _posterior("tall_scales", model, groups, y)


TALL: dict[str, Callable[[], Posterior]] = {
    "tall_clinics": tall_clinics,
    "tall_claims": tall_claims,
    "tall_robust": tall_robust,
    "tall_scales": tall_scales,
}
