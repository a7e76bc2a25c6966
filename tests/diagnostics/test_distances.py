"""Distances between two sets of draws, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import special, stats

from numpyro_kscore.diagnostics import mmd_squared, sliced_wasserstein

KEY = random.key(0)


def normal(seed, n, dim):
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def mean_projection(dim):
    """E|u·e| for a direction u uniform on the unit sphere in ``dim`` dimensions."""
    return special.gamma(dim / 2) / (np.sqrt(np.pi) * special.gamma((dim + 1) / 2))


# --------------------------------------------------------------------------- sliced Wasserstein


@pytest.mark.parametrize("shift", [0.3, -2.0])
def test_translation_in_one_dimension_is_exact(shift):
    x = normal(0, 50, 1)
    np.testing.assert_allclose(sliced_wasserstein(x, x + shift, KEY), abs(shift), rtol=1e-5)


@pytest.mark.parametrize("dim", [2, 10])
def test_translation_in_more_dimensions(dim):
    """Every projection of a translation by t is a translation by u·t."""
    x, shift = normal(1, 40, dim), np.zeros(dim, np.float32)
    shift[0] = 1.7
    num_projections = 20_000
    value = sliced_wasserstein(x, x + shift, KEY, num_projections)
    # |u₁| has second moment 1/d, so its mean over the directions scatters by less than this.
    standard_error = 1.7 * np.sqrt((1 / dim - mean_projection(dim) ** 2) / num_projections)
    assert abs(value - 1.7 * mean_projection(dim)) < 4 * standard_error


def test_gaussians_in_one_dimension():
    """W1(N(0, 1), N(1, 1)) = 1 and W1(N(0, 1), N(0, 4)) = E|z| = sqrt(2/π)."""
    n = 20_000
    x, y = normal(2, n, 1), normal(3, n, 1)
    # A difference of empirical quantiles scatters by about (1/n + 1/n)^½ times the spread.
    tolerance = 4 * np.sqrt(2 / n)
    assert abs(sliced_wasserstein(x, y + 1.0, KEY, 2) - 1.0) < tolerance
    assert abs(sliced_wasserstein(x, 2.0 * y, KEY, 2) - np.sqrt(2 / np.pi)) < 2 * tolerance


@pytest.mark.parametrize(("n", "m"), [(7, 7), (7, 5), (12, 4), (1, 9), (30, 31)])
def test_one_dimensional_distance_equals_scipy(n, m):
    x, y = normal(4, n, 1), 0.5 * normal(5, m, 1) + 0.3
    expected = stats.wasserstein_distance(x[:, 0], y[:, 0])
    np.testing.assert_allclose(sliced_wasserstein(x, y, KEY, 3), expected, rtol=1e-5)


@pytest.mark.parametrize(("n", "m"), [(20, 20), (20, 13)])
def test_projections_equal_scipy_one_by_one(n, m):
    dim, num_projections = 3, 5
    x, y = normal(6, n, dim), normal(7, m, dim) * 2 + 1
    directions = np.array(random.normal(KEY, (num_projections, dim)))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    expected = [stats.wasserstein_distance(x @ u, y @ u) for u in directions]
    value = sliced_wasserstein(x, y, KEY, num_projections)
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-4)


def test_sliced_wasserstein_is_a_distance():
    x, y, z = normal(8, 30, 2), normal(9, 30, 2) + 1, normal(10, 30, 2) * 3

    def distance(a, b):
        return float(sliced_wasserstein(a, b, KEY, 50))

    assert distance(x, x) == pytest.approx(0, abs=1e-6)
    assert distance(x, x[::-1]) == pytest.approx(0, abs=1e-6)
    assert distance(x, np.concatenate([x, x])) == pytest.approx(0, abs=1e-5)
    assert distance(x, y) == pytest.approx(distance(y, x), rel=1e-5)
    assert distance(x, z) <= distance(x, y) + distance(y, z)
    assert distance(3 * x, 3 * y) == pytest.approx(3 * distance(x, y), rel=1e-5)
    assert distance(x + 1e4, y + 1e4) == pytest.approx(distance(x, y), rel=2e-2)


@pytest.mark.thorough
def test_sampling_floor_falls_as_stated():
    floors = [
        np.mean([
            sliced_wasserstein(normal(2 * i, n, 2), normal(2 * i + 1, n, 2), KEY, 50)
            for i in range(100, 120)
        ])
        for n in (100, 1600)
    ]  # fmt: skip
    # (1/n + 1/m)^½: sixteen times the draws, a quarter of the floor.
    assert floors[0] / floors[1] == pytest.approx(4, rel=0.25)


# ----------------------------------------------------------------------------------------- MMD


def exact_mmd_squared(dim, shift, scale, bandwidth):
    """MMD² between N(0, I) and N(t, s² I) with the Gaussian kernel: three Gaussian integrals."""
    h2 = bandwidth**2

    def mean_kernel(variance, distance_squared):
        # E k(a, b) for a - b ~ N(distance, variance I).
        total = h2 + variance
        return (h2 / total) ** (dim / 2) * np.exp(-0.5 * distance_squared / total)

    within = mean_kernel(2.0, 0.0) + mean_kernel(2 * scale**2, 0.0)
    return within - 2 * mean_kernel(1 + scale**2, dim * shift**2)


@pytest.mark.parametrize(
    ("dim", "shift", "scale", "bandwidth"),
    [(1, 0.5, 1.0, 1.0), (2, 0.0, 2.0, 1.5), (5, 0.3, 0.7, 2.0), (1, 0.0, 1.0, 0.3)],
)
def test_mmd_is_unbiased_for_its_closed_form(dim, shift, scale, bandwidth):
    repetitions, n, m = 400, 20, 13

    @jax.jit
    def values(xs, ys):
        return jax.lax.map(lambda pair: mmd_squared(*pair, bandwidth), (xs, ys))

    x = normal(11, repetitions * n, dim).reshape(repetitions, n, dim)
    y = scale * normal(12, repetitions * m, dim).reshape(repetitions, m, dim) + shift
    estimates = np.asarray(values(x, y.astype(np.float32)))
    standard_error = estimates.std() / np.sqrt(repetitions)
    assert abs(estimates.mean() - exact_mmd_squared(dim, shift, scale, bandwidth)) < (
        4 * standard_error
    )
    # Small enough to detect the bias of the V-statistic, the diagonal: about 1/n + 1/m.
    assert standard_error < 0.1 * (1 / n + 1 / m)


def test_mmd_equals_its_definition():
    x, y, bandwidth = normal(13, 9, 3), normal(14, 6, 3) + 0.5, 1.3

    def kernel(a, b):
        squared = ((a[:, None].astype(float) - b[None]) ** 2).sum(-1)
        return np.exp(-0.5 * squared / bandwidth**2)

    xx, yy = kernel(x, x), kernel(y, y)
    expected = (
        (xx.sum() - np.trace(xx)) / (9 * 8)
        + (yy.sum() - np.trace(yy)) / (6 * 5)
        - 2 * kernel(x, y).mean()
    )
    np.testing.assert_allclose(mmd_squared(x, y, bandwidth), expected, rtol=1e-4)
    np.testing.assert_allclose(mmd_squared(y, x, bandwidth), expected, rtol=1e-4)
    np.testing.assert_allclose(mmd_squared(1e3 * x, 1e3 * y, 1e3 * bandwidth), expected, rtol=1e-3)


def test_mmd_over_several_blocks(x64):
    """Beyond 512 rows the sum goes block by block, the last one incomplete."""
    x, y = normal(15, 700, 2).astype(float), normal(16, 515, 2).astype(float) + 1
    squared = [((a[:, None] - b[None]) ** 2).sum(-1) for a, b in ((x, x), (y, y), (x, y))]
    xx, yy, xy = (np.exp(-0.5 * s) for s in squared)
    expected = (xx.sum() - 700) / (700 * 699) + (yy.sum() - 515) / (515 * 514) - 2 * xy.mean()
    np.testing.assert_allclose(mmd_squared(x, y, 1.0), expected, rtol=1e-9)


@pytest.mark.thorough
def test_default_bandwidth_is_the_median_distance():
    x, y = normal(17, 30, 2), normal(18, 25, 2) + 1
    pooled = np.concatenate([x, y])
    distances = np.linalg.norm(pooled[:, None] - pooled[None], axis=-1)
    median = np.median(distances[np.triu_indices(55, 1)])
    np.testing.assert_allclose(mmd_squared(x, y), mmd_squared(x, y, median), rtol=1e-3)
    # With many draws it is the median of some of them.
    many = normal(19, 1100, 2)
    value = mmd_squared(many, many + 1)
    # Two Gaussians √2 apart, with as many pairs within as between the sets.
    assert abs(value - mmd_squared(many, many + 1, 1.9)) < 0.05


def test_mmd_of_identical_draws_is_finite():
    same = np.ones((5, 2), np.float32)
    assert abs(mmd_squared(same, same)) < 1e-6
    assert np.isfinite(mmd_squared(same, same + 1))
    assert mmd_squared(same, same + 100, 0.1) == pytest.approx(2.0)


# -------------------------------------------------------------------------------------- errors

GOOD = normal(20, 6, 2)
BAD_DRAWS = [
    (TypeError, GOOD.astype(int), GOOD),
    (TypeError, GOOD, GOOD.astype(complex)),
    (ValueError, GOOD[:, 0], GOOD),
    (ValueError, GOOD, GOOD[:, :1]),
    (ValueError, GOOD[:0], GOOD),
    (ValueError, GOOD[:, :0], GOOD[:, :0]),
    (ValueError, GOOD, np.where(np.arange(12).reshape(6, 2) == 3, np.nan, GOOD)),
    (ValueError, np.where(np.arange(12).reshape(6, 2) == 3, np.inf, GOOD), GOOD),
]


@pytest.mark.parametrize(("error", "x", "y"), BAD_DRAWS)
@pytest.mark.parametrize("distance", [lambda x, y: sliced_wasserstein(x, y, KEY), mmd_squared])
def test_bad_draws_are_refused(distance, error, x, y):
    with pytest.raises(error, match=r"(?s)expected.*got"):
        distance(x, y)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ValueError, lambda: sliced_wasserstein(GOOD, GOOD, KEY, 0)),
        (TypeError, lambda: sliced_wasserstein(GOOD, GOOD, KEY, 10.0)),
        (ValueError, lambda: mmd_squared(GOOD[:1], GOOD)),
        (ValueError, lambda: mmd_squared(GOOD, GOOD[:1])),
        (ValueError, lambda: mmd_squared(GOOD, GOOD, 0.0)),
        (ValueError, lambda: mmd_squared(GOOD, GOOD, -1.0)),
        (ValueError, lambda: mmd_squared(GOOD, GOOD, jnp.nan)),
        (ValueError, lambda: mmd_squared(GOOD, GOOD, jnp.ones(2))),
    ],
)
def test_bad_options_are_refused(error, call):
    with pytest.raises(error, match=r"(?s)expected.*got"):
        call()


# ------------------------------------------------------------------------------------ under JAX


def test_under_jit_with_a_traced_bandwidth():
    x, y = jnp.asarray(GOOD), jnp.asarray(GOOD) + 1
    run = jax.jit(lambda x, y, h: (mmd_squared(x, y, h), sliced_wasserstein(x, y, KEY)))
    mmd, distance = run(x, y, 1.0)
    np.testing.assert_allclose(mmd, mmd_squared(x, y, 1.0), rtol=1e-4)
    np.testing.assert_allclose(distance, sliced_wasserstein(x, y, KEY), rtol=1e-4)


def test_float64(x64):
    x = GOOD.astype(float)
    assert mmd_squared(x, x + 1).dtype == jnp.float64
    value = sliced_wasserstein(x, x + 1e-9, KEY)
    assert value.dtype == jnp.float64
    # A translation by 1e-9 in both coordinates, which float32 would lose.
    assert value == pytest.approx(1e-9 * np.sqrt(2) * mean_projection(2), rel=0.15)


@pytest.mark.parametrize("distance", [lambda x, y: sliced_wasserstein(x, y, KEY), mmd_squared])
def test_gradients_point_apart(distance):
    """Moving one set away from the other must increase the distance; duplicates give no NaN."""
    x = jnp.asarray(GOOD)
    y = x.at[1].set(x[0]) + 0.5
    gradient = jax.grad(lambda t: distance(x, y + t))(0.0)
    assert np.isfinite(gradient)
    assert gradient > 0
