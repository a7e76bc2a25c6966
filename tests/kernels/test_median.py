"""The median distance, by bits as on a CPU and by sorting as elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore.kernels._median import median_distance
from support.oracle import median_distance as oracle_distance
from support.platforms import elsewhere_than_on_a_cpu

SAMPLES = np.random.default_rng(0).normal(size=(24, 3))
# Three quarters of all pairs coincide, then all.
TIED = np.concatenate([np.zeros((21, 3)), SAMPLES[:3]])


@pytest.mark.parametrize("is_cpu", [True, False])
def test_median_distance(is_cpu, monkeypatch):
    if not is_cpu:
        elsewhere_than_on_a_cpu(monkeypatch)
    points = np.stack([SAMPLES, TIED, np.zeros_like(SAMPLES)])
    squares = np.sum((points[:, :, None] - points[:, None]) ** 2, axis=-1)
    found = jax.jit(jax.vmap(median_distance))(jnp.asarray(squares, jnp.float32))
    pairs = SAMPLES.shape[0] * (SAMPLES.shape[0] - 1)
    mean = np.sqrt(squares[1]).sum() / pairs
    np.testing.assert_allclose(found, [oracle_distance(SAMPLES), mean, 1.0], rtol=1e-6)
