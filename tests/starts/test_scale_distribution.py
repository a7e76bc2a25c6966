"""The distribution of scales, from their evidence on axes."""

import numpy as np
import pytest
from scipy.special import ndtr

from numpyro_kscore._starts.scale_distribution import change_at_first, change_nearby, moments_by
from numpyro_kscore._starts.scale_rounds import CORNERS, MOST_SCALES, between, design
from numpyro_kscore._transports.stretch import KNOTS, slopes_at, stretched, unstretched

NODES = np.array([0.0, 1, -1, 2, -2, 3, -3])[:, None]


def exponential_tail(x):
    """A tail to the left as that of the logarithm of a half-normal scale, and none to the right."""
    return x - 0.5 * np.exp(2 * x)


DENSITIES = {
    "normal": lambda x: -0.5 * ((x - 0.4) / 1.3) ** 2,
    "exponential tail": exponential_tail,
    "logistic": lambda x: -x - 2 * np.logaddexp(0, -x),
}


def fitted(log_density, rounds=8):
    """Mean, width and slopes after rounds of changes at nodes, as a search takes them."""
    mean, width, slopes = 0.0, 1.0, unstretched(1)
    for _ in range(rounds):
        stretch = np.log(slopes_at(NODES, slopes)[0]).sum(axis=1)
        values = log_density(mean + width * stretched(NODES, slopes)[:, 0]) + stretch
        change = change_nearby(NODES, values, slopes)
        mean, width = mean + width * change.mean[0], width * change.factor[0, 0]
        slopes = change.slopes
    return mean, width, slopes, change.size


@pytest.mark.parametrize("name", DENSITIES)
def test_quantiles_are_those_of_the_density(name):
    """Probabilities below quantiles are those of a normal number, tails included."""
    log_density = DENSITIES[name]
    mean, width, slopes, size = fitted(log_density)
    assert size < 0.15
    grid = np.linspace(-60, 40, 400_001)
    density = np.exp(log_density(grid) - log_density(grid).max())
    below = np.cumsum(density) / density.sum()
    points = np.arange(-3.0, 3.5, 0.5)
    places = mean + width * stretched(points[:, None], slopes)[:, 0]
    found = np.interp(places, grid, below)
    # Seven nodes tell a seventh of a standard deviation. Beyond the last ones lines take the place
    # of densities: they are farther out than a normal tail, never nearer.
    outward = np.where(np.abs(points) > 1.5, 0.4, 0.15) * np.where(points < 0, -1, 1)
    inward = np.where(points < 0, 0.15, -0.15)
    assert np.all(found > ndtr(points + np.minimum(outward, inward)))
    assert np.all(found < ndtr(points + np.maximum(outward, inward)))


def test_tails_end_at_slopes_that_are_given():
    """The tails of a scale that is normal under its prior are no longer than the prior's."""
    values = exponential_tail(NODES[:, 0])
    free = change_nearby(NODES, values, unstretched(1))
    held = change_nearby(NODES, values, unstretched(1), most=np.array([1.2]))
    width = held.factor[0, 0]
    assert free.slopes[0, 0] * width > 2
    np.testing.assert_allclose(held.slopes[0, [0, 1]] * width, 1.2)
    # Inside, the evidence decides.
    np.testing.assert_array_equal(held.slopes[0, 2:8], free.slopes[0, 2:8])


def test_a_normal_distribution_stays():
    change = change_nearby(NODES, -0.5 * NODES[:, 0] ** 2, unstretched(1))
    assert change.size < 0.01
    np.testing.assert_allclose(change.slopes, 1, atol=0.1)


