"""The stopping rule of a fit, on traces made by hand."""

from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore._fit import last_look
from numpyro_kscore._fit.last_look import covers
from numpyro_kscore._fit.programs import largest_errors, moment_errors
from numpyro_kscore._fit.progress import CloseLook, Ending, Look, Progress, Rule
from numpyro_kscore._fit.stopping import advance, begin, conclude, step_sizes, window_gain
from numpyro_kscore._starts.start import ExactDraws
from numpyro_kscore.diagnostics._codes import Cause, Doubt
from numpyro_kscore.diagnostics._messages import fit_reason
from numpyro_kscore.diagnostics._weighing import weigh


def describe(ending):
    return fit_reason(ending.cause, ending.doubt, ending._asdict())


RULE = Rule(chunk_size=10, num_chunks=100, tol=0.1, patience=3, dim=2)


def follow(discrepancies, losses=None, rule=RULE, error=1e-3, rng=None):
    """Add looks with noise until the fit is done or the trace ends."""
    rng = rng or np.random.default_rng(0)
    losses = np.zeros(len(discrepancies)) if losses is None else losses
    progress = Progress()
    for smoothed, loss in zip(discrepancies, losses, strict=True):
        if progress.phase == "done":
            break
        smoothed, loss = smoothed + error * rng.normal(), loss + error * rng.normal()
        progress = advance(progress, Look(smoothed, error, loss, error, 0, 1, 0, 0), rule)
    return progress


@pytest.mark.parametrize("flat_from", [5, 10, 20])
@pytest.mark.parametrize("signal", ["discrepancy", "loss"])
def test_the_search_ends_soon_after_the_trace_is_flat(flat_from, signal):
    falling = np.maximum(1 - np.arange(40) / flat_from, 0) + 0.5
    level = np.full(40, 0.5)
    both = (falling, None) if signal == "discrepancy" else (level, falling)
    progress = follow(*both)
    assert progress.cause == "plateau"
    assert flat_from <= progress.settle_from <= 1.6 * flat_from + 8
    assert progress.settle_length == min(progress.settle_from, 100 - progress.settle_from)


def test_the_search_goes_on_while_either_signal_falls():
    progress = follow(np.full(100, 0.5), 100 - np.arange(100.0))
    assert (progress.cause, progress.settle_from, progress.settle_length) == ("budget", 40, 60)
    assert progress.phase == "done"
    ending = conclude(progress, RULE)
    assert (ending.cause, ending.doubt, ending.converged) == ("budget", "", False)
    reason, advice = describe(ending)
    assert "still improving when it had to end after 1000 steps" in reason
    assert "max_steps" in advice


def test_changes_too_small_to_matter_do_not_prolong_the_search():
    loss = np.linspace(0, -RULE.least_loss, 40)  # over the whole trace, not a window
    assert follow(np.full(40, 0.5), loss, error=1e-6).settle_from == 6


def test_below_tol_settles_once_the_loss_is_flat():
    low = np.full(100, RULE.tol**2 / 4)
    progress = follow(low)
    assert (progress.cause, progress.settle_from, progress.settle_length) == ("tol", 4, 4)
    assert (progress.phase, len(progress.looks)) == ("done", 8)
    assert follow(low, 100 - np.arange(100.0)).cause == "budget"
    # An error as large as tol² proves nothing.
    assert follow(low, error=RULE.tol**2).cause == "plateau"


def test_a_round_that_brought_much_is_followed_by_one_twice_as_long():
    low = np.full(100, RULE.tol**2 / 4)
    much = 12 * RULE.least_loss
    # Flat while the fit searches; each fall is that of one round.
    falls = np.zeros(100)
    falls[6:] -= much
    once = follow(low, falls, error=1e-5)
    assert (once.cause, once.settle_from, once.settle_length) == ("tol", 8, 8)
    assert (once.phase, len(once.looks)) == ("done", 16)
    falls[12:] -= much
    twice = follow(low, falls, error=1e-5)
    assert (twice.settle_from, twice.settle_length, len(twice.looks)) == (16, 16, 32)
    assert len(follow(low, falls / 4, error=1e-5).looks) == 8  # too little
    # As many steps as are left, but none shorter than half the last one.
    for most, taken in ((12, 12), (10, 10), (9, 8)):
        rule = RULE._replace(num_chunks=most)
        assert len(follow(low, falls, rule=rule, error=1e-5).looks) == taken


