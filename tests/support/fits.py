"""The fits that tests of ``fit`` make."""

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

from numpyro_kscore import fit

KEY = random.key(0)
DATA = jnp.array([1.0, -1.0])
# Mean and sd of the posterior of `model`, which is Gaussian with independent coordinates.
MEAN, SD = np.array([0.8, -0.8]), 0.2**0.5
QUICK = {"max_steps": 600, "chunk_size": 20, "progress_bar": False}


def model(data):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(len(data)), 1.0).to_event(1))
    numpyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=data)


def guide(data):
    loc = numpyro.param("loc", jnp.zeros(2))
    sd = numpyro.param("sd", jnp.full(2, 0.1), constraint=constraints.softplus_positive)
    numpyro.sample("z", dist.Normal(loc, sd).to_event(1))


def make_svi(step_size=5e-2, guide=guide, model=model, num_particles=8):
    return SVI(model, guide, optax.adam(step_size), Trace_ELBO(num_particles=num_particles))


def quiet_fit(*args, **kwargs):
    """A fit that is cut short on purpose, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(*args, **kwargs)
