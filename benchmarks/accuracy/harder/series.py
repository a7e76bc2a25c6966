"""Time series and functions: models whose likelihood is a recursion, a path or an equation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax
from jax.experimental.ode import odeint
from numpyro.distributions import constraints
from numpyro.distributions.transforms import OrderedTransform

from benchmarks.accuracy.equations import runge_kutta
from benchmarks.accuracy.harder.exact import linear_regression
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws, Target, flat_prior

__all__ = [
    "arma",
    "autoregression5",
    "garch",
    "hidden_states",
    "local_level",
    "poisson_process",
    "predators",
    "volatility",
]


def poisson_process() -> Posterior:
    """Counts at 11 points, whose log rate is a Gaussian process with unknown kernel: d = 13."""
    rng = np.random.default_rng(301)
    x = np.linspace(-10, 10, 11)
    counts = rng.poisson(np.exp(1.5 + 1.3 * np.sin(x / 3) + 0.3 * rng.normal(size=11)))

    def model(x: Array, counts: Array) -> None:
        lengthscale = numpyro.sample("lengthscale", dist.Gamma(25, 4))
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(2))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([11]).to_event(1))
        correlation = jnp.exp(-0.5 * ((x[:, None] - x) / lengthscale) ** 2)
        # The jitter is part of the model, so it is the same for all methods.
        factor = jnp.linalg.cholesky(correlation + 1e-4 * jnp.eye(11))
        numpyro.sample("counts", dist.Poisson(jnp.exp(amplitude * factor @ z)), obs=counts)

    arguments = (jnp.asarray(x, jnp.float32), jnp.asarray(counts))
    return Posterior(Target("poisson_process", model, arguments), float64=True)


# --- Lotka and Volterra's equations ---------------------------------------------------------------

_YEARS = 21
_STEPS_A_YEAR = 5  # as accurate, to 4e-5, as the tolerances below


def _growth(state: Array, time: Array, rates: Array) -> Array:
    """Growth of prey and predators, (2,), for four rates."""
    prey, predators = state
    return jnp.stack(
        [(rates[0] - rates[1] * predators) * prey, (rates[3] * prey - rates[2]) * predators]
    )


def _runge_kutta(start: Array, rates: Array) -> Array:
    """States of every year by Runge and Kutta's fixed steps, (_YEARS, 2)."""
    return runge_kutta(lambda state: _growth(state, 0.0, rates), start, _YEARS - 1, _STEPS_A_YEAR)


def _adaptive(start: Array, rates: Array) -> Array:
    years = jnp.arange(_YEARS, dtype=start.dtype)
    return odeint(_growth, start, years, rates, rtol=1e-6, atol=1e-5, mxstep=1_000)


def predators() -> Posterior:
    """Lynx and hares of 21 years: four rates, two first states and two noises, d = 8."""
    rng = np.random.default_rng(302)
    truth = np.array(_runge_kutta(jnp.array([33.0, 6.0]), jnp.array([0.55, 0.028, 0.8, 0.024])))
    seen = np.round(truth * np.exp(0.25 * rng.normal(size=truth.shape)), 1)

    def model(seen: Array, solve=_adaptive) -> None:
        center, spread = np.array([1, 0.05, 1, 0.05]), np.array([0.5, 0.05, 0.5, 0.05])
        rates = numpyro.sample("rates", dist.TruncatedNormal(center, spread, low=0.0).to_event(1))
        noise = numpyro.sample("noise", dist.LogNormal(-1, 1).expand([2]).to_event(1))
        start = numpyro.sample("start", dist.LogNormal(np.log(10), 1).expand([2]).to_event(1))
        states = jnp.maximum(solve(start, rates), 1e-9)
        numpyro.sample("seen", dist.LogNormal(jnp.log(states), noise).to_event(2), obs=seen)

    return Posterior(
        Target(
            "predators", model, (jnp.asarray(seen, jnp.float32),),
            # Fixed steps, as accurate here, have a cheaper gradient.
            nuts_model=lambda seen: model(seen, _runge_kutta),
        ),
        thinning=1,
        float64=True,
    )  # fmt: skip


# --- Recursions -----------------------------------------------------------------------------------


