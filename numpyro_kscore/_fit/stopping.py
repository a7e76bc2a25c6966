"""The stopping rule of a fit: when a noisy trace has stopped improving, and what happens then.

A fit first searches at full step size. Once windows of its trace show no improvement beyond their
errors, it settles: the step size falls to 0 along a cosine over as many steps as the search took,
which averages the noise away. If that brought much, another round follows, twice as long: a fit
has converged when it no longer pays to double it. Where the bound of a guide is known with
little noise, a fit needs no search: it takes rounds from its first step, and none at all if the
guide starts at the model. Everything here is plain numbers on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from numpyro_kscore._fit.progress import (
    CONVERGED,
    NEAR_AT_END,
    CloseLook,
    Ending,
    Gain,
    Look,
    Progress,
    Rule,
)
from numpyro_kscore._starts.start import FAR_FOR_EACH
from numpyro_kscore.diagnostics._codes import Cause, Doubt
from numpyro_kscore.diagnostics._weighing import Weighing

# A window is this fraction of the trace so far, which tells slow progress from none.
WINDOW_FRACTION = 0.2
SHORTEST_WINDOW = 2
# Fraction of the steps after which a fit settles at the latest: it has made most of its way.
SEARCH_FRACTION = 0.4
# Chunks at least in which a fit settles with more particles: these show what the search missed.
FINER_LEAST = 16
# Chunks of the first round where the bound is known, and the rounds in a row after which it ends
# if they brought nothing.
FIRST_ROUND, MOST_CALM = 4, 3
# Chunks in a row that must show a run-away, each beyond three errors, and the growth of the
# guide's log standard deviation.
RUNAWAY_CHUNKS = 3
RUNAWAY_SPREAD = 0.1
# A settled fit is called doubtful beyond this discrepancy, in standard deviations, and beyond these
# errors of a mean or a log standard deviation.
DOUBTFUL, DOUBTFUL_MOMENT = 0.3, 0.15
# A fit is also doubtful beyond this share of skipped steps, whose data do not count.
DOUBTFUL_SKIPPED = 0.02


def step_sizes(progress: Progress, rule: Rule) -> np.ndarray:
    """Factors of the step size for the steps of the next chunk, (chunk_size,)."""
    # Every recovery halves it: what broke at one step size breaks again.
    factor = 0.5**progress.recoveries
    if progress.phase == "search":
        return np.full(rule.chunk_size, factor)
    start = (len(progress.looks) - progress.settle_from) * rule.chunk_size
    fraction = (start + np.arange(rule.chunk_size)) / (progress.settle_length * rule.chunk_size)
    return factor * 0.5 * (1 + np.cos(np.pi * fraction))


def begin(look: Look, rule: Rule) -> Progress:
    """Decide what comes first, by a look at the start."""
    if look.bound_gain is None:
        return Progress()
    if rule.is_final:
        is_near = look.divergence < FAR_FOR_EACH * rule.dim and _is_below(look, rule)
        cause: Cause = "tol" if is_near else "plateau"
        return Progress(phase="done", cause=cause, start=look)
    if rule.can_be_exact and _is_near(look, rule.near_at_start, rule):
        return Progress(phase="done", cause="tol", start=look)
    if not rule.knows_bound:
        return Progress()
    length = _round_length(FIRST_ROUND, rule.num_chunks)
    return Progress(phase="settle", settle_length=length, start=look)


def advance(progress: Progress, look: Look, rule: Rule) -> Progress:
    """Add one more look and decide what comes next."""
    best = progress.best
    if not _is_worse(look, progress, rule):
        best = len(progress.looks)
    progress = progress._replace(looks=(*progress.looks, look), best=best)
    if _runs_away(progress, rule):
        return progress._replace(phase="done", cause="runaway")
    count = len(progress.looks)
    if progress.phase == "search":
        calm = progress.calm
        cause: Cause = ""
        window = max(SHORTEST_WINDOW, int(WINDOW_FRACTION * count))
        if count >= 2 * window:
            loss_falls = _gain(progress.looks, window, "loss").is_real(rule.least_loss)
            gap_falls = _gain(progress.looks, window, "discrepancy").is_real(rule.tol**2)
            calm = 0 if loss_falls or gap_falls else calm + 1
            if calm >= rule.patience:
                cause = "plateau"
            elif not loss_falls and _is_below(look, rule):
                cause = "tol"
        rest = rule.num_chunks - count
        if not cause and count >= SEARCH_FRACTION * rule.num_chunks:
            cause = "budget"
        if not cause:
            return progress._replace(calm=calm)
        # Steps of full size wobble about the optimum, and tails fill while the size falls.
        length = rest if cause == "budget" else count
        if rule.settles_finer:
            length = max(FINER_LEAST, length)
        progress = progress._replace(
            phase="settle",
            searched=count,
            cause=cause,
            calm=calm,
            settle_from=count,
            settle_length=min(length, rest),
        )
    if count >= progress.settle_from + progress.settle_length:
        return _next_round(progress, rule)
    return progress


def _next_round(progress: Progress, rule: Rule) -> Progress:
    """Settle once more, over as many steps as there were, if the last time brought much."""
    count, length = len(progress.looks), progress.settle_length
    progress = progress._replace(rounds=(*progress.rounds, count))
    rest = rule.num_chunks - count
    if progress.start is None:
        pays = progress.cause in CONVERGED and _pays(progress, rule)
        cause = progress.cause
    else:
        look = progress.looks[-1]
        nats = NEAR_AT_END * rule.least_loss
        is_near = _is_near(look, nats, rule)
        is_done = is_near and rule.can_be_exact
        gained = _bound_gain(progress).is_real(rule.least_loss, errors=2)
        brought = look.bound - progress.start.bound
        # Tails fill late: of what is left, where much is, steps that brought more than that may
        # bring nothing for a round or two. A start that was nearly all that they reach they narrow.
        progress = progress._replace(calm=0 if gained else progress.calm + 1)
        may_gain = brought > look.divergence > nats and progress.calm < MOST_CALM
        pays = not is_done and (gained or may_gain)
        cause = "tol" if is_near else "plateau"
        if gained and not is_done and not rest:
            cause = "budget"
    if not pays or 2 * rest < length:
        return progress._replace(phase="done", cause=cause)
    if progress.start is not None:
        length = _round_length(count, rest)
    else:
        length = min(2 * length if rule.settles_finer else count, rest)
    return progress._replace(settle_from=count, settle_length=length)


def _round_length(length: int, rest: int) -> int:
    """The length of a round, or all the rest if less than half of it would be left over."""
    return rest if 2 * (rest - length) < length else length


def _pays(progress: Progress, rule: Rule) -> bool:
    """Whether settling lowered the loss by more than the wobble that it takes away."""
    count, length = len(progress.looks), progress.settle_length
    window = max(SHORTEST_WINDOW, int(WINDOW_FRACTION * length))
    before = progress.settle_from
    if rule.settles_finer:
        # Losses of a search with fewer particles have another bias: the middle of the round counts.
        before += (length + window) // 2
        if before > count - window:
            return False
    ends = [*range(before - window, before), *range(count - window, count)]
    gain = _gain(tuple(progress.looks[k] for k in ends), window, "loss")
    return gain.is_real(rule.round_gain, errors=2)


def _bound_gain(progress: Progress) -> Gain:
    """How much higher the bound is than before the last round, by the better of two comparisons.

    One is of the same draws before and after; the other is of losses at the ends of two rounds,
    which are of more draws, for guides that moved so far that the same noise does not help.
    """
    look = progress.looks[-1]
    same = look.bound_gain or Gain(-math.inf, math.inf)
    if len(progress.rounds) < 2:
        return same
    lengths = np.diff([0, *progress.rounds])[-2:]
    window = max(1, int(WINDOW_FRACTION * min(lengths)))
    ends = [k for end in progress.rounds[-2:] for k in range(end - window, end)]
    losses = _gain(tuple(progress.looks[k] for k in ends), window, "loss")
    return min(same, losses, key=lambda gain: gain.standard_error)


def _is_near(look: Look, nats: float, rule: Rule) -> bool:
    """Whether the guide is at most so many nats from the model, where the guide has draws."""
    return look.divergence <= nats and _is_below(look, rule)


def _is_below(look: Look, rule: Rule) -> bool:
    """Whether the discrepancy is within tol, and no mean or width is known to be off."""
    # Negative estimates are noise: clip them at zero.
    is_near = max(look.discrepancy, 0.0) + 2 * look.discrepancy_error < rule.tol**2
    return is_near and not _is_off(look, rule.tol)


def _is_off(look: Look, most: float) -> bool:
    """Whether a mean or a width is known to be off."""
    return look.shift >= most or look.width >= most


def _is_worse(look: Look, progress: Progress, rule: Rule) -> bool:
    """Whether loss or discrepancy is higher than the best beyond three errors of the difference."""
    other = progress.best_look
    if other is None:
        return False
    if look.bound_gain is not None:
        return look.gain < -3 * look.gain_error - rule.least_loss
    if _is_alike(progress, rule) and _is_higher(look, other, rule.least_loss):
        return True
    error = math.hypot(look.discrepancy_error, other.discrepancy_error)
    return look.discrepancy - other.discrepancy > 3 * error + rule.tol**2


def _is_higher(look: Look, other: Look, least: float = 0.0) -> bool:
    """Whether a loss is higher than another beyond three errors of the difference and the least."""
    error = math.hypot(look.loss_error, other.loss_error)
    return look.loss - other.loss > 3 * error + least


def _is_alike(progress: Progress, rule: Rule) -> bool:
    """Whether the losses of the next look and of the best are means over as many particles."""
    is_searched = progress.phase == "search" or progress.best >= progress.searched
    return is_searched or not rule.settles_finer


def _gain(looks: tuple[Look, ...], window: int, name: str) -> Gain:
    values = [getattr(look, name) for look in looks]
    if not np.all(np.isfinite(values[-2 * window :])):
        return Gain(-math.inf, 0.0)
    # Errors of single losses come from few blocks and are noisy: use their median for all.
    errors = [max(getattr(look, f"{name}_error"), 1e-30) for look in looks]
    if name == "loss":
        errors = [float(np.median(errors[-2 * window :]))] * len(errors)
    return window_gain(values, errors, window)


def _runs_away(progress: Progress, rule: Rule) -> bool:
    """Whether the guide spreads while the model's density at it falls and the loss grows."""
    good = progress.best_look
    if good is None or progress.best > len(progress.looks) - 1 - RUNAWAY_CHUNKS:
        return False
    return all(
        look.log_spread > good.log_spread + RUNAWAY_SPREAD
        and good.log_density - look.log_density
        > 3 * math.hypot(look.log_density_error, good.log_density_error)
        and (_is_higher(look, good) or not _is_alike(progress, rule))
        for look in progress.looks[-RUNAWAY_CHUNKS:]
    )


