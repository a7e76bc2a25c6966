"""A standard normal model, a guide that is affine in its noise, and the loss of such pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.distributions import constraints

from numpyro_kscore import Implicit
from support.compiling import quick_jit

KEY = random.key(0)
# Plumbing runs at this size and in one dimension, un-jitted, so that the estimator compiles once.
FEW = 16


def draw_noise(dim, name="noise"):
    return numpyro.sample(
        name, dist.Normal(jnp.zeros(dim), 1.0).to_event(1), infer={"is_auxiliary": True}
    )


def standard_model(dim=1):
    def model():
        numpyro.sample("z", dist.Normal(jnp.zeros(dim), 1.0).to_event(1))

    return model


def affine_guide(dim=1):
    """z = loc + sd ε."""

    def guide(*args):
        loc = numpyro.param("loc", jnp.full(dim, 0.5))
        sd = numpyro.param("sd", jnp.full(dim, 0.7), constraint=constraints.positive)
        numpyro.sample("z", Implicit(loc + sd * draw_noise(dim), event_dim=1))

    return guide


AFFINE = {"loc": jnp.full(1, 0.5), "sd": jnp.full(1, 0.7)}


def loss_and_gradient(model, guide, params, elbo, *args, key=KEY):
    return jax.value_and_grad(lambda p: elbo.loss(key, p, model, guide, *args))(params)


def quick_loss_and_gradient(model, guide, params, elbo, *args):
    return quick_jit(lambda p: loss_and_gradient(model, guide, p, elbo, *args))(params)


def assert_close(actual, expected, rtol=1e-5, atol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected
    )


def is_finite(tree):
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))