def hidden_states() -> Posterior:
    """Two hidden states, summed over, that switch seldom: 150 numbers, d = 5."""
    rng = np.random.default_rng(303)
    state, values = 0, []
    for _ in range(150):
        state = state if rng.uniform() < (0.9, 0.8)[state] else 1 - state
        values.append(rng.normal((3.0, 7.0)[state], 1.5))

    def model(values: Array) -> None:
        stay = numpyro.sample("stay", dist.Beta(2, 1).expand([2]).to_event(1))
        prior = dist.Normal(np.array([3.0, 1.0]), np.array([5.0, 1.0])).to_event(1)
        means = numpyro.sample("means", dist.TransformedDistribution(prior, OrderedTransform()))
        scale = numpyro.sample("scale", dist.HalfNormal(3))
        moves = jnp.log(jnp.array([[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]]))
        emissions = dist.Normal(means, scale).log_prob(values[:, None])

        def step(log_joint: Array, emission: Array) -> tuple[Array, None]:
            moved = jnp.logaddexp(log_joint[0] + moves[0], log_joint[1] + moves[1])
            return moved + emission, None

        last, _ = lax.scan(step, emissions[0] - np.log(2.0), emissions[1:])
        numpyro.factor("values", jnp.logaddexp(last[0], last[1]))

    return Posterior(
        Target("hidden_states", model, (jnp.asarray(np.round(values, 2), jnp.float32),)),
        float64=True,
    )


def autoregression5() -> Posterior:
    """Five lags of 200 numbers around 40: d = 7."""
    rng = np.random.default_rng(304)
    series = np.full(205, 40.0)
    for t in range(5, 205):
        lags = series[t - 5 : t][::-1]
        series[t] = 4 + lags @ [0.7, 0.1, 0.2, -0.2, 0.1] + 1.5 * rng.normal()
    series = np.round(series, 1)
    lags = np.column_stack([np.ones(200), *(series[5 - k : 205 - k] for k in range(1, 6))])
    x, y = jnp.asarray(lags, jnp.float32), jnp.asarray(series[5:], jnp.float32)
    prior = dist.HalfCauchy(2.5)

    def model(x: Array, y: Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 10).expand([6]).to_event(1))
        scale = numpyro.sample("scale", prior)
        numpyro.sample("y", dist.Normal(x @ weights, scale), obs=y)

    exact = linear_regression(x, y, np.full(6, 10.0), prior)
    return Posterior(Target("autoregression5", model, (x, y), exact))


def arma() -> Posterior:
    """One lag of 200 numbers and one of their errors: d = 4."""
    rng = np.random.default_rng(305)
    series, error = [50.0], 0.0
    for _ in range(199):
        last, error = error, 2 * rng.normal()
        series.append(15 + 0.7 * series[-1] + 0.4 * last + error)

    def model(series: Array) -> None:
        level = numpyro.sample("level", dist.Normal(0, 100))
        lag = numpyro.sample("lag", dist.Normal(0, 2))
        average = numpyro.sample("average", dist.Normal(0, 2))
        scale = numpyro.sample("scale", dist.HalfCauchy(5))

        def step(carry: tuple[Array, Array], value: Array) -> tuple[tuple[Array, Array], Array]:
            before, error = carry
            error = value - (level + lag * before + average * error)
            return (value, error), error

        first = series[0] - (level + lag * level)
        _, errors = lax.scan(step, (series[0], first), series[1:])
        errors = jnp.concatenate([first[None], errors])
        numpyro.factor("series", dist.Normal(0, scale).log_prob(errors).sum())

    return Posterior(
        Target("arma", model, (jnp.asarray(np.round(series, 1), jnp.float32),)),
        thinning=1, dense_mass=True, float64=True,
    )  # fmt: skip


def garch() -> Posterior:
    """Changing variance of 250 returns in percent: d = 4."""
    rng = np.random.default_rng(306)
    variance, returns = 1.5, []
    for _ in range(250):
        returns.append(0.3 + np.sqrt(variance) * rng.normal())
        variance = 0.3 + 0.25 * (returns[-1] - 0.3) ** 2 + 0.6 * variance

    def model(returns: Array) -> None:
        mean = numpyro.sample("mean", dist.ImproperUniform(constraints.real, (), ()))
        constant = numpyro.sample("constant", dist.ImproperUniform(constraints.positive, (), ()))
        # Uniform where the weights of the last square and of the last variance add up to at most 1.
        weights = numpyro.sample("weights", dist.Dirichlet(np.ones(3)))

        def step(variance: Array, value: Array) -> tuple[Array, Array]:
            square = (value - mean) ** 2
            return constant + weights[0] * square + weights[1] * variance, variance

        _, variances = lax.scan(step, jnp.var(returns), returns)
        numpyro.sample("returns", dist.Normal(mean, jnp.sqrt(variances)), obs=returns)

    return Posterior(
        Target("garch", model, (jnp.asarray(np.round(returns, 3), jnp.float32),)), float64=True
    )


