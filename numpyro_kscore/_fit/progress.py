"""The state of a fit: its stopping rule, its looks at the guide, its progress and its ending."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from numpyro.infer.svi import SVIState

from numpyro_kscore._model.control_variate import ControlVariate
from numpyro_kscore._util.batches import Position
from numpyro_kscore.diagnostics._codes import Cause, Doubt

Phase = Literal["search", "settle", "done"]
# Causes of a fit that has converged.
CONVERGED = ("plateau", "tol")

# Another round follows one that lowered the loss by this many times the smallest gain that matters.
ROUND_GAIN = 4
# At full step size Adam at 1e-2 wobbles by .0045 nats for each dimension
# (benchmarks/results/2026-11-27-when-to-stop.md). A fall of that size by settling is
# no sign that more is to be had.
WOBBLE = 0.006
# Largest divergences from the model, as multiples of the smallest gain that matters, at which a
# guide whose bound is known is left as it starts, or as it is at the end of a round. Another round
# would bring half of that distance, and the first one more.
NEAR_AT_START, NEAR_AT_END = 0.5, 2.0

# Fresh draws for a discrepancy: they take a tenth of the time of a hundred steps, or less.
EVALUATION_DRAWS = 1024
# Least number of draws evaluated at once: the few particles of an explicit guide would be slow.
SMALLEST_BATCH = 64
# Batches of a loader that a look takes, one for each group of so many draws.
LOOK_BATCHES = EVALUATION_DRAWS // SMALLEST_BATCH


class Rule(NamedTuple):
    """The settings that decide when a fit stops.

    ``tol`` is in standard deviations, ``dim`` is the dimension of the latent space, and
    ``can_be_exact`` says that a guide may need no step, since nothing else is to be fitted,
    ``knows_bound`` that its bound is known at every look, ``is_final`` that it stays as it starts,
    and ``settles_finer`` that it settles with more particles than it searches with.
    """

    chunk_size: int
    num_chunks: int
    tol: float
    patience: int
    dim: int
    can_be_exact: bool = True
    knows_bound: bool = True
    is_final: bool = False
    settles_finer: bool = False

    @property
    def least_loss(self) -> float:
        """The divergence, in nats, of a Gaussian of which √d means are off by ``tol``."""
        return 0.5 * self.dim**0.5 * self.tol**2

    @property
    def round_gain(self) -> float:
        """The fall of the loss, in nats, after which settling once more may pay."""
        # Half of a round is compared, which brings less.
        gain = 1 if self.settles_finer else ROUND_GAIN
        return max(gain * self.least_loss, WOBBLE * self.dim)

    @property
    def near_at_start(self) -> float:
        """The divergence, in nats, at which a guide may be left as it starts."""
        return NEAR_AT_START * self.least_loss


class Gain(NamedTuple):
    """The fall of a number from one window to the next, positive for an improvement."""

    value: float
    standard_error: float

    def is_real(self, least: float, errors: float = 1) -> bool:
        """Whether the gain exceeds both ``errors`` of its standard errors and ``least``."""
        return self.value > max(errors * self.standard_error, least)


class Look(NamedTuple):
    """The numbers of one look at a fit. With ``criterion="loss"`` those of the guide are NaN.

    Attributes:
        discrepancy: squared, see :func:`~numpyro_kscore.diagnostics.stein_discrepancy`.
        discrepancy_error: its standard error.
        loss: mean over the steps of the chunk that were not skipped; minus the bound at the start.
        loss_error: its standard error.
        log_density: mean log density of the model at draws of the guide.
        log_density_error: its standard error.
        log_spread: mean log standard deviation of the draws' coordinates.
        skipped: number of steps skipped because their loss or gradient was not finite.
        shift: largest error of a mean that is seen beyond two standard errors, in standard
            deviations, by Stein's identity; NaN in minibatches, whose noise hides it.
        width: the same for a log standard deviation.
        bound: mean log density of the model less the guide's, the same noise at every look; NaN,
            like all that follow, unless the guide's density is known at its draws.
        bound_error: its standard error.
        divergence: from the guide to the model, in nats, by importance sampling: how far the bound
            is from the evidence, where the guide has draws.
        gain: how much higher the bound is than that of the best guide at the end of a round.
        gain_error: its standard error.
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
    bound: float = math.nan
    bound_error: float = math.nan
    divergence: float = math.nan
    gain: float = math.nan
    gain_error: float = math.nan

    @property
    def bound_gain(self) -> Gain | None:
        """The gain, if it is known."""
        gain = Gain(self.gain, self.gain_error)
        return gain if np.all(np.isfinite(gain)) else None