def conclude(
    progress: Progress,
    rule: Rule,
    stopped: Cause = "",
    weights: Weighing | None = None,
    close: CloseLook | None = None,
) -> Ending:
    """Say how a fit ended, by the rule or by what stopped it before.

    A distance is claimed only if weights say so, or a close look at the guide that is returned.
    """
    cause = stopped or progress.cause
    distance = shift = width = math.nan
    doubt: Doubt = ""
    best = progress.best_look
    if best is not None and close is not None:
        best = best._replace(
            discrepancy=close.discrepancy,
            discrepancy_error=close.discrepancy_error,
            shift=close.shift,
            width=close.width,
        )
    if best is not None:
        distance = math.sqrt(max(best.discrepancy, 0.0))
        shift, width = best.shift, best.width
        if weights is not None:
            # Looks see moments where the guide is, weights those of the model.
            shift, width = (max(pair) for pair in zip((shift, width), _moved(weights), strict=True))
        is_known = weights is None or weights.knows_all
        is_known = is_known and (close is None or close.most < rule.tol)
        is_within = _is_below(best, rule) and not max(shift, width) >= rule.tol
        if cause == "tol" and not (is_known and is_within):
            # It was within tol during the search, and is not any more, or nobody can say so.
            cause = "plateau"
    steps = len(progress.looks) * rule.chunk_size
    skipped = sum(look.skipped for look in progress.looks) / max(steps, 1)
    if best is not None and cause in CONVERGED:
        best = best._replace(shift=shift, width=width)
        doubt = _doubt(best, progress.recoveries, skipped, weights)
    if rule.is_final and cause in CONVERGED and weights is not None and weights.knows_all:
        cause, doubt, shift, width = _by_weights(weights, rule.tol)
    numbers = (steps, rule.tol, distance, progress.recoveries, shift, width, skipped)
    if weights is None:
        return Ending(cause, doubt, *numbers)
    effective = weights.evidence.num_effective / weights.evidence.num_draws
    return Ending(cause, doubt, *numbers, effective, weights.largest_shape)


