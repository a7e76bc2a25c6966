"""Gaussian processes with tinygp: hyperparameters by marginal likelihood, exact posteriors.

The covariance of regression is a sum of two: a squared exponential one for what is smooth and a
Matérn one for what is rough, each with a length scale for each input.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from scipy.linalg import lapack
from scipy.optimize import minimize
from tinygp import GaussianProcess, kernels, transforms
from tinygp.kernels import distance as distances

# Shapes of the covariance's parts, in the order of their hyperparameters.
SHAPES = (kernels.ExpSquared(), kernels.Matern32(distance=distances.L2Distance()))
# Lower limit of the noise of observations, in standardized units.
LEAST_NOISE = 0.005
# White noise in function values, so that their covariance is not singular in float32.
JITTER = 0.03
# Standard deviations of the weak normal priors of logarithms, of length scales around 2 and of
# amplitudes around 1.
SCALE_PRIOR, AMPLITUDE_PRIOR = 1.5, 1.0
# The marginal likelihood has several maxima. The fit starts at each of these log noises, and the
# best result counts.
STARTS = (-1.5, -3.0)


class Hyperparameters(NamedTuple):
    """Hyperparameters of a sum of covariances, with a length scale for each input in each of them.

    Attributes:
        log_amplitudes: logarithms of standard deviations, (P,).
        log_scales: logarithms of length scales, (P, d).
        log_noise: logarithm of the standard deviation of the noise, less its lower limit.
        least_noise: lower limit of the noise, in standardized units.
    """

    log_amplitudes: Array
    log_scales: Array
    log_noise: Array
    least_noise: Array | float = LEAST_NOISE

    @property
    def noise(self) -> Array:
        """Standard deviation of observations."""
        return lax.stop_gradient(self.least_noise) + jnp.exp(self.log_noise)

    def kernel(self) -> kernels.Kernel:
        """The covariance function."""
        parts = [
            jnp.exp(2 * log_amplitude) * transforms.Linear(jnp.exp(-log_scales), shape)
            for shape, log_amplitude, log_scales in zip(
                SHAPES, self.log_amplitudes, self.log_scales, strict=False
            )
        ]
        return sum(parts[1:], start=parts[0])

    def prior(self, points: Array, jitter: float = JITTER) -> dist.Distribution:
        """Distribution of function values at points (m, d), with the jitter."""
        process = GaussianProcess(self.kernel(), points, diag=jitter**2)
        return process.numpyro_dist()


def fit_hyperparameters(
    x: Array,
    y: Array,
    least_noise: float = LEAST_NOISE,
    *,
    num_parts: int = len(SHAPES),
    most_rows: int = 700,
    most_steps: int = 80,
) -> Hyperparameters:
    """Maximize the marginal likelihood of at most ``most_rows`` rows by L-BFGS.

    Args:
        x: inputs, (N, d).
        y: targets, (N,).
        least_noise: lower limit of the noise.
        num_parts: parts of the covariance, the first of ``SHAPES``.
        most_rows: the fit uses the first rows, at most so many.
        most_steps: limit on the steps from each start.

    Cost: O(most_rows³) a step, in float64, since noise may be a thousandth of the amplitude.
    """
    dtype, dim = x.dtype, x.shape[1]
    with jax.enable_x64(True):
        given = np.asarray(x[:most_rows], float), np.asarray(y[:most_rows], float)
        parts = np.arange(float(num_parts))
        # Initial length scales grow with the dimension, as distances do; the rough part starts
        # lower and shorter than the smooth one.
        scales = np.full((num_parts, dim), 0.5 * np.log(dim)) - 0.4 * parts[:, None]
        least = np.asarray(least_noise, float)
        starts = [
            Hyperparameters(-0.7 * parts, scales, np.asarray(start), least) for start in STARTS
        ]
        restore = ravel_pytree(starts[0])[1]

        def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = _loss(restore(flat), *given)
            return float(value), np.asarray(ravel_pytree(gradient)[0])

        options = {"maxiter": most_steps}
        found = [
            minimize(loss, np.asarray(ravel_pytree(start)[0]), jac=True, method="L-BFGS-B",
                     options=options)
            for start in starts
        ]  # fmt: skip
        best = restore(min(found, key=lambda each: each.fun).x)
        rounded = [np.asarray(leaf, dtype) for leaf in best]
    return Hyperparameters(*map(jnp.asarray, rounded))


# Compiled once for all fits to the same number of rows.
@jax.jit
@jax.value_and_grad
def _loss(values: Hyperparameters, x: Array, y: Array) -> Array:
    """Negative log marginal likelihood and log prior, per row."""
    process = GaussianProcess(values.kernel(), x, diag=values.noise**2)
    scales = dist.Normal(np.log(2), SCALE_PRIOR).log_prob(values.log_scales)
    amplitudes = dist.Normal(0.0, AMPLITUDE_PRIOR).log_prob(values.log_amplitudes)
    return -(process.log_probability(y) + jnp.sum(scales) + jnp.sum(amplitudes)) / len(y)


class Conditioned(NamedTuple):
    """A Gaussian process with data, in float64.

    Attributes:
        found: the hyperparameters.
        x: inputs, (N, d).
        y: targets, (N,).
        inverse: inverse of the covariance of the targets, (N, N).
    """

    found: Hyperparameters
    x: np.ndarray
    y: np.ndarray
    inverse: np.ndarray

    @property
    def noise(self) -> float:
        """Standard deviation of observations."""
        return float(self.found.noise)

    def cross(self, points: np.ndarray) -> np.ndarray:
        """Prior covariance of values at points (m, d) and at the data, (m, N)."""
        return covariance(self.found, points, self.x)

    def moments(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations of the posterior at points (m, d), (m,) each."""
        across = self.cross(points)
        half = across @ self.inverse
        # The covariance is a sum of stationary ones.
        prior = np.sum(np.exp(2 * np.asarray(self.found.log_amplitudes, float)))
        variance = prior - np.einsum("mn,mn->m", half, across)
        return half @ self.y, np.sqrt(np.maximum(variance, 0.0))


