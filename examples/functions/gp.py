"""Gaussian processes with tinygp: hyperparameters by marginal likelihood, exact posteriors."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax import Array, lax
from scipy.linalg import cho_solve, cholesky, solve_triangular
from tinygp import GaussianProcess, kernels, transforms

# Lower limit of the noise of observations, in standardized units.
LEAST_NOISE = 0.05
# White noise in function values, so that their covariance is not singular in float32.
JITTER = 0.03


class Hyperparameters(NamedTuple):
    """Hyperparameters of a squared exponential kernel with a length scale for each input."""

    log_amplitude: Array
    log_scales: Array
    log_noise: Array

    @property
    def noise(self) -> Array:
        """Standard deviation of observations."""
        return LEAST_NOISE + jnp.exp(self.log_noise)

    def kernel(self) -> kernels.Kernel:
        """The covariance function."""
        shape = transforms.Linear(jnp.exp(-self.log_scales), kernels.ExpSquared())
        return jnp.exp(2 * self.log_amplitude) * shape

    def prior(self, points: Array, jitter: float = JITTER) -> dist.Distribution:
        """Distribution of function values at points (m, d), with the jitter."""
        process = GaussianProcess(self.kernel(), points, diag=jitter**2)
        return process.numpyro_dist()


def fit_hyperparameters(
    x: Array, y: Array, num_steps: int = 400, most_rows: int = 800
) -> Hyperparameters:
    """Maximize the marginal likelihood of at most ``most_rows`` rows with Adam."""
    x, y = x[:most_rows], y[:most_rows]
    # Initial length scales grow with the dimension, as distances do.
    scales = jnp.full(x.shape[1], 0.5 * jnp.log(x.shape[1]))
    start = Hyperparameters(jnp.zeros(()), scales, jnp.full((), -1.5))

    return _maximize(start, x, y, num_steps)


# Compiled once for all fits to the same number of rows.
@partial(jax.jit, static_argnums=3)
def _maximize(start: Hyperparameters, x: Array, y: Array, num_steps: int) -> Hyperparameters:
    def loss(values: Hyperparameters) -> Array:
        process = GaussianProcess(values.kernel(), x, diag=values.noise**2)
        return -process.log_probability(y) / len(y)

    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, num_steps))

    def step(carry: tuple, _: None) -> tuple:
        values, state = carry
        updates, state = optimizer.update(jax.grad(loss)(values), state)
        return (optax.apply_updates(values, updates), state), None

    return lax.scan(step, (start, optimizer.init(start)), None, length=num_steps)[0][0]


def exact_posterior(
    found: Hyperparameters, x: Array, y: Array, points: Array
) -> tuple[Array, Array]:
    """Means and standard deviations of the function at points, (m,) each."""
    process = GaussianProcess(found.kernel(), x, diag=found.noise**2)
    posterior = process.condition(y, points).gp
    return posterior.mean, jnp.sqrt(posterior.variance)


def information_ratio(
    found: Hyperparameters,
    x: Array,
    y: Array,
    pool: Array,
    batch_size: int,
    num_points: int,
    jitter: float = JITTER,
    num_sets: int = 16,
    seed: int = 0,
) -> float:
    """Ratio of the information about all function values to that about a measurement set's.

    This is the KL divergence of the exact posterior from the prior at the inputs of all data,
    divided by its mean at measurement sets. Divergences of neighboring values do not add up, so it
    is below N/B; it tends to 1 if a set determines the function.

    Args:
        found: the Gaussian process.
        x: inputs, (N, d).
        y: targets, (N,).
        pool: further inputs, (K, d).
        batch_size: B, rows of the data in a set.
        num_points: points of the pool in a set.
        jitter: standard deviation of the white noise in the values of a set.
        num_sets: measurement sets that are averaged over.
        seed: seed of the sets.

    Cost: O(N³) in float64, because the covariance of neighbors is singular in float32.
    """
    rng = np.random.default_rng(seed)
    variance, kernel = float(found.noise) ** 2, found.kernel()
    targets = np.asarray(y, float)
    joint = np.asarray(kernel(x, x), float) + variance * np.eye(len(x))
    root = cholesky(joint, lower=True, overwrite_a=True, check_finite=False)
    weights = cho_solve((root, True), targets)
    inverse = solve_triangular(root, np.eye(len(x)), lower=True, overwrite_b=True)
    # With prior covariance K and A = K + σ², the posterior has mean K A⁻¹ y and covariance
    # σ² K A⁻¹, so K need not be inverted.
    of_all = 0.5 * (
        variance * np.sum(inverse**2)
        - len(x)
        + targets @ weights
        - variance * weights @ weights
        + 2 * np.sum(np.log(np.diag(root)))
        - len(x) * np.log(variance)
    )

    def of_set(points: Array) -> float:
        prior = np.asarray(kernel(points, points), float) + jitter**2 * np.eye(len(points))
        across = np.asarray(kernel(x, points), float)
        half = inverse @ across
        posterior, mean = prior - half.T @ half, across.T @ weights
        trace, square = np.trace(np.linalg.solve(prior, posterior)), np.linalg.solve(prior, mean)
        log_dets = np.linalg.slogdet(prior)[1] - np.linalg.slogdet(posterior)[1]
        return float(0.5 * (trace - len(points) + mean @ square + log_dets))

    def drawn() -> Array:
        rows = rng.choice(len(x), batch_size, replace=False)
        return jnp.concatenate([x[rows], pool[rng.choice(len(pool), num_points, replace=False)]])

    return float(of_all / np.mean([of_set(drawn()) for _ in range(num_sets)]))
