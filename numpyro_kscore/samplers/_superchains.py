"""The chains of ``refine``: find a metric and a step size, then go on until moments settle."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_kscore._util.keys import host_generator, key_apart
from numpyro_kscore.diagnostics._chains import (
    REFINEMENT,
    ChainProgram,
    ChainState,
    Metric,
    Window,
    fit_metric,
)
from numpyro_kscore.estimators._base.standardization import LARGEST_WHITENED
from numpyro_kscore.samplers._convergence import (
    MOST_DIVERGENT,
    ChainMoments,
    Chains,
    are_at_rest,
    scale_of,
    summarize,
)
from numpyro_kscore.samplers._guide import Guide

# Windows in which metric and step size are found, at most and at least.
MOST_ADAPTING, LEAST_ADAPTING = 40, 2
# A metric is kept if in its coordinates no mean of the chains is farther from zero, and no standard
# deviation farther from 1, by a factor.
NEAR_MEAN, NEAR_SD = 0.3, 1.35
# Later on the factor is larger, and the acceptance has a lower limit. Beyond these, or where too
# many transitions diverge, metric and step size are found anew: after so many windows, then after
# twice as many, since chains that are restarted often seem to have settled at some time.
STILL_NEAR, LEAST_ACCEPTED = 1.6, 0.5
FIRST_LOOK = 4
# Metrics are of draws cut off so many half-ranges of 68 % from the median.
FAR = 4.0
# Superchains start at draws whose distance from the median is multiplied by this.
SPREAD = 2.0
# Part of the windows since the metric was found that is left out.
LEFT_OUT = 1 / 3
# Fewest windows that are judged.
FEWEST = 3


class ChainSettings(NamedTuple):
    """How many chains there are, and how long they go on, see :func:`~numpyro_kscore.refine`."""

    num_chains: int
    num_superchains: int
    max_gradients: int
    tol: float


def run_chains(guide: Guide, settings: ChainSettings, key: Array) -> Chains:
    """Chains from draws of a guide, until their moments have settled or a limit is reached."""
    run = _Run(guide, settings, key)
    run.find_metric()
    look = FIRST_LOOK
    while True:
        run.prolong()
        if len(run.kept) < FEWEST and not run.is_over():
            continue
        is_fit, moments = run.is_fit(), run.moments()
        has_settled = is_fit and are_at_rest(moments, settings.tol, settings.num_superchains)
        if has_settled or run.is_over():
            return run.chains(moments, has_settled)
        if not is_fit and len(run.windows) >= look:
            run.find_metric()
            look *= 2


class _Run:
    """Chains from draws of a guide, with their metric, step size and windows."""

    def __init__(self, guide: Guide, settings: ChainSettings, key: Array) -> None:
        self.guide, self.settings, self.key = guide, settings, key
        self.program = ChainProgram(guide.density, fit_metric(jnp.asarray(guide.draws)))
        starts = guide.valid[np.arange(settings.num_chains) % len(guide.valid)]
        # The windows since the metric was found, how many of them adapted the step size, and the
        # unconstrained values of the others, (WINDOW, chains, d) each.
        self.windows: list[Window] = []
        self.num_adapting = 0
        self.values: list[np.ndarray] = []
        self.unconstrained = guide.unconstrained
        self.num_gradients, self.num_windows = 0, 0
        self.state: ChainState
        self._start(self.program.metric.whiten(starts))

    @property
    def kept(self) -> list[Window]:
        """The windows that count."""
        left_out = max(self.num_adapting + 1, int(LEFT_OUT * len(self.windows)))
        # At the limit of gradients there may be no other.
        return self.windows[min(left_out, len(self.windows) - 1) :]

    def find_metric(self) -> None:
        """Adapt the step size, and the metric to the chains, until they fit; then start anew."""
        self.windows, self.values = [], []
        for index in range(MOST_ADAPTING):
            self.windows.append(self._advance(adapts=True))
            is_near = self._is_near(self.windows[-1:], NEAR_SD)
            if self.is_over() or (index + 1 >= LEAST_ADAPTING and is_near):
                break
            if not is_near:
                self._adapt_metric()
                self.windows = []
        self.num_adapting = len(self.windows)
        self._start_superchains()

    def prolong(self) -> None:
        """One more window."""
        window = self._advance(adapts=False)
        self.windows.append(window)
        flat = self._flat(window.draws)
        u = np.asarray(self.unconstrained(jnp.asarray(flat.reshape(-1, flat.shape[-1]))))
        self.values.append(u.astype(np.float64).reshape(flat.shape))

    def is_over(self) -> bool:
        """Whether another window would exceed the limit of gradients."""
        mean = self.num_gradients / max(self.num_windows, 1)
        return self.num_gradients + mean > self.settings.max_gradients

    def is_fit(self) -> bool:
        """Whether metric and step size fit the draws that count."""
        transitions = sum(window.draws[..., 0].size for window in self.kept)
        divergent = sum(int(window.num_divergent) for window in self.kept)
        accepted = float(np.mean([window.acceptance for window in self.kept]))
        return (
            self._is_near(self.kept, STILL_NEAR)
            and divergent <= MOST_DIVERGENT * transitions
            and accepted > LEAST_ACCEPTED
        )

    def moments(self) -> ChainMoments:
        """Moments of the unconstrained values of the draws that count."""
        values = np.concatenate(self.values[-len(self.kept) :]).swapaxes(0, 1)
        return summarize(values, self.settings.num_superchains)

    def chains(self, moments: ChainMoments, has_settled: bool) -> Chains:
        """The draws that count, and their moments."""
        return Chains(
            self._flat(np.concatenate([window.draws for window in self.kept]).swapaxes(0, 1)),
            moments,
            has_settled,
            np.mean([window.acceptance for window in self.kept], axis=0),
            sum(int(window.num_divergent) for window in self.kept),
            self.num_gradients,
            self.num_windows,
        )

    def _advance(self, adapts: bool) -> Window:
        key = jax.random.fold_in(self.key, self.num_windows)
        self.state, found = self.program.advance(self.state, key, REFINEMENT, adapts)
        window = Window(*jax.device_get(found))
        self.num_gradients += self.settings.num_chains * int(window.num_steps)
        self.num_windows += 1
        return window

    def _start(self, z: np.ndarray, log_step: Any = None) -> None:
        """Chains at whitened points (n, d)."""
        self.state = self.program.start(z, log_step)
        self.num_gradients += len(z)

    def _flat(self, z: np.ndarray) -> np.ndarray:
        """Whitened draws (..., d) in the guide's coordinates."""
        return self.program.metric.unwhiten(z).astype(self.guide.draws.dtype)

    @staticmethod
    def _is_near(windows: list[Window], factor: float) -> bool:
        """Whether chains vary in whitened coordinates as they should, up to a factor."""
        mean, sd = _mean_and_sd(_later_half(windows))
        is_centered = np.all(np.abs(mean) < NEAR_MEAN * factor / NEAR_SD)
        return bool(is_centered and np.all(np.abs(np.log(sd)) < np.log(factor)))

    def _adapt_metric(self) -> None:
        z, old = _later_half(self.windows[-1:]), self.program.metric
        root = np.asarray(old.root, np.float64) @ _shrunk_factor(z, self.settings.num_chains)
        arrays = old.unwhiten(_mean_and_sd(z)[0]), root, np.linalg.norm(root, axis=1)
        metric = Metric(*(jnp.asarray(a, self.guide.draws.dtype) for a in arrays))
        self.program = self.program._replace(metric=metric)
        self._start(metric.whiten(old.unwhiten(self.state.point)), self.state.log_step)

    def _start_superchains(self) -> None:
        """Move all chains of a superchain to one place: that of a chain, moved away from the mean.

        R-hat shows what chains remember of places that are farther apart than draws are; of places
        nearer together it shows nothing.
        """
        count, dtype = self.settings.num_superchains, self.guide.draws.dtype
        key = key_apart(jax.random.fold_in(self.key, self.num_windows), 0)
        points = np.asarray(self.state.point, np.float64)
        z = points[host_generator(key).permutation(len(points))[:count]]
        center = np.median(points, axis=0)
        far = center + SPREAD * (z - center)
        value, _ = self.program.evaluate(jnp.asarray(far, dtype))
        starts = np.where(np.isfinite(value)[:, None], far, z)
        self._start(np.repeat(starts, len(points) // count, axis=0), self.state.log_step)


def _later_half(windows: list[Window]) -> np.ndarray:
    """The later half of some draws, whitened, (n, d)."""
    z = np.concatenate([window.draws for window in windows])
    return z[len(z) // 2 :].reshape(-1, z.shape[-1]).astype(np.float64)


def _without_tails(z: np.ndarray) -> np.ndarray:
    """Draws (n, d), cut off where Gaussian ones have next to none."""
    scale = scale_of(z)
    return scale.center + scale.width * scale.standardize(z, FAR)


def _mean_and_sd(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moments of draws (n, d) without tails: heavy ones have another sd in every window."""
    cut = _without_tails(z)
    return cut.mean(0), np.maximum(cut.std(0), 1e-6)


def _shrunk_factor(z: np.ndarray, num_independent: int) -> np.ndarray:
    """A factor of the covariance of draws (n, d), its correlations shrunk to zero, (d, d).

    By the oracle-approximating factor of Chen, Wiesel, Eldar and Hero (2010) for as many
    independent draws. In coordinates of the last metric little is left to be correlated, and what
    shrinks away in one window comes in the next.
    """
    dim = z.shape[1]
    mean, sd = _mean_and_sd(z)
    if dim > LARGEST_WHITENED:
        return np.diag(sd)
    u = (_without_tails(z) - mean) / sd
    correlation = u.T @ u / len(u)
    square = np.sum(correlation**2)
    numerator = (1 - 2 / dim) * square + dim**2
    denominator = (num_independent + 1 - 2 / dim) * (square - dim)
    shrinkage = min(1.0, numerator / denominator) if denominator > 0 else 1.0
    matrix = (1 - shrinkage) * correlation + shrinkage * np.eye(dim)
    return sd[:, None] * np.linalg.cholesky(matrix + 1e-9 * np.eye(dim))
