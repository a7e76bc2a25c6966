"""PSIS k̂ of a guide, from its own log density or, if it has none, from an estimate of it.

:mod:`numpyro_kscore.diagnostics._pareto` explains k̂. This module makes the log weights of a guide
without a density, and says how far they can be trusted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._tracing.draws import GuideDraws
from numpyro_kscore._util.checks import check_count, with_jax_leaves
from numpyro_kscore.diagnostics._closed_form import take_rows
from numpyro_kscore.diagnostics._codes import Doubt, Verdict
from numpyro_kscore.diagnostics._energy import (
    FAMILIES,
    FOLDS,
    CrossFit,
    Family,
    cross_fit,
)
from numpyro_kscore.diagnostics._estimate import KhatEstimate
from numpyro_kscore.diagnostics._messages import khat_reason
from numpyro_kscore.diagnostics._pareto import GOOD_KHAT, pareto_smooth, smoother, weight_ess
from numpyro_kscore.estimators._base.coordinates import whiten_samples
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator
from numpyro_kscore.kernels._matrix import CurlFree
from numpyro_kscore.regularizers._iterations import NuMethod

__all__ = ["check_is_draws", "energy_estimator", "khat", "whitened_draws"]

NUM_REPEATS, NUM_BOOTSTRAP = 4, 100
# Covariance and mean have d(d+3)/2 numbers; with fewer draws a dimension their noise alone makes
# log weights vary by half a nat and more.
DRAWS_PER_DIMENSION = 10
# Least variance of whitened draws in any direction: 1, unless draws lie in a plane or coincide.
DEGENERATE = 0.1
# Distrust an energy whose error, in nats, exceeds this and half the spread of the log weights.
LARGE_ERROR = 0.5
# Coverage of the interval.
LEVEL = 0.9
# Coefficient of variation below which weights of a rival do not matter. By Cauchy and Schwarz they
# change no average by more than .15 sd: what `diagnose` calls good (a variance changes by .15 √2 of
# itself at most where tails are Gaussian, an sd by 10 %).
SMALLEST_VARIATION = 0.15


def khat(
    draws: GuideDraws,
    *,
    num_repeats: int = NUM_REPEATS,
    num_bootstrap: int = NUM_BOOTSTRAP,
    seed: int = 0,
    exact: bool | None = None,
    estimator: Any = None,
) -> KhatEstimate:
    """PSIS k̂ of a guide against its model.

    If the guide has a density the log weights are exact. Otherwise several energies, estimates of
    -log q (docs/diagnostics), are each fitted to three quarters of the draws and evaluated on the
    rest, in turn. The one with the least held-out score-matching loss is used, and its log weights
    are averaged over several ways to fold the draws. The interval is the hull of

    * a bootstrap over draws, each replicate with the energy of a random folding; the differences
      between foldings are those of a delete-a-quarter jackknife, √3 too small, and scaled by √3;
    * k̂ by every other energy whose loss is within two standard errors of the least. If its
      weights vary by less than 15 % it does not raise the upper end: a shape has no scale, and
      that of nearly equal weights, which change no average by more than 0.15 standard deviations,
      may be that of the energy's noise, up to 3.

    The verdict is "cannot tell" if the interval holds 0.7, if there are fewer than ten draws a
    dimension, if draws do not vary in some direction, or if the energy's error exceeds both half a
    nat and half the spread of the log weights.

    Args:
        draws: from :func:`~numpyro_kscore.evaluate_guide`, or made from arrays.
        num_repeats: number of foldings of the draws, at least 2.
        num_bootstrap: number of bootstrap replicates, at least 20.
        seed: seed of foldings and bootstrap.
        exact: whether to use the guide's own density; by default if there is one.
        estimator: a :class:`~numpyro_kscore.ScoreEstimator` for the kernel part of an energy; its
            kernel must be curl-free. The default has an automatic step count.

    Returns:
        k̂, its interval and verdict, and its log weights.

    Raises:
        TypeError: if the draws are not :class:`~numpyro_kscore.diagnostics.GuideDraws`, and for a
            kernel without an energy.
        ValueError: for draws that do not fit together, or ``exact`` without a density.
        FloatingPointError: if no energy has a finite held-out loss.
        ImportError: without ArviZ.

    Cost: about 30 kernel fits of at most 1024 draws; nothing if exact.

    Example::

        from numpyro_kscore import khat

        estimate = khat(draws)
        estimate.low <= estimate.value <= estimate.high  # True
        print(estimate)  # with the verdict, and why
    """
    check_is_draws(draws)
    check_count("num_repeats", num_repeats, minimum=2)
    check_count("num_bootstrap", num_bootstrap, minimum=20)
    draws = draws.checked()
    if exact and draws.log_q is None:
        raise ValueError(
            "exact: expected a guide with a density; got one that can only be sampled. Leave "
            "exact out: its density is then estimated"
        )
    estimator = energy_estimator(estimator)
    smoother()
    rng = np.random.default_rng(seed)
    if draws.log_q is not None and exact is not False:
        return _exact_khat(draws, num_bootstrap, rng)
    return _energy_khat(draws, num_repeats, num_bootstrap, rng, estimator)


def check_is_draws(draws: Any) -> None:
    """Raise ``TypeError`` for anything but ``GuideDraws``."""
    if not isinstance(draws, GuideDraws):
        raise TypeError(
            f"draws: expected GuideDraws, as evaluate_guide returns them; got {draws!r}"
        )


def _exact_khat(draws: GuideDraws, num_bootstrap: int, rng: np.random.Generator) -> KhatEstimate:
    log_q = np.asarray(draws.log_q, np.float64)
    weights = np.asarray(draws.log_density, np.float64) - log_q
    value = pareto_smooth(weights)[1]
    offsets = _bootstrap([weights], weights, 0.0, num_bootstrap, rng)
    low, high = _interval(value, offsets, {})
    verdict, doubt = _judge(low, high)
    n, dim = draws.samples.shape
    reason = khat_reason(doubt, "exact", n, dim, 0.0)
    missing = (float("nan"), float("nan"))
    return KhatEstimate(
        value, low, high, verdict, reason, weights, log_q, "exact", 0.0, {}, missing, doubt
    )


def _energy_khat(
    draws: GuideDraws,
    num_repeats: int,
    num_bootstrap: int,
    rng: np.random.Generator,
    estimator: Any,
) -> KhatEstimate:
    n, dim = draws.samples.shape
    used = FOLDS * (n // FOLDS)
    target = whitened_draws(draws)
    part = take_rows(target, slice(used))
    orders = [jnp.asarray(rng.permutation(used)) for _ in range(num_repeats)]
    families = _families(n, dim, draws.laplacian is not None)
    first = {family: cross_fit(part, orders[0], family, estimator) for family in families}
    best, rivals = _choose({family: np.asarray(fit.loss) for family, fit in first.items()})
    fits = [first[best], *(cross_fit(part, order, best, estimator) for order in orders[1:])]
    rows = [_weights(fit) for fit in fits]
    weights = np.mean(rows, axis=0)
    value = pareto_smooth(weights)[1]
    alternatives = {family.name: _rival_shape(_weights(first[family]), value) for family in rivals}
    scale = (FOLDS - 1.0) ** 0.5
    error = scale * float(np.sqrt(np.mean(np.var(rows, axis=0, ddof=1))))
    offsets = _bootstrap(rows, weights, scale, num_bootstrap, rng)
    low, high = _interval(value, offsets, alternatives)
    verdict, doubt = _judge(low, high, _doubt(target.samples, weights, error))
    reason = khat_reason(doubt, best.name, n, dim, error)
    bound = np.asarray(fits[0].fisher, np.float64) / dim
    fisher = (float(np.mean(bound)), float(np.std(bound) / used**0.5))
    log_q = np.asarray(part.log_density, np.float64) - weights
    return KhatEstimate(
        value, low, high, verdict, reason, weights, log_q, best.name, error, alternatives, fisher,
        doubt,
    )  # fmt: skip


def _are_few(n: int, dim: int) -> bool:
    return n < DRAWS_PER_DIMENSION * dim


def _families(n: int, dim: int, has_laplacian: bool) -> list[Family]:
    """The families of energies to compare."""
    # With few draws the verdict is "cannot tell": only cheap energies are fitted, for log_q.
    return [
        family
        for family in FAMILIES
        if family.serves(n, dim)
        and not (family.kernel and _are_few(n, dim))
        and (has_laplacian or family.model == "fixed")
    ]


def _doubt(points: jax.Array, weights: np.ndarray, error: float) -> Doubt:
    """Why an energy of whitened draws cannot be trusted, whatever its k̂; empty if it can."""
    if _are_few(*points.shape):
        return "few draws"
    if not _least_variance(points) > DEGENERATE:
        return "flat draws"
    if error > max(LARGE_ERROR, 0.5 * float(np.std(weights))):
        return "large error"
    return ""


@jax.jit
def whitened_draws(draws: GuideDraws) -> GuideDraws:
    """Draws and model in coordinates whitened by the draws, the log density centered."""
    coordinates = whiten_samples(draws.samples)
    return GuideDraws(
        coordinates.to_kernel(draws.samples),
        draws.log_density - jnp.mean(draws.log_density),
        coordinates.scores_to_kernel(draws.scores),
        draws.laplacian,
    )


@jax.jit
def _least_variance(points: jax.Array) -> jax.Array:
    centered = points - jnp.mean(points, axis=0)
    return jnp.linalg.eigvalsh(centered.T @ centered / points.shape[0])[0]


def _rival_shape(log_weights: np.ndarray, value: float) -> float:
    """k̂ by another energy; at most the value itself where its weights vary too little to matter."""
    shape = pareto_smooth(log_weights)[1]
    variance = len(log_weights) / weight_ess(log_weights) - 1.0
    return shape if variance >= SMALLEST_VARIATION**2 else min(shape, value)


def _weights(fit: CrossFit) -> np.ndarray:
    return np.asarray(fit.log_weights, np.float64)


def _choose(losses: dict[Family, np.ndarray]) -> tuple[Family, list[Family]]:
    """The family with the least loss, and those within two standard errors of it."""
    means = {family: float(np.mean(loss)) for family, loss in losses.items()}
    finite = [family for family in losses if np.isfinite(means[family])]
    if not finite:
        raise FloatingPointError(
            "khat: expected finite held-out losses; got none. Look for scores or Laplacians of "
            "the model that overflow"
        )
    best = min(finite, key=lambda family: means[family])
    rivals = []
    for family in finite:
        difference = losses[family] - losses[best]
        error = float(np.std(difference)) / difference.shape[0] ** 0.5
        if family is not best and np.mean(difference) <= 2 * error:
            rivals.append(family)
    return best, rivals


def _bootstrap(
    rows: list[np.ndarray],
    center: np.ndarray,
    scale: float,
    num_bootstrap: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Deviations of bootstrap k̂ from their mean."""
    n = center.shape[0]
    replicates = []
    for _ in range(num_bootstrap):
        row = rows[rng.integers(len(rows))]
        values = center + scale * (row - center)
        replicates.append(pareto_smooth(values[rng.integers(n, size=n)])[1])
    # Replicates of equal weights have no tail.
    finite = np.array(replicates)[np.isfinite(replicates)]
    return finite - np.mean(finite) if finite.size else np.zeros(1)


