"""Gaussian processes by tinygp: hyper-parameters by marginal likelihood, and exact posteriors."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax import Array, lax
from tinygp import GaussianProcess, kernels, transforms

# The least noise of observations, in standardised units.
LEAST_NOISE = 0.05
# White noise in function values, so that those at neighbouring inputs have a density in float32.
JITTER = 0.03


class Hyperparameters(NamedTuple):
    """Of a squared exponential with a length scale for each input."""

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
        """Function values at points (m, d), with the jitter."""
        process = GaussianProcess(self.kernel(), points, diag=jitter**2)
        return process.numpyro_dist()


def fit_hyperparameters(
    x: Array, y: Array, num_steps: int = 400, most_rows: int = 800
) -> Hyperparameters:
    """Maximise the marginal likelihood of (at most some of) the data, by Adam."""
    x, y = x[:most_rows], y[:most_rows]
    # Distances grow with the dimension, and length scales with them.
    scales = jnp.full(x.shape[1], 0.5 * jnp.log(x.shape[1]))
    start = Hyperparameters(jnp.zeros(()), scales, jnp.full((), -1.5))

    return _maximise(start, x, y, num_steps)


# Compiled once for all fits to as many rows: the methods of a table ask for it one after another.
@partial(jax.jit, static_argnums=3)
def _maximise(start: Hyperparameters, x: Array, y: Array, num_steps: int) -> Hyperparameters:
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
