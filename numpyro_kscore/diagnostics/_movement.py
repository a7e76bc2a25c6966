"""Do means and standard deviations of a guide's draws move, if Markov chains start from them?

The estimate of a moment is that of the chains' later part, regressed on its value at the start.
The slope β of the regression says how much the chains remember. With a slope of zero they have
forgotten the guide, and what is left is the model's moment; with a slope β they have gone 1 - β of
the way, exactly so for an eigenfunction of the chain.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_kscore.diagnostics._chains import (
    FARTHEST,
    WINDOW,
    ChainState,
    Density,
    Frame,
    Window,
    advance,
    evaluate,
)
from numpyro_kscore.estimators._base.coordinates import whiten_samples

__all__ = ["NUM_CHAINS", "Movement", "Walk", "make_frame", "start_state"]

NUM_CHAINS = 512
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
    """What chains from a guide's draws say of its moments, coordinate by coordinate.

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
        acceptance: fraction of accepted transitions.

    Example::

        from numpyro_kscore import diagnose

        diagnosis = diagnose(svi, result, y, verbose=False)
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


@jax.jit
def make_frame(samples: Array) -> Frame:
    """Coordinates whitened by draws (n, d)."""
    coordinates = whiten_samples(samples)
    return Frame(coordinates.mean, coordinates.root(), coordinates.scale)


class Walk:
    """Chains from some of the draws, prolonged as long as their answer is not clear.

    Args:
        density: the model.
        frame: coordinates whitened by all draws.
        samples: all draws, (N, d); chains start from the first 512.
        key: random key.
    """

    def __init__(self, density: Density, frame: Frame, samples: Array, key: Array) -> None:
        self.density, self.frame, self.key = density, frame, key
        u = np.asarray((samples - frame.mean) / frame.sd, np.float64)
        self._guide = np.clip(u, -FARTHEST, FARTHEST)
        self._start = self._guide[:NUM_CHAINS]
        self.state = start_state(density, frame, samples[:NUM_CHAINS])
        self.windows: list[Window] = []

    def prolong(self, num_windows: int) -> None:
        """Go on until the chains have so many windows."""
        while len(self.windows) < num_windows:
            index = len(self.windows)
            # Steps that suit the guide may be far too long where it is far from the model.
            is_poor = index == 0 or float(self.windows[-1].acceptance) < POOR
            adapts, cold = jnp.asarray([float(is_poor), 1.0], self.state.point.dtype)
            key = jax.random.fold_in(self.key, index)
            self.state, window = advance(self.density, self.frame, self.state, key, adapts, cold)
            self.windows.append(jax.device_get(window))

    def movement(self) -> Movement:
        """What the chains say so far."""
        kept = self.windows[int(LEFT_OUT * len(self.windows)) :]
        halves = [_average(part) for part in (kept[: len(kept) // 2], kept[len(kept) // 2 :])]
        u, start = self._guide, self._start
        mean = _Moment(start, [(first, *known) for first, _, *known in halves], u)
        square = _Moment(start**2, [(second, *known) for _, second, *known in halves], u**2)
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
            len(self.windows) * WINDOW,
            float(np.mean([w.acceptance for w in self.windows])),
        )


def start_state(density: Density, frame: Frame, x: Array) -> ChainState:
    """Chains at points (n, d)."""
    root = np.asarray(frame.root, np.float64)
    centered = np.asarray(x, np.float64) - np.asarray(frame.mean, np.float64)
    z = jnp.asarray(np.linalg.solve(root, centered.T).T, x.dtype)
    log_step = jnp.asarray(-0.25 * np.log(x.shape[1]), x.dtype)
    value, gradient = evaluate(density, frame, z)
    return ChainState(z, value, gradient, log_step)


class _Moment:
    """Averages of chains, adjusted for where they started and for Stein's identities.

    The adjustment is the linear regression of the averages, chain by chain, on the value at the
    start, whose mean over all draws of the guide is known, and on two functions of the score whose
    mean under the model is zero (Mira, Solgi and Imparato 2013). It takes most of the noise away
    where the posterior is nearly normal.

    Args:
        start: values where the chains start, (n, d).
        halves: of the earlier and the later half of the chains, averages of the values and of the
            two functions, (n, d) each.
        guide: values at all draws of the guide, (N, d).

    Attributes:
        memory: slope of the averages on the values at the start alone, (d,).
        value: the moment after the chains, (d,).
        residual: of the regression, (n, d).
        trend: change from the earlier to the later half, in standard errors, (d,).
    """

    def __init__(
        self, start: np.ndarray, halves: list[tuple[np.ndarray, ...]], guide: np.ndarray
    ) -> None:
        average, *controls = (0.5 * (a + b) for a, b in zip(*halves, strict=True))
        centered = start - start.mean(0)
        self.memory = (centered * average).mean(0) / np.maximum((centered**2).mean(0), TINY)
        # Where their mean is not zero the chains are not at rest, or the density has an edge at
        # which Stein's identity lacks a term.
        holds = [np.abs(c.mean(0)) < MOST_CONTROL * np.maximum(_error(c), TINY) for c in controls]
        used = np.logical_and(*holds)
        # Columns with known means: (d, n, 3).
        known = [start - guide.mean(0), *(np.where(used, c, 0.0) for c in controls)]
        columns = np.stack(known, axis=-1).swapaxes(0, 1)
        slopes = _regress(columns, average)
        values = average - _predict(columns, slopes)
        self.value = values.mean(0)
        self.residual = values - self.value
        change, *others = (b - a for a, b in zip(*halves, strict=True))
        moved = change - _predict(np.stack(others, axis=-1).swapaxes(0, 1), slopes[:, 1:])
        self.trend = np.abs(moved.mean(0)) / np.maximum(_error(moved), TINY)


def _regress(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Slopes (d, k, 1) of values (n, d) on columns (d, n, k), each with an intercept."""
    inner = columns - columns.mean(1, keepdims=True)
    gram = inner.swapaxes(1, 2) @ inner
    # Scaled to a diagonal of ones, with a ridge at the level of rounding: a column may be zero.
    scale = np.sqrt(np.maximum(np.diagonal(gram, axis1=1, axis2=2), TINY))[:, :, None]
    gram = gram / scale / scale.swapaxes(1, 2) + 1e-9 * np.eye(gram.shape[1])
    return np.linalg.solve(gram, inner.swapaxes(1, 2) @ values.T[:, :, None] / scale) / scale


def _predict(columns: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """What columns (d, n, k) explain of values (n, d)."""
    return (columns @ slopes)[:, :, 0].T


def _average(windows: list[Window]) -> tuple[np.ndarray, ...]:
    """Averages over windows of the four functions of a chain, (n, d) each."""
    columns = zip(*(window[:4] for window in windows), strict=True)
    return tuple(np.mean(np.asarray(a, np.float64), axis=0) for a in columns)


def _error(values: np.ndarray) -> np.ndarray:
    """Standard errors of means over rows."""
    return values.std(0) / values.shape[0] ** 0.5