@pytest.mark.parametrize(("fall", "taken"), [(0.5, 8), (0.9, 16)])
def test_the_wobble_of_full_steps_is_no_reason_for_another_round(fall, taken):
    falls = np.zeros(100)  # 100 dimensions lose .45 nats of it when steps get small
    falls[6:] -= fall
    low = np.full(100, RULE.tol**2 / 4)
    progress = follow(low, falls, RULE._replace(dim=100), error=1e-5)
    assert (progress.phase, len(progress.looks)) == ("done", taken)


FINER = RULE._replace(settles_finer=True)


def test_settling_with_more_particles_takes_enough_steps_to_see_what_they_show():
    low = np.full(100, RULE.tol**2 / 4)
    progress = follow(low, rule=FINER)
    assert (progress.cause, progress.searched, progress.rounds) == ("tol", 4, (20,))
    long = follow(np.full(40, 0.5), 5 - np.minimum(np.arange(40.0), 18), rule=FINER)
    assert long.searched > 16
    assert long.settle_length == long.searched
    # A round takes no more chunks than are left.
    assert len(follow(low, rule=FINER._replace(num_chunks=10)).looks) == 10


@pytest.mark.parametrize("bias", [-3.0, 3.0])
def test_losses_of_different_numbers_of_particles_are_not_compared(bias):
    low = np.full(100, RULE.tol**2 / 4)
    losses = np.zeros(100)
    losses[4:] += bias
    progress = follow(low, losses, rule=FINER)
    assert (progress.rounds, progress.best) == ((20,), 19)
    # Losses of the round are compared: a rise within it leaves the best where it was.
    losses[10:] += 1
    assert follow(low, losses, rule=FINER).best == 9
    # So is the discrepancy of a search: where settling is worse, the guide before it is returned.
    assert follow(np.where(np.arange(100) < 4, low, 1.0), losses, rule=FINER).best == 3


def test_a_finer_round_is_followed_by_another_while_its_second_half_gains():
    low = np.full(100, RULE.tol**2 / 4)
    falls = np.zeros(100)
    falls[16:] -= 3 * RULE.least_loss
    twice = follow(low, falls, rule=FINER, error=1e-5)
    assert (twice.rounds, twice.settle_length) == ((20, 52), 32)
    falls[16:] += 2.5 * RULE.least_loss
    assert follow(low, falls, rule=FINER, error=1e-5).rounds == (20,)
    early = np.where(np.arange(100) < 8, 1.0, 0.0)
    assert follow(low, early, rule=FINER, error=1e-5).rounds == (20,)


def known(bound, gain, error=1e-4, divergence=1.0, discrepancy=1e-3, **numbers):
    """A look at a guide whose bound is known."""
    look = Look(discrepancy, 1e-4, -bound, 0.1, 0, 1, 0, 0, **numbers)
    return look._replace(bound=bound, gain=gain, gain_error=error, divergence=divergence)


def in_rounds(bounds, rule=RULE, error=1e-4, **numbers):
    """A fit whose bound, from the start on, is ``bounds`` at the looks."""
    progress, last = begin(known(bounds[0], 0.0, **numbers), rule), bounds[0]
    for bound in bounds[1:]:
        if progress.phase == "done":
            break
        rounds = len(progress.rounds)
        progress = advance(progress, known(bound, bound - last, error, **numbers), rule)
        if len(progress.rounds) > rounds:
            last = bound
    return progress


def test_rounds_double_until_one_gains_nothing():
    near = {"divergence": 1.9 * RULE.least_loss, "shift": 0.11}
    assert in_rounds(np.zeros(101), **near).rounds == (4,)
    rising = np.r_[0.0, np.full(4, 1.0), np.full(4, 2.0), np.full(92, 3.0)]
    progress = in_rounds(rising, **near)
    assert (progress.rounds, progress.cause, progress.phase) == ((4, 8, 16, 32), "plateau", "done")
    sizes = step_sizes(progress._replace(looks=progress.looks[:8], settle_from=8), RULE)
    np.testing.assert_allclose(sizes, 0.5 * (1 + np.cos(np.pi * np.arange(10) / 160)))
    # Gains within two of their errors, or below the least that matters, are none.
    assert in_rounds(rising, error=0.6, **near).rounds == (4,)
    assert in_rounds(rising * 0.9 * RULE.least_loss, **near).rounds == (4,)
    assert in_rounds(rising * 1.1 * RULE.least_loss, **near).rounds == (4, 8, 16, 32)


