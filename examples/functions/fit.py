"""Functional networks: the data's rows and a few other inputs a step, a prior of functions."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive

from examples.functions.gp import JITTER, Hyperparameters, information_ratio
from examples.functions.networks import RandomFunction
from numpyro_kscore import ImplicitELBO
from numpyro_kscore.functions import measure

# Functions behind a prediction.
DRAWS = 500


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

    num_steps: int = 20_000
    step_size: float = 3e-3
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
        seconds: of processor time that the fit took.
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
    """SVI with the common optimizer; steps that are not finite are skipped.

    Data are arguments, not constants, so that a program compiled for one seed serves the next.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(settings.step_size, settings.num_steps))
    svi = SVI(model, guide, optimizer, loss)
    result = svi.run(key, settings.num_steps, *args, progress_bar=False, stable_update=True)
    # What is timed is the fit, not its start.
    return jax.block_until_ready(result)


def learned_noise(start: Any, least: Any) -> Array:
    """The noise of observations: the least there may be, and a parameter of the model."""
    extra = jnp.maximum(jnp.asarray(start) - least, 0.01)
    return least + numpyro.param("extra_noise", extra, constraint=constraints.positive)


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
    ratio: float = 1.0,
    num_draws: int = DRAWS,
) -> tuple[Fitted, Any]:
    """A functional Bayesian neural network, and what SVI returned.

    Args:
        x: inputs, (N, d).
        y: targets, (N,).
        prior: the prior of function values at points.
        prior_args: what it needs beside the points.
        noise: standard deviation of observations, or the least there may be.
        settings: of the fit.
        key: random key.
        pool: further inputs, (K, d).
        function: the random function, called inside the guide.
        jitter: standard deviation of the white noise in function values.
        learn_noise: whether the noise is a parameter.
        ratio: how many times the divergence at a measurement set is counted, beside a log
            likelihood that counts for all data.
        num_draws: functions behind predictions.
    """
    start = time.process_time()
    batch_size, num_points = min(settings.batch_size, len(y)), settings.num_points

    def model(x: Array, y: Array, pool: Array, prior_args: Any, noise: Array, ratio: Array) -> None:
        at = measure(x, batch_size, pool, num_points)
        f = numpyro.sample("f", prior(prior_args, at.points))
        sd = learned_noise(noise, noise) if learn_noise else noise
        # The whole objective divided by the ratio, so that step sizes mean the same for all.
        with handlers.scale(scale=1 / ratio), at.data:
            numpyro.sample("y", dist.Normal(at.of_data(f), sd), obs=y[at.rows])

    def guide(x: Array, y: Array, pool: Array, prior_args: Any, noise: Array, ratio: Array) -> None:
        at = measure(x, batch_size, pool, num_points)
        numpyro.sample("f", dist.Normal(function(at.points), jitter).to_event(1))

    loss = ImplicitELBO(settings.num_particles, base="moments")
    given = (x, y, pool, prior_args, jnp.asarray(noise), jnp.asarray(ratio))
    result = run(model, guide, loss, settings, key, *given)
    sd = float(noise + (result.params["extra_noise"] if learn_noise else 0.0))

    def values(points: Array) -> None:
        numpyro.deterministic("f", function(points))

    predictive = Predictive(values, params=result.params, num_samples=num_draws, parallel=True)
    draw = jax.jit(lambda points: predictive(random.key(1), points)["f"])
    return Fitted(draw, sd, time.process_time() - start), result


def functional_network(
    x: Array, y: Array, found: Hyperparameters, settings: Settings, key: Array
) -> Fitted:
    """With the Gaussian process as its prior, and Gaussian weights as its noise."""
    start = time.process_time()
    function = RandomFunction("gaussian", settings.hidden, settings.activation, settings.frequency)
    pool = uniform_pool(random.key(2), x)
    size = min(settings.batch_size, len(y))
    ratio = information_ratio(found, x, y, pool, size, settings.num_points)
    seconds = time.process_time() - start
    fitted = functional(
        x, y, Hyperparameters.prior, found, found.noise, settings, key,
        pool=pool, function=function, ratio=ratio,
    )[0]  # fmt: skip
    return fitted._replace(seconds=fitted.seconds + seconds)
