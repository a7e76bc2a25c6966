"""A density learned from a simulator of functions by denoising, once and before inference.

Values of simulated functions at some points are often not a Gaussian vector: for piecewise-constant
functions, neighbors are equal except at a few jumps. Draws of a simulator cost little, so a network
can be trained on as many as it needs, where a kernel estimate is limited to some hundred draws.
Also, the white noise that gives the values a density is known, so the score can be learned without
derivatives of an unknown function: the best guess of the noise, given the noisy values, is the
score times the negative variance of the noise (Vincent 2011).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from numpyro_kscore._util.checks import check_count, check_positive
from numpyro_kscore._util.keys import check_key
from numpyro_kscore._util.linalg import eigh
from numpyro_kscore.sliced._network import (
    Layers,
    as_widths,
    init_layers,
    make_adam,
    network,
    take_step,
)

Sampler = Callable[[jax.Array, jax.Array], jax.Array]

# Number of draws for the Gaussian that the network starts from, and for the held-out losses.
MOMENT_DRAWS, HELD_OUT_DRAWS = 10_000, 4_000


class LearnedPriorInfo(NamedTuple):
    """Report of the training of a :class:`LearnedPrior`.

    A loss is the mean square error of the guessed noise, per point, in units of the jitter squared:
    1 means nothing learned; the exact score has the smallest loss, which is above 0.

    Attributes:
        losses: losses at every step, (num_steps,); NaN where a step was skipped.
        held_out: loss at draws that were not trained on.
        gaussian: loss, at the same draws, of the Gaussian with the prior's mean and covariance. If
            the two hardly differ, the prior is Gaussian, or the network has learned nothing.

    Example::

        from numpyro_kscore.functions import learn_prior


        def step(key, x):
            return jnp.where(x < random.uniform(key), -1.0, 1.0)


        x = jnp.linspace(0.0, 1.0, 8)
        prior = learn_prior(random.key(0), step, x, jitter=0.1, hidden_dims=(32,), num_steps=200)
        prior.info.raise_if_failed()
        prior.info.held_out < prior.info.gaussian  # True
    """

    losses: jax.Array
    held_out: jax.Array
    gaussian: jax.Array

    def raise_if_failed(self) -> None:
        """Raise ``FloatingPointError`` if a loss is not finite. Call it outside ``jit``."""
        if not bool(jnp.isfinite(self.held_out) & jnp.isfinite(self.gaussian)):
            raise FloatingPointError(
                "learn_prior: expected finite losses; got NaN or infinity. Look for values of the "
                "sampler that are not finite"
            )


class LearnedPrior(Distribution):
    """The distribution of a random function's values at some points, with a learned density.

    ``log p(f) = log N(f) + u(f) + constant``, where N is the Gaussian with the mean and covariance
    of the values, jitter included, and u is a perceptron. :func:`learn_prior` makes it.

    Attributes:
        points: inputs, (m, ...); the distribution is that of values at these, in this order.
        jitter: standard deviation of the white noise in the values.
        loc: mean of the values, (m,).
        root: symmetric root of their covariance, (m, m).
        inverse_root: inverse of the root.
        layers: weights and biases of u.
        info: report of the training.
        sampler: the simulator.

    Example::

        from numpyro_kscore.functions import learn_prior


        def step(key, x):
            return jnp.where(x < random.uniform(key), -1.0, 1.0)


        x = jnp.linspace(0.0, 1.0, 8)
        prior = learn_prior(random.key(0), step, x, jitter=0.1, hidden_dims=(32,), num_steps=200)
        values = prior.sample(random.key(1), (5,))
        values  # (5, 8)
        prior.log_prob(values)  # (5,)
    """

    support = constraints.real_vector
    pytree_data_fields = ("points", "jitter", "loc", "root", "inverse_root", "layers", "info")
    pytree_aux_fields = ("sampler",)

    def __init__(
        self,
        sampler: Sampler,
        points: jax.Array,
        jitter: jax.Array,
        loc: jax.Array,
        root: jax.Array,
        inverse_root: jax.Array,
        layers: Layers,
        info: LearnedPriorInfo,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.sampler, self.points, self.jitter = sampler, points, jitter
        self.loc, self.root, self.inverse_root = loc, root, inverse_root
        self.layers, self.info = layers, info
        super().__init__((), loc.shape, validate_args=validate_args)

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """Values of the simulator's functions with the noise; the learned density is not used."""
        check_key("key", key, "sample_shape")
        count = math.prod(sample_shape)
        values = _noisy(self.sampler, key, self.points, count, self.jitter)[0]
        return values.reshape(*sample_shape, *self.event_shape)

    @validate_sample
    def log_prob(self, value: Any, intermediates: Any = None) -> jax.Array:
        """The log density up to a constant: (..., m) -> (...)."""
        z = (jnp.asarray(value, self.loc.dtype) - self.loc) @ self.inverse_root
        return _log_density(self.layers, z)

    @property
    def mean(self) -> jax.Array:
        """Means of the values, (m,)."""
        return self.loc

    @property
    def variance(self) -> jax.Array:
        """Variances of the values, (m,)."""
        return jnp.sum(self.root**2, axis=1)


