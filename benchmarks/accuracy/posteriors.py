"""Posteriors that guides are compared on: the toys of ``targets`` and models as users have them.

Data are simulated with fixed seeds or come with scikit-learn; only waveform needs a file. Reference
draws are exact where the posterior can be sampled; otherwise they come from NUTS on a suitable
parametrization.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.distributions.transforms import OrderedTransform, StickBreakingTransform

from benchmarks.accuracy import regressions
from benchmarks.accuracy.harder import HARDER
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.tall import TALL
from benchmarks.accuracy.targets import Draws, Target, flat_prior, make_target
from benchmarks.accuracy.textbook import TEXTBOOK

__all__ = ["POSTERIORS", "SUITES", "Posterior", "make_posterior"]


def ordered(locs: Array, scales: Array) -> dist.Distribution:
    """A prior on increasing vectors: a Gaussian first entry, log-normal gaps."""
    return dist.TransformedDistribution(dist.Normal(locs, scales).to_event(1), OrderedTransform())


# --- Constrained parameters -----------------------------------------------------------------------


def _dirichlet() -> Target:
    """Proportions of five classes after few observations, none of the first class."""
    counts = jnp.array([0.0, 1.0, 3.0, 8.0, 20.0])

    def model(counts: Array) -> None:
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(5)))
        numpyro.sample("counts", dist.Multinomial(32, shares), obs=counts)

    def exact(key: Array, num_draws: int) -> Array:
        shares = random.dirichlet(key, 1 + counts, (num_draws,))
        return StickBreakingTransform().inv(shares)

    return Target("dirichlet", model, (counts,), exact)


def _rates() -> Target:
    """Positive Poisson rates under a Gamma(1/2, 1/10) prior, one of them without an event."""
    counts = jnp.array([0.0, 1.0, 2.0, 5.0, 20.0])
    exposures = jnp.array([2.0, 2.0, 1.0, 1.0, 4.0])

    def model(counts: Array, exposures: Array) -> None:
        rates = numpyro.sample("rates", dist.Gamma(0.5, 0.1).expand([5]).to_event(1))
        numpyro.sample("counts", dist.Poisson(rates * exposures), obs=counts)

    def exact(key: Array, num_draws: int) -> Array:
        # Logarithms, because a Gamma(1/2) draw may underflow.
        return random.loggamma(key, 0.5 + counts, (num_draws, 5)) - jnp.log(0.1 + exposures)

    return Target("rates", model, (counts, exposures), exact)


def _correlations() -> Target:
    """Cholesky factor of a 4 by 4 correlation matrix, and four scales, from 40 rows."""
    rng = np.random.default_rng(17)
    factor = np.linalg.cholesky(0.7 * np.ones((4, 4)) + 0.3 * np.eye(4)) * [[1], [2], [0.5], [1]]
    rows = jnp.asarray(rng.normal(size=(40, 4)) @ factor.T, jnp.float32)

    def model(rows: Array) -> None:
        scales = numpyro.sample("scales", dist.HalfNormal(3).expand([4]).to_event(1))
        factor = numpyro.sample("factor", dist.LKJCholesky(4, 1.0))
        scale_tril = scales[:, None] * factor
        numpyro.sample(
            "rows", dist.MultivariateNormal(jnp.zeros(4), scale_tril=scale_tril), obs=rows
        )

    return Target("correlations", model, (rows,))


def _ordinal() -> Target:
    """Ordered logistic regression: three weights and the four cutpoints of five classes."""
    rng = np.random.default_rng(18)
    features = rng.normal(size=(80, 3))
    latent = features @ [1.5, -1.0, 0.3] + rng.logistic(size=80)
    classes = np.searchsorted([-2.5, -0.5, 0.5, 3.0], latent)

    def model(features: Array, classes: Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 3).expand([3]).to_event(1))
        prior = ordered(jnp.array([-2.0, 0.0, 0.0, 0.0]), jnp.array([3.0, 1.0, 1.0, 1.0]))
        cutpoints = numpyro.sample("cutpoints", prior)
        numpyro.sample("classes", dist.OrderedLogistic(features @ weights, cutpoints), obs=classes)

    return Target("ordinal", model, (jnp.asarray(features, jnp.float32), jnp.asarray(classes)))


def _autoregression() -> Target:
    """AR(1) with uniform priors on intervals and data that push its coefficient against 1."""
    rng = np.random.default_rng(19)
    series = np.zeros(41)
    for t in range(1, 41):
        series[t] = 0.95 * series[t - 1] + 0.5 * rng.normal()

    def model(series: Array) -> None:
        coefficient = numpyro.sample("coefficient", dist.Uniform(-1, 1))
        level = numpyro.sample("level", dist.Uniform(-5, 5))
        scale = numpyro.sample("scale", dist.Uniform(0, 2))
        before = series[:-1] - level
        numpyro.sample("series", dist.Normal(level + coefficient * before, scale), obs=series[1:])

    return Target("autoregression", model, (jnp.asarray(series, jnp.float32),))


def _mixture() -> Target:
    """Three Gaussian components, identified by the order of their means, from 120 numbers."""
    rng = np.random.default_rng(20)
    kinds = rng.choice(3, size=120, p=[0.3, 0.5, 0.2])
    values = rng.normal(np.array([-3.0, 0.0, 3.0])[kinds], np.array([0.6, 0.8, 0.5])[kinds])

    def model(values: Array) -> None:
        weights = numpyro.sample("weights", dist.Dirichlet(2 * jnp.ones(3)))
        prior = ordered(jnp.array([-3.0, 1.0, 1.0]), jnp.array([2.0, 0.5, 0.5]))
        means = numpyro.sample("means", prior)
        scales = numpyro.sample("scales", dist.LogNormal(-0.5, 0.5).expand([3]).to_event(1))
        components = dist.Normal(means, scales)
        mixture = dist.MixtureSameFamily(dist.Categorical(weights), components)
        numpyro.sample("values", mixture, obs=values)

    return Target("mixture", model, (jnp.asarray(values, jnp.float32),))


# --- A funnel, a path, functions ------------------------------------------------------------------


def _funnel() -> Target:
    """Neal's funnel in ten dimensions: v ~ N(0, 3²), nine x ~ N(0, exp(v))."""

    def model() -> None:
        v = numpyro.sample("v", dist.Normal(0, 3))
        numpyro.sample("x", dist.Normal(0, jnp.exp(v / 2)).expand([9]).to_event(1))

    def exact(key: Array, num_draws: int) -> Array:
        v, *x = random.normal(key, (10, num_draws))
        return jnp.stack([3 * v, *(jnp.exp(1.5 * v) * noise for noise in x)], axis=1)

    return Target("funnel", model, exact=exact)


