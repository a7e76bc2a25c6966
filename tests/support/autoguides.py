"""Automatic guides that have seen their model."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, ScoreEstimator
from numpyro_kscore.regularizers import Tikhonov

KEY = random.key(0)
NUM_DRAWS = 20_000


def normal_model():
    numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def initialized(model, *args, guide=None, key=KEY, **options):
    """A guide that has seen its model, SVI and the parameters it starts from."""
    guide = AutoImplicit(model, **options) if guide is None else guide
    # Tikhonov without the correction compiles fast; what is estimated does not matter here.
    elbo = ImplicitELBO(16, estimator=ScoreEstimator(regularizer=Tikhonov(1e-2)), debias=None)
    svi = SVI(model, guide, optax.adam(1e-2), elbo)
    state = svi.init(key, *args)
    return guide, svi, state, svi.get_params(state)


def shapes_of(draws):
    return {name: np.shape(value) for name, value in draws.items()}
