"""Tails of scales that data hardly tell from zero, against quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore._starts.interpolation import Scales
from numpyro_kscore._starts.scale_rounds import find_scales
from numpyro_kscore._starts.scale_tails import tails_of
from numpyro_kscore._starts.search import AtPoints, CountedDensity
from numpyro_kscore._starts.start import NUM_DRAWS
from numpyro_kscore._starts.structure_search import _moved_by_weights, _start
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.centering import of_degrees
from numpyro_kscore._transports.stretch import unstretched
from numpyro_kscore._util.pareto import weight_ess
from support.dense_others import dense_others

GROUPS = 8
# Where the logarithms of the scale of effects and of that of the noise are integrated.
LINE, NOISES = np.linspace(-20.0, 3.0, 2301), np.linspace(-3.0, 1.5, 181)
MIDDLES = np.linspace(-1.3, 1.3, GROUPS)
HALVES = 0.35 * np.array([1.0, -1.2, 0.8, 1.1, -0.9, -1.3, 0.7, 1.0])


def energy(point):
    """Two observations of each of eight effects ``exp(s) z``, both scales half normal."""
    s, log_noise, z = point[0], point[1], point[2:]
    y = jnp.stack([MIDDLES + HALVES, MIDDLES - HALVES])
    left = (y - jnp.exp(s) * z) * jnp.exp(-log_noise)
    of_scales = 0.5 * jnp.exp(2 * point[:2]) - point[:2]
    return 0.5 * jnp.sum(left**2) + 2 * GROUPS * log_noise + 0.5 * jnp.sum(z**2) + of_scales.sum()


def masses():
    """The distribution of the logarithm of the scale of effects on its line."""
    s, log_noise = LINE[:, None], NOISES
    variance = np.exp(2 * log_noise)
    of_middle = variance + 2 * np.exp(2 * s)
    fit = GROUPS * 0.5 * (np.log(variance) + np.log(of_middle))
    fit = fit + np.sum(HALVES**2) / variance + np.sum(MIDDLES**2) / of_middle
    fit = fit + 0.5 * (np.exp(2 * s) + np.exp(2 * log_noise)) - s - log_noise
    found = np.exp(-(fit - fit.min())).sum(axis=1)
    return found / found.sum()


def test_others_follow_into_a_long_tail_and_are_integrated_out():
    """Others that are normal there, narrower or wider, are integrated exactly."""
    asked = []

    def evidence_at(point):
        asked.append(point)
        place, width = 0.3 * point[0], np.exp(0.1 * point[0])
        away = (point[1] - place) / width
        return -0.5 * abs(point[0]) - 0.5 * away**2, np.array([np.nan, -away / width])

    slopes = unstretched(2)
    slopes[0, 0] = 2.0
    found = tails_of(evidence_at, slopes, 0.0)
    # One side of one scale may be long: the others are not looked at.
    assert all(point[0] < 0 for point in asked)
    places = found.points[:, 0]
    np.testing.assert_array_equal(places, [-4.5, -6.5, -10.0, -16.0])
    np.testing.assert_allclose(found.evidences, 0.6 * places, rtol=1e-6)


@pytest.fixture(scope="module")
def found():
    """The Gaussian that changes with both scales."""
    with jax.enable_x64(True):
        others, at, mode = dense_others(energy, [-0.3, -0.9], GROUPS)
        now = Scales(
            Affine(at[:2], 0.3 * np.eye(2)),
            unstretched(2),
            mode.mean,
            np.zeros((2, GROUPS)),
            mode.triangle,
        )
        return find_scales(others, now, np.arange(2), is_small=True)


@pytest.mark.thorough
def test_weights_of_draws_move_scales_back(found):
    """Moved by half a standard deviation, and widened by a fifth, they return to where they are."""
    both = jax.jit(jax.vmap(jax.value_and_grad(energy)))

    def density(points, centering, other):
        del centering, other
        with jax.enable_x64(True):
            energies, gradients = (np.asarray(a) for a in both(points))
        return AtPoints(energies, gradients, points, points, points, points)

    form = of_degrees(np.ones(GROUPS + 2))
    points = np.random.default_rng(3).standard_normal((NUM_DRAWS, GROUPS + 2))
    off = found.moved_before(Affine(np.array([0.5, -0.3]), np.diag([1.2, 1.0])))
    model = CountedDensity(density)
    start = _start(model, form, off, off.transport, points)
    again = _moved_by_weights(model, form, off, start, points)
    right = found.transport.push(points)[:, :2]
    before, after = (one.transports.push(points)[:, :2] for one in (start, again))
    assert weight_ess(start.exact_draws.gaps) < 0.8 * NUM_DRAWS
    assert weight_ess(again.exact_draws.gaps) > 0.9 * NUM_DRAWS
    # Weighted moments of 4096 draws have errors of a fiftieth of a standard deviation.
    for moved, least, most in ((before, 0.25, 0.6), (after, 0.0, 0.08)):
        shift = np.abs(moved.mean(0) - right.mean(0)) / right.std(0)
        assert np.all((shift >= least) & (shift < most))


@pytest.mark.thorough
def test_a_scale_near_zero_has_its_tail(found):
    """A fiftieth of the posterior of the logarithm is far out, and has much of its variance."""
    exact = masses()
    mean = exact @ LINE
    sd = np.sqrt(exact @ (LINE - mean) ** 2)
    noise = np.random.default_rng(3).standard_normal((40_000, GROUPS + 2))
    draws = found.transport.push(noise)[:, 0]
    # Without looks at tails it is .56; parabolas are right to a tenth.
    assert draws.std() / sd == pytest.approx(1, abs=0.15)
    for end in (-2.0, -3.0, -4.0):
        # The least of them is .0023, with a Monte-Carlo error of a tenth.
        assert 0.6 < np.mean(draws < end) / exact[end > LINE].sum() < 1.7
