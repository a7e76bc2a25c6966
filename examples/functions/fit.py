"""Fits of functional networks: each step uses rows of the data and a few other inputs."""

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
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.svi import SVIRunResult

from examples.functions.gp import (
    JITTER,
    Conditioned,
    Hyperparameters,
    condition,
    information_ratio,
)
from examples.functions.networks import RandomFunction
from examples.functions.pathwise import draw_paths, draw_prior, make_paths
from numpyro_kscore import ImplicitELBO
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore.functions import measure

# Number of functions behind a prediction.
DRAWS = 500
# Lower limit of the noise of observations around a network, in standardized units.
LEAST_NETWORK_NOISE = 0.05
# Inputs outside the data at which functions of the pathwise guide are computed in advance.
PATHWISE_POOL = 500
# That guide starts near its end: it needs this fraction of the steps of a network, and a smaller
# jitter, because it follows the function more closely.
PATHWISE_STEPS, PATHWISE_JITTER = 0.15, 0.005
# Logarithm of the degrees of freedom, less 1, at which Student noise starts.
START_LOG_DF = 1.5


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
        noise: distribution of observations around the function, with a mean of 0.
        seconds: processor seconds of the fit.
    """

    draw: Callable[[Any], Any]
    noise: dist.Distribution
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
    # Both under the package's compile options: `SVI.run` takes twice as long on 3000 steps.
    # Automatic guides look for a start, which is no part of a program.
    init = svi.init if isinstance(guide, AutoGuide) else quick_jit(svi.init)
    state = init(key, *args)

    @quick_jit
    def whole(state: Any, *args: Any) -> Any:
        return lax.scan(
            lambda state, _: svi.stable_update(state, *args), state, length=settings.num_steps
        )

    state, losses = jax.block_until_ready(whole(state, *args))
    return SVIRunResult(svi.get_params(state), state, losses)


def draw_values(
    function: Callable[..., Array], params: Any, num_draws: int
) -> Callable[..., Array]:
    """Values of a fitted random function, with its arguments: -> (num_draws, m)."""

    def values(*given: Any) -> None:
        numpyro.deterministic("f", function(*given))

    predictive = Predictive(values, params=params, num_samples=num_draws, parallel=True)
    return jax.jit(lambda *given: predictive(random.key(1), *given)["f"])


def learned_noise(start: Any, least: Any) -> Array:
    """Standard deviation of observations: a lower limit plus a positive parameter of the model."""
    extra = jnp.maximum(jnp.asarray(start) - least, 0.1 * jnp.asarray(start))
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
    function: Callable[[Any, Array], Array],
    least_noise: Any = None,
    jitter: float = JITTER,
    learn_noise: bool = True,
    log_df: Any = None,
    ratio: float = 1.0,
    num_draws: int = DRAWS,
) -> tuple[Fitted, Any]:
    """A fitted functional Bayesian neural network, and the result of SVI.

    Args:
        x: inputs, (N, d).
        y: targets, (N,).
        prior: the prior of function values at points.
        prior_args: its first argument.
        noise: standard deviation of observations, or where it starts if it is learned.
        settings: settings of the fit.
        key: random key.
        pool: further inputs, (K, d).
        function: the random function, called inside the guide with the prior's argument and points.
        least_noise: lower limit of a noise that is learned; ``noise`` by default.
        jitter: standard deviation of the white noise in function values.
        learn_noise: whether the noise is a parameter.
        log_df: logarithm of the degrees of freedom, less 1, at which learned Student noise starts;
            Gaussian noise by default.
        ratio: factor on the divergence at a measurement set, relative to the log likelihood of all
            data.
        num_draws: functions behind predictions.
    """
    start = time.process_time()
    batch_size, num_points = min(settings.batch_size, len(y)), settings.num_points

    def around(values: Array, sd: Any) -> dist.Distribution:
        if log_df is None:
            return dist.Normal(values, sd)
        return dist.StudentT(1 + jnp.exp(numpyro.param("log_df", log_df)), values, sd)

    def model(x: Array, y: Array, pool: Array, prior_args: Any, least: Array, ratio: Array) -> None:
        at = measure(x, batch_size, pool, num_points)
        f = numpyro.sample("f", prior(prior_args, at.points))
        sd = learned_noise(noise, least) if learn_noise else noise
        # The objective is divided by the ratio, so that one step size suits all ratios.
        with handlers.scale(scale=1 / ratio), at.data:
            numpyro.sample("y", around(at.of_data(f), sd), obs=y[at.rows])

    def guide(x: Array, y: Array, pool: Array, prior_args: Any, least: Array, ratio: Array) -> None:
        at = measure(x, batch_size, pool, num_points)
        values = function(prior_args, at.points)
        numpyro.sample("f", dist.Normal(values, jitter).to_event(1))

    loss = ImplicitELBO(settings.num_particles, base="moments")
    least_noise = jnp.asarray(noise if least_noise is None else least_noise)
    given = (x, y, pool, prior_args, least_noise, jnp.asarray(ratio))
    result = run(model, guide, loss, settings, key, *given)
    sd = least_noise + result.params["extra_noise"] if learn_noise else noise
    of_noise = handlers.substitute(around, result.params)(0.0, sd)

    draw = partial(draw_values(function, result.params, num_draws), prior_args)
    return Fitted(draw, of_noise, time.process_time() - start), result


def functional_network(
    x: Array, y: Array, found: Hyperparameters, settings: Settings, key: Array
) -> Fitted:
    """A functional network with Gaussian weights and the Gaussian process as its prior."""
    start = time.process_time()
    function = RandomFunction("gaussian", settings.hidden, settings.activation, settings.frequency)
    pool = uniform_pool(random.key(2), x)
    size = min(settings.batch_size, len(y))
    ratio = information_ratio(condition(found, x, y), pool, size, settings.num_points)
    seconds = time.process_time() - start
    least = jnp.maximum(found.noise, LEAST_NETWORK_NOISE)
    fitted = functional(
        x, y, Hyperparameters.prior, found, least, settings, key,
        pool=pool, function=lambda _, points: function(points), ratio=ratio,
    )[0]  # fmt: skip
    return fitted._replace(seconds=fitted.seconds + seconds)


def functional_pathwise(
    x: Array,
    y: Array,
    found: Hyperparameters,
    settings: Settings,
    key: Array,
    *,
    log_df: float | None = START_LOG_DF,
) -> Fitted:
    """Draws of the Gaussian process that data correct, under Student noise."""
    start = time.process_time()
    data = condition(found, x, y)
    pool = uniform_pool(random.key(2), x, PATHWISE_POOL)
    settings = replace(settings, batch_size=min(settings.batch_size, len(y)))
    ratio = information_ratio(data, pool, settings.batch_size, settings.num_points, PATHWISE_JITTER)
    fitted, _ = pathwise_fit(data, pool, settings, key, log_df=log_df, ratio=ratio)
    return fitted._replace(seconds=time.process_time() - start)


def pathwise_fit(
    data: Conditioned,
    pool: Array,
    settings: Settings,
    key: Array,
    *,
    num_priors: int = 1,
    **options: Any,
) -> tuple[Fitted, Any]:
    """Fit :class:`~examples.functions.pathwise.Paths`, and the result of SVI.

    Inputs of the fit are numbers of rows: those of the data, then those of the pool. With Gaussian
    noise the guide starts at the exact posterior, and leaves it as far as the objective at small
    measurement sets has another optimum.

    Args:
        data: the Gaussian process with its data.
        pool: further inputs, (K, d).
        settings: settings of the fit, with the steps that a network would take.
        key: random key.
        num_priors: sets of 512 prior functions, each with both signs, behind predictions.
        options: of :func:`functional`.
    """
    settings = replace(settings, num_steps=max(int(PATHWISE_STEPS * settings.num_steps), 1))
    found, y = data.found, jnp.asarray(data.y, pool.dtype)
    inputs = jnp.concatenate([jnp.asarray(data.x, pool.dtype), pool])
    priors = [draw_prior(data, seed) for seed in range(num_priors)]
    paths = make_paths(data, priors[0], pool)

    def of_points(given: Any, at: Array) -> dist.Distribution:
        hyperparameters, inputs, _ = given
        return Hyperparameters.prior(hyperparameters, inputs[at], PATHWISE_JITTER)

    fitted, result = functional(
        jnp.arange(len(y)), y, of_points, (found, inputs, paths), found.noise, settings, key,
        pool=len(y) + jnp.arange(len(pool)), function=lambda given, at: given[2](at),
        least_noise=found.least_noise, jitter=PATHWISE_JITTER, **options,
    )  # fmt: skip
    learned = result.params["shift"], result.params["log_size"]

    # No seed is used twice: the first ones made the prior functions.
    draws = [draw_paths(data, prior, *learned, num_priors + k) for k, prior in enumerate(priors)]

    def draw(points: Array) -> np.ndarray:
        return np.concatenate([each(np.asarray(points)) for each in draws])

    return fitted._replace(draw=draw), result