_TIME_STEP = 0.01


def _drift(x: Array) -> Array:
    return 10 * x * (1 - x**2)


def _path(increments: Array) -> Array:
    """Euler's path of dx = 10 x (1 - x²) dt + dw from 0, for standard normal increments."""

    def step(x: Array, noise: Array) -> tuple[Array, Array]:
        x = x + _drift(x) * _TIME_STEP + _TIME_STEP**0.5 * noise
        return x, x

    return lax.scan(step, jnp.zeros(()), increments)[1]


def _diffusion() -> Target:
    """A path of 100 steps in a double well, observed at every fifth with noise of sd 0.1."""
    rng = np.random.default_rng(21)
    truth = _path(jnp.asarray(rng.normal(size=100), jnp.float32))
    seen = truth[4::5] + jnp.asarray(0.1 * rng.normal(size=20), jnp.float32)

    def model(seen: Array) -> None:
        path = numpyro.sample("path", flat_prior(100))
        before = jnp.concatenate([jnp.zeros(1), path[:-1]])
        steps = dist.Normal(before + _drift(before) * _TIME_STEP, _TIME_STEP**0.5)
        numpyro.factor("steps", steps.log_prob(path).sum())
        numpyro.sample("seen", dist.Normal(path[4::5], 0.1), obs=seen)

    def nuts_model(seen: Array) -> None:
        # Neighbors on a path are nearly equal, but its increments are nearly independent.
        increments = numpyro.sample("increments", dist.Normal(0, 1).expand([100]).to_event(1))
        numpyro.sample("seen", dist.Normal(_path(increments)[4::5], 0.1), obs=seen)

    return Target(
        "diffusion", model, (seen,), nuts_model=nuts_model,
        from_nuts=lambda draws: {"path": jax.vmap(_path)(draws["increments"])},
    )  # fmt: skip


