"""Whole fits mapped over data sets: each is what it is alone."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO
from support.compiling import quick_jit

NUM_STEPS, NUMBER = 10, 3


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("groups", 3):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, 10), obs=y)


@pytest.mark.parametrize("warm_start", [True, False], ids=["warm", "cold"])
@pytest.mark.slow
def test_fits_of_many_data_sets_are_those_of_each(warm_start):
    """Everything agrees, from initial parameters to draws; a warm start is that of earlier data."""
    data = 10 * random.normal(random.key(1), (NUMBER, 3))
    keys = random.split(random.key(2), NUMBER)
    guide = AutoImplicit(model, warm_start=warm_start, hidden_dims=(4,))
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(16))
    guide.set_up(random.key(0), data[0])

    def posterior(key, y):
        result = svi.run(key, NUM_STEPS, y, progress_bar=False)
        draws = guide.sample_posterior(key, result.params, sample_shape=(5,))
        return draws, result.params, result.losses

    many = quick_jit(jax.vmap(posterior))(keys, data)
    one = quick_jit(posterior)
    assert np.ptp(many[2], axis=0).min() > 0, "different data, different losses"
    for k in range(NUMBER):
        alone = one(keys[k], data[k])
        # Adam's first steps have the size of the rate whatever the gradient: roundings of 1e-7 in
        # it come to 1e-5 in ten steps.
        jax.tree.map(
            lambda a, b, k=k: np.testing.assert_allclose(a[k], b, rtol=1e-4, atol=1e-4), many, alone
        )
