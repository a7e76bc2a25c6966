"""Automatic guides that have seen their model."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore._fit.svi import initial_state
from support.compiling import quick_jit
from support.doubles import GaussianScore

KEY = random.key(0)
NUM_DRAWS = 20_000
# What is estimated does not matter to tests of guides.
CHEAP = ImplicitELBO(16, estimator=GaussianScore(), debias=None)


def normal_model():
    numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def initialized(model, *args, guide=None, key=KEY, compiled=True, **options):
    """A guide that has seen its model, SVI and the parameters it starts from: a cold start.

    Operation by operation it takes longer; but a guide set up in a compiled program keeps, as
    NumPyro's do, a trace of it, with which it cannot be pickled.
    """
    options = {"warm_start": False, **options}
    guide = AutoImplicit(model, **options) if guide is None else guide
    svi = SVI(model, guide, optax.adam(1e-2), CHEAP)
    state = (quick_jit(svi.init) if compiled else svi.init)(key, *args)
    return guide, svi, state, svi.get_params(state)


def first_state(svi, *args, key=KEY):
    """The state of ``svi.init``, in one program, of a guide that looks for its start before."""
    return initial_state(svi, key, (args, {}))[0]


def shapes_of(draws):
    return {name: np.shape(value) for name, value in draws.items()}