def _by_weights(weights: Weighing, tol: float) -> tuple[Cause, Doubt, float, float]:
    """The ending of a start that stays as it is, and its errors, by weights that know all.

    It has few draws far out, whose scores are wild and say that means are off or are too noisy to
    tell. They have no weight.
    """
    shift, width = _moved(weights)
    is_within = max(_moved(weights, -2.0)) < tol
    doubt: Doubt = "moments" if max(shift, width) >= DOUBTFUL_MOMENT else ""
    return "tol" if is_within else "plateau", doubt, shift, width


def _moved(weights: Weighing, errors_less: float = 2.0) -> tuple[float, float]:
    """The errors of means and log standard deviations by weights, less two standard errors."""
    errors = (
        np.where(weights.is_known, np.maximum(np.abs(value) - errors_less * error, 0.0), 0.0)
        for value, error in (
            (weights.shift, weights.shift_error),
            (np.log(weights.ratio), weights.ratio_error),
        )
    )
    shift, width = (float(np.max(error)) for error in errors)
    return shift, width


def _doubt(best: Look, recoveries: int, skipped: float, weights: Weighing | None) -> Doubt:
    if best.discrepancy - 3 * best.discrepancy_error > DOUBTFUL**2:
        return "far"
    if _is_off(best, DOUBTFUL_MOMENT):
        return "moments"
    if weights is not None and weights.lacks_draws:
        return "tail"
    if 3 * best.discrepancy_error > DOUBTFUL**2:
        return "noisy"
    if skipped > DOUBTFUL_SKIPPED:
        return "skipped"
    return "recovered" if recoveries else ""


def window_gain(values: Sequence[float], errors: Sequence[float], window: int) -> Gain:
    """Compare the means of the last two windows of a trace, whose numbers are finite.

    Entries are weighted by their inverse variances, so one with a huge error counts for nothing.
    Where they scatter more than their errors explain, as losses do while an optimizer wanders, the
    error of the mean grows by the ratio. A window needs at least 2 entries for a scatter.
    """
    value, error = np.asarray(values, float), np.asarray(errors, float)
    before = _mean(value[-2 * window : -window], error[-2 * window : -window])
    after = _mean(value[-window:], error[-window:])
    return Gain(before[0] - after[0], float(np.hypot(before[1], after[1])))


def _mean(value: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    weight = (np.min(error) / error) ** 2
    mean = float(np.sum(weight * value) / np.sum(weight))
    scatter = np.sum(((value - mean) / error) ** 2) / max(len(value) - 1, 1)
    return mean, float(np.min(error) / np.sqrt(np.sum(weight)) * np.sqrt(max(scatter, 1.0)))
