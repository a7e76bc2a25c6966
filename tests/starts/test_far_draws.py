"""Draws of a start from farther out than its own, against closed forms."""

import numpy as np

from numpyro_kscore._model.defense import FARTHEST
from numpyro_kscore._starts.far_draws import TIMES, with_far_draws
from numpyro_kscore._starts.start import draws_at
from numpyro_kscore._transports.affine import standard
from numpyro_kscore._transports.transport import Chain
from numpyro_kscore.diagnostics._weighing import weigh

NUM, DIM, SD = 4_096, 5, 1.5


def energies(points):
    """A normal distribution whose first coordinate has a standard deviation of 1.5."""
    scaled = points / np.array([SD, *np.ones(DIM - 1)])
    constant = 0.5 * DIM * np.log(2 * np.pi) + np.log(SD)
    return 0.5 * np.sum(scaled**2, axis=1) + constant, scaled**2 / np.where(points, points, 1)


def test_they_see_a_tail_that_own_draws_do_not():
    rng, transport = np.random.default_rng(3), Chain((standard(DIM),))
    own = draws_at(energies, transport, rng.standard_normal((NUM, DIM)))
    both = with_far_draws(own, energies, transport, rng)
    assert both.weighted.is_own.sum() == NUM
    assert len(both.weighted.samples) == (1 + TIMES) * NUM
    assert np.max(np.abs(both.weighted.samples[NUM:])) <= FARTHEST
    few, more = weigh(own.as_weighted()), weigh(both.as_weighted())
    # Own draws: weights whose variance does not exist, and a ratio that is off.
    assert few.evidence.khat > 0.3
    assert abs(few.ratio[0] * SD - 1) > 0.02
    assert more.evidence.khat < 0.2
    assert abs(np.log(more.ratio[0] * SD)) < 3 * more.ratio_error[0] < 0.06
    assert np.all(np.abs(np.log(more.ratio[1:])) < 3 * more.ratio_error[1:])
    assert abs(more.evidence.value) < 3 * more.evidence.error < 0.06