def test_gradients_on_axes_tell_correlations():
    """A normal density of four scales is found at once; values on axes know no correlation."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4)) / 2 + np.eye(4)
    mean, precision = np.array([0.3, -0.2, 0.1, 0.4]), np.linalg.inv(root @ root.T)
    points = np.concatenate([np.zeros((1, 4)), 1.5 * np.eye(4), -1.5 * np.eye(4)])
    values = -0.5 * np.einsum("ni,ij,nj->n", points - mean, precision, points - mean)
    change = change_at_first(points, values, -(points - mean) @ precision)
    np.testing.assert_allclose(change.mean, mean, atol=1e-8)
    np.testing.assert_allclose(change.factor @ change.factor.T, root @ root.T, atol=1e-8)
    alone = change_at_first(points, values)
    assert np.max(np.abs(alone.factor @ alone.factor.T - root @ root.T)) > 0.1


def test_moments_are_those_of_weighted_points():
    points = np.random.default_rng(0).normal(size=(20_000, 2))
    # A normal density with another mean, and correlated.
    precision, mean = np.array([[1.1, -0.3], [-0.3, 1.2]]), np.array([0.2, -0.1])
    rest = points - mean
    values = 0.5 * np.sum(points**2, axis=1) - 0.5 * np.einsum("ni,ij,nj->n", rest, precision, rest)
    found = moments_by(values, points)
    # Four standard errors of 20 000 points, of which most are effective.
    np.testing.assert_allclose(found.mean, mean, atol=0.04)
    covariance = found.factor @ found.factor.T
    np.testing.assert_allclose(covariance, np.linalg.inv(precision), atol=0.06)
    assert moments_by(20 * points[:, 0], points) is None


def test_slopes_are_derivatives():
    rng = np.random.default_rng(0)
    slopes = np.exp(rng.normal(size=(2, len(KNOTS) + 1)))
    points, step = rng.normal(scale=3, size=(50, 2)), 1e-5
    ahead, behind = (stretched(points + sign * step, slopes) for sign in (1, -1))
    found, of_logs = slopes_at(points, slopes)
    np.testing.assert_allclose(found, (ahead - behind) / (2 * step), rtol=1e-6)
    ahead, behind = (np.log(slopes_at(points + sign * step, slopes)[0]) for sign in (1, -1))
    np.testing.assert_allclose(of_logs, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stretched(np.zeros(2), slopes), 0, atol=1e-15)


@pytest.mark.parametrize("count", CORNERS)
def test_corners_tell_scales_and_pairs_apart(count):
    """All of them are orthogonal: a fraction of resolution V."""
    corners = between(count)
    pairs = [corners[:, a] * corners[:, b] for a in range(count) for b in range(a)]
    columns = np.column_stack([corners, *pairs])
    np.testing.assert_array_equal(columns.T @ columns, len(corners) * np.eye(columns.shape[1]))
    assert len(corners) < 4 * len(pairs)


def test_gradients_center_many_scales():
    """A density with cubic terms: the best Gaussian has no mean slope, and the mean curvature."""
    count = MOST_SCALES + 4
    rng = np.random.default_rng(0)
    factor = np.eye(count) + 0.1 * rng.normal(size=(count, count))
    curvature, center = factor @ factor.T, 0.3 * rng.normal(size=count)
    cubic = 0.01 * rng.normal(size=(count, count))

    def gradients(x):
        moved = x - center
        # The log density has minus the sum over pairs of cubic[a, b] x[a]² x[b].
        return -moved @ curvature - 2 * x * (x @ cubic.T) - x**2 @ cubic

    points = design(count, (1.2,))
    mean, root = np.zeros(count), np.eye(count)
    for _ in range(30):
        at = mean + points @ root.T
        change = change_at_first(points, np.zeros(len(points)), gradients(at) @ root)
        mean, root = mean + root @ change.mean, root @ change.factor
    assert change.size < 1e-6
    draws = rng.normal(size=(200_000, count))
    draws = np.concatenate([draws, -draws])
    slopes = gradients(mean + draws @ root.T) @ root
    # Slopes have a standard deviation of about 1 at these draws, of which linear parts cancel.
    assert np.max(np.abs(slopes.mean(axis=0))) < 0.005
    hessian = -slopes.T @ draws / len(draws)
    np.testing.assert_allclose(hessian, np.eye(count), atol=0.02)
