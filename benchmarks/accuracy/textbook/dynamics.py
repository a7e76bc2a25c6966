"""Curves in time that equations describe: populations, an epidemic, a drug, growth."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.equations import runge_kutta
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.textbook.coordinates import (
    around,
    in_coordinates,
    noncentered_logs,
    ratio,
    to_arrays,
)

__all__ = ["growth_curve", "lotka_volterra", "pharmacokinetics", "sir"]

_STEPS = 10  # to a unit of time


# --- Lotka and Volterra's equations ---------------------------------------------------------------

# Pelts in thousands, of the years 1900 to 1920: those of the Hudson's Bay Company.
_HARES = [
    *(30, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22, 25.4, 27.1),
    *(40.3, 57, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6, 16.2, 24.7),
]
_LYNX = [
    *(4, 6.1, 9.8, 35.2, 59.4, 41.7, 19, 13, 8.3, 9.1, 7.4),
    *(8, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7, 10.1, 8.6),
]


def lotka_volterra() -> Posterior:
    """Hares and lynx of 21 years: four rates, two first states and two noises, d = 8."""

    def model(seen: Array) -> None:
        center, spread = np.array([1.0, 0.05, 1.0, 0.05]), np.array([0.5, 0.05, 0.5, 0.05])
        rates = numpyro.sample("rates", dist.TruncatedNormal(center, spread, low=0.0).to_event(1))
        start = numpyro.sample("start", dist.LogNormal(np.log(10.0), 1.0).expand([2]).to_event(1))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0).expand([2]).to_event(1))

        def change(state: Array) -> Array:
            hares, lynx = state
            of_hares = (rates[0] - rates[1] * lynx) * hares
            return jnp.stack([of_hares, (-rates[2] + rates[3] * hares) * lynx])

        states = jnp.maximum(runge_kutta(change, start, len(seen) - 1, _STEPS), 1e-8)
        numpyro.sample("seen", dist.LogNormal(jnp.log(states), noise).to_event(2), obs=seen)

    # Far from the posterior, where populations die out, chains of NUTS stay.
    target = in_coordinates(
        "lotka_volterra", model, to_arrays(np.column_stack([_HARES, _LYNX])),
        {
            "rates": ratio([0.55, 0.028, 0.8, 0.024], 0.1),
            "start": ratio([33.0, 6.0], 0.1),
            "noise": ratio(0.25, 0.2),
        },
    )  # fmt: skip
    return Posterior(target, accept=0.9, dense_mass=True, float64=True)


# --- An epidemic ----------------------------------------------------------------------------------

_PUPILS = 763.0


def sir() -> Posterior:
    """Influenza in a boarding school, boys in bed on 14 days, counts overdispersed: d = 4."""
    in_bed = np.array([3, 8, 26, 76, 225, 298, 258, 233, 189, 128, 68, 29, 14, 4])

    def model(in_bed: Array) -> None:
        infection = numpyro.sample("infection", dist.TruncatedNormal(2.0, 1.0, low=0.0))
        recovery = numpyro.sample("recovery", dist.TruncatedNormal(0.4, 0.5, low=0.0))
        first = numpyro.sample("first", dist.LogNormal(0.0, 1.0))
        overdispersion = numpyro.sample("overdispersion", dist.Exponential(5.0))

        def change(state: Array) -> Array:
            susceptible, infected = state
            new = infection * susceptible * infected / _PUPILS
            return jnp.stack([-new, new - recovery * infected])

        states = runge_kutta(change, jnp.stack([_PUPILS - first, first]), len(in_bed), _STEPS)
        infected = jnp.maximum(states[1:, 1], 1e-6)
        counts = dist.NegativeBinomial2(infected, 1.0 / overdispersion).to_event(1)
        numpyro.sample("in_bed", counts, obs=in_bed)

    # Without an epidemic the number of infected has no gradient.
    target = in_coordinates(
        "sir", model, to_arrays(in_bed),
        {
            "infection": ratio(1.8, 0.1),
            "recovery": ratio(0.5, 0.1),
            "first": ratio(0.7, 0.5),
            "overdispersion": ratio(0.1, 0.5),
        },
    )  # fmt: skip
    return Posterior(target, accept=0.9, dense_mass=True, float64=True)


# --- A drug ---------------------------------------------------------------------------------------


def _concentration(
    hours: Any, dose: Any, absorption: Any, clearance: Any, volume: Any, exp: Any = jnp.exp
) -> Any:
    """Concentrations in one compartment after an oral dose, (subjects, hours); NumPy or JAX."""
    elimination = clearance / volume
    height = dose * absorption / (volume * (absorption - elimination))
    gone, absorbed = (exp(-rate[:, None] * hours) for rate in (elimination, absorption))
    return height[:, None] * (gone - absorbed)


def pharmacokinetics() -> Posterior:
    """Concentrations of a drug at ten times in twelve subjects, three parameters each: d = 43."""
    rng = np.random.default_rng(606)
    hours = np.array([0.25, 0.5, 1.0, 2.0, 3.5, 5.0, 7.0, 9.0, 12.0, 24.0])
    dose = np.array([320.0, 319, 320, 320, 320, 320, 310, 320, 267, 320, 320, 320])
    absorption = 1.5 * np.exp(0.65 * rng.standard_normal(12))
    clearance = 2.8 * np.exp(0.25 * rng.standard_normal(12))
    volume = 32 * np.exp(0.15 * rng.standard_normal(12))
    truth = _concentration(hours, dose, absorption, clearance, volume, np.exp)
    seen = np.round(truth * np.exp(0.2 * rng.standard_normal(truth.shape)), 2)

    def model(hours: Array, dose: Array, seen: Array) -> None:
        typical = {
            name: numpyro.sample(f"typical_{name}", dist.LogNormal(np.log(center), 1.0))
            for name, center in (("absorption", 1.0), ("clearance", 3.0), ("volume", 30.0))
        }
        spreads = numpyro.sample("spreads", dist.HalfNormal(1.0).expand([3]).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        with numpyro.plate("subjects", len(dose)):
            own = {
                name: numpyro.sample(name, dist.LogNormal(jnp.log(center), spread))
                for (name, center), spread in zip(typical.items(), spreads, strict=True)
            }
        # Where both rates are equal, as at the origin of unconstrained space, the formula is 0 / 0.
        equal = own["absorption"] == own["clearance"] / own["volume"]
        own["absorption"] = jnp.where(equal, 1.001, 1.0) * own["absorption"]
        # 1e-6 keeps the logarithm finite where the drug is gone.
        center = jnp.log(_concentration(hours, dose, **own) + 1e-6)
        numpyro.sample("seen", dist.LogNormal(center, noise).to_event(2), obs=seen)

    # Absorption slower than elimination fits as well, with little mass under these priors; chains
    # start where it is faster.
    target = in_coordinates(
        "pharmacokinetics", model, to_arrays(hours, dose, seen),
        {
            "typical_absorption": ratio(1.6, 0.2),
            "typical_clearance": ratio(2.7, 0.1),
            "typical_volume": ratio(32.0, 0.1),
            "spreads": ratio([0.7, 0.3, 0.15], 0.3),
            "noise": ratio(0.2, 0.1),
            "absorption": ratio(1.6, 0.4),
            "clearance": ratio(2.7, 0.2),
            **noncentered_logs("volume"),
        },
    )  # fmt: skip
    return Posterior(target, float64=True)


# --- Growth ---------------------------------------------------------------------------------------


def growth_curve() -> Posterior:
    """Grams of broilers at eight ages in eight pens, Gompertz's curve, centered: d = 13."""
    rng = np.random.default_rng(1111)
    days = np.array([1.0, 7, 14, 21, 28, 35, 42, 49])
    limits = rng.normal(5200, 450, 8)
    truth = limits[:, None] * np.exp(-4.6 * np.exp(-0.045 * days))
    grams = np.round(truth + 60 * rng.standard_normal(truth.shape))

    def model(days: Array, grams: Array) -> None:
        mean = numpyro.sample("mean", dist.Normal(5000.0, 2500.0))
        spread = numpyro.sample("spread", dist.HalfNormal(1000.0))
        delay = numpyro.sample("delay", dist.LogNormal(1.5, 0.5))
        rate = numpyro.sample("rate", dist.LogNormal(-3.0, 0.5))
        noise = numpyro.sample("noise", dist.HalfCauchy(100.0))
        with numpyro.plate("pens", len(grams)):
            limits = numpyro.sample("limits", dist.Normal(mean, spread))
        curves = limits[:, None] * jnp.exp(-delay * jnp.exp(-rate * days))
        numpyro.sample("grams", dist.Normal(curves, noise).to_event(2), obs=grams)

    target = in_coordinates(
        "growth_curve", model, to_arrays(days, grams),
        {
            "mean": around(5300.0, 250.0),
            "spread": ratio(450.0, 0.3),
            "delay": ratio(4.6, 0.02),
            "rate": ratio(0.045, 0.04),
            "noise": ratio(55.0, 0.1),
            "limits": around(5300.0, 400.0),
        },
    )  # fmt: skip
    return Posterior(target, accept=0.95, dense_mass=True, float64=True)