class Progress(NamedTuple):
    """The state of the stopping rule; lengths are counted in chunks, each of which has one look.

    The step size falls over ``settle_length`` chunks after the first ``settle_from``; the search
    had ``searched`` chunks. ``cause`` says why it ended, and ``calm`` counts successive looks
    without improvement. ``best`` is the index of the look at the best state, -1 for the start, at
    which ``start`` is the look if the bound is known. ``recoveries`` counts chunks that were
    undone, and ``rounds`` are numbers of looks at the ends of rounds.
    """

    looks: tuple[Look, ...] = ()
    phase: Phase = "search"
    cause: Cause = ""
    settle_from: int = 0
    settle_length: int = 0
    searched: int = 0
    calm: int = 0
    best: int = -1
    recoveries: int = 0
    start: Look | None = None
    rounds: tuple[int, ...] = ()

    @property
    def best_look(self) -> Look | None:
        """The look at the best state, if there was one."""
        return self.looks[self.best] if self.best >= 0 else self.start


class Ending(NamedTuple):
    """The end of a fit, as codes and the numbers they rest on.

    :class:`~numpyro_kscore.FitInfo` explains the codes. ``distance``, the discrepancy of the best
    guide, is in standard deviations and NaN if not known; ``shift`` and ``width`` are those of
    :class:`Look`, or by weights; ``skipped`` is the share of steps that were skipped, ``effective``
    that of draws that are effective by weights, and ``khat`` the largest shape of the weights.
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
    effective: float = 1.0
    khat: float = -math.inf

    @property
    def converged(self) -> bool:
        """Whether the search ended because nothing was left to gain."""
        return self.cause in CONVERGED


class Run(NamedTuple):
    """The state that a fit carries from chunk to chunk and writes into its checkpoint.

    ``best`` is the best state so far, with mean parameters; ``losses`` are those of all steps, in
    pieces; ``position`` is where the next batch of a loader is. ``gaps`` are log densities of the
    model less the guide's, (n,), at draws of the best guide at the end of a round, if known.
    """

    state: Any
    best: Any
    progress: Progress = Progress()
    losses: tuple[np.ndarray, ...] = ()
    control_variate: ControlVariate | None = None
    position: Position = Position()
    gaps: np.ndarray | None = None

    def all_losses(self) -> np.ndarray:
        """Losses of all steps, (steps,)."""
        return np.concatenate([np.zeros(0, np.float32), *self.losses])


class Chunk(NamedTuple):
    """The result of a chunk of steps.

    ``averaged`` is the last state with the mean of the parameters over the steps; ``losses`` are
    NaN where a step was skipped; ``look`` has fields of :class:`Look`. ``finite`` is whether
    parameters and discrepancy are finite, and at least half of the losses.
    """

    state: SVIState
    averaged: SVIState
    losses: jax.Array
    look: dict[str, jax.Array]
    finite: jax.Array
    gaps: jax.Array | None = None


class Seen(NamedTuple):
    """The result of a look, with fields of :class:`Look` as its numbers.

    ``finite`` is whether they and all before them are finite. ``gaps`` are the log densities of the
    model less the guide's at each draw, (n,), where they are known, and ``moments`` the errors of
    means and of log standard deviations with their standard errors, (2, 2, d).
    """

    numbers: dict[str, jax.Array]
    finite: jax.Array
    gaps: jax.Array | None
    moments: jax.Array


class CloseLook(NamedTuple):
    """A look at ten times as many draws, and beyond some of them along rays, after the fit.

    The first four fields are those of :class:`Look`. ``most`` is the largest error of a mean or of
    a log standard deviation, plus two of its standard errors.
    """

    discrepancy: float
    discrepancy_error: float
    shift: float
    width: float
    most: float
