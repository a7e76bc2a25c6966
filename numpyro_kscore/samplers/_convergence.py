"""Have many short chains settled? Nested R-hat, errors and trends of their moments; the verdict.

Chains come in superchains that start at the same point and go on independently. What the means of
superchains differ by, more than chains within one do, is what is left of the start and of the Monte
Carlo error: nested R-hat (Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman 2024,
*Nested R-hat: assessing the convergence of Markov chain Monte Carlo when running many short
chains*). What all chains have in common, such as a way they still have to go, it cannot see; the
change from the earlier to the later half of the draws does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore.diagnostics._codes import Code, Finding, Verdict
from numpyro_kscore.diagnostics._missed_modes import Modes

# Standardized coordinates are cut off here, which gives averages of heavy tails a finite error.
FARTHEST = 10.0
TINY = 1e-30
# Largest change from earlier to later draws, in standard errors.
TREND = 4.0
# A standard deviation that changes by more without one superchain rests on it. Where all visit the
# same regions, the change is about the Monte Carlo error, of up to 3.5 %, over the root of their
# number, twice as much for the one with the largest.
LARGEST_INFLUENCE = 0.05
# Larger shares of divergent transitions mean regions that chains cannot enter.
MOST_DIVERGENT = 0.01
# A chain that accepts less is stuck.
STUCK = 0.05


class Scale(NamedTuple):
    """Medians and half the ranges of 68 %, (d,) each."""

    center: np.ndarray
    width: np.ndarray

    def standardize(self, x: np.ndarray, farthest: float = FARTHEST) -> np.ndarray:
        """Standardized values, cut off."""
        return np.clip((x - self.center) / self.width, -farthest, farthest)


class ChainMoments(NamedTuple):
    """Moments of coordinates by chains, and whether they have settled.

    Attributes:
        mean: (d,).
        sd: standard deviations, (d,).
        rhat: nested R-hat of the value or of its squared deviation, whichever is larger, (d,).
        mean_error: Monte Carlo error of the mean, in standard deviations, (d,).
        sd_error: Monte Carlo error of the standard deviation, relative to it, (d,).
        trend: change of the mean or the mean square from the earlier to the later half of the
            draws, in standard errors, whichever is larger, (d,).
        influence: largest relative change of the standard deviation without one superchain, of
            draws that are not cut off, (d,).
    """

    mean: np.ndarray
    sd: np.ndarray
    rhat: np.ndarray
    mean_error: np.ndarray
    sd_error: np.ndarray
    trend: np.ndarray
    influence: np.ndarray


class Chains(NamedTuple):
    """Draws of chains, and whether they have settled.

    Attributes:
        draws: draws of the windows that count, in the guide's coordinates, (chains, draws, d).
        moments: moments of their unconstrained values.
        has_settled: whether they did before the limit.
        acceptance: mean probability of each chain, (chains,).
        num_divergent: divergent transitions in the windows that count.
        num_gradients: gradients in all windows.
        num_windows: number of all windows.
    """

    draws: np.ndarray
    moments: ChainMoments
    has_settled: bool
    acceptance: np.ndarray
    num_divergent: int
    num_gradients: int
    num_windows: int


def scale_of(draws: np.ndarray) -> Scale:
    """Location and width of draws (n, d), by quantiles; width 1 where they do not vary."""
    low, center, high = np.quantile(draws, [0.16, 0.5, 0.84], axis=0)
    width = 0.5 * (high - low)
    return Scale(center, np.where(width > 0, width, 1.0))


def nested_rhat(values: np.ndarray) -> np.ndarray:
    """Nested R-hat of values (superchains, chains of each, draws, ...), with the last axes' shape.

    Needs at least two superchains, and two chains or two draws of each.
    """
    _, chains, draws = values.shape[:3]
    of_chains = values.mean(2)
    between = of_chains.mean(1).var(0, ddof=1)
    within = np.zeros_like(between)
    if chains > 1:
        within = within + of_chains.var(1, ddof=1).mean(0)
    if draws > 1:
        within = within + values.var(2, ddof=1).mean((0, 1))
    return np.sqrt(1 + between / np.maximum(within, TINY))


def summarize(draws: np.ndarray, num_superchains: int) -> ChainMoments:
    """Moments of draws (chains, draws, d); consecutive chains belong to a superchain."""
    chains, count, dim = draws.shape
    scale = scale_of(draws.reshape(-1, dim))
    u = scale.standardize(draws).reshape(num_superchains, -1, count, dim)
    mean = u.mean((0, 1, 2))
    square = (u - mean) ** 2
    variance = np.maximum(square.mean((0, 1, 2)), TINY)
    sd = np.sqrt(variance)
    return ChainMoments(
        scale.center + scale.width * mean,
        scale.width * sd,
        np.maximum(nested_rhat(u), nested_rhat(square)),
        _error(u.mean((1, 2))) / sd,
        _error(square.mean((1, 2))) / (2 * variance),
        np.maximum(_trend(u), _trend(square)),
        _influence((draws.reshape(u.shape) - scale.center) / scale.width),
    )


def _influence(values: np.ndarray) -> np.ndarray:
    """Largest relative change of standard deviations without one of the superchains, (d,)."""
    mean, square = values.mean((1, 2)), (values**2).mean((1, 2))
    rest = len(values) - 1
    means, squares = (mean.sum(0) - mean) / rest, (square.sum(0) - square) / rest
    without = np.maximum(squares - means**2, TINY)
    variance = np.maximum(square.mean(0) - mean.mean(0) ** 2, TINY)
    return np.abs(np.sqrt(without / variance) - 1).max(0)


def _error(values: np.ndarray) -> np.ndarray:
    """Standard errors of means over superchains."""
    return values.std(0, ddof=1) / len(values) ** 0.5


def _trend(values: np.ndarray) -> np.ndarray:
    """Change from the earlier to the later half of the draws, in standard errors."""
    half = values.shape[2] // 2
    earlier, later = values[:, :, :half], values[:, :, -half:]
    change = later.mean((1, 2)) - earlier.mean((1, 2))
    return np.abs(change.mean(0)) / np.maximum(_error(change), TINY)


def are_at_rest(moments: ChainMoments, tol: float, num_superchains: int) -> bool:
    """Whether superchains agree, nothing changes, and errors of spreads are those of means.

    No spread may rest on one superchain: those errors are of values that are cut off.
    """
    # Nested R-hat bounds errors of means so, but those of spreads less: squares vary more.
    largest = np.sqrt(2 * tol / num_superchains)
    agree = np.all(moments.rhat < 1 + tol)
    is_known = np.all(moments.sd_error < largest) and np.all(moments.influence < LARGEST_INFLUENCE)
    return bool(agree and is_known and np.all(moments.trend < TREND))


def judge_chains(
    chains: Chains, modes: Modes, num_lost: int, names: Sequence[str], tol: float
) -> tuple[Verdict, tuple[Finding, ...]]:
    """The verdict on chains that were to have a nested R-hat of ``1 + tol``, and its reasons."""
    moments = chains.moments
    findings = [Finding("draws lost", num_lost)] if num_lost else []
    troubles = [Finding("mode missed", modes.share)] if modes.num_missed else []
    stuck = float(np.mean(chains.acceptance < STUCK))
    if stuck > 0:
        troubles.append(Finding("chains stuck", stuck))
    divergent = chains.num_divergent / chains.draws[..., 0].size
    if divergent > MOST_DIVERGENT:
        troubles.append(Finding("divergences", divergent))
    if chains.has_settled:
        verdict: Verdict = "bad" if modes.num_missed else "cannot tell" if troubles else "good"
        settled = [] if troubles else [Finding("settled", float(np.max(moments.rhat)))]
        return verdict, (*findings, *troubles, *settled)
    # The first that holds; errors that are too large are what is left.
    doubts: tuple[tuple[Code, np.ndarray, float], ...] = (
        ("chains moving", moments.trend, TREND),
        ("chains apart", moments.rhat, 1 + tol),
        ("few far draws", moments.influence, LARGEST_INFLUENCE),
        ("too few draws", moments.sd_error, 0.0),
    )
    for code, values, limit in doubts:
        worst = int(np.argmax(values))
        if values[worst] >= limit:
            findings.append(Finding(code, float(values[worst]), where=names[worst]))
            break
    return "bad" if modes.num_missed else "cannot tell", (*findings, *troubles)
