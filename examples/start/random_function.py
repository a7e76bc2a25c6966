"""A guide that only draws: a network with random inputs, as a posterior of functions.

Counts of events over time have a log rate with a Gaussian process as prior. The guide draws a
whole function: a network of the time and of some noise, which is the same at all times. It has no
density, so no other objective of NumPyro can fit it; and it goes on at times that it never saw.
"""

import time

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import linen as nn
from jax import Array
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Predictive

from examples.start.methods import NUM_PARTICLES, Result
from numpyro_kscore import Implicit, ImplicitELBO

NUM_TIMES, NOISE_DIM = 20, 8
TIMES = jnp.linspace(-1, 1, NUM_TIMES)
# Nothing is known of the middle.
SEEN = jnp.abs(TIMES) > 0.25
LENGTH = 0.35


def simulate() -> Array:
    """Counts at the times."""
    log_rate = 1 + 1.2 * np.sin(3 * TIMES) + 0.8 * TIMES
    return jnp.asarray(np.random.default_rng(4).poisson(np.exp(log_rate)), jnp.float32)


def _covariance() -> Array:
    distance = (TIMES[:, None] - TIMES) / LENGTH
    return jnp.exp(-0.5 * distance**2) + 1e-4 * jnp.eye(NUM_TIMES)


def model(counts: Array) -> None:
    """A Gaussian process for the log rate; counts in the middle are not seen."""
    prior = dist.MultivariateNormal(jnp.ones(NUM_TIMES), _covariance())
    log_rate = numpyro.sample("log_rate", prior)
    with numpyro.handlers.mask(mask=SEEN):
        numpyro.sample("counts", dist.Poisson(jnp.exp(log_rate)), obs=counts)


class Network(nn.Module):
    """A perceptron from time and noise to the log rate."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Rows (m, inputs) to values (m,)."""
        for _ in range(2):
            x = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(1)(x)[..., 0]


def guide(counts: Array) -> None:
    """One random function, at all times."""
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(NOISE_DIM), 1).to_event(1), infer={"is_auxiliary": True}
    )
    inputs = jnp.column_stack([3 * TIMES, jnp.tile(noise, (NUM_TIMES, 1))])
    network = flax_module("network", Network(), input_shape=inputs.shape)
    numpyro.sample("log_rate", Implicit(network(inputs), 1))


def whitened(counts: Array) -> None:
    """The same model in coordinates that suit NUTS."""
    noise = numpyro.sample("noise", dist.Normal(jnp.zeros(NUM_TIMES), 1).to_event(1))
    root = jnp.linalg.cholesky(_covariance())
    log_rate = numpyro.deterministic("log_rate", 1 + root @ noise)
    with numpyro.handlers.mask(mask=SEEN):
        numpyro.sample("counts", dist.Poisson(jnp.exp(log_rate)), obs=counts)


def flatten(draws: dict[str, Array]) -> Array:
    """The functions, one row per draw."""
    return draws["log_rate"]


def fit_guide(key: Array, counts: Array, num_draws: int, num_steps: int) -> Result:
    """The guide by plain ``svi.run``."""
    start = time.perf_counter()
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))
    svi = SVI(model, guide, optimizer, ImplicitELBO(NUM_PARTICLES))
    params = svi.run(key, num_steps, counts).params
    draws = flatten(Predictive(guide, params=params, num_samples=num_draws)(key, counts))
    return Result(draws, time.perf_counter() - start, num_steps * NUM_PARTICLES)
