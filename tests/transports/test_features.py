"""Features of scales: their derivatives, and what they are for many scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore._transports.features import MANY, features, through_features

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("count", [0, 1, 2, 3, MANY, MANY + 1, 20])
def test_derivatives_are_those_of_the_features(count, x64):
    points = jnp.asarray(2 * RNG.normal(size=(4, count)))
    values = features(points)
    assert not np.any(features(jnp.zeros((1, count))))
    factors = jnp.asarray(RNG.normal(size=values.shape))
    found = jax.grad(lambda x: jnp.sum(features(x) * factors))(points)
    np.testing.assert_allclose(through_features(points, factors), found, rtol=1e-9, atol=1e-9)
    host = through_features(np.asarray(points), np.asarray(factors))
    np.testing.assert_allclose(host, found, rtol=1e-9, atol=1e-9)


def test_many_scales_have_themselves_and_products_of_two():
    count = MANY + 2
    points = 1e-3 * RNG.normal(size=(5, count))
    one, other = np.triu_indices(count)
    products = points[:, one] * points[:, other]
    np.testing.assert_allclose(features(points)[:, :count], points)
    np.testing.assert_allclose(features(points)[:, count:], products, rtol=1e-5)
    # A linear part has no end: with fifty scales some are beyond three standard deviations.
    far = np.zeros((1, count))
    far[0, 0] = 10.0
    assert features(far)[0, 0] == 10
    assert features(far)[0, count] < 9.1
