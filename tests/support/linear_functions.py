"""A prior of functions that are linear in four features, and a guide that can be its posterior."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import Median
from numpyro_kscore.functions import measure
from numpyro_kscore.regularizers import NuMethod

AUXILIARY = {"is_auxiliary": True}
X = jnp.asarray(np.linspace(-1.0, 1.0, 6)[:, None], jnp.float32)
Y = jnp.asarray(np.sin(3 * np.linspace(-1.0, 1.0, 6)), jnp.float32)
POOL = jnp.asarray(np.linspace(-2.0, 2.0, 200)[:, None], jnp.float32)
NOISE, JITTER = 0.3, 0.05
# The least that an estimate of a score costs, where it is not what is tested.
CHEAP = ScoreEstimator(regularizer=NuMethod(1), bandwidth=Median(1e3))


def features(points):
    """Four functions whose random combinations are the functions of a prior, (m, 4)."""
    return jnp.stack([jnp.cos(k * points[:, 0] + k**2) for k in range(1, 5)], axis=1)


def prior(points):
    f = features(points)
    return dist.MultivariateNormal(0.0, f @ f.T + JITTER**2 * jnp.eye(len(points)))


def model(x, y, pool, batch_size=None, num_points=3):
    at = measure(x, batch_size, pool, num_points)
    f = numpyro.sample("f", prior(at.points))
    with at.data:
        numpyro.sample("y", dist.Normal(at.of_data(f), NOISE), obs=y[at.rows])


def linear_function(points):
    """Random weights of the prior's own features, with a covariance of any shape."""
    loc = numpyro.param("loc", jnp.array([0.3, -0.2, 0.1, 0.4]))
    root = numpyro.param("root", jnp.eye(4) + 0.2 * jnp.tri(4, k=-1))
    unit = numpyro.sample("unit", dist.Normal(jnp.zeros(4), 1.0).to_event(1), infer=AUXILIARY)
    return features(points) @ (loc + jnp.tril(root) @ unit)


def guide(x, y, pool, batch_size=None, num_points=3):
    at = measure(x, batch_size, pool, num_points)
    numpyro.sample("f", dist.Normal(linear_function(at.points), JITTER).to_event(1))
