"""Shapes of coordinates that few data tell of, against the densities themselves on a grid."""

import numpy as np
import pytest

from numpyro_kscore._starts.fit_shapes import reshaped, unshaped
from numpyro_kscore._starts.noise import spread_out
from numpyro_kscore._transports.skewed import pushed, slopes_of

GRID = np.linspace(-12.0, 12.0, 9601)
PLACES = np.linspace(-6.0, 6.0, 1201)
# Standard normal numbers z given counts of zero and of three, three ones of three, and no loss.
DENSITIES = {
    "no event": lambda z: -0.5 * z**2 - 4 * np.exp(1.6 * z - 2.2),
    "three events": lambda z: -0.5 * z**2 - 4 * np.exp(1.6 * z - 2.2) + 4.8 * z,
    "ones": lambda z: -0.5 * z**2 - 3 * np.logaddexp(0, -3 * z),
    "gamma": lambda z: 2.5 * z - 3 * np.exp(z),
}
ROWS = 64


def at_mode(log_density):
    """The log density in units of its curvature at the mode, normalized, and its score."""
    values, step = log_density(GRID), GRID[1] - GRID[0]
    top = int(np.argmax(values))
    width = (step**2 / -(values[top + 1] - 2 * values[top] + values[top - 1])) ** 0.5
    total = np.log(np.sum(np.exp(values - values[top])) * step) + values[top] - np.log(width)

    def inside(y):
        return log_density(GRID[top] + width * y) - total

    return inside, lambda y: (inside(y + 1e-4) - inside(y - 1e-4)) / 2e-4


def divergence(inside, shapes):
    """The divergence of a shape (5,) from the density, in nats."""
    shapes, places = shapes[:, None], PLACES[:, None]
    weights = np.exp(-0.5 * PLACES**2) / np.sum(np.exp(-0.5 * PLACES**2))
    log_q = -0.5 * PLACES**2 - 0.5 * np.log(2 * np.pi) - np.log(slopes_of(places, shapes)[0][:, 0])
    return float(weights @ (log_q - inside(pushed(places, shapes)[:, 0])))


def fitted(score, noise, steps):
    """Shapes of 200 coordinates with the same score, to which others add noise."""
    rng = np.random.default_rng(0)
    spread, shapes = spread_out(rng, ROWS, 200), unshaped(200)
    for _ in range(steps):
        scores = score(pushed(spread.points, shapes))
        shapes = reshaped(shapes, spread, scores + noise * rng.normal(size=scores.shape))
    return shapes


@pytest.mark.parametrize("name", DENSITIES)
def test_a_skewed_density_is_found(name):
    inside, score = at_mode(DENSITIES[name])
    shapes = fitted(score, 0.0, 5)
    # Every coordinate has the same points; in an order of its own, which does not matter.
    np.testing.assert_allclose(shapes, shapes[:, :1] + 0 * shapes, atol=1e-9)
    found, normal = (divergence(inside, a[:, 0]) for a in (shapes, unshaped(1)))
    assert normal > 0.02
    assert found < 0.02 * normal


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_costs_no_more_than_its_variance(noise):
    inside, score = at_mode(DENSITIES["no event"])
    shapes = fitted(score, noise, 5)
    found = np.mean([divergence(inside, shapes[:, k]) for k in range(200)])
    # Five numbers of a shape from 64 scores: half of 5 noise² / 64 nats, if none were shortened.
    assert found < 2.5 * noise**2 / ROWS + 1e-3


def test_a_normal_density_stays_normal_under_noise():
    rng = np.random.default_rng(1)
    spread = spread_out(rng, ROWS, 2_000)
    scores = -spread.points + rng.normal(size=spread.points.shape)
    shapes = reshaped(unshaped(2_000), spread, scores)
    shift, slopes = shapes[0], shapes[1:]
    # A mean over 64 scores has a standard error of an eighth. Of the rest most is left out.
    assert np.std(shift) < 0.2
    assert np.mean(np.all(slopes == 0, axis=0)) > 0.4
    assert np.std(slopes[1:3]) < 0.2


def test_points_stand_for_a_normal_distribution():
    spread = spread_out(np.random.default_rng(0), ROWS, 3)
    np.testing.assert_allclose(np.sum(spread.weights, axis=0), 1)
    np.testing.assert_allclose(np.mean(spread.points**2, axis=0), 1)
    second = np.sum(spread.weights * spread.points**2, axis=0)
    np.testing.assert_allclose(
        second, 1, atol=0.06
    )  # tails beyond the outermost point are left out