def test_far_from_the_model_three_rounds_in_a_row_must_gain_nothing():
    """Tails fill late: where much is left, a round or two may bring nothing."""
    late = np.r_[0.0, np.full(4, 1.1), np.full(4, 1.1), np.full(92, 2.0)]
    progress = in_rounds(late)
    assert (progress.rounds, progress.cause) == ((4, 8, 16, 32, 64, 100), "plateau")
    # Not so where less was brought than is left.
    assert in_rounds(0.9 / 1.1 * late).rounds == (4, 8)
    # Where steps end after the first such round, it was not still gaining.
    assert in_rounds(late, RULE._replace(num_chunks=8)).cause == "plateau"


def test_a_fit_that_gains_to_the_end_of_its_steps_says_so():
    progress = in_rounds(np.arange(101.0))
    assert (progress.rounds, progress.cause) == ((4, 8, 16, 32, 64, 100), "budget")
    # What is left is a round of its own if it is at least half of the last one.
    for most, rounds in ((12, (4, 8, 12)), (10, (4, 8, 10)), (9, (4, 9)), (5, (5,)), (3, (3,))):
        progress = in_rounds(np.arange(101.0), RULE._replace(num_chunks=most))
        assert (progress.rounds, progress.cause) == (rounds, "budget")


def test_where_the_same_noise_does_not_help_losses_tell_the_gain():
    """A few draws with a great gap make it noisy; a chunk has more draws than a look."""
    progress = begin(known(0.0, 0.0), RULE)
    falls = 0.0
    while progress.phase != "done":
        falls += 1.0 if len(progress.looks) < 16 else 0.0
        look = known(0.0, 10.0 if len(progress.looks) < 4 else 0.0, error=4.0)
        progress = advance(progress, look._replace(loss=-falls, loss_error=0.01), RULE)
    assert progress.rounds == (4, 8, 16, 32)


def test_a_guide_at_the_model_takes_no_step():
    exact = {"divergence": 0.4 * RULE.least_loss}
    progress = in_rounds(np.zeros(101), **exact)
    assert (progress.phase, progress.cause, progress.best) == ("done", "tol", -1)
    ending = conclude(progress, RULE)
    assert (ending.steps, ending.converged, ending.doubt) == (0, True, "")
    assert describe(ending)[0].startswith("no step was needed: means and sds agree")
    for apart in ({"divergence": 0.6 * RULE.least_loss}, {"shift": 0.1}, {"discrepancy": 0.02}):
        assert in_rounds(np.zeros(101), **{**exact, **apart}).rounds == (4,)
    # A model with parameters has more to fit, and one that gets there stops there.
    assert in_rounds(np.zeros(101), RULE._replace(can_be_exact=False), **exact).rounds == (4,)
    rising = np.arange(101.0)
    assert in_rounds(rising, RULE._replace(can_be_exact=False), **exact).cause == "budget"
    # A round that leaves little, but more than would do at the start, is the last one.
    near, far = ({"divergence": share * RULE.least_loss} for share in (1.9, 2.1))
    assert (in_rounds(rising, **near).rounds, in_rounds(rising, **near).cause) == ((4,), "tol")
    assert in_rounds(rising, **far).cause == "budget"


def test_the_start_is_returned_if_steps_make_it_worse():
    progress = in_rounds(-np.arange(101.0))
    assert (progress.rounds, progress.best) == ((4,), -1)
    assert conclude(progress, RULE).distance == pytest.approx(1e-3**0.5)
    assert in_rounds(-1e-3 * np.arange(101.0)).best == 3


def test_noise_alone_stops_within_a_few_looks():
    starts = [
        follow(np.full(100, 0.5), error=0.3, rng=np.random.default_rng(seed)).settle_from
        for seed in range(50)
    ]
    assert np.median(starts) <= 12


def test_window_gain_against_plain_formulas():
    rng = np.random.default_rng(1)
    values, errors = rng.normal(size=9), np.full(9, 0.5)
    gain = window_gain(values, errors, 4)
    before, after = values[1:5], values[5:]
    np.testing.assert_allclose(gain.value, before.mean() - after.mean())
    # Values that scatter more than their errors say have the error of their scatter.
    wide = 10 * values
    gain = window_gain(wide, errors, 4)
    expected = np.sqrt((wide[1:5].var(ddof=1) + wide[5:].var(ddof=1)) / 4)
    np.testing.assert_allclose(gain.standard_error, expected)
    # A value with a huge error changes nothing.
    broken, unsure = values.copy(), errors.copy()
    broken[6], unsure[6] = 1e6, 1e9
    kept = np.delete(values[5:], 1).mean()
    np.testing.assert_allclose(
        window_gain(broken, unsure, 4).value, before.mean() - kept, rtol=1e-6
    )


