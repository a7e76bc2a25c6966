"""Models with subsampled plates at all of their rows."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer.util import log_density

from numpyro_kscore import AutoImplicit
from numpyro_kscore._tracing.subsampling import whole_plates

DATA = jnp.asarray(np.random.default_rng(0).normal(3.0, 1.0, 500).astype(np.float32))


def indexed(data, batch):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", len(data), subsample_size=batch) as rows:
        numpyro.sample("data", dist.Normal(mean, 1.0), obs=data[rows])


def handed(batch, size):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", size, subsample_size=len(batch)):
        numpyro.sample("data", dist.Normal(mean, 1.0), obs=batch)


def _density(model, *args):
    return log_density(numpyro.handlers.seed(model, random.key(0)), args, {}, {"mean": 2.0})[0]


def test_the_density_is_that_of_all_rows():
    whole = whole_plates(indexed, (DATA, 20), {})
    np.testing.assert_allclose(_density(whole, DATA, 20), _density(indexed, DATA, None), rtol=1e-6)


def test_batches_from_outside_stay_as_they_are():
    batch = DATA[:20]
    model = whole_plates(handed, (batch, 500), {})
    np.testing.assert_allclose(_density(model, batch, 500), _density(handed, batch, 500), rtol=1e-6)


def test_guides_start_at_the_posterior_of_all_data():
    """A batch of 20 rows has a posterior whose mean is off by five standard deviations."""
    guide = AutoImplicit(indexed)
    guide.set_up(random.key(0), DATA, 20)
    precision = len(DATA) + 0.01
    mean, sd = float(jnp.sum(DATA)) / precision, precision**-0.5
    np.testing.assert_allclose(guide.start.gaussian.mean, mean, atol=0.1 * sd)
    np.testing.assert_allclose(guide.start.gaussian.factor, sd, rtol=0.1)
