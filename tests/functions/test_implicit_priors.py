"""Priors that can only be drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, KernelExponentialFamily, ScoreEstimator
from numpyro_kscore._model.joint import log_joint_and_gradients
from numpyro_kscore._model.particles import draw_particle
from numpyro_kscore._model.program import Program, inspect_program
from numpyro_kscore.estimators import Median
from numpyro_kscore.regularizers import NuMethod
from support.compiling import quick_jit

PRIOR_LOC, PRIOR_SD, NOISE = np.array([1.0, -1.0]), np.array([0.5, 2.0]), 0.8
Y = np.array([2.0, 1.5])
CHEAP = ScoreEstimator(regularizer=NuMethod(10), bandwidth=Median())


def sampler(key):
    return PRIOR_LOC + PRIOR_SD * random.normal(key, (2,))


def fresh_model():
    """A prior that is simulated anew at every step."""
    keys = random.split(numpyro.prng_key(), 200)
    prior = KernelExponentialFamily(jax.vmap(sampler)(keys), CHEAP)
    z = numpyro.sample("z", prior)
    numpyro.sample("y", dist.Normal(z, NOISE).to_event(1), obs=jnp.asarray(Y))


def fixed_model(draws):
    z = numpyro.sample("z", KernelExponentialFamily(draws, CHEAP))
    numpyro.sample("y", dist.Normal(z, NOISE).to_event(1), obs=jnp.asarray(Y))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fresh", "fixed"])
def test_posterior_under_a_simulated_prior(kind):
    """The prior's draws are Gaussian, so the posterior is known."""
    args = ()
    if kind == "fixed":
        args = (jax.vmap(sampler)(random.split(random.key(9), 1000)),)
    model = fresh_model if kind == "fresh" else fixed_model
    guide = AutoImplicit(model)
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, 600))
    result = SVI(model, guide, optimizer, ImplicitELBO(64)).run(
        random.key(0), 600, *args, progress_bar=False
    )
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(4000,))["z"]
    precision = PRIOR_SD**-2.0 + NOISE**-2.0
    loc = (PRIOR_LOC * PRIOR_SD**-2.0 + Y * NOISE**-2.0) / precision
    sd = precision**-0.5
    # Draws, 200 in each step or 1000 in all, give the prior's mean to 7 % or 3 % of its sd.
    assert np.all(np.abs(np.mean(draws, axis=0) - loc) < 0.15 * sd)
    assert np.all(np.abs(np.std(draws, axis=0) / sd - 1) < 0.1)


def test_draws_are_simulated_once_a_step():
    """All particles of a step see the same draws, and each step sees new ones."""

    def model():
        center = random.normal(numpyro.prng_key(), (1,))
        z = numpyro.sample("z", dist.Normal(center, 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=jnp.ones(1))

    def guide():
        numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))

    program = Program({}, model, guide, (), {}, {})
    structure = inspect_program(random.key(0), program)

    @quick_jit
    def centers(key):
        keys = random.split(key, 8)
        draws = jax.vmap(lambda key: draw_particle(key, program, structure))(keys)
        joint = log_joint_and_gradients(draws, program, structure, None, False)
        # The score is center - z + 1 - z.
        return joint.scores + 2 * draws.flat - 1

    first, second = (np.asarray(centers(random.key(seed))) for seed in (1, 2))
    assert np.ptp(first) < 1e-5
    assert np.ptp(second) < 1e-5
    assert abs(first[0] - second[0]) > 1e-2
