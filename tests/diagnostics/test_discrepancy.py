"""``stein_discrepancy`` against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_kscore.diagnostics import stein_discrepancy
from numpyro_kscore.diagnostics._discrepancy import masked_stein_discrepancy

KEY = random.key(0)


def imq(x, y, h):
    return (1 + np.sum((x - y) ** 2) / h**2) ** -0.5


def defined_discrepancy(x, s):
    """The U-statistic of the Stein operator's kernel, derivatives by central differences."""
    n, d = x.shape
    covariance = np.cov(x.T, bias=True).reshape(d, d)
    root = np.linalg.cholesky(covariance)
    z, s = np.linalg.solve(root, (x - x.mean(0)).T).T, s @ root
    distances = np.linalg.norm(z[:, None] - z[None], axis=2)
    h = np.median(distances[np.triu_indices(n, 1)])
    step, eye = 1e-4, np.eye(d)
    kernel, phi = np.zeros((n, n)), np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            a, b = z[i], z[j]
            phi[i, j] = imq(a, b, h)
            kernel[i, j] = phi[i, j] * s[i] @ s[j]
            for k in range(d):
                e = step * eye[k]
                kernel[i, j] += s[i, k] * (imq(a, b + e, h) - imq(a, b - e, h)) / (2 * step)
                kernel[i, j] += s[j, k] * (imq(a + e, b, h) - imq(a - e, b, h)) / (2 * step)
                corners = imq(a + e, b + e, h) - imq(a + e, b - e, h)
                corners += imq(a - e, b - e, h) - imq(a - e, b + e, h)
                kernel[i, j] += corners / (4 * step**2)
    return kernel.sum() / (d * phi.sum()), kernel / (d * phi.sum() / (n * (n - 1)))


@pytest.mark.parametrize("dim", [1, 3])
def test_discrepancy_is_its_definition(x64, dim):
    rng = np.random.default_rng(dim)
    x = rng.normal(size=(12, dim)) @ rng.normal(size=(dim, dim)) + 5.0
    s = rng.normal(size=(12, dim))
    expected, kernel = defined_discrepancy(x, s)
    found = stein_discrepancy(x, s)
    np.testing.assert_allclose(found.value, expected, rtol=1e-6)
    n, rows = 12, kernel.sum(1) / 11
    pairs = kernel[~np.eye(n, dtype=bool)]
    variance = 4 * rows.var(ddof=1) / n - 2 * pairs.var() / n**2
    variance = max(variance, 2 * pairs.var() / n**2)
    np.testing.assert_allclose(found.standard_error, variance**0.5, rtol=1e-6)


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.thorough
def test_discrepancy_is_the_squared_shift_and_its_error_is_right(shift):
    """Draws of N(0, AAᵀ) against scores of a Gaussian shifted by so many sd in every coordinate."""
    mixing = jnp.array([[1.0, 0.0], [30.0, 2.0]])

    def estimate(key):
        z = random.normal(key, (200, 2))
        return stein_discrepancy(z @ mixing.T, jnp.linalg.solve(mixing.T, (shift - z).T).T)

    found = jax.lax.map(estimate, random.split(KEY, 200))
    values = np.asarray(found.value)
    # Unbiased: the mean lies within three of its standard errors.
    assert abs(values.mean() - shift**2) < 3 * values.std() / 200**0.5 + 0.01 * shift**2
    # The error is too large near zero, where the statistic is degenerate; right elsewhere.
    ratio = np.sqrt(np.mean(np.square(found.standard_error))) / values.std()
    assert 0.9 < ratio < (1.4 if shift == 0 else 1.15)


def test_draws_that_are_not_valid_count_in_no_pair():
    x = random.normal(KEY, (200, 2))
    valid = jnp.arange(200) >= 40
    x = jnp.where(valid[:, None], x, x[-1])
    found = masked_stein_discrepancy(x, -x, valid)
    assert abs(found.value) < 4 * found.standard_error
    # If the copies counted, their pairs would swamp the rest.
    counted = masked_stein_discrepancy(x, -x, jnp.ones(200, bool))
    assert counted.value > 4 * found.standard_error
    assert jnp.isnan(masked_stein_discrepancy(x, -x, jnp.arange(200) < 2).value)


def test_wrong_input_is_named():
    x = jnp.ones((4, 2))
    with pytest.raises(ValueError, match=r"samples: expected at least 3 rows; got shape \(2, 2\)"):
        stein_discrepancy(x[:2], x[:2])
    with pytest.raises(ValueError, match=r"scores: expected shape \(4, 2\).*got \(3, 2\)"):
        stein_discrepancy(x, x[:3])
    with pytest.raises(TypeError, match="scores: expected an array of float32 or float64"):
        stein_discrepancy(x, x.astype(int))
