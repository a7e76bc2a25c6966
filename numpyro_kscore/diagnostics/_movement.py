"""Do means and standard deviations of a guide's draws move, if Markov chains start from them?

The estimate of a moment is that of the chains' later part, regressed on its value at the start.
The slope β of the regression says how much the chains remember. With a slope of zero they have
forgotten the guide, and what is left is the model's moment; with a slope β they have gone 1 - β of
the way, exactly so for an eigenfunction of the chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.diagnostics._budget import NUM_CHAINS, Clock, Stages
from numpyro_kscore.diagnostics._chains import (
    DIAGNOSIS,
    WINDOW,
    ChainProgram,
    Metric,
    Window,
    fit_metric,
)

# Standardized coordinates are cut off here, which gives averages of heavy tails a finite error.
FARTHEST = 10.0
# Acceptance below which the step size goes on to adapt.
POOR = 0.3
# Part of the windows that is left out of averages.
LEFT_OUT = 1 / 3
# Standard errors from zero from which on a function of the score is not used.
MOST_CONTROL = 4.0
TINY = 1e-30
# Standard deviations of the guide up to which a mean may move before the spread is cut off.
FOLLOWED = 0.5 * FARTHEST
# Larger ratios mean a guide that does not vary, or a model that does not.
LARGEST = 20.0
LEAST_VARIANCE = 0.1 / LARGEST**2


class Movement(NamedTuple):
    """Changes of a guide's moments, coordinate by coordinate.

    They are those along chains from its draws, or by importance weights, with no transition.

    Attributes:
        shift: mean of the guide less that of the model, in standard deviations of the model, (d,);
            at most 10.
        shift_error: its standard error, (d,).
        ratio: standard deviation of the guide over that of the model, (d,), between 0.05 and 20; 1
            where the mean has moved so far that it is not known.
        ratio_error: its standard error, relative to the ratio, (d,).
        memory: the larger slope β of the mean and the square on their values at the start, (d,).
        trend: difference between the later and the earlier half of the chains, in standard errors,
            of the mean or the square, whichever is larger, (d,).
        num_transitions: number of transitions of each chain.
        acceptance: fraction of accepted transitions; NaN without any.

    Example::

        from numpyro_kscore import diagnose

        diagnosis = diagnose(svi, result, y)
        diagnosis.names  # ("loc", "scale")
        abs(diagnosis.movement.shift).max() < 0.15  # True: standard deviations
        diagnosis.movement.ratio  # (2,)
    """

    shift: np.ndarray
    shift_error: np.ndarray
    ratio: np.ndarray
    ratio_error: np.ndarray
    memory: np.ndarray
    trend: np.ndarray
    num_transitions: int
    acceptance: float


class Walk:
    """Chains from the first of all draws (N, d), prolonged while their answer is not clear."""

    def __init__(
        self,
        program: ChainProgram,
        samples: Array,
        key: Array,
        num_chains: int = NUM_CHAINS[0],
        push: Callable[[Array], Array] | None = None,
    ) -> None:
        """``push`` maps points (n, d) to the values whose moments are wanted, if they differ."""
        self.program, self.key, metric = program, key, program.metric
        self._push, self._standard = push, (metric.mean, metric.sd)
        values = samples
        if push is not None:
            values = push(samples)
            standard = fit_metric(values[jnp.isfinite(values).all(axis=1)])
            self._standard = standard.mean, standard.sd
        u = np.asarray((values - self._standard[0]) / self._standard[1], np.float64)
        self._guide = np.clip(np.nan_to_num(u), -FARTHEST, FARTHEST)
        self._start = self._guide[:num_chains]
        self.state = program.start(metric.whiten(samples[:num_chains]))
        # Averages over each window, and the acceptance of all chains in it.
        self._averages: list[tuple[np.ndarray, ...]] = []
        self._acceptance: list[float] = []
        self._seconds: list[float] = []

    def seconds_until(self, num_windows: int) -> float:
        """The time until the chains have so many windows, as far as it is known."""
        # The first window is compiled.
        of_window = float(np.median(self._seconds[1:])) if len(self._seconds) > 1 else 0.0
        return of_window * (num_windows - len(self._averages))

    def prolong(
        self, num_windows: int, clock: Clock | None = None, stages: Stages | None = None
    ) -> bool:
        """Go on until the chains have so many windows; False if there is no time for them."""
        clock, stages = clock or Clock(), stages or Stages()
        if self.seconds_until(num_windows) > clock.left:
            return False
        for index in range(len(self._averages), num_windows):
            left = self.seconds_until(num_windows)
            text = f"window {index + 1} of {num_windows} of {len(self._start)} chains"
            stages.tell(f"{text}, {left:.0f} s left" if left else text)
            begin = time.perf_counter()
            # Steps that suit the guide may be far too long where it is far from the model.
            is_poor = index == 0 or self._acceptance[-1] < POOR
            key = jax.random.fold_in(self.key, index)
            self.state, window = self.program.advance(self.state, key, DIAGNOSIS, is_poor)
            self._averages.append(jax.device_get(self._average(window)))
            self._acceptance.append(float(np.mean(window.acceptance)))
            self._seconds.append(time.perf_counter() - begin)
            clock.spend(self._seconds[-1] if index else 0.0)
        return True

    def _average(self, window: Window) -> tuple[Array, ...]:
        near, *others = _average(self.program.metric, window)
        if self._push is None:
            return near, *others
        metric = self.program.metric
        points = window.draws.reshape(-1, window.draws.shape[-1]) @ metric.root.T + metric.mean
        values = self._push(points)
        return *_average_pushed(values, self._standard, len(window.draws)), *others[1:]

    def movement(self) -> Movement:
        """Estimates from the chains so far."""
        count = len(self._averages)
        kept = np.asarray(self._averages[int(LEFT_OUT * count) :], np.float64)
        halves = [part.mean(0) for part in (kept[: len(kept) // 2], kept[len(kept) // 2 :])]
        u, start = self._guide, self._start
        mean = _adjusted(start, [half[[0, 2, 3]] for half in halves], u)
        square = _adjusted(start**2, [half[[1, 2, 3]] for half in halves], u**2)
        variance = np.maximum(square.value - mean.value**2, LEAST_VARIANCE)
        guide_mean, guide_variance = u.mean(0), np.maximum(u.var(0), LEAST_VARIANCE)
        # The error of a variance, from those of the chains' averages.
        deviations = square.residual - 2 * mean.value * mean.residual
        relative = np.hypot(
            _error(deviations) / (2 * variance),
            0.5 * _error((u - guide_mean) ** 2) / guide_variance,
        )
        ratio = np.clip(np.sqrt(guide_variance / variance), 1 / LARGEST, LARGEST)
        is_followed = np.abs(mean.value) < FOLLOWED
        return Movement(
            np.clip((guide_mean - mean.value) / variance**0.5, -FARTHEST, FARTHEST),
            np.hypot(_error(mean.residual), _error(u)) / variance**0.5,
            np.where(is_followed, ratio, 1.0),
            np.where(is_followed, relative, 0.0),
            np.maximum(mean.memory, square.memory),
            np.maximum(mean.trend, square.trend),
            count * WINDOW,
            float(np.mean(self._acceptance)),
        )


@jax.jit
@full_precision
def _average(metric: Metric, window: Window) -> tuple[Array, ...]:
    """Averages over a window of four functions of a chain, (n, d) each.

    They are the standardized coordinates ``u = (x - mean)/sd`` and their squares, the score v in
    the same coordinates, and ``u v + 1``. The last two are zero on average under the model, by
    Stein's identity.
    """
    # Rows of norm 1: the mean of u v is minus the square of the norm.
    rows = metric.root / metric.sd[:, None]
    u, v = window.draws @ rows.T, window.scores @ rows.T
    near = jnp.clip(u, -FARTHEST, FARTHEST)
    values = near, near**2, v, u * v + jnp.sum(rows**2, axis=1)
    return tuple(jnp.mean(a, axis=0) for a in values)


@partial(jax.jit, static_argnums=2)
def _average_pushed(
    values: Array, standard: tuple[Array, Array], count: int
) -> tuple[Array, Array]:
    """The first two of these averages, of other values (count * n, d), whose controls they keep."""
    near = jnp.nan_to_num((values - standard[0]) / standard[1])
    near = jnp.clip(near, -FARTHEST, FARTHEST)
    near = near.reshape(count, -1, near.shape[1])
    return jnp.mean(near, axis=0), jnp.mean(near**2, axis=0)


class _Moment(NamedTuple):
    """A moment after the chains, (d,), and residuals of the regression, (n, d).

    The memory is the slope of the averages on the values at the start alone, and the trend the
    change from the earlier to the later half, in standard errors, (d,) each.
    """

    value: np.ndarray
    residual: np.ndarray
    memory: np.ndarray
    trend: np.ndarray


def _adjusted(start: np.ndarray, halves: list[np.ndarray], guide: np.ndarray) -> _Moment:
    """A moment from averages of chains, by regression on the start and on Stein's identities.

    The averages are regressed, chain by chain, on the value at the start, whose mean over all draws
    of the guide is known, and on two functions of the score whose mean under the model is zero
    (Mira, Solgi and Imparato 2013). That takes most of the noise away where the posterior is nearly
    normal.

    Values are given where the chains start, (n, d), and at all draws of the guide, (N, d); averages
    of them and of the two functions over both halves of the chains, (3, n, d) each.
    """
    average, *controls = 0.5 * (halves[0] + halves[1])
    centered = start - start.mean(0)
    memory = (centered * average).mean(0) / np.maximum((centered**2).mean(0), TINY)
    # Where their mean is not zero the chains are not at rest, or the density has an edge at which
    # Stein's identity lacks a term.
    holds = [np.abs(c.mean(0)) < MOST_CONTROL * np.maximum(_error(c), TINY) for c in controls]
    used = np.logical_and(*holds)
    # Columns with known means: (d, n, 3).
    known = [start - guide.mean(0), *(np.where(used, c, 0.0) for c in controls)]
    columns = np.stack(known, axis=-1).swapaxes(0, 1)
    slopes = _regress(columns, average)
    values = average - _predict(columns, slopes)
    change, *others = halves[1] - halves[0]
    moved = change - _predict(np.stack(others, axis=-1).swapaxes(0, 1), slopes[:, 1:])
    trend = np.abs(moved.mean(0)) / np.maximum(_error(moved), TINY)
    return _Moment(values.mean(0), values - values.mean(0), memory, trend)


def _regress(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Slopes (d, k, 1) of values (n, d) on columns (d, n, k), each with an intercept."""
    inner = columns - columns.mean(1, keepdims=True)
    gram = inner.swapaxes(1, 2) @ inner
    # Scaled to a diagonal of ones, with a ridge at the level of rounding: a column may be zero.
    scale = np.sqrt(np.maximum(np.diagonal(gram, axis1=1, axis2=2), TINY))[:, :, None]
    gram = gram / scale / scale.swapaxes(1, 2) + 1e-9 * np.eye(gram.shape[1])
    return np.linalg.solve(gram, inner.swapaxes(1, 2) @ values.T[:, :, None] / scale) / scale


def _predict(columns: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Predictions (n, d) from columns (d, n, k) and their slopes."""
    return (columns @ slopes)[:, :, 0].T


def _error(values: np.ndarray) -> np.ndarray:
    """Standard errors of means over rows."""
    return values.std(0) / values.shape[0] ** 0.5
