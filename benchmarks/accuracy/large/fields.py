"""A map of neighbors, points in a square, and smooth curves of several covariates."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from scipy.interpolate import BSpline

from benchmarks.accuracy.large.compared import LargePosterior
from benchmarks.accuracy.targets import Draws, Target, flat_prior
from benchmarks.accuracy.textbook.coordinates import to_arrays

__all__ = ["cox_process", "disease_map", "splines"]


def disease_map() -> LargePosterior:
    """Cases on a grid of 40 by 40 areas, intrinsic autoregression of neighbors: d = 1602.

    The sum of the field is held near zero, softly, as is usual. For NUTS the field is a sum of
    cosines, the eigenvectors of the autoregression.
    """
    rng = np.random.default_rng(521)
    side = 40
    moves = np.diff(np.eye(side), axis=0)
    values, waves = np.linalg.eigh(moves.T @ moves)
    sizes = values[:, None] + values
    sizes[0, 0] = 1 / (0.001 * side) ** 2  # of the mean, which the soft sum holds
    sizes = sizes**-0.5
    field = waves @ (sizes * rng.normal(size=(side, side))) @ waves.T
    expected = rng.uniform(1, 8, (side, side)).round(1)
    cases = rng.poisson(expected * np.exp(-0.1 + 0.35 * field))

    def priors() -> tuple[Array, Array]:
        return numpyro.sample("level", dist.Normal(0, 1)), numpyro.sample(
            "scale", dist.HalfNormal(1)
        )

    def model(expected: Array, cases: Array) -> None:
        level, scale = priors()
        field = numpyro.sample("field", flat_prior(side**2)).reshape(side, side)
        down, right = jnp.diff(field, axis=0), jnp.diff(field, axis=1)
        numpyro.factor("neighbors", -0.5 * (jnp.sum(down**2) + jnp.sum(right**2)))
        numpyro.factor("sum", dist.Normal(0, 0.001 * side**2).log_prob(field.sum()))
        rates = expected * jnp.exp(level + scale * field)
        numpyro.sample("cases", dist.Poisson(rates).to_event(2), obs=cases)

    def field_of(z: Array) -> Array:
        z = z.reshape(*z.shape[:-1], side, side)
        return jnp.asarray(waves) @ (jnp.asarray(sizes) * z) @ jnp.asarray(waves.T)

    def nuts_model(expected: Array, cases: Array) -> None:
        level, scale = priors()
        z = numpyro.sample("z", dist.Normal(0, 1).expand([side**2]).to_event(1))
        rates = expected * jnp.exp(level + scale * field_of(z))
        numpyro.sample("cases", dist.Poisson(rates).to_event(2), obs=cases)

    def from_nuts(draws: Draws) -> Draws:
        field = field_of(draws["z"]).reshape(-1, side**2)
        return {"level": draws["level"], "scale": draws["scale"], "field": field}

    data = to_arrays(expected, cases)
    return LargePosterior(
        Target("disease_map", model, data, nuts_model=nuts_model, from_nuts=from_nuts),
        scales=("level", "scale"),
        effects=lambda draws: draws["scale"][:, None] * draws["field"],
    )


def cox_process() -> LargePosterior:
    """Points counted in 32 by 32 cells, a Gaussian process of unknown length and size: d = 1027.

    The covariance is a product of exponentials of both coordinates. The model factors it as a
    dense matrix, 1024 by 1024; for NUTS that factor is the product of two of 32 by 32.
    """
    rng = np.random.default_rng(522)
    side = 32
    cells = np.arange(side) + 0.5

    def kernel(length: float) -> np.ndarray:
        return np.exp(-np.abs(cells[:, None] - cells) / length)

    factor = np.linalg.cholesky(kernel(8.0))
    field = factor @ rng.normal(size=(side, side)) @ factor.T
    counts = rng.poisson(np.exp(0.8 + 0.9 * field)).ravel()
    at = np.stack(np.meshgrid(cells, cells, indexing="ij"), -1).reshape(-1, 2)

    def priors() -> tuple[Array, Array, Array, Array]:
        level = numpyro.sample("level", dist.Normal(0, 2))
        size = numpyro.sample("size", dist.HalfNormal(2))
        length = numpyro.sample("length", dist.LogNormal(2, 0.5))
        return (
            level,
            size,
            length,
            numpyro.sample("z", dist.Normal(0, 1).expand([side**2]).to_event(1)),
        )

    def model(at: Array, counts: Array) -> None:
        level, size, length, z = priors()
        distances = jnp.abs(at[:, None] - at).sum(-1)
        factor = jnp.linalg.cholesky(jnp.exp(-distances / length))
        rates = jnp.exp(level + size * factor @ z)
        numpyro.sample("counts", dist.Poisson(rates).to_event(1), obs=counts)

    def field_of(length: Array, z: Array) -> Array:
        distances = jnp.abs(jnp.asarray(cells[:, None] - cells))
        factor = jnp.linalg.cholesky(jnp.exp(-distances / length[..., None, None]))
        field = factor @ z.reshape(*z.shape[:-1], side, side) @ jnp.swapaxes(factor, -1, -2)
        return field.reshape(*z.shape)

    def nuts_model(at: Array, counts: Array) -> None:
        level, size, length, z = priors()
        rates = jnp.exp(level + size * field_of(length, z))
        numpyro.sample("counts", dist.Poisson(rates).to_event(1), obs=counts)

    data = to_arrays(at, counts)
    return LargePosterior(
        Target("cox_process", model, data, nuts_model=nuts_model),
        scales=("level", "size", "length"),
        effects=lambda draws: draws["size"][:, None] * field_of(draws["length"], draws["z"]),
        # A whitening of all cells has a gradient that costs thirty times as much.
        dense_mass=[("level", "size", "length")],
        rival_warmup=50,
    )


def splines() -> LargePosterior:
    """Smooth curves of seven covariates, 43 coefficients each, 2000 rows: d = 317.

    A curve is a line and penalized splines, their coefficients in the units of the penalty.
    """
    rng = np.random.default_rng(523)
    curves, rows, pieces = 7, 2_000, 42
    x = rng.uniform(size=(rows, curves))
    wiggles = [np.sin(2 * np.pi * f * x[:, k]) for k, f in enumerate((0.5, 1, 1.5, 2, 3))]
    y = 2 + np.stack(wiggles, 1) @ [1.0, 0.6, 0.4, 0.5, 0.3] + 0.8 * x[:, 5]
    y = np.round(y + rng.normal(0, 0.7, rows), 3)
    knots = np.concatenate([np.full(3, 0.0), np.linspace(0, 1, pieces + 1), np.full(3, 1.0)])
    size = pieces + 3
    bends = np.diff(np.eye(size), n=2, axis=0)
    # Coefficients whose second differences are standard normal.
    shapes = bends.T @ np.linalg.inv(bends @ bends.T)
    bases = np.stack([BSpline.design_matrix(column, knots, 3).toarray() @ shapes for column in x.T])
    bases = bases - bases.mean(1, keepdims=True)

    def model(x: Array, bases: Array, y: Array) -> None:
        level = numpyro.sample("level", dist.Normal(0, 5))
        noise = numpyro.sample("noise", dist.HalfNormal(2))
        with numpyro.plate("curves", curves):
            slope = numpyro.sample("slope", dist.Normal(0, 2))
            scale = numpyro.sample("scale", dist.HalfNormal(0.1))
            z = numpyro.sample("z", dist.Normal(0, 1).expand([size - 2]).to_event(1))
        mean = level + (x - 0.5) @ slope + jnp.einsum("knc,kc->n", bases, scale[:, None] * z)
        with numpyro.plate("rows", rows):
            numpyro.sample("y", dist.Normal(mean, noise), obs=y)

    # Curves at five places each, where they are compared.
    places = bases[:, :: rows // 10, :][:, :10]

    def effects(draws: Draws) -> Array:
        coefficients = draws["scale"][..., None] * draws["z"]
        values = jnp.einsum("kpc,skc->skp", jnp.asarray(places, jnp.float32), coefficients)
        return values.reshape(len(values), -1)

    return LargePosterior(
        Target("splines", model, to_arrays(x, bases, y)),
        scales=("level", "slope", "scale", "noise"),
        effects=effects,
        near={"scale": [0.02] * 5 + [0.005] * 2, "noise": 0.7},
        others=("level", "slope", "z"),
    )
