"""Six ways to regress, under one roof: data in, random functions and a noise level out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy.special import ndtri

from examples.functional_gp import (
    JITTER,
    LEAST_NOISE,
    Hyperparameters,
    exact_posterior,
    fit_hyperparameters,
)
from examples.functional_networks import RandomFunction, initial_weights, perceptron
from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore.functions import measure

# Functions behind a prediction.
DRAWS = 500
# Rows that the exact Gaussian process is conditioned on; a larger set is thinned at random.
MOST_ROWS = 3000
# Independent Gaussian weights come to rest ten times later than functions do; their steps are
# cheap.
WEIGHT_STEPS = 10


@dataclass(frozen=True)
class Settings:
    """Of a fit.

    Attributes:
        num_steps: of Adam, with a step size that falls to zero along a cosine.
        step_size: the first.
        batch_size: rows of the data a step.
        num_points: further points of a measurement set.
        num_particles: functions a step.
        hidden: widths of hidden layers.
        activation: of hidden units.
        frequency: how much larger the first layer's weights start.
    """

    num_steps: int = 6000
    step_size: float = 5e-3
    batch_size: int = 20
    num_points: int = 5
    num_particles: int = 100
    hidden: tuple[int, ...] = (50,)
    activation: Callable[[Array], Array] = jax.nn.relu
    frequency: float = 1.0


class Fitted(NamedTuple):
    """Random functions.

    Attributes:
        draw: inputs (m, d) -> values of functions at them, (S, m).
        noise: standard deviation of observations.
        seconds: what the fit took.
    """

    draw: Callable[[Any], Array]
    noise: float
    seconds: float


# (arguments, points (m, d)) -> distribution of values (m,)
Prior = Callable[[Any, Array], dist.Distribution]


def uniform_pool(key: Array, x: Array, count: int = 4000, margin: float = 0.1) -> Array:
    """Inputs spread evenly over the box of the data and a margin around it."""
    low, high = jnp.min(x, axis=0), jnp.max(x, axis=0)
    wider = margin * (high - low)
    return random.uniform(key, (count, x.shape[1]), minval=low - wider, maxval=high + wider)


def run(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    loss: Any,
    settings: Settings,
    key: Array,
    *args: Any,
) -> Any:
    """SVI with the common optimiser; steps that are not finite are skipped.

    Data are arguments, not constants, so that a program compiled for one seed serves the next.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(settings.step_size, settings.num_steps))
    svi = SVI(model, guide, optimizer, loss)
    result = svi.run(key, settings.num_steps, *args, progress_bar=False, stable_update=True)
    # What is timed is the fit, not its start.
    return jax.block_until_ready(result)


def learned_noise(start: Any) -> Array:
    """The noise of observations, a parameter of the model."""
    positive = constraints.greater_than(0.99 * LEAST_NOISE)
    return numpyro.param("noise", jnp.maximum(start, LEAST_NOISE), constraint=positive)


def functional(
    x: Array,
    y: Array,
    prior: Prior,
    prior_args: Any,
    noise: Any,
    settings: Settings,
    key: Array,
    *,
    pool: Array,
    function: Callable[[Array], Array],
    jitter: float = JITTER,
    learn_noise: bool = True,
    num_draws: int = DRAWS,
) -> tuple[Fitted, Any]:
    """A functional Bayesian neural network, and what SVI returned."""
    start = time.perf_counter()
    batch_size, num_points = min(settings.batch_size, len(y)), settings.num_points

    def model(x: Array, y: Array, pool: Array, prior_args: Any, noise: Array) -> None:
        at = measure(x, batch_size, pool, num_points)
        f = numpyro.sample("f", prior(prior_args, at.points))
        sd = learned_noise(noise) if learn_noise else noise
        with at.data:
            numpyro.sample("y", dist.Normal(at.of_data(f), sd), obs=y[at.rows])

    def guide(x: Array, y: Array, pool: Array, prior_args: Any, noise: Array) -> None:
        at = measure(x, batch_size, pool, num_points)
        numpyro.sample("f", dist.Normal(function(at.points), jitter).to_event(1))

    loss = ImplicitELBO(settings.num_particles, base="moments")
    result = run(model, guide, loss, settings, key, x, y, pool, prior_args, jnp.asarray(noise))
    sd = float(result.params["noise"]) if learn_noise else float(noise)

    def values(points: Array) -> None:
        numpyro.deterministic("f", function(points))

    predictive = Predictive(values, params=result.params, num_samples=num_draws, parallel=True)
    draw = jax.jit(lambda points: predictive(random.key(1), points)["f"])
    return Fitted(draw, sd, time.perf_counter() - start), result


def functional_network(
    x: Array, y: Array, found: Hyperparameters, settings: Settings, key: Array
) -> Fitted:
    """With the Gaussian process as its prior, and Gaussian weights as its noise."""
    function = RandomFunction("gaussian", settings.hidden, settings.activation, settings.frequency)
    pool = uniform_pool(random.key(2), x)
    prior = Hyperparameters.prior
    return functional(x, y, prior, found, found.noise, settings, key, pool=pool, function=function)[
        0
    ]


