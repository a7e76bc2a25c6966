"""Mutable state of guide and model through steps of ``ImplicitELBO``."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI
from numpyro.primitives import mutable

from numpyro_kscore import ImplicitELBO
from support.affine import FEW, KEY, affine_guide, assert_close, standard_model
from support.compiling import quick_jit
from support.doubles import GaussianScore


def counting_guide(data):
    state = mutable("guide_state", {"steps": jnp.array(0), "average": jnp.zeros(())})
    state["steps"] = state["steps"] + 1
    state["average"] = 0.5 * state["average"] + 0.5 * jnp.mean(data)
    affine_guide()()


def counting_model(data):
    state = mutable("model_state", {"average": jnp.zeros(()), "latent": jnp.zeros(())})
    z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
    state["average"] = 0.5 * state["average"] + 0.5 * jnp.mean(data)
    state["latent"] = z[0]
    numpyro.sample("data", dist.Normal(z, 1.0), obs=data)


@pytest.mark.parametrize("vectorize", [True, False])
def test_mutable_state_of_guide_and_model_is_updated(vectorize):
    elbo = ImplicitELBO(256, estimator=GaussianScore(), vectorize_particles=vectorize)
    svi = SVI(counting_model, counting_guide, optax.sgd(0.0), elbo)
    data = jnp.array([1.0, 3.0])
    state = svi.init(KEY, data)
    update = quick_jit(svi.update)
    for _ in range(3):
        state, loss = update(state, data)
    assert np.isfinite(loss)
    guide_state, model_state = (state.mutable_state[k] for k in ("guide_state", "model_state"))
    # Setting up runs guide and model once, before the three steps.
    assert guide_state["steps"] == 4
    assert_close(guide_state["average"], 2 * (1 - 0.5**4))
    assert_close(model_state["average"], 2 * (1 - 0.5**4))
    # An average over 256 particles of N(.5, .49): five standard errors.
    assert abs(model_state["latent"] - 0.5) < 5 * 0.7 / np.sqrt(256)


def test_nested_mutable_state():
    def guide():
        state = mutable("state", {"inner": {"steps": jnp.zeros(())}})
        state["inner"]["steps"] = state["inner"]["steps"] + 1.0
        affine_guide()()

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(standard_model(), guide, optax.sgd(0.0), elbo)
    state = svi.init(KEY)
    update = quick_jit(svi.update)
    for _ in range(2):
        state, _ = update(state)
    assert state.mutable_state["state"]["inner"]["steps"] == 3


@pytest.mark.thorough
def test_batch_normalization_in_the_model():
    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)

    inputs = jnp.array([[1.0], [3.0]])

    def model():
        network = flax_module("network", Normalized(), input_shape=(2, 1), mutable=["batch_stats"])
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        numpyro.sample("data", dist.Normal(network(inputs) + z, 1.0).to_event(2), obs=inputs)

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(model, affine_guide(), optax.sgd(0.0), elbo)
    state, _ = quick_jit(svi.update)(svi.init(KEY))
    (mean,) = [leaf for path, leaf in jax.tree.leaves_with_path(state.mutable_state)
               if "mean" in str(path)]  # fmt: skip
    # The inputs' mean is 2, and the initial running mean 0; two updates at weight 0.1.
    assert_close(mean, jnp.array([2 * (1 - 0.9**2)]))


def test_no_tracer_leaks():
    with jax.checking_leaks():
        elbo = ImplicitELBO(FEW, estimator=GaussianScore())
        svi = SVI(counting_model, counting_guide, optax.adam(1e-2), elbo)
        data = jnp.array([1.0, 3.0])
        _, loss = jax.jit(svi.update)(svi.init(KEY, data), data)
    assert np.isfinite(loss)
