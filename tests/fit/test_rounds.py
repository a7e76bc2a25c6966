"""Fits of guides whose bound is known: none of their steps, or rounds of them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit
from numpyro_kscore._fit import loop
from numpyro_kscore._fit.checkpoint import save_checkpoint
from support.fits import KEY, quiet_fit

pytestmark = pytest.mark.thorough
X = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
Y = X @ np.array([1.0, -1.0, 0.5, 0.0], np.float32)


def linear(x, y):
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(4), 2.0).to_event(1))
    numpyro.sample("y", dist.Normal(x @ weights, 1.0).to_event(1), obs=y)


def scaled(x, y):
    """One more parameter, which is no latent."""
    sd = numpyro.param("sd", jnp.array(3.0))
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(4), 2.0).to_event(1))
    numpyro.sample("y", dist.Normal(x @ weights, sd).to_event(1), obs=y)


def bent(x, y):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
    numpyro.sample("y", dist.Normal(z[0] ** 2 + z[1:].sum(), 0.3), obs=y[0])


def make_svi(model, **kwargs):
    guide = AutoImplicit(model, hidden_dims=(8,), **kwargs)
    return guide, SVI(model, guide, optax.adam(2e-2), ImplicitELBO(16))


def posterior():
    """Mean and covariance of the weights of `linear`."""
    covariance = np.linalg.inv(X.T @ X + np.eye(4) / 4)
    return covariance @ X.T @ Y, covariance


def test_a_gaussian_posterior_takes_no_step(tmp_path):
    guide, svi = make_svi(linear)
    path = tmp_path / "fit"
    result = fit(svi, KEY, X, Y, checkpoint=path)
    info = result.info
    assert (info.steps, info.best_step, info.converged, info.doubt) == (0, 0, True, "")
    assert info.reason == "no step was needed: means and sds agree with the model within 0.1 sd"
    # Looks and the loss are those of the start, so that there is something to plot.
    np.testing.assert_array_equal(info.trace_steps, [0])
    assert result.losses.shape == (1,)
    mean, covariance = posterior()
    draws = np.asarray(guide.sample_posterior(KEY, result.params, sample_shape=(4000,))["weights"])
    sd = np.sqrt(np.diag(covariance))
    # Four errors of means and of log standard deviations of 4000 draws.
    np.testing.assert_allclose(draws.mean(0), mean, atol=4 * np.max(sd) / 4000**0.5)
    np.testing.assert_allclose(draws.std(0), sd, rtol=4 / 8000**0.5)
    noise = np.linalg.slogdet(np.eye(30) + 4 * X @ X.T)[1]
    square = Y @ np.linalg.solve(np.eye(30) + 4 * X @ X.T, Y)
    evidence = -0.5 * (30 * np.log(2 * np.pi) + noise + square)
    # A Gaussian's density less that of a Gaussian posterior is the evidence at every draw.
    np.testing.assert_allclose(-result.losses[0], evidence, rtol=1e-4)
    again = fit(svi, KEY, X, Y, checkpoint=path)
    assert repr(again.info) == repr(info)
    np.testing.assert_array_equal(again.losses, result.losses)


def test_parameters_of_the_model_are_fitted_though_the_guide_starts_at_the_posterior():
    _, svi = make_svi(scaled)
    result = quiet_fit(svi, KEY, X, Y, max_steps=640)
    assert result.info.steps > 0
    # At the residual standard deviation of noise-free data the likelihood is highest near zero.
    assert float(result.params["sd"]) < 2.5


def test_rounds_follow_while_the_bound_rises_and_go_on_to_the_last_bit(monkeypatch, tmp_path):
    _, svi = make_svi(bent, warm_start=False)
    settings = {"chunk_size": 10, "max_steps": 320, "progress_bar": False}
    seen = []
    result = quiet_fit(svi, KEY, X, Y, **settings, callback=lambda *look: seen.append(look))
    info = result.info
    assert info.steps in (80, 160, 320)
    assert [sizes["step_size"] for _, _, sizes in seen][3] < 0.01
    assert [sizes["step_size"] for _, _, sizes in seen][4] > 0.8
    bounds = [look.bound for look in info.trace]
    assert bounds[4] > bounds[0]
    assert len(info.trace) == len(seen) + 1 == info.steps // 10 + 1
    np.testing.assert_array_equal(info.trace_steps, 10 * np.arange(len(info.trace)))
    # The gain is that over the best guide at the end of a round.
    np.testing.assert_allclose(info.trace[6].gain, bounds[6] - bounds[4], rtol=1e-3)
    # Stop after the second chunk of the second round, and go on.
    calls = []

    def save(*args):
        save_checkpoint(*args)
        calls.append(None)
        if len(calls) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "save_checkpoint", save)
    path = tmp_path / "fit"
    assert quiet_fit(svi, KEY, X, Y, checkpoint=path, **settings).info.steps == 60
    monkeypatch.setattr(loop, "save_checkpoint", save_checkpoint)
    resumed = quiet_fit(svi, KEY, X, Y, checkpoint=path, **settings)
    assert repr(resumed.info) == repr(info)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, result.params)


@pytest.mark.slow
def test_a_cold_start_far_away_arrives():
    """There a few draws have nearly all of the weight, and must not be followed alone."""

    def far(x, y):
        numpyro.sample("z", dist.StudentT(5.0, jnp.full(5, 30.0), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y[0])

    guide = AutoImplicit(far, hidden_dims=(8,), warm_start=False)
    svi = SVI(far, guide, optax.adam(5e-2), ImplicitELBO(32))
    result = quiet_fit(svi, KEY, X, Y, max_steps=1600)
    z = guide.sample_posterior(KEY, result.params, sample_shape=(4000,))["z"]
    # The sd is sqrt(5/3) = 1.29; tails of a small network are somewhat thin.
    np.testing.assert_allclose(z.mean(axis=0), 30.0, atol=0.3)
    np.testing.assert_allclose(z.std(axis=0), 1.29, rtol=0.25)
    assert result.info.cause != "runaway"
