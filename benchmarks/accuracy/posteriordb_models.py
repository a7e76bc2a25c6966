"""Models of fifty posteriors, most of them from posteriordb, written from their specifications.

A model takes the arrays of its data as keyword arguments and samples its latents in the order in
which they are compared. Posteriors that differ in data alone share a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.distributions import constraints

from benchmarks.accuracy.equations import runge_kutta
from benchmarks.accuracy.targets import flat_prior

__all__ = ["PROGRAMS", "Program"]

Model = Callable[..., None]
Columns = Mapping[str, Array]


class Program(NamedTuple):
    """A model and how it is fitted and compared.

    Attributes:
        model: takes the data as keyword arguments.
        float64: whether the specification says that float32 needs care.
        compared: sites that are compared, all unconstrained; None for all latents.
        to_latents: compared columns of one draw, by site, to unconstrained values of the latents.
    """

    model: Model
    float64: bool = False
    compared: tuple[str, ...] | None = None
    to_latents: Callable[..., dict[str, Array]] = lambda columns, **data: dict(columns)


# --- Regressions ----------------------------------------------------------------------------------


def _flat_scale() -> dist.Distribution:
    return dist.ImproperUniform(constraints.positive, (), ())


def _normal(size: int, scale: float) -> dist.Distribution:
    return dist.Normal(0, scale).expand([size]).to_event(1)


def _linear(scale: Callable[[], dist.Distribution]) -> Model:
    """Linear regression with flat weights and the given prior of the noise."""

    def model(features: Array, response: Array) -> None:
        beta = numpyro.sample("beta", flat_prior(features.shape[1]))
        sigma = numpyro.sample("sigma", scale())
        numpyro.sample("response", dist.Normal(features @ beta, sigma), obs=response)

    return model


def _sblr(features: Array, response: Array) -> None:
    beta = numpyro.sample("beta", _normal(5, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    numpyro.sample("response", dist.Normal(features @ beta, sigma), obs=response)


def _kilpisjarvi(x: Array, y: Array, prior_mean: Array, prior_sd: Array) -> None:
    alpha = numpyro.sample("alpha", dist.Normal(prior_mean[0], prior_sd[0]))
    beta = numpyro.sample("beta", dist.Normal(prior_mean[1], prior_sd[1]))
    sigma = numpyro.sample("sigma", _flat_scale())
    numpyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


def _diamonds(features: Array, response: Array) -> None:
    b = numpyro.sample("b", _normal(24, 1))
    intercept = numpyro.sample("intercept", dist.StudentT(3, 8, 10))
    sigma = numpyro.sample("sigma", dist.TruncatedDistribution(dist.StudentT(3, 0, 10), low=0.0))
    numpyro.sample("response", dist.Normal(intercept + features @ b, sigma), obs=response)


def _dogs(avoided: Array, shocked: Array, y: Array) -> None:
    beta = numpyro.sample("beta", _normal(3, 100))
    logits = beta[0] + beta[1] * avoided + beta[2] * shocked
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


# --- Hierarchies ----------------------------------------------------------------------------------


def _schools_noncentered(y: Array, sigma: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        eta = numpyro.sample("eta", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * eta, sigma), obs=y)


def _schools_centered(y: Array, sigma: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def _surgical(deaths: Array, operations: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1000))
    variance = numpyro.sample("variance", dist.InverseGamma(0.001, 0.001))
    with numpyro.plate("hospitals", 12):
        b = numpyro.sample("b", dist.Normal(mu, jnp.sqrt(variance)))
        numpyro.sample("deaths", dist.Binomial(operations, logits=b), obs=deaths)


def _glmm_poisson(year: Array, counts: Array) -> None:
    alpha = numpyro.sample("alpha", dist.Uniform(-20, 20))
    beta = numpyro.sample("beta", dist.Uniform(-10, 10).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.Uniform(0, 5))
    trend = alpha + beta[0] * year + beta[1] * year**2 + beta[2] * year**3
    with numpyro.plate("years", 40):
        eps = numpyro.sample("eps", dist.Normal(0, sigma))
        numpyro.sample("counts", dist.Poisson(jnp.exp(trend + eps)), obs=counts)


def _radon(county: Array, log_uppm: Array, floor_measure: Array, log_radon: Array) -> None:
    sigma_alpha = numpyro.sample("sigma_alpha", dist.HalfNormal(1))
    sigma_y = numpyro.sample("sigma_y", dist.HalfNormal(1))
    mu_alpha = numpyro.sample("mu_alpha", dist.Normal(0, 10))
    beta = numpyro.sample("beta", _normal(2, 10))
    with numpyro.plate("counties", 85):
        alpha = numpyro.sample("alpha", dist.Normal(mu_alpha, sigma_alpha))
    mean = alpha[county] + beta[0] * log_uppm + beta[1] * floor_measure
    with numpyro.plate("houses", len(log_radon)):
        numpyro.sample("log_radon", dist.Normal(mean, sigma_y), obs=log_radon)


# --- Series ---------------------------------------------------------------------------------------


def _autoregression(y: Array) -> None:
    alpha = numpyro.sample("alpha", dist.Normal(0, 10))
    beta = numpyro.sample("beta", _normal(5, 10))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    past = jnp.stack([y[5 - lag : -lag] for lag in range(1, 6)], axis=1)
    numpyro.sample("y", dist.Normal(alpha + past @ beta, sigma), obs=y[5:])


def _arma(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    phi = numpyro.sample("phi", dist.Normal(0, 2))
    theta = numpyro.sample("theta", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))

    def step(mean: Array, value: Array) -> tuple[Array, Array]:
        return mu + phi * value + theta * (value - mean), mean

    numpyro.sample("y", dist.Normal(lax.scan(step, mu + phi * mu, y)[1], sigma), obs=y)


def _garch(y: Array, sigma1: Array) -> None:
    mu = numpyro.sample("mu", dist.ImproperUniform(constraints.real, (), ()))
    alpha0 = numpyro.sample("alpha0", dist.ImproperUniform(constraints.positive, (), ()))
    alpha1, beta1, _ = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))

    def step(variance: Array, value: Array) -> tuple[Array, Array]:
        return alpha0 + alpha1 * (value - mu) ** 2 + beta1 * variance, variance

    variances = lax.scan(step, sigma1**2 + 0 * mu, y)[1]
    numpyro.sample("y", dist.Normal(mu, jnp.sqrt(variances)), obs=y)


# --- Functions ------------------------------------------------------------------------------------


def _covariance(x: Array, rho: Array, alpha: Array, diagonal: Any) -> Array:
    squares = (x[:, None] - x) ** 2
    return alpha**2 * jnp.exp(-squares / (2 * rho**2)) + diagonal * jnp.eye(len(x))


def _gp_regression(x: Array, y: Array) -> None:
    rho = numpyro.sample("rho", dist.Gamma(25, 4))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2))
    variance = numpyro.sample("variance", dist.HalfNormal(1))
    covariance = _covariance(x, rho, alpha, variance)
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), covariance), obs=y)


def _jitter() -> float:
    return 1e-10 if jax.config.jax_enable_x64 else 1e-4


def _gp_poisson(x: Array, k: Array) -> None:
    rho = numpyro.sample("rho", dist.Gamma(25, 4))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2))
    eta = numpyro.sample("eta", _normal(len(x), 1))
    factor = jnp.linalg.cholesky(_covariance(x, rho, alpha, _jitter()))
    f = numpyro.deterministic("f", factor @ eta)
    numpyro.sample("k", dist.Poisson(jnp.exp(f)), obs=k)


def _eta(columns: Columns, x: Array, **_: Array) -> dict[str, Array]:
    """The noise that the compared values are made of."""
    rho, alpha = jnp.exp(columns["rho"]), jnp.exp(columns["alpha"])
    factor = jnp.linalg.cholesky(_covariance(x, rho, alpha, _jitter()))
    eta = jax.scipy.linalg.solve_triangular(factor, columns["f"], lower=True)
    return {"rho": columns["rho"], "alpha": columns["alpha"], "eta": eta}


# --- Mixtures and hidden states -------------------------------------------------------------------


def _pair(name: str, support: constraints.Constraint, prior: dist.Distribution) -> Array:
    """An increasing pair with a density proportional to that of two independent numbers."""
    pair = numpyro.sample(name, dist.ImproperUniform(support, (), (2,)))
    numpyro.factor(f"prior_of_{name}", prior.log_prob(pair).sum())
    return pair


def _mixture(y: Array) -> None:
    mu = _pair("mu", constraints.ordered_vector, dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5, 5))
    components = dist.Normal(mu, sigma)
    shares = dist.Categorical(jnp.stack([theta, 1 - theta]))
    numpyro.sample("y", dist.MixtureSameFamily(shares, components), obs=y)


def _hidden_states(theta1: Array, theta2: Array, emissions: Array) -> None:
    """The factor of a hidden Markov model: rows of transitions, log densities (n, 2)."""
    moves = jnp.log(jnp.stack([theta1, theta2]))

    def step(state: Array, emission: Array) -> tuple[Array, None]:
        return jax.nn.logsumexp(state[:, None] + moves, axis=0) + emission, None

    numpyro.factor("path", jax.nn.logsumexp(lax.scan(step, emissions[0], emissions[1:])[0]))


def _hmm_example(y: Array) -> None:
    theta1 = numpyro.sample("theta1", dist.Dirichlet(jnp.ones(2)))
    theta2 = numpyro.sample("theta2", dist.Dirichlet(jnp.ones(2)))
    prior = dist.Normal(jnp.array([3.0, 10.0]), 1)
    mu = _pair("mu", constraints.positive_ordered_vector, prior)
    _hidden_states(theta1, theta2, dist.Normal(mu, 1).log_prob(y[:, None]))


def _drive(support: constraints.Constraint, emission: Callable[..., dist.Distribution]) -> Model:
    """Two states of a player: speed and distance are independent given the state."""

    def model(u: Array, v: Array, alpha: Array, tau: Any = None, rho: Any = None) -> None:
        theta1 = numpyro.sample("theta1", dist.Dirichlet(alpha[0]))
        theta2 = numpyro.sample("theta2", dist.Dirichlet(alpha[1]))
        prior = dist.Normal(jnp.array([0.0, 3.0]), 1)
        phi, lam = _pair("phi", support, prior), _pair("lambda", support, prior)
        densities = emission(phi, tau).log_prob(u[:, None])
        _hidden_states(theta1, theta2, densities + emission(lam, rho).log_prob(v[:, None]))

    return model


# --- Differential equations -----------------------------------------------------------------------

_STEPS = 10  # between two times; both have equal spaces between times


def _lotka_volterra(ts: Array, y: Array) -> None:
    center, spread = jnp.array([1.0, 0.05, 1.0, 0.05]), jnp.array([0.5, 0.05, 0.5, 0.05])
    theta = numpyro.sample("theta", dist.TruncatedNormal(center, spread, low=0.0).to_event(1))
    log_normal = lambda loc: dist.LogNormal(loc, 1).expand([2]).to_event(1)  # noqa: E731
    z_init = numpyro.sample("z_init", log_normal(jnp.log(10.0)))
    sigma = numpyro.sample("sigma", log_normal(-1.0))

    def change(state: Array) -> Array:
        prey, predators = state
        growth = jnp.stack([theta[0] - theta[1] * predators, theta[3] * prey - theta[2]])
        return growth * state * (ts[1] - ts[0])

    states = jnp.maximum(runge_kutta(change, z_init, len(ts) - 1, _STEPS), 1e-8)
    numpyro.sample("y", dist.LogNormal(jnp.log(states), sigma), obs=y)


def _one_compartment(times: Array, concentration: Array, dose: Array, volume: Array) -> None:
    k_a, k_m, v_m, sigma = (
        numpyro.sample(name, dist.HalfCauchy(1)) for name in ("k_a", "K_m", "V_m", "sigma")
    )

    def change(state: Array) -> Array:  # of the concentration and of the time
        c, time = state
        absorbed = dose / volume * k_a * jnp.exp(-k_a * time)
        return jnp.stack([absorbed - v_m / volume * c / (k_m + c), 1 + 0 * c]) * times[1]

    states = runge_kutta(change, jnp.zeros(2) + 0 * k_a, len(times) - 1, _STEPS)
    curve = jnp.log(jnp.maximum(states[1:, 0], 1e-8))
    numpyro.sample("concentration", dist.LogNormal(curve, sigma), obs=concentration)


# --- All ------------------------------------------------------------------------------------------

_FLAT, _HALF_CAUCHY = _linear(_flat_scale), _linear(lambda: dist.HalfCauchy(2.5))
_COLLINEAR = ("earn_height", "log10earn_height", "logearn_height", "logearn_height_male")
_COLLINEAR += ("logearn_logheight_male", "logearn_interaction")
_PLAIN = ("logearn_interaction_z", "kidscore_interaction_c", "kidscore_interaction_c2")
_PLAIN += ("kidscore_interaction_z", "kidscore_mom_work", "mesquite", "logmesquite")
_PLAIN += ("logmesquite_logvolume", "logmesquite_logva", "logmesquite_logvash")
_PLAIN += ("logmesquite_logvas", *(f"nes{year}" for year in range(1972, 2001, 4)))

PROGRAMS: dict[str, Program] = {
    **{name: Program(_FLAT, float64=True) for name in _COLLINEAR},
    **{name: Program(_FLAT) for name in _PLAIN},
    "kidscore_momhs": Program(_HALF_CAUCHY),
    "kidscore_momiq": Program(_HALF_CAUCHY, float64=True),
    "kidscore_momhsiq": Program(_HALF_CAUCHY, float64=True),
    "kidscore_interaction": Program(_HALF_CAUCHY, float64=True),
    "sblrc": Program(_sblr),
    "sblri": Program(_sblr),
    "kilpisjarvi": Program(_kilpisjarvi, float64=True),
    "diamonds": Program(_diamonds),
    "dogs": Program(_dogs),
    "eight_schools_noncentered": Program(_schools_noncentered),
    "eight_schools_centered": Program(_schools_centered),
    "surgical": Program(_surgical),
    "glmm_poisson": Program(_glmm_poisson),
    "radon": Program(_radon),
    "arK": Program(_autoregression),
    "arma11": Program(_arma),
    "garch11": Program(_garch),
    "gp_regr": Program(_gp_regression),
    "gp_pois_regr": Program(_gp_poisson, True, ("rho", "alpha", "f"), _eta),
    "low_dim_gauss_mix": Program(_mixture),
    "lotka_volterra": Program(_lotka_volterra),
    "one_comp": Program(_one_compartment),
    "hmm_example": Program(_hmm_example),
    "hmm_drive_0": Program(
        _drive(constraints.positive_ordered_vector, lambda rate, _: dist.Exponential(rate))
    ),
    "hmm_drive_1": Program(_drive(constraints.ordered_vector, dist.Normal)),
}