# --- Hidden paths ---------------------------------------------------------------------------------


def _persistent(mean: Array, lag: Array, scale: Array, z: Array) -> Array:
    """A stationary path around ``mean`` from independent standard normals, (..., T)."""
    first = z[..., 0] / jnp.sqrt(1 - lag**2)

    def step(before: Array, z: Array) -> tuple[Array, Array]:
        now = lag * before + z
        return now, now

    rest = lax.scan(step, first, jnp.moveaxis(z[..., 1:], -1, 0))[1]
    path = jnp.concatenate([first[None], rest])
    return mean[..., None] + scale[..., None] * jnp.moveaxis(path, 0, -1)


def volatility() -> Posterior:
    """Stochastic volatility of 80 returns, the path of log variances centered: d = 83."""
    rng = np.random.default_rng(307)
    path = _persistent(
        *(jnp.asarray(v) for v in (-1.0, 0.95, 0.25)), jnp.asarray(rng.normal(size=80))
    )
    returns = np.exp(np.asarray(path) / 2) * rng.normal(size=80)

    def priors() -> tuple[Array, Array, Array]:
        mean = numpyro.sample("mean", dist.Normal(0, 5))
        share = numpyro.sample("share", dist.Beta(20, 1.5))
        return mean, 2 * share - 1, numpyro.sample("scale", dist.HalfCauchy(1))

    def model(returns: Array) -> None:
        mean, lag, scale = priors()
        path = numpyro.sample("path", flat_prior(80))
        first = dist.Normal(mean, scale / jnp.sqrt(1 - lag**2)).log_prob(path[0])
        moves = dist.Normal(mean + lag * (path[:-1] - mean), scale).log_prob(path[1:])
        numpyro.factor("moves", first + moves.sum())
        numpyro.sample("returns", dist.Normal(0, jnp.exp(path / 2)), obs=returns)

    def nuts_model(returns: Array) -> None:
        mean, lag, scale = priors()
        z = numpyro.sample("z", dist.Normal(0, 1).expand([80]).to_event(1))
        path = _persistent(mean, lag, scale, z)
        numpyro.sample("returns", dist.Normal(0, jnp.exp(path / 2)), obs=returns)

    def from_nuts(draws: Draws) -> Draws:
        lag = 2 * draws["share"] - 1
        return draws | {"path": _persistent(draws["mean"], lag, draws["scale"], draws["z"])}

    arguments = (jnp.asarray(np.round(returns, 3), jnp.float32),)
    target = Target("volatility", model, arguments, nuts_model=nuts_model, from_nuts=from_nuts)
    return Posterior(target, float64=True)


def local_level() -> Posterior:
    """Yearly flow of a river around a level that wanders, 60 years, centered: d = 62."""
    rng = np.random.default_rng(308)
    flow = np.round(1_000 + np.cumsum(rng.normal(0, 40, 60)) + rng.normal(0, 120, 60))

    def priors() -> tuple[Array, Array]:
        return numpyro.sample("drift", dist.HalfCauchy(100)), numpyro.sample(
            "noise", dist.HalfCauchy(100)
        )

    def model(flow: Array) -> None:
        drift, noise = priors()
        level = numpyro.sample("level", flat_prior(60))
        numpyro.factor("moves", dist.Normal(level[:-1], drift).log_prob(level[1:]).sum())
        numpyro.sample("flow", dist.Normal(level, noise), obs=flow)

    def walk(first: Array, drift: Array, z: Array) -> Array:
        first = first[..., None]
        moves = jnp.concatenate([jnp.zeros_like(first), drift[..., None] * z], axis=-1)
        return first + jnp.cumsum(moves, axis=-1)

    def nuts_model(flow: Array) -> None:
        drift, noise = priors()
        first = numpyro.sample("first", dist.ImproperUniform(constraints.real, (), ()))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([59]).to_event(1))
        level = walk(1_000 + 100 * first, drift, z)
        numpyro.sample("flow", dist.Normal(level, noise), obs=flow)

    def from_nuts(draws: Draws) -> Draws:
        return draws | {"level": walk(1_000 + 100 * draws["first"], draws["drift"], draws["z"])}

    arguments = (jnp.asarray(flow, jnp.float32),)
    target = Target("local_level", model, arguments, nuts_model=nuts_model, from_nuts=from_nuts)
    return Posterior(target, float64=True)
