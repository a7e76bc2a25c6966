"""Curves and maps whose smoothness is unknown: no element by itself has a size that varies."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws, Target, flat_prior

__all__ = ["moving_line", "smooth_counts", "smooth_map"]


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


def moving_line() -> Posterior:
    """A line whose level and slope wander for 40 weeks, all scales in one vector: d = 85."""
    rng = np.random.default_rng(403)
    level = 50 + np.cumsum(rng.normal(0, 1.5, 40))
    slope = 0.5 + np.cumsum(rng.normal(0, 0.08, 40))
    x = rng.normal(0, 3, 40)
    y = level + slope * x + rng.normal(0, 2, 40)

    def priors() -> tuple[Array, Array, Array]:
        scales = numpyro.sample("scales", dist.HalfNormal(3).expand([3]).to_event(1))
        level = numpyro.sample("first_level", dist.Normal(50, 20))
        return scales, level, numpyro.sample("first_slope", dist.Normal(0, 2))

    def observe(x: Array, y: Array, level: Array, slope: Array, noise: Array) -> None:
        numpyro.sample("y", dist.Normal(level + slope * x, noise), obs=y)

    def model(x: Array, y: Array) -> None:
        scales, level, slope = priors()
        levels = numpyro.sample("levels", dist.GaussianRandomWalk(scales[0], num_steps=40))
        slopes = numpyro.sample("slopes", dist.GaussianRandomWalk(0.1 * scales[1], num_steps=40))
        observe(x, y, level + levels, slope + slopes, scales[2])

    def moves(name: str) -> Array:
        return numpyro.sample(name, dist.Normal(0, 1).expand([40]).to_event(1))

    def walks(scales: Array, of_level: Array, of_slope: Array) -> tuple[Array, Array]:
        sizes = scales[..., :2] * jnp.array([1.0, 0.1])
        paths = jnp.cumsum(jnp.stack([of_level, of_slope], -2), -1) * sizes[..., None]
        return paths[..., 0, :], paths[..., 1, :]

    def nuts_model(x: Array, y: Array) -> None:
        scales, level, slope = priors()
        levels, slopes = walks(scales, moves("of_level"), moves("of_slope"))
        observe(x, y, level + levels, slope + slopes, scales[2])

    def from_nuts(draws: Draws) -> Draws:
        levels, slopes = walks(draws["scales"], draws["of_level"], draws["of_slope"])
        return draws | {"levels": levels, "slopes": slopes}

    arguments = (jnp.asarray(x, jnp.float32), jnp.asarray(np.round(y, 2), jnp.float32))
    target = Target("moving_line", model, arguments, nuts_model=nuts_model, from_nuts=from_nuts)
    return Posterior(target, float64=True)