def test_step_sizes_fall_to_zero_along_a_cosine():
    progress = Progress(looks=(None,) * 4, phase="settle", settle_from=4, settle_length=2)
    first = step_sizes(progress, RULE)
    second = step_sizes(progress._replace(looks=(None,) * 5), RULE)
    expected = 0.5 * (1 + np.cos(np.pi * np.arange(20) / 20))
    np.testing.assert_allclose(np.concatenate([first, second]), expected)
    np.testing.assert_array_equal(step_sizes(Progress(recoveries=2), RULE), 0.25)


def test_a_run_away_is_called_and_the_state_before_it_kept():
    def a_look(spread, log_density, loss):
        return Look(0.5, 0.01, loss, 0.01, log_density, 0.1, spread, 0)

    good = [a_look(0.0, -1.0, 5.0 - k) for k in range(4)]
    progress = Progress()
    for look in [*good, *(a_look(0.5 * k, -5.0 * k, 3.0 + k) for k in range(1, 9))]:
        progress = advance(progress, look, RULE)
        if progress.phase == "done":
            break
    assert (progress.cause, progress.best, len(progress.looks)) == ("runaway", 3, 7)
    assert "ran away: by step 70" in describe(conclude(progress, RULE))[0]
    # A guide that starts narrow grows too, and the density at it falls, but so does the loss.
    progress = Progress()
    for k in range(8):
        progress = advance(progress, a_look(0.5 * k, -5.0 * k, -k), RULE)
    assert progress.phase == "search"


@pytest.mark.parametrize(
    ("smoothed", "error", "skipped", "doubt", "words"),
    [
        (0.25, 0.01, 0, "far", "0.5 sd from the model"),
        (0.25, 0.08, 0, "noisy", "too noisy to tell"),
        (0.1, 0.01, 1, "skipped", "10% of the steps were skipped"),
        (0.1, 0.01, 0, "", ""),
    ],
)
def test_a_doubtful_end_is_reported(smoothed, error, skipped, doubt, words):
    looks = [Look(smoothed, error, 0.0, 0.1, 0, 1, 0, skipped)] * 100
    progress = Progress()
    while progress.phase != "done":
        progress = advance(progress, looks[0], RULE)
    ending = conclude(progress, RULE)
    assert (ending.cause, ending.doubt, ending.converged) == ("plateau", doubt, True)
    reason, advice = describe(ending)
    assert bool(advice) == bool(doubt)
    assert words in reason


def test_an_interrupted_fit_has_no_other_reason():
    """The only cause is the interruption, with looks and without."""
    for looks in ((), (Look(1.0, 0.01, 0.0, 0.1, 0, 1, 0, 0),)):
        progress = Progress(looks=looks, cause="plateau", recoveries=1)
        ending = conclude(progress, RULE, "interrupted")
        assert (ending.cause, ending.doubt, ending.converged) == ("interrupted", "", False)
        assert describe(ending) == (f"interrupted after {10 * len(looks)} steps", "")


def test_every_code_has_words():
    for cause in get_args(Cause):
        for doubt in get_args(Doubt):
            if cause:
                assert "{" not in "".join(describe(Ending(cause, doubt, 10, 0.1, 0.5, 2)))
    kept, _ = describe(Ending("plateau", "tail", 0, 0.1, 0.05, 0))
    assert kept.startswith("no step was needed, at a guide with too few draws in a tail")
    agrees, _ = describe(Ending("tol", "", 10, 0.1, 0.05, 0))
    assert agrees == "converged after 10 steps: means and sds agree with the model within 0.1 sd"
    # In minibatches nothing is known of moments.
    near, _ = describe(Ending("tol", "", 10, 0.1, 0.05, 0, np.nan, np.nan))
    assert near == "converged after 10 steps: the discrepancy from the model is below 0.1 sd"


def largest(*given):
    """The largest errors of moments, of arrays as `moment_errors` takes them."""
    return largest_errors(moment_errors(*(jnp.asarray(a, float) for a in given)))


