"""The Gaussian with the draws' moments as a base, for values that are nearly Gaussian."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import ImplicitELBO
from numpyro_kscore.estimators._base.gaussian import moment_scores
from support.compiling import quick_jit
from support.linear_functions import CHEAP, JITTER, NOISE, POOL, X, Y, features, guide, model

# ----------------------------------------------------------------------------------------- scores

quick_scores = quick_jit(moment_scores)


def test_moment_scores_are_those_of_the_gaussian(x64):
    rng = np.random.default_rng(0)
    x = 3 + rng.normal(size=(12, 4)) @ rng.normal(size=(4, 4))
    expected = -np.linalg.solve(np.cov(x.T, bias=True), (x - x.mean(0)).T).T
    np.testing.assert_allclose(quick_scores(jnp.asarray(x)), expected, rtol=1e-9)


def test_moment_scores_given_a_context(x64):
    """The block of the joint precision matrix that belongs to the samples."""
    rng = np.random.default_rng(1)
    joint = rng.normal(size=(15, 5)) @ rng.normal(size=(5, 5)) + 2
    centered = joint - joint.mean(0)
    expected = -np.linalg.solve(np.cov(joint.T, bias=True), centered.T).T[:, :3]
    found = quick_scores(jnp.asarray(joint[:, :3]), jnp.asarray(joint[:, 3:]))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("samples", [np.ones((9, 3)), np.tile(np.arange(9.0), (3, 1)).T])
def test_moment_scores_of_degenerate_samples_are_finite(samples):
    assert np.all(np.isfinite(quick_scores(jnp.asarray(samples, jnp.float32))))


def test_moment_scores_of_ill_conditioned_samples_in_float32():
    """Correlations like those of function values: condition 1e8, and 1e4 for the root."""
    rng = np.random.default_rng(2)
    basis = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    x = rng.normal(size=(60, 20)) @ (basis * np.logspace(0, -4, 20)).T
    x = x.astype(np.float32).astype(float)
    expected = -np.linalg.solve(np.cov(x.T, bias=True), (x - x.mean(0)).T).T
    found = np.asarray(quick_scores(jnp.asarray(x, jnp.float32)))
    # Rounding of 6e-8 times the root's condition; by way of the covariance it would be the square.
    assert np.linalg.norm(found - expected) < 6e-8 * 1e4 * 10 * np.linalg.norm(expected)


def test_entropy_gradient_of_a_linear_guide_is_exact(x64):
    """The gradient for f = A ε is A⁻ᵀ, for noise of full rank, Gaussian or not, and any draws."""
    rng = np.random.default_rng(3)
    root, noise = rng.normal(size=(4, 4)), rng.exponential(size=(9, 4))
    scores = np.asarray(quick_scores(jnp.asarray(noise @ root.T)))
    np.testing.assert_allclose(-scores.T @ noise / 9, np.linalg.inv(root).T, rtol=1e-8)


# ------------------------------------------------------------------------------ fits of functions


def closed_form_loss(params):
    """Negative ELBO at all of X and three points of the pool, in closed form, in float64."""
    points = jnp.concatenate([X, POOL[::80]])
    phi, m = features(points), len(points)
    root = jnp.tril(params["root"])
    q_loc, q = phi @ params["loc"], phi @ root @ root.T @ phi.T + JITTER**2 * jnp.eye(m)
    p = phi @ phi.T + JITTER**2 * jnp.eye(m)
    kl = 0.5 * (
        jnp.trace(jnp.linalg.solve(p, q))
        + q_loc @ jnp.linalg.solve(p, q_loc)
        - m
        + jnp.linalg.slogdet(p)[1]
        - jnp.linalg.slogdet(q)[1]
    )
    n = len(X)
    misfit = jnp.sum((Y - q_loc[:n]) ** 2) + jnp.trace(q[:n, :n])
    return kl + 0.5 * misfit / NOISE**2 + 0.5 * n * jnp.log(2 * jnp.pi * NOISE**2)


@pytest.mark.slow
def test_gradient_is_that_of_the_closed_form(x64):
    """Mean over keys; Gaussian guides have no bias at all, with hardly more draws than values."""
    x, y, pool = (jnp.asarray(np.float64(a)) for a in (X, Y, POOL[::80]))
    # One step of tiny weight makes the kernel's part vanish, so that only the moments act.
    elbo = ImplicitELBO(12, estimator=CHEAP, base="moments", debias=None)
    params = {
        "loc": np.array([0.3, -0.2, 0.1, 0.4]),
        "root": np.eye(4) + 0.2 * np.tri(4, k=-1),
    }
    keys = random.split(random.key(0), 600)

    @quick_jit
    def gradients(keys):
        one = jax.grad(lambda p, key: elbo.loss(key, p, model, guide, x, y, pool))
        return jax.lax.map(lambda key: one(params, key), keys)

    found = jax.device_get(gradients(keys))
    expected = jax.device_get(quick_jit(jax.grad(closed_form_loss))(params))
    for name, values in found.items():
        error = np.std(values, axis=0) / np.sqrt(len(keys))
        # 14 numbers differ from zero by Monte-Carlo error; one of them exceeds 4.5 standard errors
        # with a chance of one in ten thousand.
        assert np.all(np.abs(np.mean(values, axis=0) - expected[name]) <= 4.5 * error + 1e-6), name


def test_too_few_draws_for_the_moments():
    loss = ImplicitELBO(10, base="moments").loss
    with pytest.raises(ValueError, match="at least 11 with base='moments'.* got 10"):
        jax.eval_shape(lambda key: loss(key, {}, model, guide, X, Y, POOL), random.key(0))


@pytest.mark.slow
def test_fit_is_the_exact_posterior():
    """A guide that can be exact, also at points where it was not measured."""
    settings = {"num_particles": 64, "base": "moments"}
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, 1200))
    svi = SVI(model, guide, optimizer, ImplicitELBO(**settings))

    @quick_jit
    def fit(key):
        state = svi.init(key, X, Y, POOL)
        step = lambda state, _: (svi.update(state, X, Y, POOL)[0], None)  # noqa: E731
        return svi.get_params(jax.lax.scan(step, state, None, length=1200)[0])

    params = fit(random.key(0))
    points = jnp.linspace(-2, 2, 9)[:, None]
    # Weights of the features have a standard normal prior, and the noise the jitter in it.
    phi = np.asarray(features(X), float)
    covariance = np.linalg.inv(np.eye(4) + phi.T @ phi / (NOISE**2 + JITTER**2))
    loc = covariance @ phi.T @ np.asarray(Y) / (NOISE**2 + JITTER**2)
    at = np.asarray(features(points), float)
    sd = np.sqrt(np.einsum("ij,jk,ik->i", at, covariance, at))
    found = np.linalg.norm(at @ np.tril(params["root"]), axis=1)
    # The remaining error is noise of the last steps.
    assert np.all(np.abs(at @ (params["loc"] - loc)) < 0.08 * sd)
    assert np.all(np.abs(found / sd - 1) < 0.08)