def learn_prior(
    key: jax.Array,
    sampler: Sampler,
    points: Any,
    *,
    jitter: Any,
    hidden_dims: tuple[int, ...] = (256, 256, 256),
    num_steps: int = 8_000,
    batch_size: int = 256,
    learning_rate: Any = 2e-3,
) -> LearnedPrior:
    """Learn the density of a simulator's functions at some points, with white noise added.

    The method is denoising score matching (Vincent 2011): it minimizes ``E|s(g + σε) + ε/σ|²`` over
    noise ε and draws g of the simulator, which are new at every step. The score s is the gradient
    of a Gaussian's log density plus a perceptron, in coordinates in which the covariance is the
    identity. The output layer starts at zero, so training starts from the Gaussian::

        prior = learn_prior(random.key(0), steps, jnp.concatenate([x, grid]), jitter=0.1)


        def model(x, y, grid):
            at = measure(x, pool=grid)  # all points of both, in this order
            f = numpyro.sample("f", prior)

    The guide needs the same noise: ``dist.Normal(network(at.points), jitter)``. A smaller jitter
    makes a sharper prior, which is harder to learn.

    Args:
        key: random key.
        sampler: ``(key, points (m, ...)) -> values (m,)`` of one random function; traced.
        points: inputs, (m, ...).
        jitter: σ, standard deviation of the noise, in units of the values.
        hidden_dims: widths of the hidden layers, at least one.
        num_steps: steps of Adam, with a step size that falls to zero along a cosine. A step whose
            gradient is not finite is skipped.
        batch_size: functions in a step.
        learning_rate: the first step size.

    Returns:
        A distribution of event shape (m,). Compare ``info.held_out`` with ``info.gaussian``.

    Raises:
        ImportError: if optax is not installed.
        TypeError: for counts that are not integers, or a key that is not a random key.
        ValueError: for values of another shape than (m,), or numbers that are not positive.

    Cost: num_steps forward and backward passes over the network and its gradient; 20 s on one core
    for 31 points and 4 000 steps.

    Example::

        from numpyro_kscore.functions import learn_prior


        def step(key, x):
            return jnp.where(x < random.uniform(key), -1.0, 1.0)


        x = jnp.linspace(0.0, 1.0, 8)
        prior = learn_prior(random.key(0), step, x, jitter=0.1, hidden_dims=(32,), num_steps=200)
        prior.info.losses  # (200,)
    """
    check_key("key", key, "the sampler")
    widths = as_widths("hidden_dims", hidden_dims)
    check_count("num_steps", num_steps)
    check_count("batch_size", batch_size)
    check_positive("jitter", jitter)
    check_positive("learning_rate", learning_rate)
    points = as_inputs("points", points)
    return _learn(key, sampler, points, jitter, widths, num_steps, batch_size, learning_rate)


def as_inputs(name: str, x: Any) -> jax.Array:
    """Inputs of functions, (m, ...), checked."""
    x = jnp.asarray(x)
    if x.ndim < 1 or x.shape[0] < 1:
        raise ValueError(f"{name}: expected shape (m, ...), one input a row; got {x.shape}")
    return x


