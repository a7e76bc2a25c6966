"""Regressions and hierarchical models in NumPyro, with their data."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from sklearn.datasets import load_diabetes

from benchmarks.accuracy.targets import Target

__all__ = [
    "gaussian_process",
    "horseshoe",
    "linear",
    "negative_binomial",
    "poisson_mixed",
    "varying_slopes",
]


def _float(*arrays: np.ndarray) -> tuple[Array, ...]:
    return tuple(jnp.asarray(array, jnp.float32) for array in arrays)


def _diabetes() -> tuple[np.ndarray, np.ndarray]:
    """Ten collinear features of 442 patients and a response, all with mean 0 and variance 1."""
    features, response = load_diabetes(return_X_y=True)
    return features / features.std(0), (response - response.mean()) / response.std()


def linear() -> Target:
    """Linear regression with unknown noise and the conjugate prior, so that draws are exact."""
    features, response = _diabetes()
    num_rows, num_features = features.shape

    def model(features: Array, response: Array) -> None:
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
        scale = jnp.sqrt(variance)
        weights = numpyro.sample(
            "weights", dist.Normal(0, scale).expand([num_features]).to_event(1)
        )
        numpyro.sample("response", dist.Normal(features @ weights, scale), obs=response)

    precision = features.T @ features + np.eye(num_features)
    mean = np.linalg.solve(precision, features.T @ response)
    shape = 3 + num_rows / 2
    rate = 2 + (response @ response - mean @ precision @ mean) / 2
    root = np.linalg.inv(np.linalg.cholesky(precision))  # noise @ root has covariance P⁻¹

    def exact(key: Array, num_draws: int) -> Array:
        variance_key, noise_key = random.split(key)
        variance = rate / random.gamma(variance_key, shape, (num_draws,))
        noise = random.normal(noise_key, (num_draws, num_features)) @ jnp.asarray(root)
        weights = jnp.asarray(mean) + jnp.sqrt(variance)[:, None] * noise
        return jnp.column_stack([jnp.log(variance), weights])

    return Target("linear", model, _float(features, response), exact)


def horseshoe() -> Target:
    """Linear regression on the same data with a horseshoe prior in its usual product form."""
    features, response = _diabetes()

    def model(features: Array, response: Array) -> None:
        num_features = features.shape[1]
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        overall = numpyro.sample("overall", dist.HalfCauchy(0.3))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([num_features]).to_event(1))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([num_features]).to_event(1))
        predictor = features @ (overall * local * z)
        numpyro.sample("response", dist.Normal(predictor, scale), obs=response)

    return Target("horseshoe", model, _float(features, response))


def poisson_mixed() -> Target:
    """Poisson counts of 12 groups, each with its own intercept."""
    rng = np.random.default_rng(11)
    groups = np.repeat(np.arange(12), 5)
    x = rng.normal(size=60)
    effects = rng.normal(0, 0.6, size=12)
    counts = rng.poisson(np.exp(0.8 + 0.4 * x + effects[groups]))

    def model(x: Array, groups: Array, counts: Array) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0, 3))
        slope = numpyro.sample("slope", dist.Normal(0, 3))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", 12):
            effects = numpyro.sample("effects", dist.Normal(0, tau))
        rate = jnp.exp(intercept + slope * x + effects[groups])
        numpyro.sample("counts", dist.Poisson(rate), obs=counts)

    (x,) = _float(x)
    return Target("poisson_mixed", model, (x, jnp.asarray(groups), jnp.asarray(counts)))


def negative_binomial() -> Target:
    """Regression of overdispersed counts: an intercept, four weights and the concentration."""
    rng = np.random.default_rng(12)
    features = rng.normal(size=(100, 4))
    mean = np.exp(1 + features @ [0.5, -0.3, 0.2, 0.0])
    counts = rng.poisson(mean * rng.gamma(1.5, 1 / 1.5, size=100))

    def model(features: Array, counts: Array) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0, 3))
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([4]).to_event(1))
        concentration = numpyro.sample("concentration", dist.Gamma(2, 0.5))
        mean = jnp.exp(intercept + features @ weights)
        numpyro.sample("counts", dist.NegativeBinomial2(mean, concentration), obs=counts)

    (features,) = _float(features)
    return Target("negative_binomial", model, (features, jnp.asarray(counts)))


def varying_slopes() -> Target:
    """Eight groups with correlated intercepts and slopes, in the non-centered form."""
    rng = np.random.default_rng(13)
    groups = np.repeat(np.arange(8), 6)
    x = rng.normal(size=48)
    factor = np.array([[1.0, 0.0], [0.3, 0.4]])
    lines = np.array([1.0, -0.5]) + rng.normal(size=(8, 2)) @ factor.T
    y = lines[groups, 0] + lines[groups, 1] * x + 0.5 * rng.normal(size=48)

    def model(x: Array, groups: Array, y: Array) -> None:
        center = numpyro.sample("center", dist.Normal(0, 3).expand([2]).to_event(1))
        scales = numpyro.sample("scales", dist.HalfNormal(1).expand([2]).to_event(1))
        factor = numpyro.sample("factor", dist.LKJCholesky(2, 2.0))
        with numpyro.plate("groups", 8):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        lines = center + z @ (scales[:, None] * factor).T
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        numpyro.sample("y", dist.Normal(lines[groups, 0] + lines[groups, 1] * x, noise), obs=y)

    x, y = _float(x, y)
    return Target("varying_slopes", model, (x, jnp.asarray(groups), y))


def gaussian_process() -> Target:
    """Length-scale, amplitude and noise of a Gaussian process with 20 observations."""
    rng = np.random.default_rng(14)
    x = np.sort(rng.uniform(-2, 2, size=20))
    y = np.sin(2 * x) + 0.3 * rng.normal(size=20)

    def model(x: Array, y: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1))
        amplitude = numpyro.sample("amplitude", dist.LogNormal(0, 1))
        noise = numpyro.sample("noise", dist.LogNormal(-1, 1))
        squares = ((x[:, None] - x) / lengthscale) ** 2
        # The jitter is part of the model, so it is the same for all methods.
        covariance = amplitude**2 * jnp.exp(-squares / 2) + (noise**2 + 1e-4) * jnp.eye(len(x))
        zeros = jnp.zeros(len(x))
        numpyro.sample("y", dist.MultivariateNormal(zeros, covariance_matrix=covariance), obs=y)

    return Target("gaussian_process", model, _float(x, y))
