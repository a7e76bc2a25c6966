"""The chains of ``refine``: find a metric and a step size, then go on until moments settle."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._chains import Frame, evaluate
from numpyro_kscore.diagnostics._movement import make_frame
from numpyro_kscore.estimators._base.coordinates import LARGEST_WHITENED
from numpyro_kscore.samplers._convergence import Moments, scale_of, summarize
from numpyro_kscore.samplers._guide import Guide
from numpyro_kscore.samplers._outcome import LARGEST_INFLUENCE, MOST_DIVERGENT, TREND, Chains
from numpyro_kscore.samplers._windows import Window, advance

__all__ = ["Settings", "run_chains"]

# Windows in which metric and step size are found, at most and at least.
MOST_ADAPTING, LEAST_ADAPTING = 40, 2
# A metric is kept if in its coordinates no mean of the chains is farther from zero, and no standard
# deviation farther from 1, by a factor.
NEAR_MEAN, NEAR_SD = 0.3, 1.35
# The same later on, and the lowest acceptance: beyond, or where too many transitions diverge, the
# metric and the step size are found anew. That is looked at after so many windows, then after twice
# as many: who tries often enough finds chains that seem to have settled.
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


class Settings(NamedTuple):
    """How long chains go on.

    Attributes:
        num_chains: number of chains.
        num_superchains: number of groups that start at the same point.
        max_gradients: most gradients of all chains.
        tol: nested R-hat less 1 below which chains have settled.
    """

    num_chains: int
    num_superchains: int
    max_gradients: int
    tol: float


def run_chains(guide: Guide, settings: Settings, key: Array) -> Chains:
    """Chains from draws of a guide, until their moments have settled or a limit is reached."""
    run = _Run(guide, settings, key)
    run.find_metric()
    look = FIRST_LOOK
    while True:
        run.prolong()
        if len(run.kept) < FEWEST and not run.is_over():
            continue
        is_fit, moments = run.is_fit(), run.moments()
        has_settled = is_fit and _is_at_rest(moments, settings)
        if has_settled or run.is_over():
            return run.chains(moments, has_settled)
        if not is_fit and len(run.windows) >= look:
            run.find_metric()
            look *= 2


def _is_at_rest(moments: Moments, settings: Settings) -> bool:
    """Whether superchains agree, nothing changes, and errors of spreads are those of means.

    No spread may rest on one superchain: those errors are of values that are cut off.
    """
    # Nested R-hat bounds errors of means so, but those of spreads less: squares vary more.
    largest = np.sqrt(2 * settings.tol / settings.num_superchains)
    agree = np.all(moments.rhat < 1 + settings.tol)
    is_known = np.all(moments.sd_error < largest) and np.all(moments.influence < LARGEST_INFLUENCE)
    return bool(agree and is_known and np.all(moments.trend < TREND))


class _Run:
    """Chains on their way.

    Args:
        guide: the guide that they start from.
        settings: how long they go on.
        key: random key.
    """

    def __init__(self, guide: Guide, settings: Settings, key: Array) -> None:
        self.guide, self.settings, self.key = guide, settings, key
        self.frame = make_frame(jnp.asarray(guide.draws))
        starts = guide.valid(settings.num_chains)
        starts = starts[np.arange(settings.num_chains) % len(starts)]
        self.z = _whiten(self.frame, starts.astype(np.float64))
        # Of the order that has the same acceptance in all dimensions.
        self.log_step = -0.25 * np.log(starts.shape[1])
        # Since the metric was found, how many of them adapted the step size, and the unconstrained
        # values of the others, (WINDOW, chains, d) each.
        self.windows: list[Window] = []
        self.num_adapting = 0
        self.values: list[np.ndarray] = []
        self.unconstrained = guide.unconstrained
        self.num_gradients, self.num_windows = 0, 0

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
        divergent = sum(window.num_divergent for window in self.kept)
        accepted = float(np.mean([window.acceptance for window in self.kept]))
        return (
            self._is_near(self.kept, STILL_NEAR)
            and divergent <= MOST_DIVERGENT * transitions
            and accepted > LEAST_ACCEPTED
        )

    def moments(self) -> Moments:
        """Moments of the unconstrained values of the draws that count."""
        values = np.concatenate(self.values[-len(self.kept) :]).swapaxes(0, 1)
        return summarize(values, self.settings.num_superchains)

    def chains(self, moments: Moments, has_settled: bool) -> Chains:
        """What is known at the end."""
        return Chains(
            self._flat(np.concatenate([window.draws for window in self.kept]).swapaxes(0, 1)),
            moments,
            has_settled,
            np.mean([window.acceptance for window in self.kept], axis=0),
            sum(window.num_divergent for window in self.kept),
            self.num_gradients,
            self.num_windows,
        )

    def _advance(self, adapts: bool) -> Window:
        key = jax.random.fold_in(self.key, self.num_windows)
        window = advance(self.guide.density, self.frame, self.z, self.log_step, key, adapts)
        self.z, self.log_step = window.draws[-1], window.log_step
        self.num_gradients += window.num_gradients
        self.num_windows += 1
        return window

    def _flat(self, z: np.ndarray) -> np.ndarray:
        """Whitened draws (..., d) in the guide's coordinates."""
        return _unwhiten(self.frame, z.astype(np.float64)).astype(self.guide.draws.dtype)

    @staticmethod
    def _is_near(windows: list[Window], factor: float) -> bool:
        """Whether chains vary in whitened coordinates as they should, up to a factor."""
        mean, sd = _mean_and_sd(_later_half(windows))
        is_centered = np.all(np.abs(mean) < NEAR_MEAN * factor / NEAR_SD)
        return bool(is_centered and np.all(np.abs(np.log(sd)) < np.log(factor)))

    def _adapt_metric(self) -> None:
        z = _later_half(self.windows[-1:])
        factor = _shrunk_factor(z, self.settings.num_chains)
        x = _unwhiten(self.frame, self.z.astype(np.float64))
        mean = _unwhiten(self.frame, _mean_and_sd(z)[0])
        root = np.asarray(self.frame.root, np.float64) @ factor
        arrays = mean, root, np.linalg.norm(root, axis=1)
        self.frame = Frame(*(jnp.asarray(a, self.guide.draws.dtype) for a in arrays))
        self.z = _whiten(self.frame, x)

    def _start_superchains(self) -> None:
        """All chains of a superchain at one place: that of one of them, moved away from the mean.

        R-hat shows what chains remember of places that are farther apart than draws are; of places
        nearer together it shows nothing.
        """
        count, dtype = self.settings.num_superchains, self.guide.draws.dtype
        key = key_apart(jax.random.fold_in(self.key, self.num_windows), 0)
        order = np.asarray(jax.random.permutation(key, len(self.z)))
        z = self.z[order[:count]]
        center = np.median(self.z, axis=0)
        far = center + SPREAD * (z - center)
        value, _ = evaluate(self.guide.density, self.frame, jnp.asarray(far, dtype))
        starts = np.where(np.isfinite(value)[:, None], far, z)
        self.z = np.repeat(starts, len(self.z) // count, axis=0)


def _later_half(windows: list[Window]) -> np.ndarray:
    """The later half of some draws, whitened, (n, d)."""
    z = np.concatenate([window.draws for window in windows])
    return z[len(z) // 2 :].reshape(-1, z.shape[-1]).astype(np.float64)


def _without_tails(z: np.ndarray) -> np.ndarray:
    """Draws (n, d), cut off where Gaussian ones have next to none."""
    scale = scale_of(z)
    return scale.center + scale.width * np.clip((z - scale.center) / scale.width, -FAR, FAR)


def _mean_and_sd(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of draws (n, d) without their tails: heavy ones have another sd in every window."""
    cut = _without_tails(z)
    return cut.mean(0), np.maximum(cut.std(0), 1e-6)


def _whiten(frame: Frame, x: np.ndarray) -> np.ndarray:
    mean, root = (np.asarray(a, np.float64) for a in (frame.mean, frame.root))
    return np.linalg.solve(root, (x - mean).T).T


def _unwhiten(frame: Frame, z: np.ndarray) -> np.ndarray:
    mean, root = (np.asarray(a, np.float64) for a in (frame.mean, frame.root))
    return mean + z @ root.T


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