def covariance(found: Hyperparameters, points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Prior covariance of values at two sets of inputs, (m, d) and (k, d) -> (m, k)."""
    with jax.enable_x64(True):
        wide = Hyperparameters(*(jnp.asarray(np.asarray(leaf, float)) for leaf in found))
        return np.array(_covariance(wide, np.asarray(points, float), np.asarray(others, float)))


@jax.jit
def _covariance(found: Hyperparameters, points: Array, others: Array) -> Array:
    return found.kernel()(points, others)


def condition(found: Hyperparameters, x: Array, y: Array) -> Conditioned:
    """Condition on all data. Cost: O(N³) and 16 N² bytes, in float64."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    joint = covariance(found, x, x)
    joint[np.diag_indices_from(joint)] += float(found.noise) ** 2
    root = lapack.dpotrf(joint, lower=1)[0]
    lower = np.tril(lapack.dpotri(root, lower=1, overwrite_c=1)[0])
    return Conditioned(found, x, y, lower + np.tril(lower, -1).T)


def information_ratio(
    data: Conditioned,
    pool: Array,
    batch_size: int,
    num_points: int,
    jitter: float = JITTER,
    num_sets: int = 16,
    seed: int = 0,
) -> float:
    """Ratio of the information about all function values to that about a measurement set's.

    This is the KL divergence of the posterior from the prior at the inputs of all data, divided by
    its mean at measurement sets. Divergences of neighboring values do not add up, so it is below
    N/B; it tends to 1 if a set determines the function.

    Args:
        data: the Gaussian process with its data.
        pool: further inputs, (K, d).
        batch_size: B, rows of the data in a set.
        num_points: points of the pool in a set.
        jitter: standard deviation of the white noise in the values of a set.
        num_sets: measurement sets that are averaged over.
        seed: seed of the sets.
    """
    rng = np.random.default_rng(seed)
    x, y, variance, precision = data.x, data.y, data.noise**2, data.inverse
    weights = precision @ y
    # With prior covariance K and A = K + σ², the posterior has mean K A⁻¹ y and covariance
    # σ² K A⁻¹, so K need not be inverted.
    log_det = -np.linalg.slogdet(precision)[1]
    of_all = 0.5 * (
        variance * np.trace(precision) - len(x) + weights @ y - variance * weights @ weights
        + log_det - len(x) * np.log(variance)
    )  # fmt: skip

    def of_set(points: np.ndarray) -> float:
        prior = covariance(data.found, points, points) + jitter**2 * np.eye(len(points))
        across = data.cross(points)
        posterior, mean = prior - across @ precision @ across.T, across @ weights
        trace, square = np.trace(np.linalg.solve(prior, posterior)), np.linalg.solve(prior, mean)
        log_dets = np.linalg.slogdet(prior)[1] - np.linalg.slogdet(posterior)[1]
        return float(0.5 * (trace - len(points) + mean @ square + log_dets))

    def drawn() -> np.ndarray:
        rows = rng.choice(len(x), batch_size, replace=False)
        others = np.asarray(pool, float)[rng.choice(len(pool), num_points, replace=False)]
        return np.concatenate([x[rows], others])

    return float(of_all / np.mean([of_set(drawn()) for _ in range(num_sets)]))