def test_moment_errors_of_a_gaussian_are_exact():
    """Draws with another mean and other widths than those of a correlated Gaussian model."""
    rng = np.random.default_rng(0)
    factor = np.array([[2.0, 0.0], [1.5, 0.5]])
    x = rng.normal(size=(500, 2)) @ factor.T * 0.9
    centered = x - x.mean(0)
    weight = np.full(500, 1 / 500)
    # Where draws are 10 % too narrow, E[(C s)_i x_i] is -.81 C_ii.
    narrow = np.cov(centered.T, bias=True)
    scores = -centered @ np.linalg.inv(narrow) * 0.81
    shift, width = largest(centered, scores, weight)
    # The residual is .19 x, whose square has a standard error of sqrt(2 / 500) of its mean; two
    # errors are taken off. The error itself is known to a tenth.
    assert float(width) == pytest.approx(0.095 * (1 - 2 * np.sqrt(2 / 500)), abs=0.0015)
    assert float(shift) < 1e-5
    moved = scores + 0.3 * np.linalg.inv(np.linalg.cholesky(narrow)).T[:, 0]
    shift, _ = largest(centered, moved, weight)
    # C L⁻ᵀ e₁ is the first column of L, so that the first mean is off by .3 sd.
    assert 0.25 < float(shift) < 0.32


def test_moment_errors_have_no_noise_where_the_score_of_the_guide_is_known():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.gamma(3.0, size=(200, 2)) - 3.0)
    weight, own = jnp.full(200, 1 / 200), 2 / (x + 3.0) - 1.0
    assert max(map(float, largest(x, own, weight, own))) == 0.0
    # The variance is 3: a score that is .1 higher everywhere asks for means .1 √3 sd higher. The
    # covariance of these draws is within a tenth of the true one, with an error of 7 %.
    shift, _ = largest(x, own + 0.1, weight, own)
    assert float(shift) == pytest.approx(0.1 * np.sqrt(3), rel=0.2)
    # Folded draws, whose score is NaN, do not count.
    folded = own.at[:50].set(jnp.nan)
    np.testing.assert_allclose(largest(x, own + 0.1, weight, folded)[0], shift, rtol=1e-5)


@pytest.mark.parametrize(("most", "cause"), [(0.05, "tol"), (0.15, "plateau")])
def test_a_distance_is_claimed_only_if_many_draws_say_so(most, cause):
    progress = follow(np.full(100, RULE.tol**2 / 4))
    close = CloseLook(1e-3, 1e-4, 0.0, 0.0, most)
    assert conclude(progress, RULE, close=close).cause == cause
    # An error that few draws did not show counts, too.
    off = conclude(progress, RULE, close=close._replace(shift=0.2))
    assert (off.cause, off.doubt, off.shift) == ("plateau", "moments", 0.2)
    assert conclude(progress, RULE, close=close._replace(discrepancy=0.2)).doubt == "far"


@pytest.mark.parametrize(
    ("ratio", "shape", "covered"), [(0.9, 0.8, False), (1.1, 0.8, True), (0.9, 0.4, True)]
)
def test_a_thin_tail_counts_where_weights_make_it_wider(monkeypatch, ratio, shape, covered):
    points = np.random.default_rng(0).normal(size=(1000, 1))
    exact = ExactDraws(points, points, points[:, 0], np.zeros(1000), 0.0, points)
    assert covers(exact)
    seen = weigh(exact.as_weighted())
    seen = seen._replace(ratio=np.array([ratio]), shapes=np.array([shape]))
    monkeypatch.setattr(last_look, "weigh", lambda draws: seen)
    assert seen.lacks_draws == (shape > 0.7)
    assert covers(exact) == covered


@pytest.mark.parametrize(
    ("ratio", "error", "shape", "cause", "doubt"),
    [
        (0.97, 0.02, 0.4, "tol", ""),
        (0.97, 0.05, 0.4, "plateau", ""),
        (0.7, 0.02, 0.4, "plateau", "moments"),
        (0.97, 0.02, 0.8, "plateau", "moments"),
    ],
)
def test_a_start_that_stays_is_judged_by_weights(ratio, error, shape, cause, doubt):
    """Few draws far out say that its means are off, if weights do not know better."""
    wild = Look(50.0, 20.0, 0, 1, 0, 1, 0, 0, shift=24.0, width=3.0, bound=0.0, divergence=0.1)
    progress = Progress(phase="done", cause="plateau", start=wild)
    points = np.random.default_rng(0).normal(size=(1000, 1))
    exact = ExactDraws(points, points, points[:, 0], np.zeros(1000), 0.0, points)
    weights = weigh(exact.as_weighted())._replace(
        ratio=np.array([ratio]), ratio_error=np.array([error]), shapes=np.array([shape])
    )
    ending = conclude(progress, RULE._replace(is_final=True), weights=weights)
    assert (ending.cause, ending.doubt) == (cause, doubt)
