"""Functions that are draws of a Gaussian process, corrected by data (Matheron's rule).

A draw f₀ of the prior becomes one of the posterior by an update through the data,

    f(x) = f₀(x) + k(x, X) A⁻¹ (y - f₀(X) - ε),   A = K + σ²,   ε ~ N(0, σ²),

with the covariance K of the function at the inputs X (Wilson et al. 2020, *Efficiently sampling
functions from Gaussian process posteriors*). With Gaussian noise that is exact. Here the targets
y and the sizes of the ε are parameters, which start there: under other noise the posterior is
another, and the functional objective finds it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random

from examples.functions.gp import Conditioned
from examples.functions.networks import AUXILIARY

# Prior functions: groups of them share their frequencies, and each also counts with its sign
# reversed, which leaves the mean at the exact one.
GROUPS, FUNCTIONS, FEATURES = 16, 32, 256


class PriorFunctions(NamedTuple):
    """Draws of a Gaussian process as sums of waves; their covariance is exact in expectation.

    There are S of them, in G groups; F frequencies of each part of the covariance.

    Attributes:
        frequencies: in radians per unit of the inputs, (G, P F, d).
        weights: of cosines and sines, (G, 2 P F, S/G).
    """

    frequencies: np.ndarray
    weights: np.ndarray

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """Values at points (m, d) -> (S, m)."""
        angles = points @ np.swapaxes(self.frequencies, 1, 2)
        waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=2)
        values = waves @ self.weights
        return np.moveaxis(values, 2, 1).reshape(-1, len(points))


def draw_prior(data: Conditioned, seed: int = 0) -> PriorFunctions:
    """Draws of the prior: waves whose frequencies have the spectral density of a covariance."""
    rng = np.random.default_rng(seed)
    amplitudes = np.exp(np.asarray(data.found.log_amplitudes, float))
    scales = np.exp(np.asarray(data.found.log_scales, float))
    frequencies, sizes = [], []
    for part, (amplitude, scale) in enumerate(zip(amplitudes, scales, strict=True)):
        drawn = rng.normal(size=(GROUPS, FEATURES, len(scale)))
        if part == 1:
            # The spectral density of Matérn-3/2 is Student's t with 3 degrees of freedom.
            drawn /= np.sqrt(rng.chisquare(3, (GROUPS, FEATURES, 1)) / 3)
        frequencies.append(drawn / scale)
        sizes.append(np.full(FEATURES, amplitude / FEATURES**0.5))
    # One weight of each cosine, then one of each sine.
    both = np.concatenate(2 * sizes)
    weights = both[:, None] * rng.normal(size=(GROUPS, len(both), FUNCTIONS))
    return PriorFunctions(np.concatenate(frequencies, axis=1), weights)


class Paths(NamedTuple):
    """Posterior functions at the data and the pool, before noise and learned shifts.

    Attributes:
        values: update of each prior function by the data without noise, (S, N + K).
        mean: posterior means, (N + K,).
        response: change of the values with the targets, (N + K, N).
        noise: standard deviation of observations with which the update was made.
    """

    values: Array
    mean: Array
    response: Array
    noise: Array

    def __call__(self, at: Array) -> Array:
        """A random function at inputs with these numbers (m,) -> (m,), inside a guide."""
        number = self.response.shape[1]
        shift = numpyro.param("shift", jnp.zeros(number))
        log_size = numpyro.param("log_size", jnp.zeros(number))
        drawn = random.randint(numpyro.prng_key(), (), 0, len(self.values))
        sign = random.rademacher(numpyro.prng_key(), (), self.mean.dtype)
        normal = dist.Normal(jnp.zeros(number), 1.0).to_event(1)
        unit = numpyro.sample("noise", normal, infer=AUXILIARY)
        change = self.noise * (shift + jnp.exp(log_size) * unit)
        return self.mean[at] + sign * self.values[drawn, at] + self.response[at] @ change


def make_paths(data: Conditioned, prior: PriorFunctions, pool: Array) -> Paths:
    """Posterior functions at the data and at the pool (K, d).

    Cost: O((N + K) N S) operations.
    """
    inputs = np.concatenate([data.x, np.asarray(pool, float)])
    response = data.cross(inputs) @ data.inverse
    drawn = prior(inputs)
    values = drawn - drawn[:, : len(data.x)] @ response.T
    found = values, response @ data.y, response, data.noise
    return Paths(*(jnp.asarray(np.asarray(leaf, np.float32)) for leaf in found))


def draw_paths(
    data: Conditioned, prior: PriorFunctions, shift: Array, log_size: Array, seed: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Functions of the guide: any points (m, d) -> (2 S, m), in float64.

    Every prior function counts twice, with either sign. Its update by the data is computed once,
    for all points.
    """
    targets = data.y + data.noise * np.asarray(shift, float)
    sizes = data.noise * np.exp(np.asarray(log_size, float))
    at_data = prior(data.x)
    unit = np.random.default_rng(seed).normal(size=at_data.shape)
    of_mean = data.inverse @ targets
    of_departure = data.inverse @ (at_data + sizes * unit).T

    def draw(points: np.ndarray) -> np.ndarray:
        across = data.cross(points)
        mean = across @ of_mean
        departure = prior(np.asarray(points, float)) - (across @ of_departure).T
        return np.concatenate([mean + departure, mean - departure])

    return draw
