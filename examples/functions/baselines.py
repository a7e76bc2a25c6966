"""Baselines for functional guides: a GP, posteriors over weights, ensembles, dropout, Laplace."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from scipy.special import ndtri
from sklearn.linear_model import BayesianRidge

from examples.functions.fit import (
    DRAWS,
    LEAST_NETWORK_NOISE,
    Fitted,
    Settings,
    learned_noise,
    run,
)
from examples.functions.gp import Hyperparameters, condition
from examples.functions.networks import initial_weights, perceptron

# Standard deviation of the noise around networks at the start, in standardized units.
START_NOISE = 0.2
# Quantiles of a Gaussian instead of draws, so that there is no sampling noise, (S, 1).
QUANTILES = ndtri((np.arange(DRAWS) + 0.5) / DRAWS)[:, None]


def weight_model(settings: Settings, x: Array, y: Array, noise: float) -> None:
    """A network with standard normal weights, scaled by the number of inputs of their unit."""
    widths = (x.shape[1], *settings.hidden, 1)
    weights = []
    for i, (size, width) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        unit = dist.Normal(jnp.zeros((size, width)), 1.0).to_event(2)
        kernel = numpyro.sample(f"kernel{i}", unit) * jnp.sqrt(2 / size)
        bias = numpyro.sample(f"bias{i}", dist.Normal(jnp.zeros(width), 1.0).to_event(1))
        weights.append((kernel, bias))
    sd = learned_noise(noise, LEAST_NETWORK_NOISE)
    size = min(settings.batch_size, len(y))
    with numpyro.plate("data", len(y), subsample_size=size) as rows:
        values = perceptron(weights, x[rows], settings.activation)
        numpyro.sample("y", dist.Normal(values, sd), obs=y[rows])


def weight_space(
    x: Array,
    y: Array,
    settings: Settings,
    key: Array,
    *,
    guide_class: Any,
    loss: Any,
) -> Fitted:
    """A Bayesian neural network with a posterior over weights from an automatic guide."""
    start = time.process_time()
    model = partial(weight_model, settings)
    guide = guide_class(model)
    result = run(model, guide, loss, settings, key, x, y, START_NOISE)
    weights = guide.sample_posterior(random.key(1), result.params, sample_shape=(DRAWS,))
    depth = range(len(settings.hidden) + 1)
    scales = [jnp.sqrt(2 / size) for size in (x.shape[1], *settings.hidden)]

    def one(drawn: dict[str, Array], points: Array) -> Array:
        layers = [(drawn[f"kernel{i}"] * scales[i], drawn[f"bias{i}"]) for i in depth]
        return perceptron(layers, points, settings.activation)

    draw = jax.jit(lambda points: jax.vmap(one, (0, None))(weights, points))
    sd = LEAST_NETWORK_NOISE + float(result.params["extra_noise"])
    return Fitted(draw, dist.Normal(0.0, sd), time.process_time() - start)


def gaussian_process(
    x: Array, y: Array, found: Hyperparameters, settings: Settings, key: Array
) -> Fitted:
    """The exact Gaussian process under Gaussian noise."""
    start = time.process_time()
    data = condition(found, x, y)

    def draw(points: Array) -> np.ndarray:
        mean, sd = data.moments(np.asarray(points))
        return mean + sd * QUANTILES

    return Fitted(draw, dist.Normal(0.0, found.noise), time.process_time() - start)


def train_networks(
    x: Array, y: Array, settings: Settings, key: Array, members: int, rate: float
) -> tuple[Any, Callable[..., Array]]:
    """Networks fitted by maximum likelihood.

    Args:
        x: inputs, (N, d).
        y: targets, (N,).
        settings: settings of the fit.
        key: random key.
        members: number of networks.
        rate: fraction of the hidden units that are left out at random.

    Returns:
        Weights and log noises, with a leading axis of members, and the function of weights, points
        (m, d) and a key -> values (m,).
    """
    widths = (x.shape[1], *settings.hidden, 1)
    num_steps, size = settings.num_steps, min(settings.batch_size, len(y))
    # The usual small weight decay; that of a standard normal prior would be 1/N.
    optimizer = optax.adamw(
        optax.cosine_decay_schedule(settings.step_size, num_steps), weight_decay=1e-4
    )

    def values(weights: Any, points: Array, key: Array) -> Array:
        kept = random.bernoulli(key, 1 - rate, settings.hidden[-1:]) / (1 - rate)
        kernel, bias = weights[-1]
        dropped = [*weights[:-1], (kernel * kept[:, None], bias)]
        return perceptron(dropped, points, settings.activation)

    def loss(params: Any, rows: Array, key: Array) -> Array:
        keys = random.split(key, len(rows))
        found = jax.vmap(lambda point, key: values(params[0], point[None], key)[0])(x[rows], keys)
        sd = LEAST_NETWORK_NOISE + jnp.exp(params[1])
        return -jnp.mean(dist.Normal(found, sd).log_prob(y[rows]))

    def fit_one(key: Array) -> Any:
        first, key = random.split(key)
        params = (initial_weights(first, widths, settings.frequency), jnp.array(-1.0))

        def step(carry: Any, key: Array) -> tuple[Any, None]:
            params, state = carry
            row_key, drop_key = random.split(key)
            rows = random.randint(row_key, (size,), 0, len(y))
            updates, state = optimizer.update(jax.grad(loss)(params, rows, drop_key), state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = (params, optimizer.init(params))
        return lax.scan(step, carry, random.split(key, num_steps))[0][0]

    return jax.jit(jax.vmap(fit_one))(random.split(key, members)), values


def point_networks(
    x: Array,
    y: Array,
    settings: Settings,
    key: Array,
    *,
    members: int,
    rate: float,
) -> Fitted:
    """A deep ensemble, or one network with dropout."""
    start = time.process_time()
    params, values = train_networks(x, y, settings, key, members, rate)
    noise = LEAST_NETWORK_NOISE + float(jnp.sqrt(jnp.mean(jnp.exp(2 * params[1]))))
    copies = 1 if rate == 0 else DRAWS // members

    @jax.jit
    def draw(points: Array) -> Array:
        keys = random.split(random.key(1), copies)
        of_member = jax.vmap(values, (None, None, 0))
        found = jax.vmap(of_member, (0, None, None))(params[0], points, keys)
        return found.reshape(-1, len(points))

    return Fitted(draw, dist.Normal(0.0, noise), time.process_time() - start)


def last_layer(x: Array, y: Array, settings: Settings, key: Array) -> Fitted:
    """One network whose last layer has its exact posterior, with hyperparameters by evidence."""
    start = time.process_time()
    params, _ = train_networks(x, y, settings, key, 1, 0.0)
    hidden = [tuple(leaf[0] for leaf in layer) for layer in params[0][:-1]]

    def units(points: Any) -> np.ndarray:
        points = jnp.asarray(points)
        for kernel, bias in hidden:
            points = settings.activation(points @ kernel + bias)
        return np.asarray(points, float)

    linear = BayesianRidge().fit(units(x), np.asarray(y, float))

    def draw(points: Any) -> np.ndarray:
        mean, sd = linear.predict(units(points), return_std=True)
        # The deviations of scikit-learn include the noise.
        of_function = np.sqrt(np.maximum(sd**2 - 1 / linear.alpha_, 0.0))
        return mean + of_function * QUANTILES

    noise = dist.Normal(0.0, float(linear.alpha_) ** -0.5)
    return Fitted(draw, noise, time.process_time() - start)


def automatic(loss: Callable[[], Any], guide_class: Any, longer: int = 1) -> Callable[..., Fitted]:
    """:func:`weight_space` with a guide, a loss and ``longer`` times as many steps."""

    def run_longer(x: Array, y: Array, settings: Settings, key: Array) -> Fitted:
        settings = replace(settings, num_steps=longer * settings.num_steps)
        return weight_space(x, y, settings, key, guide_class=guide_class, loss=loss())

    return run_longer
