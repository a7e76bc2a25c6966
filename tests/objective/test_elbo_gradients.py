"""Gradients and loss of ``ImplicitELBO`` against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro.distributions import constraints
from scipy import stats

from numpyro_kscore import Implicit, ImplicitELBO, ScoreEstimator
from numpyro_kscore.kernels import CurlFree, Diagonal, Gaussian
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import Dense
from support.affine import (
    AFFINE,
    FEW,
    KEY,
    affine_guide,
    assert_close,
    draw_noise,
    is_finite,
    loss_and_gradient,
    quick_loss_and_gradient,
    standard_model,
)
from support.compiling import quick_jit
from support.doubles import GaussianScore

# -------------------------------------------------------------- a posterior with a closed-form KL

DESIGN = jnp.array([[1.0, 0.5, -0.3], [0.0, 1.0, 0.8], [0.7, -1.0, 0.2]])
PRIOR_MEAN, PRIOR_SD = jnp.array([0.0, 0.0, 0.3]), jnp.array([2.0, 2.0, 0.8])
NOISE_SD = 0.7
OBSERVED = jnp.array([1.0, -0.5, 2.0])
PARAMS = {
    "loc": jnp.array([0.3, -0.6, 0.5]),
    "sd": jnp.array([0.4, 0.9, 0.6]),
    "shift": jnp.array(0.4),
}


def linear_model(data):
    """Linear in (weights, log scale), so everything is Gaussian in unconstrained coordinates."""
    weights = numpyro.sample("weights", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.3, 0.8))
    shift = numpyro.param("shift", 0.0)
    mean = DESIGN @ jnp.append(weights, jnp.log(scale)) + shift
    numpyro.sample("data", dist.Normal(mean, NOISE_SD).to_event(1), obs=data)


def linear_guide(data):
    loc = numpyro.param("loc", PARAMS["loc"])
    sd = numpyro.param("sd", PARAMS["sd"], constraint=constraints.positive)
    u = loc + sd * draw_noise(3)
    numpyro.sample("weights", Implicit(u[:2], event_dim=1))
    numpyro.sample("scale", Implicit(jnp.exp(u[2])))


def exact_negative_elbo(params, data=OBSERVED):
    """KL(N(loc, sd²) ‖ posterior) - log evidence: Gaussian integrals written out."""
    loc, sd = params["loc"], params["sd"]
    prior = 0.5 * ((loc - PRIOR_MEAN) ** 2 + sd**2) / PRIOR_SD**2 + jnp.log(PRIOR_SD)
    residual = data - DESIGN @ loc - params["shift"]
    squares = jnp.sum(residual**2) + jnp.sum(DESIGN**2 @ sd**2)
    likelihood = 0.5 * squares / NOISE_SD**2 + 3 * jnp.log(NOISE_SD)
    # 2π: three for the prior and three for the data, less three for the entropy.
    return jnp.sum(prior - jnp.log(sd) - 0.5) + likelihood + 1.5 * jnp.log(2 * jnp.pi)


EXACT = {"mean": PARAMS["loc"], "sd": PARAMS["sd"]}


def gradients_over_keys(elbo, num_keys):
    # With a kernel estimate the loop runs long enough to be compiled with all optimizations.
    compile_ = quick_jit if isinstance(elbo.estimator, GaussianScore) else jax.jit

    @compile_
    def run(keys):
        one = lambda key: loss_and_gradient(  # noqa: E731
            linear_model, linear_guide, PARAMS, elbo, OBSERVED, key=key
        )
        return lax.map(one, keys)

    return run(random.split(random.key(1), num_keys))


@pytest.mark.thorough
def test_gradient_with_the_exact_score_is_the_closed_form():
    elbo = ImplicitELBO(64, estimator=GaussianScore(**EXACT), base=None)
    losses, gradients = gradients_over_keys(elbo, 500)
    exact_value, exact = quick_jit(jax.value_and_grad(exact_negative_elbo))(PARAMS)
    for name, values in gradients.items():
        standard_error = np.std(values, axis=0) / np.sqrt(500)
        # Five standard errors, which are small enough to show an error of a few percent.
        assert np.all(np.abs(np.mean(values, axis=0) - exact[name]) < 5 * standard_error), name
        assert np.linalg.norm(standard_error) < 0.02 * np.linalg.norm(exact[name]), name
    # The reported loss is nearly right too: its entropy estimate is unbiased for Gaussians.
    standard_error = np.std(losses) / np.sqrt(500)
    assert abs(np.mean(losses) - exact_value) < 5 * standard_error + 0.02


@pytest.fixture(scope="module")
def relative_bias():
    """Bias of the mean gradient at 32 particles, over its norm, with the standard error."""
    exact = quick_jit(jax.grad(exact_negative_elbo))(PARAMS)
    exact = np.concatenate([exact["loc"], exact["sd"]])
    results = {}
    for debias in ("jackknife", None):
        _, gradients = gradients_over_keys(ImplicitELBO(32, debias=debias), 1000)
        values = np.concatenate([gradients["loc"], gradients["sd"]], axis=1)
        error = np.sqrt(np.sum(np.var(values, axis=0)) / 1000)
        bias = np.linalg.norm(values.mean(0) - exact)
        results[debias] = (bias / np.linalg.norm(exact), error / np.linalg.norm(exact))
    return results


@pytest.mark.slow
def test_estimated_gradient_is_close_to_the_closed_form(relative_bias):
    # Measured: 0.075 with standard error 0.011 at n = 32, then 0.048 at 64 and 0.036 at 128, so the
    # bias that the jackknife leaves vanishes with n as well. The limit is four standard errors
    # above the first.
    bias, error = relative_bias["jackknife"]
    assert error < 0.015
    assert bias < 0.12


@pytest.mark.slow
def test_jackknife_reduces_the_bias(relative_bias):
    # Measured: from 0.110 to 0.054, each with standard error 0.011.
    (corrected, error), (plain, plain_error) = relative_bias["jackknife"], relative_bias[None]
    assert plain - corrected > 3 * np.hypot(error, plain_error)
    assert corrected < 0.6 * plain


@pytest.mark.thorough
def test_forward_and_reverse_mode_agree():
    elbo = ImplicitELBO(FEW, estimator=GaussianScore(), debias=None)

    def loss(params):
        return elbo.loss(KEY, params, linear_model, linear_guide, OBSERVED)

    @quick_jit
    def differentiate(params):
        return jax.jacfwd(loss)(params), jax.jacrev(loss)(params)

    forward, reverse = differentiate(PARAMS)
    assert_close(forward, reverse, rtol=1e-4, atol=1e-4)
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(reverse))


# ------------------------------------------------------------------------------------- on average


@pytest.mark.slow
def test_subsampled_observations_give_the_full_gradient_on_average():
    data, num_keys = jnp.linspace(-1.0, 2.0, 12), 3000

    def model():
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        with numpyro.plate("rows", 12, subsample_size=4):
            batch = numpyro.subsample(data, event_dim=0)
            numpyro.sample("y", dist.Normal(z + numpyro.param("shift", 0.3), 1.5), obs=batch)

    estimator = GaussianScore(mean=AFFINE["loc"], sd=AFFINE["sd"])
    elbo = ImplicitELBO(FEW, estimator=estimator, base=None)
    params = {**AFFINE, "shift": jnp.array(0.3)}

    @quick_jit
    @jax.vmap
    def gradients(key):
        return jax.grad(lambda p: elbo.loss(key, p, model, affine_guide()))(params)

    # KL(N(loc, sd²) ‖ p) with all twelve rows: precision 12/1.5² from the data, and 1 more for z.
    misfit = (12 * (0.5 + 0.3) - jnp.sum(data)) / 1.5**2
    exact = {
        "loc": misfit + 0.5,
        "shift": misfit,
        "sd": 0.7 * (1 + 12 / 1.5**2) - 1 / 0.7,
    }
    for name, values in gradients(random.split(KEY, num_keys)).items():
        standard_error = np.std(values) / np.sqrt(num_keys)
        assert standard_error < 0.05
        assert abs(np.mean(values) - exact[name]) < 5 * standard_error


@pytest.mark.parametrize("dim", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_reported_loss_at_the_posterior_is_minus_log_evidence(dim):
    """log p(y, z) - log q(z) is the log evidence at every z, so that no optimization enters."""
    root = np.linalg.cholesky(0.5 * np.eye(dim) + 0.5)

    def model():
        white = numpyro.sample("z", dist.Normal(jnp.zeros(dim), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(root @ white, 0.5).to_event(1), obs=jnp.ones(dim))

    precision = np.eye(dim) + root.T @ root / 0.25
    covariance = np.linalg.inv(precision)
    mean = covariance @ root.T @ np.ones(dim) / 0.25

    factor = np.linalg.cholesky(covariance)

    def guide():
        numpyro.sample("z", Implicit(mean + factor @ draw_noise(dim), event_dim=1))

    marginal = stats.multivariate_normal(np.zeros(dim), root @ root.T + 0.25 * np.eye(dim))
    evidence = marginal.logpdf(np.ones(dim))
    elbo = ImplicitELBO(64, estimator=GaussianScore())
    run = quick_jit(lambda keys: lax.map(lambda key: elbo.loss(key, {}, model, guide), keys))
    losses = run(random.split(KEY, 40))
    # The entropy estimate scatters by sqrt((1.6 + d/2)/n), as documented, and the mean log joint
    # density by sqrt(d/2n); this includes the error of the correction, which has 32 sets.
    entropy_sd, joint_sd = np.sqrt((1.6 + dim / 2) / 64), np.sqrt(dim / 128)
    standard_error = (entropy_sd + joint_sd) / np.sqrt(32)
    assert abs(np.mean(losses) + evidence) < 4 * standard_error
    assert np.std(losses) < 1.5 * (entropy_sd + joint_sd)


# ---------------------------------------------------------------------- one step in every setting


def slow(*values):
    """Slow cases: what an estimator does with these options does not depend on the objective."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("base", "debias", "estimator"),
    [
        (None, "jackknife", ScoreEstimator(regularizer=NuMethod(50))),
        ("gaussian", None, ScoreEstimator(regularizer=Tikhonov(1e-2))),
        ("model", "jackknife", ScoreEstimator(Diagonal(Gaussian()), Tikhonov(1e-2))),
        slow("gaussian", None, ScoreEstimator()),
        slow("model", None, ScoreEstimator(CurlFree(), Tikhonov(1e-2), Dense(), bandwidth=1.5)),
        slow("model", None, ScoreEstimator(standardize="none", normalize=False)),
    ],
)
@pytest.mark.thorough
def test_every_base_and_estimator(base, debias, estimator):
    elbo = ImplicitELBO(FEW, base=base, debias=debias, estimator=estimator)
    loss, gradient = quick_loss_and_gradient(standard_model(), affine_guide(), AFFINE, elbo)
    # KL(N(.5, .49) ‖ N(0, 1)) has gradient .5 in loc and .7 - 1/.7 in sd; 16 draws scatter loc's
    # by .25, and every estimate pushes sd the right way.
    assert is_finite((loss, gradient))
    assert abs(gradient["loc"] - 0.5) < 5 * 0.25
    assert gradient["sd"] < 0.5


@pytest.mark.parametrize("num_particles", [2, pytest.param(9, marks=pytest.mark.slow)])
def test_few_and_odd_numbers_of_particles(num_particles):
    elbo = ImplicitELBO(num_particles)
    assert is_finite(quick_loss_and_gradient(standard_model(), affine_guide(), AFFINE, elbo))
