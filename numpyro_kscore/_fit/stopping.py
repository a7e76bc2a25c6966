"""The stopping rule of a fit: when a noisy trace has stopped improving, and what happens then.

A fit first searches at full step size. Once windows of its trace show no improvement beyond their
errors, it settles: the step size falls to 0 along a cosine over as many steps as the search took,
which averages the noise away. If that brought much, another round follows, twice as long: a fit
has converged when it has stopped paying to double it. Everything here is plain numbers on the host.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from numpyro_kscore._fit.windows import Gain, window_gain

__all__ = [
    "Cause",
    "Doubt",
    "Ending",
    "Look",
    "Progress",
    "Rule",
    "advance",
    "conclude",
    "step_sizes",
]

Phase = Literal["search", "settle", "done"]
Cause = Literal["", "plateau", "tol", "budget", "runaway", "nan", "interrupted", "callback"]
Doubt = Literal["", "far", "moments", "noisy", "skipped", "recovered"]
# Causes of a fit that has converged.
CONVERGED = ("plateau", "tol")

# A window is this fraction of the trace so far, which tells slow progress from none.
WINDOW_FRACTION = 0.2
SHORTEST_WINDOW = 2
# Fraction of the steps after which a fit settles at the latest: it has made most of its way.
SEARCH_FRACTION = 0.4
# A round that lowered the loss by this many times the smallest gain that matters is followed by
# another; the second number is for fits with little noise.
ROUND_GAIN, QUIET_GAIN = 4, 1
# At full step size Adam at 1e-2 wobbles by .0045 nats for each dimension, and by .0004 to .0013
# where local densities leave little noise (docs/convergence). To lose that by settling is no sign
# that more is to be had.
WOBBLE, LEAST_WOBBLE = 0.006, 0.001
# Chunks in a row that must show a run-away, each beyond three errors, and the growth of the
# guide's log standard deviation.
RUNAWAY_CHUNKS = 3
RUNAWAY_SPREAD = 0.1
# A settled fit is called doubtful beyond this discrepancy, in standard deviations, and beyond these
# errors of a mean or a log standard deviation.
DOUBTFUL, DOUBTFUL_MOMENT = 0.3, 0.15
# And beyond this share of steps that were skipped: data of those do not count.
DOUBTFUL_SKIPPED = 0.02


class Rule(NamedTuple):
    """The settings that decide when a fit stops.

    Attributes:
        chunk_size: steps between two looks.
        num_chunks: largest number of chunks.
        tol: tolerance, in standard deviations.
        patience: successive looks without improvement that end the search.
        dim: dimension of the latent space.
        is_quiet: whether local densities leave little noise in the gradient.
    """

    chunk_size: int
    num_chunks: int
    tol: float
    patience: int
    dim: int
    is_quiet: bool = False

    @property
    def least_loss(self) -> float:
        """The divergence, in nats, of a Gaussian of which √d means are off by ``tol``."""
        return 0.5 * self.dim**0.5 * self.tol**2

    @property
    def round_gain(self) -> float:
        """The fall of the loss, in nats, after which settling once more may pay."""
        wobble, factor = (LEAST_WOBBLE, QUIET_GAIN) if self.is_quiet else (WOBBLE, ROUND_GAIN)
        return max(factor * self.least_loss, wobble * self.dim)


class Look(NamedTuple):
    """The numbers of one look at a fit. With ``criterion="loss"`` those of the guide are NaN.

    Attributes:
        discrepancy: squared, see :func:`~numpyro_kscore.diagnostics.stein_discrepancy`.
        discrepancy_error: its standard error.
        loss: mean over the steps of the chunk that were not skipped.
        loss_error: its standard error.
        log_density: mean log density of the model at draws of the guide.
        log_density_error: its standard error.
        log_spread: mean log standard deviation of the draws' coordinates.
        skipped: number of steps skipped because their loss or gradient was not finite.
        shift: largest error of a mean that is seen beyond two standard errors, in standard
            deviations, by Stein's identity; NaN in minibatches, whose noise hides it.
        width: the same for a log standard deviation.
    """

    discrepancy: float
    discrepancy_error: float
    loss: float
    loss_error: float
    log_density: float
    log_density_error: float
    log_spread: float
    skipped: int
    shift: float = 0.0
    width: float = 0.0


class Progress(NamedTuple):
    """The state of the stopping rule.

    Attributes:
        looks: one for each chunk.
        phase: ``"search"``, ``"settle"`` or ``"done"``.
        cause: why the search ended: ``"plateau"``, ``"tol"``, ``"budget"``, ``"runaway"``,
            ``"nan"``; empty before.
        settle_from: number of chunks before the step size began to fall.
        settle_length: number of chunks over which it falls.
        calm: number of successive looks without improvement.
        best: index of the look at the best state; -1 before the first look.
        recoveries: how often a chunk was undone and tried again.
    """

    looks: tuple[Look, ...] = ()
    phase: Phase = "search"
    cause: Cause = ""
    settle_from: int = 0
    settle_length: int = 0
    calm: int = 0
    best: int = -1
    recoveries: int = 0


class Ending(NamedTuple):
    """How a fit ended, as codes and the numbers they rest on.

    Attributes:
        cause: why it stopped: ``"plateau"`` (nothing improved any more), ``"tol"`` (discrepancy
            below ``tol``), ``"budget"`` (out of steps), ``"runaway"``, ``"nan"``,
            ``"interrupted"`` or ``"callback"`` (which ended it).
        doubt: what is wrong with a converged fit: ``"far"`` (the guide is far from the model),
            ``"moments"`` (a mean or a standard deviation is off),
            ``"noisy"`` (its distance is too noisy to tell), ``"skipped"`` (so were many steps),
            ``"recovered"`` (numbers were not finite on the way); otherwise empty.
        steps: number of steps.
        tol: tolerance of the rule.
        distance: discrepancy of the best guide, in standard deviations; NaN if not known.
        recoveries: how often a chunk was undone and tried again.
        shift: largest error of a mean, in standard deviations, as in :class:`Look`.
        width: largest error of a log standard deviation.
        skipped: share of steps that were skipped.
    """

    cause: Cause
    doubt: Doubt
    steps: int
    tol: float
    distance: float
    recoveries: int
    shift: float = 0.0
    width: float = 0.0
    skipped: float = 0.0

    @property
    def converged(self) -> bool:
        """Whether the search ended because nothing was left to gain."""
        return self.cause in CONVERGED


def step_sizes(progress: Progress, rule: Rule) -> np.ndarray:
    """Factors of the step size for the steps of the next chunk, (chunk_size,)."""
    # Halved at every recovery: what broke at one step size breaks again.
    factor = 0.5**progress.recoveries
    if progress.phase == "search":
        return np.full(rule.chunk_size, factor)
    start = (len(progress.looks) - progress.settle_from) * rule.chunk_size
    fraction = (start + np.arange(rule.chunk_size)) / (progress.settle_length * rule.chunk_size)
    return factor * 0.5 * (1 + np.cos(np.pi * fraction))


def advance(progress: Progress, look: Look, rule: Rule) -> Progress:
    """Add one more look and decide what comes next."""
    best = progress.best
    if best < 0 or not _is_worse(look, progress.looks[best], rule):
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
        # At full size steps wobble about where they could get to, and tails fill while they fall.
        length = rest if cause == "budget" else count
        progress = progress._replace(
            phase="settle",
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
    rest = rule.num_chunks - count
    window = max(SHORTEST_WINDOW, int(WINDOW_FRACTION * length))
    ends = [
        *range(progress.settle_from - window, progress.settle_from),
        *range(count - window, count),
    ]
    gain = _gain(tuple(progress.looks[k] for k in ends), window, "loss")
    least = max(rule.round_gain, 2 * gain.standard_error)
    if progress.cause not in CONVERGED or gain.value <= least or 2 * rest < length:
        return progress._replace(phase="done")
    return progress._replace(settle_from=count, settle_length=min(count, rest))


def _is_below(look: Look, rule: Rule) -> bool:
    """Whether the discrepancy is within tol, and no mean or width is known to be off."""
    # Negative estimates are noise: clip them at zero.
    is_near = max(look.discrepancy, 0.0) + 2 * look.discrepancy_error < rule.tol**2
    return is_near and not _is_off(look, rule.tol)


def _is_off(look: Look, most: float) -> bool:
    """Whether a mean or a width is known to be off."""
    return look.shift >= most or look.width >= most


def _is_worse(look: Look, other: Look, rule: Rule) -> bool:
    """Whether loss or discrepancy is higher beyond three errors of the difference."""
    loss_error = math.hypot(look.loss_error, other.loss_error)
    if look.loss - other.loss > 3 * loss_error + rule.least_loss:
        return True
    error = math.hypot(look.discrepancy_error, other.discrepancy_error)
    return look.discrepancy - other.discrepancy > 3 * error + rule.tol**2


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
    if progress.best > len(progress.looks) - 1 - RUNAWAY_CHUNKS:
        return False
    good = progress.looks[progress.best]
    return all(
        look.log_spread > good.log_spread + RUNAWAY_SPREAD
        and good.log_density - look.log_density
        > 3 * math.hypot(look.log_density_error, good.log_density_error)
        and look.loss - good.loss > 3 * math.hypot(look.loss_error, good.loss_error)
        for look in progress.looks[-RUNAWAY_CHUNKS:]
    )


def conclude(progress: Progress, rule: Rule, stopped: Cause = "") -> Ending:
    """How a fit ended, by the rule or by what stopped it before."""
    cause = stopped or progress.cause
    distance = shift = width = math.nan
    doubt: Doubt = ""
    if progress.looks:
        best = progress.looks[progress.best]
        distance = math.sqrt(max(best.discrepancy, 0.0))
        shift, width = best.shift, best.width
        if cause == "tol" and not _is_below(best, rule):
            # It was while the search lasted.
            cause = "plateau"
    steps = len(progress.looks) * rule.chunk_size
    skipped = sum(look.skipped for look in progress.looks) / max(steps, 1)
    if progress.looks and cause in CONVERGED:
        doubt = _doubt(best, progress.recoveries, skipped)
    numbers = (steps, rule.tol, distance, progress.recoveries, shift, width, skipped)
    return Ending(cause, doubt, *numbers)


def _doubt(best: Look, recoveries: int, skipped: float) -> Doubt:
    if best.discrepancy - 3 * best.discrepancy_error > DOUBTFUL**2:
        return "far"
    if _is_off(best, DOUBTFUL_MOMENT):
        return "moments"
    if 3 * best.discrepancy_error > DOUBTFUL**2:
        return "noisy"
    if skipped > DOUBTFUL_SKIPPED:
        return "skipped"
    return "recovered" if recoveries else ""
