"""Curves and maps whose smoothness is unknown, written as a factor: no prior says what scales."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws, Target, flat_prior

__all__ = ["smooth_counts", "smooth_map"]


def _field(name: str, precision: np.ndarray, counts: np.ndarray, exposures: np.ndarray) -> Target:
    """Poisson counts whose log rates have an improper Gaussian prior of unknown scale.

    Args:
        name: of the target.
        precision: that of the log rates at a scale of 1, (n, n), of less than full rank.
        counts: shape (n,).
        exposures: shape (n,).
    """
    size = len(counts)
    values, vectors = np.linalg.eigh(precision)
    flat = int(np.sum(values < 1e-8))
    # Of the flat directions, and of the others at a scale of 1.
    levels, shapes = vectors[:, :flat], vectors[:, flat:] / np.sqrt(values[flat:])

    def model(counts: Array, exposures: Array) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        field = numpyro.sample("field", flat_prior(size))
        square = field @ jnp.asarray(precision, field.dtype) @ field
        numpyro.factor("smoothness", -0.5 * square / scale**2 - (size - flat) * jnp.log(scale))
        numpyro.sample("counts", dist.Poisson(exposures * jnp.exp(field)), obs=counts)

    def field_of(level: Array, scale: Array, z: Array) -> Array:
        return level @ levels.T + scale[..., None] * (z @ shapes.T)

    def nuts_model(counts: Array, exposures: Array) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        level = numpyro.sample("level", flat_prior(flat))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([size - flat]).to_event(1))
        log_rates = field_of(level, scale, z)
        numpyro.sample("counts", dist.Poisson(exposures * jnp.exp(log_rates)), obs=counts)

    def from_nuts(draws: Draws) -> Draws:
        field = field_of(draws["level"], draws["scale"], draws["z"])
        return {"scale": draws["scale"], "field": field}

    data = tuple(jnp.asarray(a, jnp.float32) for a in (counts, exposures))
    return Target(name, model, data, nuts_model=nuts_model, from_nuts=from_nuts)


def smooth_counts() -> Posterior:
    """Weekly counts around a curve of unknown smoothness, a second-order random walk: d = 41."""
    rng = np.random.default_rng(310)
    weeks = np.arange(40)
    counts = rng.poisson(np.exp(2 + 1.2 * np.sin(weeks / 6) + 0.02 * weeks))
    bends = np.diff(np.eye(40), n=2, axis=0)
    return Posterior(_field("smooth_counts", bends.T @ bends, counts, np.ones(40)))


def smooth_map() -> Posterior:
    """Cases in 36 areas, a grid of which neighbors are alike, intrinsic autoregression: d = 37."""
    rng = np.random.default_rng(311)
    moves = np.diff(np.eye(6), axis=0)
    edges = np.concatenate([np.kron(moves, np.eye(6)), np.kron(np.eye(6), moves)])
    precision = edges.T @ edges
    values, vectors = np.linalg.eigh(precision)
    risk = 0.8 * vectors[:, 1:] @ (rng.normal(size=35) / np.sqrt(values[1:]))
    exposures = rng.uniform(2, 30, 36).round(1)
    counts = rng.poisson(exposures * np.exp(-0.2 + risk))
    return Posterior(_field("smooth_map", precision, counts, exposures))
