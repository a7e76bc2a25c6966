"""Fits of functional networks: each step uses rows of the data and a few other inputs."""

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

# Number of functions behind a prediction.
DRAWS = 500


@dataclass(frozen=True)
class Settings:
    """Settings of a fit.

    Attributes:
        num_steps: steps of Adam, whose step size falls to zero along a cosine.
        step_size: first step size.
        batch_size: rows of the data per step.
        num_points: further points of a measurement set.
        num_particles: functions per step.
        hidden: widths of the hidden layers.
        activation: activation of the hidden units.
        frequency: factor on the initial weights of the first layer.
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
    """A fitted distribution of functions.

    Attributes:
        draw: inputs (m, d) -> values of S functions there, (S, m).
        noise: standard deviation of observations.
        seconds: processor seconds of the fit.
    """

    draw: Callable[[Any], Array]
    noise: float
    seconds: float


# (arguments, points (m, d)) -> distribution of values (m,)
Prior = Callable[[Any, Array], dist.Distribution]


def uniform_pool(key: Array, x: Array, count: int = 4000, margin: float = 0.1) -> Array:
    """Inputs uniformly distributed over the box of the data and a margin around it, (count, d)."""
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
    # Wait for the result, so that the whole fit is timed.
    return jax.block_until_ready(result)


def learned_noise(start: Any, least: Any) -> Array:
    """Standard deviation of observations: a lower limit plus a positive parameter of the model."""
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
    """A fitted functional Bayesian neural network, and the result of SVI.

    Args:
        x: inputs, (N, d).
        y: targets, (N,).
        prior: the prior of function values at points.
        prior_args: its first argument.
        noise: standard deviation of observations, or its lower limit if it is learned.
        settings: settings of the fit.
        key: random key.
        pool: further inputs, (K, d).
        function: the random function, called inside the guide.
        jitter: standard deviation of the white noise in function values.
        learn_noise: whether the noise is a parameter.
        ratio: factor on the divergence at a measurement set, relative to the log likelihood of all
            data.
        num_draws: functions behind predictions.
    """
    start = time.process_time()
    batch_size, num_points = min(settings.batch_size, len(y)), settings.num_points

    def model(x: Array, y: Array, pool: Array, prior_args: Any, noise: Array, ratio: Array) -> None:
        at = measure(x, batch_size, pool, num_points)
        f = numpyro.sample("f", prior(prior_args, at.points))
        sd = learned_noise(noise, noise) if learn_noise else noise
        # The objective is divided by the ratio, so that one step size suits all ratios.
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
    """A functional network with Gaussian weights and the Gaussian process as its prior."""
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
