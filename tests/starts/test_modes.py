"""Modes that a search finds are in the start, with their fractions of probability."""

from itertools import permutations

import numpy as np
import pytest

from numpyro_kscore._starts.gaussian_search import find_gaussian
from numpyro_kscore._starts.search import AtPoints, Latents

LABELED = np.array(list(permutations([-6.0, 0.0, 6.0])))


def gaussians(means, widths, log_weights):
    """The density of a mixture of round Gaussians."""
    dim = means.shape[1]

    def density(points, centering, other):
        apart = points[:, None] - means
        each = log_weights - dim * np.log(widths) - 0.5 * np.sum(apart**2, 2) / widths**2
        log_density = np.logaddexp.reduce(each, axis=1)
        shares = np.exp(each - log_density[:, None]) / widths**2
        nothing = np.zeros_like(points)
        gradients = np.einsum("mk,mkd->md", shares, apart)
        return AtPoints(-log_density, gradients, points, points, nothing, nothing)

    return density


def latents(draws):
    dim = draws.shape[1]
    none = np.zeros(dim, bool)
    return Latents(np.ones(dim), draws, none, none, none, (dim,))


@pytest.mark.parametrize("seed", range(3))
def test_all_labels_of_three_components_are_found(seed):
    rng = np.random.default_rng(seed)
    density = gaussians(LABELED, np.full(6, 0.5), np.zeros(6))
    start = find_gaussian(density, latents(8.0 * rng.normal(size=(64, 3))), rng)
    assert len(start.parts) == 6
    # Gaussians are fitted exactly: weights have no error but that of the fit.
    np.testing.assert_allclose(start.weights, 1 / 6, atol=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_a_mode_that_does_not_count_leaves_the_others_apart(seed):
    """The third has e⁻⁷ of the mass, and is flat along a line."""
    rng = np.random.default_rng(seed)
    line = np.linspace(-3, 3, 9)[:, None] * np.array([0.0, 1.0])
    means = np.concatenate([[[-6.0, 0.0], [6.0, 0.0]], line])
    weights = np.concatenate([[0.0, 0.0], np.full(9, -7.0 - np.log(9))])
    density = gaussians(means, np.full(11, 0.8), weights)
    start = find_gaussian(density, latents(5.0 * rng.normal(size=(64, 2))), rng)
    assert len(start.parts) == 2
    np.testing.assert_allclose(start.weights, 0.5, atol=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_draws_that_are_all_the_same_are_no_starts(seed):
    rng = np.random.default_rng(seed)
    density = gaussians(np.array([[-3.0, 0.0], [3.0, 0.0]]), np.full(2, 0.5), np.zeros(2))
    start = find_gaussian(density, latents(np.zeros((64, 2))), rng)
    np.testing.assert_allclose(start.weights, [0.5, 0.5], atol=0.01)
    drawn = latents(np.column_stack([np.zeros(64), np.arange(64.0)])).with_spread(rng).from_prior
    np.testing.assert_array_equal(drawn[:, 1], np.arange(64.0))
    assert len(set(drawn[:, 0])) == 64


def test_one_mode_takes_no_more_paths():
    counts = []
    for number in (1, 2):
        rng = np.random.default_rng(0)
        means = np.array([[4.0, 0.0], [-4.0, 0.0]])[:number]
        density = gaussians(means, np.full(number, 0.5), np.zeros(number))
        start = find_gaussian(density, latents(3.0 * rng.normal(size=(64, 2))), rng)
        assert len(start.weights) == number
        counts.append(start.num_gradients)
    # 4096 of them are of draws that tell how near the start is.
    assert counts[0] < 4000 + 4096
