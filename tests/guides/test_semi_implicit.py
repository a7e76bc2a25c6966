"""``AutoSemiImplicit``: mixtures with less noise than there are latents."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, init_to_median

from numpyro_kscore import AutoSemiImplicit, ImplicitELBO
from support.compiling import quick_jit
from support.doubles import GaussianScore

FACTOR = np.array([[1.0, 0.0], [0.8, 0.5], [-0.4, 1.0], [0.0, 0.7], [0.6, -0.6]])
REST = np.array([0.3, 0.5, 0.4, 0.6, 0.3])
FACTOR_COVARIANCE = FACTOR @ FACTOR.T + np.diag(REST**2)


def factor_model():
    covariance = jnp.asarray(FACTOR_COVARIANCE, jnp.float32)
    numpyro.sample("z", dist.MultivariateNormal(jnp.arange(5.0), covariance))


@pytest.mark.slow
def test_fewer_noise_than_latents_in_a_mixture():
    """Two factors and independent residuals, as a mixture over two noise dimensions has."""
    guide = AutoSemiImplicit(factor_model, noise_dim=2, hidden_dims=(32,))
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, 1500))
    svi = SVI(factor_model, guide, optimizer, ImplicitELBO())
    result = svi.run(random.key(0), 1500, progress_bar=False)
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(20_000,))["z"]
    sd = np.sqrt(np.diag(FACTOR_COVARIANCE))
    # 20 000 draws scatter a mean by .007 sd and an sd by .5 %; the rest is the error of the fit.
    # Over five keys means were within .02 sd, sds 1 to 4 % too small, correlations within .026.
    assert np.all(np.abs(np.mean(draws, axis=0) - np.arange(5.0)) < 0.04 * sd)
    assert np.all(np.abs(np.std(draws, axis=0) / sd - 1) < 0.07)
    expected = FACTOR_COVARIANCE / np.outer(sd, sd)
    assert np.all(np.abs(np.corrcoef(draws.T) - expected) < 0.07)


@pytest.mark.thorough
def test_mixtures_start_as_the_narrow_gaussian():
    guide = AutoSemiImplicit(
        factor_model, noise_dim=2, init_loc_fn=init_to_median, warm_start=False
    )
    svi = SVI(factor_model, guide, optax.adam(1e-2), ImplicitELBO(16))

    @quick_jit
    def draw(key):
        params = svi.get_params(svi.init(key))
        return guide.sample_posterior(random.key(1), params, sample_shape=(4000,))["z"]

    draws = draw(random.key(0))
    # Four standard errors of a deviation, 1/sqrt(8000).
    assert np.all(np.abs(np.std(draws, axis=0) / 0.1 - 1) < 4 / np.sqrt(8000))
    correlations = np.corrcoef(draws.T) - np.eye(5)
    assert np.all(np.abs(correlations) < 4 / np.sqrt(4000))


@pytest.mark.thorough
def test_networks_of_the_user_in_a_mixture():
    def network(noise):
        weight = numpyro.param("weight", jnp.ones((3, 5)))
        return noise @ weight

    guide = AutoSemiImplicit(factor_model, noise_dim=3, network=network, warm_start=False)
    elbo = ImplicitELBO(16, estimator=GaussianScore(), debias=None)
    svi = SVI(factor_model, guide, optax.adam(1e-2), elbo)
    state, loss = quick_jit(lambda key: svi.update(svi.init(key)))(random.key(0))
    assert np.isfinite(loss)
    assert set(svi.get_params(state)) == {"weight", "auto_loc", "auto_scale"}
    median = guide.median(svi.get_params(state))["z"]
    assert median.shape == (5,)