def _interval(
    value: float, offsets: np.ndarray, alternatives: dict[str, float]
) -> tuple[float, float]:
    tails = np.quantile(offsets, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    ends = [value + tails[0], value + tails[1], *alternatives.values()]
    return float(min(ends)), float(max(ends))


def _judge(low: float, high: float, doubt: Doubt = "") -> tuple[Verdict, Doubt]:
    """The verdict of an interval, unless there is a doubt already."""
    if not doubt and high < GOOD_KHAT:
        return "good", doubt
    if not doubt and low > GOOD_KHAT:
        return "bad", doubt
    return "cannot tell", doubt or "interval"


def energy_estimator(estimator: Any = None) -> ScoreEstimator:
    """The estimator of the kernel part of an energy, checked.

    Raises:
        TypeError: for anything but a ``ScoreEstimator`` with a curl-free kernel.
    """
    if estimator is None:
        estimator = ScoreEstimator(regularizer=NuMethod("auto"))
    if not isinstance(estimator, ScoreEstimator):
        raise TypeError(
            f"estimator: expected a ScoreEstimator with a curl-free kernel; got {estimator!r}"
        )
    if not isinstance(estimator.kernel, CurlFree):
        raise TypeError(
            f"estimator: expected a curl-free kernel, whose fields have a potential; got "
            f"{type(estimator.kernel).__name__}, which gives no energy. Use CurlFree(), or leave "
            "estimator out"
        )
    # The points are whitened already, and the base is the closed form's.
    return with_jax_leaves(dataclasses.replace(estimator, standardize="none", base=None))