def weight_model(settings: Settings, x: Array, y: Array, noise: Array) -> None:
    """A network with standard normal weights, scaled by the inputs of their unit."""
    widths = (x.shape[1], *settings.hidden, 1)
    weights = []
    for i, (size, width) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        unit = dist.Normal(jnp.zeros((size, width)), 1.0).to_event(2)
        kernel = numpyro.sample(f"kernel{i}", unit) * jnp.sqrt(2 / size)
        bias = numpyro.sample(f"bias{i}", dist.Normal(jnp.zeros(width), 1.0).to_event(1))
        weights.append((kernel, bias))
    sd = learned_noise(noise)
    size = min(settings.batch_size, len(y))
    with numpyro.plate("data", len(y), subsample_size=size) as rows:
        values = perceptron(weights, x[rows], settings.activation)
        numpyro.sample("y", dist.Normal(values, sd), obs=y[rows])


def weight_space(
    x: Array,
    y: Array,
    found: Hyperparameters,
    settings: Settings,
    key: Array,
    *,
    guide_class: Any,
    loss: Any,
) -> Fitted:
    """A Bayesian neural network with a posterior over weights, by an automatic guide."""
    start = time.perf_counter()
    model = partial(weight_model, settings)
    guide = guide_class(model)
    result = run(model, guide, loss, settings, key, x, y, found.noise)
    weights = guide.sample_posterior(random.key(1), result.params, sample_shape=(DRAWS,))
    depth = range(len(settings.hidden) + 1)
    scales = [jnp.sqrt(2 / size) for size in (x.shape[1], *settings.hidden)]

    def one(drawn: dict[str, Array], points: Array) -> Array:
        layers = [(drawn[f"kernel{i}"] * scales[i], drawn[f"bias{i}"]) for i in depth]
        return perceptron(layers, points, settings.activation)

    draw = jax.jit(lambda points: jax.vmap(one, (0, None))(weights, points))
    return Fitted(draw, float(result.params["noise"]), time.perf_counter() - start)


def gaussian_process(
    x: Array, y: Array, found: Hyperparameters, settings: Settings, key: Array
) -> Fitted:
    """The exact Gaussian process, conditioned on at most 3000 rows."""
    start = time.perf_counter()
    x, y = x[:MOST_ROWS], y[:MOST_ROWS]
    # Equally likely values stand for a Gaussian: no noise of draws.
    levels = jnp.asarray(ndtri((np.arange(DRAWS) + 0.5) / DRAWS), x.dtype)

    @jax.jit
    def draw(points: Array) -> Array:
        mean, sd = exact_posterior(found, x, y, points)
        return mean + sd * levels[:, None]

    draw(x[:1]).block_until_ready()
    return Fitted(draw, float(found.noise), time.perf_counter() - start)


def point_networks(
    x: Array,
    y: Array,
    found: Hyperparameters,
    settings: Settings,
    key: Array,
    *,
    members: int,
    rate: float,
) -> Fitted:
    """Networks fitted by maximum likelihood, a deep ensemble; or one with dropout."""
    start = time.perf_counter()
    widths = (x.shape[1], *settings.hidden, 1)
    num_steps, size = settings.num_steps, min(settings.batch_size, len(y))
    # Decay as of a standard normal prior would be 1/N; it is the usual small one.
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
        return -jnp.mean(dist.Normal(found, LEAST_NOISE + jnp.exp(params[1])).log_prob(y[rows]))

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

    params = jax.jit(jax.vmap(fit_one))(random.split(key, members))
    noise = LEAST_NOISE + float(jnp.sqrt(jnp.mean(jnp.exp(2 * params[1]))))
    copies = 1 if rate == 0 else DRAWS // members

    @jax.jit
    def draw(points: Array) -> Array:
        keys = random.split(random.key(1), copies)
        of_member = jax.vmap(values, (None, None, 0))
        found = jax.vmap(of_member, (0, None, None))(params[0], points, keys)
        return found.reshape(-1, len(points))

    return Fitted(draw, noise, time.perf_counter() - start)


def automatic(loss: Callable[[], Any], guide_class: Any, longer: int = 1) -> Callable[..., Fitted]:
    def run_longer(
        x: Array, y: Array, found: Hyperparameters, settings: Settings, key: Array
    ) -> Fitted:
        settings = replace(settings, num_steps=longer * settings.num_steps)
        return weight_space(x, y, found, settings, key, guide_class=guide_class, loss=loss())

    return run_longer


METHODS: dict[str, Callable[..., Fitted]] = {
    "functional BNN": functional_network,
    "weights, AutoNormal": automatic(lambda: TraceMeanField_ELBO(8), AutoNormal, WEIGHT_STEPS),
    "weights, AutoImplicit": automatic(lambda: ImplicitELBO(64), AutoImplicit),
    "Gaussian process": gaussian_process,
    "deep ensemble": partial(point_networks, members=5, rate=0.0),
    "MC dropout": partial(point_networks, members=1, rate=0.05),
}


def hyperparameters(x: np.ndarray, y: np.ndarray) -> tuple[Hyperparameters, float]:
    """Those of the Gaussian process, for all methods of a split, and the seconds they took."""
    start = time.perf_counter()
    found = fit_hyperparameters(jnp.asarray(x), jnp.asarray(y))
    found.noise.block_until_ready()
    return found, time.perf_counter() - start


def fit(
    method: str,
    x: np.ndarray,
    y: np.ndarray,
    settings: Settings,
    seed: int,
    given: tuple[Hyperparameters, float],
) -> Fitted:
    """One method; where it needs the Gaussian process, its time is part of the fit's."""
    found, seconds = given
    fitted = METHODS[method](jnp.asarray(x), jnp.asarray(y), found, settings, random.key(seed))
    if method.startswith(("functional", "Gauss")):
        fitted = fitted._replace(seconds=fitted.seconds + seconds)
    return fitted