def _network(draws: Draws, x: Array) -> Array:
    """Values at x (k,) of a network with one hidden layer: weights (..., 8) -> (..., k)."""
    hidden = jnp.tanh(x[:, None] * draws["slopes"][..., None, :] + draws["shifts"][..., None, :])
    return (hidden * draws["heights"][..., None, :]).sum(-1) + draws["offset"][..., None]


def _bnn() -> Posterior:
    """A network of eight hidden units on two clusters of points; weights are not identified."""
    rng = np.random.default_rng(22)
    x = np.concatenate([rng.uniform(-1.5, -0.5, 8), rng.uniform(0.5, 1.5, 8)])
    y = np.sin(2 * x) + 0.1 * rng.normal(size=16)

    def model(x: Array, y: Array) -> None:
        draws = {
            "slopes": numpyro.sample("slopes", dist.Normal(0, 2).expand([8]).to_event(1)),
            "shifts": numpyro.sample("shifts", dist.Normal(0, 2).expand([8]).to_event(1)),
            "heights": numpyro.sample("heights", dist.Normal(0, 0.5).expand([8]).to_event(1)),
            "offset": numpyro.sample("offset", dist.Normal(0, 0.5)),
        }
        numpyro.sample("y", dist.Normal(_network(draws, x), 0.1), obs=y)

    target = Target("bnn", model, (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)))
    # Permuting hidden units changes the weights but not the function, so functions are compared.
    return Posterior(target, lambda draws: _network(draws, jnp.linspace(-2.5, 2.5, 21)), thinning=4)


def _known(name: str) -> Callable[[], Posterior]:
    return lambda: Posterior(make_target(name))


_FACTORIES: dict[str, Callable[[], Posterior | Target]] = {
    **{name: _known(name) for name in ("banana", "multimodal", "x_shape", "ring")},
    "student": lambda: Posterior(make_target("student"), heavy_tails=True),
    "gaussian30": _known("gaussian30"),
    "funnel": lambda: Posterior(_funnel(), heavy_tails=True),
    "eight_schools": _known("eight_schools"),
    "eight_schools_centered": _known("eight_schools_centered"),
    "varying_slopes": regressions.varying_slopes,
    "poisson_mixed": regressions.poisson_mixed,
    "negative_binomial": regressions.negative_binomial,
    "linear": regressions.linear,
    "horseshoe": lambda: Posterior(regressions.horseshoe(), thinning=4),
    "gaussian_process": regressions.gaussian_process,
    "mixture": _mixture,
    "dirichlet": _dirichlet,
    "rates": _rates,
    "correlations": _correlations,
    "ordinal": _ordinal,
    "autoregression": _autoregression,
    "diffusion": _diffusion,
    "bnn": _bnn,
}
# The defaults were tuned on the familiar ones, and are tested on the harder ones.
SUITES = {
    "familiar": (*_FACTORIES, "waveform"),
    "harder": tuple(HARDER),
    "tall": tuple(TALL),
    "textbook": tuple(TEXTBOOK),
}
POSTERIORS = tuple(name for suite in SUITES.values() for name in suite)
# Of the tables that are made without naming posteriors.
SUITES["all"] = SUITES["familiar"] + SUITES["harder"]


def make_posterior(name: str, data: Path | None = None) -> Posterior:
    """Build a posterior by name.

    Args:
        name: one of ``POSTERIORS``.
        data: path of ``waveform.mat`` or of its folder; only waveform needs it.

    Raises:
        ValueError: if the name is unknown, or the waveform data are not found.
    """
    if name == "waveform":
        return Posterior(make_target(name, data))
    if name not in POSTERIORS:
        raise ValueError(f"expected a posterior among {', '.join(POSTERIORS)}; got {name!r}")
    made = (_FACTORIES | HARDER | TALL | TEXTBOOK)[name]()
    return Posterior(made) if isinstance(made, Target) else made