def draw_functions(
    sampler: Sampler, key: jax.Array, points: jax.Array, num_draws: int
) -> jax.Array:
    """Draw values of random functions at points, (num_draws, m); not differentiated.

    Raises:
        ValueError: for values of another shape than (m,).
    """
    values = jax.vmap(lambda key: sampler(key, points))(random.split(key, num_draws))
    if values.shape != (num_draws, points.shape[0]):
        raise ValueError(
            f"sampler: expected values of shape ({points.shape[0]},), one at each point; got "
            f"{values.shape[1:]}"
        )
    return lax.stop_gradient(values)


@partial(jax.jit, static_argnums=(1, 4, 5, 6))
def _learn(
    key: jax.Array,
    sampler: Sampler,
    points: jax.Array,
    jitter: Any,
    hidden_dims: tuple[int, ...],
    num_steps: int,
    batch_size: int,
    learning_rate: Any,
) -> LearnedPrior:
    adam = make_adam("learn_prior")
    moment_key, init_key, train_key, test_key = random.split(key, 4)
    draws = draw_functions(sampler, moment_key, points, MOMENT_DRAWS)
    dtype, dim = draws.dtype, points.shape[0]
    jitter = jnp.asarray(jitter, dtype)
    mean = jnp.mean(draws, axis=0)
    centered = draws - mean
    # The noise's part is known, and keeps the covariance from being singular.
    covariance = centered.T @ centered / MOMENT_DRAWS + jitter**2 * jnp.eye(dim, dtype=dtype)
    values, vectors = eigh(covariance)
    # Rounding may leave an eigenvalue below the noise's variance, the lower bound.
    deviations = jnp.sqrt(jnp.maximum(values, jitter**2))
    # The symmetric root leaves every coordinate near its own point; a Cholesky factor does not, and
    # with it the score of functions with jumps was off by .54 of its mean square instead of .11
    # (31 points, 4 000 steps).
    root = (vectors * deviations) @ vectors.T
    inverse_root = (vectors / deviations) @ vectors.T

    def loss_of(layers: Layers, key: jax.Array, count: int) -> jax.Array:
        noisy, noise = _noisy(sampler, key, points, count, jitter)
        z = (noisy - mean) @ inverse_root
        score = jax.grad(lambda z: jnp.sum(_log_density(layers, z)))(z) @ inverse_root
        return jnp.mean(jnp.square(jitter * score + noise))

    def step(carry: Any, inputs: Any) -> tuple[Any, jax.Array]:
        layers, moments = carry
        key, rate = inputs
        return take_step(adam, lambda at: loss_of(at, key, batch_size), layers, moments, rate)

    start = init_layers(init_key, (dim, *hidden_dims, 1), dtype)
    fraction = jnp.arange(num_steps) / num_steps
    rates = (learning_rate * 0.5 * (1.0 + jnp.cos(jnp.pi * fraction))).astype(dtype)
    keys = random.split(train_key, num_steps)
    (layers, _), losses = lax.scan(step, (start, adam.init(start)), (keys, rates))
    # One loop serves both: two calls would be compiled twice.
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), layers, start)
    held_out, gaussian = lax.map(lambda each: loss_of(each, test_key, HELD_OUT_DRAWS), both)
    info = LearnedPriorInfo(losses, held_out, gaussian)
    return LearnedPrior(sampler, points, jitter, mean, root, inverse_root, layers, info)


def _log_density(layers: Layers, z: jax.Array) -> jax.Array:
    """Log density at coordinates (..., m) in which the covariance is the identity: (...)."""
    return network(layers, z)[..., 0] - 0.5 * jnp.sum(z * z, axis=-1)


def _noisy(
    sampler: Sampler, key: jax.Array, points: jax.Array, count: int, jitter: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Functions with white noise, and the noise in units of the jitter, (count, m) each."""
    draw_key, noise_key = random.split(key)
    values = draw_functions(sampler, draw_key, points, count)
    noise = random.normal(noise_key, values.shape, values.dtype)
    return values + jitter * noise, noise
