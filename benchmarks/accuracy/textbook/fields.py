"""Counts on a map and along a line, around fields of unknown smoothness."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws, Target, flat_prior
from benchmarks.accuracy.textbook.coordinates import (
    NONCENTERED,
    around,
    in_coordinates,
    ratio,
    to_arrays,
)

__all__ = ["gp_counts", "icar", "smooth_rw2"]


def _neighbors(rows: int, columns: int) -> np.ndarray:
    """Matrix (n, n) of ones where areas of a grid, row after row, share an edge, else zeros."""
    vertical, horizontal = (np.eye(n, k=1) + np.eye(n, k=-1) for n in (rows, columns))
    return np.kron(vertical, np.eye(columns)) + np.kron(np.eye(rows), horizontal)


def icar() -> Posterior:
    """Cases in 40 areas on outdoor work, a proper autoregression and noise of each: d = 85."""
    neighbors = _neighbors(5, 8)
    rng = np.random.default_rng(404)
    precision = 3.0 * (np.diag(neighbors.sum(1)) - 0.95 * neighbors)
    truth = np.linalg.solve(np.linalg.cholesky(precision).T, rng.standard_normal(40))
    expected = np.round(np.exp(rng.uniform(np.log(2), np.log(60), 40)), 1)
    outdoors = np.round(np.clip(rng.gamma(1.5, 6.0, 40), 0, 24))  # percent
    log_risk = -0.3 + 0.04 * outdoors + truth + 0.25 * rng.standard_normal(40)
    cases = rng.poisson(expected * np.exp(log_risk))

    def model(expected: Array, outdoors: Array, cases: Array) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
        noise_precision = numpyro.sample("noise_precision", dist.Gamma(3.2761, 1.81))
        field_precision = numpyro.sample("field_precision", dist.Gamma(1.0, 1.0))
        dependence = numpyro.sample("dependence", dist.Uniform(0.0, 1.0))
        adjacency = jnp.asarray(neighbors, expected.dtype)
        prior = dist.CAR(jnp.zeros(40), dependence, field_precision, adjacency)
        field = numpyro.sample("field", prior)
        with numpyro.plate("areas", 40):
            noise = numpyro.sample("noise", dist.Normal(0.0, 1.0 / jnp.sqrt(noise_precision)))
            log_rates = jnp.log(expected) + intercept + slope * outdoors + field + noise
            numpyro.sample("cases", dist.Poisson(jnp.exp(log_rates)), obs=cases)

    target = in_coordinates(
        "icar", model, to_arrays(expected, outdoors, cases),
        {"slope": around(0.05, 0.02), "noise": NONCENTERED},
    )  # fmt: skip
    return Posterior(target, accept=0.9, dense_mass=True, float64=True)


def smooth_rw2() -> Posterior:
    """Counts at 40 times around a second-order random walk, under a wide prior: d = 41."""
    rng = np.random.default_rng(808)
    times = np.linspace(0, 1, 40)
    counts = rng.poisson(np.exp(1.2 + 1.3 * np.sin(5.5 * times) + 0.8 * times))
    wide = dist.Normal(0.0, 10.0)

    def model(counts: Array) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        curve = numpyro.sample("curve", wide.expand([len(counts)]).to_event(1))
        steps = dist.Normal(2 * curve[1:-1] - curve[:-2], scale).log_prob(curve[2:])
        numpyro.factor("steps", steps.sum())
        numpyro.sample("counts", dist.Poisson(jnp.exp(curve)).to_event(1), obs=counts)

    # Second differences of ``bends @ z`` are independent standard normal numbers.
    _, lengths, right = np.linalg.svd(np.diff(np.eye(40), n=2, axis=0), full_matrices=False)
    bends = right.T / lengths
    lines = np.column_stack([np.ones(40), np.linspace(-1, 1, 40)])

    def curve_of(line: Array, scale: Array, z: Array) -> Array:
        return line @ lines.T + scale[..., None] * (z @ bends.T)

    def nuts_model(counts: Array) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        line = numpyro.sample("line", flat_prior(2))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([38]).to_event(1))
        curve = curve_of(line, scale, z)
        numpyro.factor("curve", wide.log_prob(curve).sum())
        numpyro.sample("counts", dist.Poisson(jnp.exp(curve)).to_event(1), obs=counts)

    def from_nuts(draws: Draws) -> Draws:
        curve = curve_of(draws["line"], draws["scale"], draws["z"])
        return {"scale": draws["scale"], "curve": curve}

    # Rates of rough curves overflow.
    smooth = handlers.reparam(nuts_model, config={"scale": ratio(0.07, 0.4)})
    target = Target("smooth_rw2", model, to_arrays(counts), nuts_model=smooth, from_nuts=from_nuts)
    return Posterior(target, accept=0.9, dense_mass=True, float64=True)


def gp_counts() -> Posterior:
    """Weekly counts on 40 days, whose log rate is a Gaussian process, non-centered: d = 43."""
    rng = np.random.default_rng(2020)
    days = np.unique(np.round(np.sort(rng.uniform(0, 280, 40))))
    while len(days) < 40:
        days = np.unique(np.append(days, np.round(rng.uniform(0, 280))))
    covariance = 0.8**2 * np.exp(-0.5 * ((days[:, None] - days) / 35.0) ** 2) + 1e-8 * np.eye(40)
    log_rates = 1.3 + np.linalg.cholesky(covariance) @ rng.standard_normal(40)
    counts = rng.poisson(np.exp(log_rates))

    def model(days: Array, counts: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(3.0, 100.0))
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(days)]).to_event(1))
        correlation = jnp.exp(-0.5 * ((days[:, None] - days) / lengthscale) ** 2)
        # The jitter is part of the model, so it is the same for all methods.
        factor = jnp.linalg.cholesky(correlation + 1e-4 * jnp.eye(len(days)))
        log_rates = level + amplitude * (factor @ z)
        numpyro.sample("counts", dist.Poisson(jnp.exp(log_rates)).to_event(1), obs=counts)

    target = in_coordinates(
        "gp_counts", model, to_arrays(days, counts), {"lengthscale": ratio(50.0, 0.5)}
    )
    return Posterior(target, accept=0.9, float64=True)
