"""Groups of unequal size: growth, failures, contests, sites, people, cells of a poll."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.scipy.stats import norm

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws, Target
from benchmarks.accuracy.textbook.coordinates import (
    NONCENTERED,
    around,
    in_coordinates,
    noncentered_logs,
    ratio,
    to_arrays,
)

__all__ = ["bradley_terry", "exgaussian_rt", "mrp", "pumps", "rats", "tobit"]

# Weights of 30 rats on five days: Gelfand and others (1990).
_RATS = """
151 199 246 283 320 145 199 249 293 354 147 214 263 312 328 155 200 237 272 297
135 188 230 280 323 159 210 252 298 331 141 189 231 275 305 159 201 248 297 338
177 236 285 350 376 134 182 220 260 296 160 208 261 313 352 143 188 220 273 314
154 200 244 289 325 171 221 270 326 358 163 216 242 281 312 160 207 248 288 324
142 187 234 280 316 156 203 243 283 317 157 212 259 307 336 152 203 246 286 321
154 205 253 298 334 139 190 225 267 302 146 191 229 272 302 157 211 250 285 323
132 185 237 286 331 160 207 257 303 345 169 216 261 295 333 157 205 248 289 316
137 180 219 258 291 153 200 244 286 324
"""


def rats() -> Posterior:
    """Grams of 30 rats on five days, a line each, correlated, centered, raw days: d = 66."""
    days = np.array([8.0, 15, 22, 29, 36])
    grams = np.array(_RATS.split(), float).reshape(30, 5)

    def model(days: Array, grams: Array) -> None:
        mean = numpyro.sample("mean", dist.Normal(0.0, np.array([500.0, 100.0])).to_event(1))
        scales = numpyro.sample("scales", dist.HalfCauchy(np.array([25.0, 5.0])).to_event(1))
        correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
        noise = numpyro.sample("noise", dist.HalfCauchy(25.0))
        factor = scales[:, None] * correlation
        with numpyro.plate("rats", len(grams)):
            lines = numpyro.sample("lines", dist.MultivariateNormal(mean, scale_tril=factor))
        center = lines[:, :1] + lines[:, 1:] * days
        numpyro.sample("grams", dist.Normal(center, noise).to_event(2), obs=grams)

    # Every line is known well, so that the centered form suits NUTS, in other units.
    target = in_coordinates(
        "rats", model, to_arrays(days, grams),
        {
            "mean": around([106.0, 6.2], [5.0, 0.2]),
            "scales": ratio([11.0, 0.5], 0.2),
            "noise": ratio(6.0, 0.1),
            "lines": around([106.0, 6.2], [10.0, 0.5]),
        },
    )  # fmt: skip
    return Posterior(target, accept=0.9, float64=True)


def pumps() -> Posterior:
    """Failures of ten pumps of a power plant, rates of a gamma distribution: d = 12."""
    hours = np.array([94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5])
    failures = np.array([5, 1, 5, 14, 3, 19, 1, 1, 4, 22])

    def model(hours: Array, failures: Array) -> None:
        alpha = numpyro.sample("alpha", dist.Exponential(1.0))
        beta = numpyro.sample("beta", dist.Gamma(0.1, 1.0))
        with numpyro.plate("pumps", len(hours)):
            rates = numpyro.sample("rates", dist.Gamma(alpha, beta))
            numpyro.sample("failures", dist.Poisson(rates * hours), obs=failures)

    return Posterior(Target("pumps", model, to_arrays(hours, failures)), accept=0.9, float64=True)


def bradley_terry() -> Posterior:
    """Contests of 20 teams, whose abilities add up to almost zero, at home or not: d = 22."""
    rng = np.random.default_rng(909)
    truth = 0.9 * rng.standard_normal(20)
    one, two = np.triu_indices(20, 1)
    exchanged = rng.uniform(size=len(one)) < 0.5
    one, two = np.where(exchanged, two, one), np.where(exchanged, one, two)
    played = rng.uniform(size=len(one)) < 0.8
    host, guest = one[played], two[played]
    logits = 0.4 + truth[host] - truth[guest]
    won = (rng.uniform(size=len(host)) < 1 / (1 + np.exp(-logits))).astype(int)

    soft = 0.001 * 20  # deviation of the sum of all abilities from zero

    def model(host: Array, guest: Array, won: Array) -> None:
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        home = numpyro.sample("home", dist.Normal(0.0, 1.0))
        with numpyro.plate("teams", 20):
            abilities = numpyro.sample("abilities", dist.Normal(0.0, spread))
        numpyro.factor("zero_sum", dist.Normal(0.0, soft).log_prob(abilities.sum()))
        logits = home + abilities[host] - abilities[guest]
        numpyro.sample("won", dist.Bernoulli(logits=logits).to_event(1), obs=won)

    # Orthonormal directions along which the sum stays.
    contrasts = np.linalg.qr(np.column_stack([np.ones(20), np.eye(20)[:, 1:]]))[0][:, 1:]

    def abilities_of(spread: Array, z: Array, z_sum: Array) -> Array:
        total = z_sum / jnp.sqrt(1 / (20 * spread**2) + 1 / soft**2)
        return spread[..., None] * (z @ contrasts.T) + total[..., None] / 20

    def nuts_model(host: Array, guest: Array, won: Array) -> None:
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        home = numpyro.sample("home", dist.Normal(0.0, 1.0))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([19]).to_event(1))
        z_sum = numpyro.sample("z_sum", dist.Normal(0.0, 1.0))
        # Two normal densities of the sum, its prior and the factor, are one times this constant.
        both = dist.Normal(0.0, jnp.sqrt(20 * spread**2 + soft**2))
        numpyro.factor("zero_sum", both.log_prob(0.0))
        abilities = abilities_of(spread, z, z_sum)
        logits = home + abilities[host] - abilities[guest]
        numpyro.sample("won", dist.Bernoulli(logits=logits).to_event(1), obs=won)

    def from_nuts(draws: Draws) -> Draws:
        abilities = abilities_of(draws["spread"], draws["z"], draws["z_sum"])
        return {"spread": draws["spread"], "home": draws["home"], "abilities": abilities}

    data = to_arrays(host, guest, won)
    target = Target("bradley_terry", model, data, nuts_model=nuts_model, from_nuts=from_nuts)
    return Posterior(target, accept=0.9, float64=True)


def tobit() -> Posterior:
    """Micrograms a liter at twelve sites by depth, censored below 5, centered: d = 16."""
    rng = np.random.default_rng(1717)
    site_of = np.repeat(np.arange(12), [2, 3, 5, 4, 2, 6, 3, 4, 2, 5, 3, 4])
    depth = np.round(rng.uniform(2, 40, len(site_of)), 1)
    level = 7.5 + 1.6 * rng.standard_normal(12)[site_of] - 0.11 * depth
    truth = level + 2.2 * rng.standard_normal(len(site_of))
    below = truth < 5.0
    found = np.round(np.where(below, 5.0, truth), 2)

    def model(site_of: Array, depth: Array, below: Array, found: Array) -> None:
        mean = numpyro.sample("mean", dist.Normal(0.0, 20.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
        spread = numpyro.sample("spread", dist.HalfCauchy(2.5))
        noise = numpyro.sample("noise", dist.HalfCauchy(2.5))
        with numpyro.plate("sites", 12):
            levels = numpyro.sample("levels", dist.Normal(mean, spread))
        center = levels[site_of] + slope * depth
        with numpyro.plate("samples", len(found)):
            numpyro.sample("found", dist.Normal(center, noise).mask(~below), obs=found)
        censored = jnp.where(below, norm.logcdf((found - center) / noise), 0.0)
        numpyro.factor("below", censored.sum())

    target = in_coordinates(
        "tobit", model, to_arrays(site_of, depth, below, found),
        {"mean": around(7.0, 1.0), "slope": around(-0.1, 0.05), "levels": NONCENTERED},
    )  # fmt: skip
    return Posterior(target, accept=0.95, dense_mass=True, float64=True)


def exgaussian_rt() -> Posterior:
    """Milliseconds of 20 reactions of ten people, normal plus exponential, centered: d = 36."""
    rng = np.random.default_rng(1818)
    locations = rng.normal(420, 45, 10)[:, None]
    scales = 38 * np.exp(0.3 * rng.standard_normal(10))[:, None]
    tails = 110 * np.exp(0.4 * rng.standard_normal(10))[:, None]
    normal = locations + scales * rng.standard_normal((10, 20))
    times = np.round(normal + tails * rng.exponential(size=(10, 20)))

    def model(times: Array) -> None:
        location = numpyro.sample("location", dist.Normal(400.0, 200.0))
        location_spread = numpyro.sample("location_spread", dist.HalfNormal(100.0))
        scale = numpyro.sample("scale", dist.Normal(np.log(50.0), 1.0))
        scale_spread = numpyro.sample("scale_spread", dist.HalfNormal(0.5))
        tail = numpyro.sample("tail", dist.Normal(np.log(100.0), 1.0))
        tail_spread = numpyro.sample("tail_spread", dist.HalfNormal(0.5))
        with numpyro.plate("people", len(times)):
            locations = numpyro.sample("locations", dist.Normal(location, location_spread))
            scales = numpyro.sample("scales", dist.LogNormal(scale, scale_spread))
            tails = numpyro.sample("tails", dist.LogNormal(tail, tail_spread))
        locations, scales, tails = locations[:, None], scales[:, None], tails[:, None]
        rest, share = times - locations, scales / tails
        exponential = -jnp.log(tails) - rest / tails + 0.5 * share**2
        numpyro.factor("times", (exponential + norm.logcdf(rest / scales - share)).sum())

    target = in_coordinates(
        "exgaussian_rt", model, to_arrays(times),
        {
            "location": around(420.0, 15.0), "location_spread": ratio(43.0, 0.3),
            "scale": around(3.4, 0.3), "scale_spread": ratio(0.3, 0.5),
            "tail": around(4.7, 0.2), "tail_spread": ratio(0.4, 0.4),
            "locations": around(420.0, 40.0), **noncentered_logs("scales", "tails"),
        },
    )  # fmt: skip
    return Posterior(target, accept=0.95, float64=True)


def mrp() -> Posterior:
    """A poll of 700 by age, schooling and state, effects of all and of pairs, centered: d = 61."""
    rng = np.random.default_rng(1919)
    sizes = rng.dirichlet(np.full(20, 0.8))
    state = rng.choice(20, 700, p=sizes)
    age = rng.choice(6, 700, p=[0.12, 0.18, 0.18, 0.2, 0.18, 0.14])
    schooling = rng.choice(4, 700, p=[0.1, 0.4, 0.3, 0.2])
    male = rng.integers(0, 2, 700)
    republican = np.round(50 + 9 * rng.standard_normal(20), 1)  # percent of the last vote
    logits = (
        1.6 - 0.04 * republican[state] - 0.35 * male + 0.3 * rng.standard_normal(6)[age]
        + 0.35 * rng.standard_normal(4)[schooling] + 0.4 * rng.standard_normal(20)[state]
        + 0.2 * rng.standard_normal(24)[age * 4 + schooling]
    )  # fmt: skip
    agreed = (rng.uniform(size=700) < 1 / (1 + np.exp(-logits))).astype(int)

    def model(
        male: Array, republican: Array, age: Array, schooling: Array, state: Array, agreed: Array
    ) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
        of_male = numpyro.sample("of_male", dist.Normal(0.0, 2.0))
        of_republican = numpyro.sample("of_republican", dist.Normal(0.0, 2.0))
        spreads = {
            name: numpyro.sample(f"{name}_spread", dist.HalfNormal(1.0))
            for name in ("ages", "schoolings", "states", "pairs")
        }
        centers = {"states": intercept + of_republican * republican}
        effects = {}
        for (name, spread), size in zip(spreads.items(), (6, 4, 20, 24), strict=True):
            with numpyro.plate(f"every_{name}", size):
                prior = dist.Normal(centers.get(name, 0.0), spread)
                effects[name] = numpyro.sample(name, prior)
        logits = (
            of_male * male + effects["ages"][age] + effects["schoolings"][schooling]
            + effects["states"][state] + effects["pairs"][age * 4 + schooling]
        )  # fmt: skip
        numpyro.sample("agreed", dist.Bernoulli(logits=logits).to_event(1), obs=agreed)

    effects = dict.fromkeys(("ages", "schoolings", "states", "pairs"), NONCENTERED)
    target = in_coordinates(
        "mrp", model,
        to_arrays(male.astype(float), republican, age, schooling, state, agreed),
        {"of_republican": around(-0.02, 0.02), **effects},
    )  # fmt: skip
    return Posterior(target, accept=0.95, float64=True)
