"""PSIS k̂ of a guide, from its own log density or, if it has none, from an estimate of it.

:mod:`numpyro_kscore._util.pareto` explains k̂. This module makes the log weights of a guide
without a density, and says how far they can be trusted.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._model.draws import GuideDraws, WeightedDraws
from numpyro_kscore._util.checks import check_count, with_jax_leaves
from numpyro_kscore._util.pareto import (
    GOOD_KHAT,
    are_nearly_equal,
    pareto_smooth,
    weight_variation,
)
from numpyro_kscore.diagnostics._codes import KhatDoubt, Verdict
from numpyro_kscore.diagnostics._discrepancy import Discrepancy
from numpyro_kscore.diagnostics._energy import FAMILIES, FOLDS, Family, cross_fit, take_rows
from numpyro_kscore.diagnostics._messages import khat_reason
from numpyro_kscore.estimators._base.standardization import whiten_samples
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator
from numpyro_kscore.kernels._matrix import CurlFree
from numpyro_kscore.regularizers._iterations import NuMethod

NUM_REPEATS, NUM_BOOTSTRAP = 4, 100
# Covariance and mean have d(d+3)/2 numbers; with fewer draws a dimension their noise alone makes
# log weights vary by half a nat and more.
DRAWS_PER_DIMENSION = 10
# Least variance of whitened draws in any direction: 1, unless draws lie in a plane or coincide.
DEGENERATE = 0.1
# Distrust an energy whose error, in nats, exceeds this and half the spread of the log weights.
LARGE_ERROR = 0.5
# A jackknife that leaves out one of the folds makes errors smaller by this factor.
FOLD_SCALE = (FOLDS - 1.0) ** 0.5
# Coverage of the interval.
LEVEL = 0.9


class KhatEstimate(NamedTuple):
    """A Pareto k̂ and how far it can be trusted.

    Attributes:
        value: the estimate; ``-inf`` where all weights are equal.
        low: lower end of a 90 % interval, which includes the error of the energy.
        high: upper end.
        verdict: ``"good"`` (the interval below 0.7), ``"bad"`` (above) or ``"cannot tell"``.
        reason: why, in words.
        log_weights: log p - log q at the draws, up to a constant, (n,); unless they are exact, n
            is rounded down to a multiple of 4.
        log_q: the guide's log density at the same draws, up to a constant, (n,).
        energy: the family of the energy, the estimate of -log q, that was used; ``"exact"`` if the
            guide has a density.
        energy_error: standard deviation over draws of the error of that estimate, in nats.
        alternatives: k̂ by other families that fit the draws equally well; at most ``value``
            where their weights hardly vary, see :func:`~numpyro_kscore.khat`.
        fisher: lower bound of the Fisher divergence in whitened coordinates, averaged over
            dimensions, and its standard error; see
            :func:`~numpyro_kscore.diagnostics.fisher_divergence`.
        doubt: the reason of a "cannot tell", to match on: ``"interval"`` (it holds 0.7),
            ``"few draws"``, ``"flat draws"`` or ``"large error"``; empty otherwise.

    Example::

        from numpyro_kscore import khat

        estimate = khat(draws)
        print(estimate.verdict, estimate.reason)
        estimate.log_weights  # (4000,): for importance_resample
        estimate.doubt in ("", "interval")  # True
    """

    value: float
    low: float
    high: float
    verdict: Verdict
    reason: str
    log_weights: np.ndarray
    log_q: np.ndarray
    energy: str
    energy_error: float
    alternatives: dict[str, float]
    fisher: tuple[float, float]
    doubt: KhatDoubt = ""

    def __str__(self) -> str:
        equal = " (all weights are equal)" if self.value == -np.inf else ""
        return (
            f"k̂ = {self.value:.2f}{equal}, 90 % interval {self.low:.2f} to {self.high:.2f}: "
            f"{self.verdict} ({self.reason})"
        )


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

    Cost: about 30 kernel fits of at most 1024 draws; nothing if exact.

    Example::

        from numpyro_kscore import khat

        estimate = khat(draws)
        estimate.low <= estimate.value <= estimate.high  # True
        print(estimate)  # with the verdict, and why
    """
    _check_is_draws(draws)
    check_count("num_repeats", num_repeats, minimum=2)
    check_count("num_bootstrap", num_bootstrap, minimum=20)
    draws = draws.checked()
    if exact and draws.log_q is None:
        raise ValueError(
            "exact: expected a guide with a density; got one that can only be sampled. Leave "
            "exact out: its density is then estimated"
        )
    estimator = energy_estimator(estimator)
    rng = np.random.default_rng(seed)
    if draws.log_q is not None and exact is not False:
        return exact_khat(draws, num_bootstrap, rng)
    return _energy_khat(draws, num_repeats, num_bootstrap, rng, estimator)


def exact_khat(
    draws: Any, num_bootstrap: int = NUM_BOOTSTRAP, rng: np.random.Generator | None = None
) -> KhatEstimate:
    """k̂ of draws with ``samples``, ``log_density`` and ``log_q`` of a guide that has a density."""
    rng = np.random.default_rng(0) if rng is None else rng
    if isinstance(draws, WeightedDraws):
        weights = draws.log_weights
    else:
        weights = np.asarray(draws.log_density, np.float64) - np.asarray(draws.log_q, np.float64)
    unknown = (float("nan"), float("nan"))
    return _estimate(draws, [weights], "exact", {}, unknown, "", 0.0, num_bootstrap, rng)


def fisher_divergence(draws: GuideDraws, fitted: KhatEstimate | None = None) -> Discrepancy:
    """A lower bound of the Fisher divergence ``E|s_q - s_p|²``, averaged over dimensions.

    For any field f, ``-2 E[½|f|² + f·s_p + div f]`` is the divergence less ``E|f - (s_q - s_p)|²``.
    Here f is the estimated difference of the scores, at held-out draws. In whitened coordinates the
    bound has no units: for a Gaussian guide in which only the means are wrong, the divergence is
    their mean squared error in standard deviations squared. The bound is zero if no difference is
    found.

    Args:
        draws: from :func:`~numpyro_kscore.evaluate_guide`.
        fitted: k̂ of the same draws, which saves its computation; ignored if it is exact.

    Returns:
        The bound and its standard error.

    Raises:
        TypeError: if the draws are not ``GuideDraws``.
        ValueError: for draws that do not fit together, or without their Laplacian.
        FloatingPointError: see :func:`~numpyro_kscore.khat`.

    Cost: that of :func:`~numpyro_kscore.khat`; nothing with ``fitted``.

    Example::

        from numpyro_kscore.diagnostics import fisher_divergence

        bound = fisher_divergence(draws)
        bound.value < 0.1 + 3 * bound.standard_error  # True
    """
    _check_is_draws(draws)
    if draws.laplacian is None:
        raise ValueError(
            "draws: expected the model's Laplacian; got None. evaluate_guide gives it if it is "
            "finite at every draw"
        )
    if fitted is None or fitted.energy == "exact":
        fitted = khat(draws, exact=False)
    value, error = fitted.fisher
    return Discrepancy(jnp.asarray(value), jnp.asarray(error))


def _check_is_draws(draws: Any) -> None:
    """Raise ``TypeError`` for anything but ``GuideDraws``."""
    if not isinstance(draws, GuideDraws):
        raise TypeError(
            f"draws: expected GuideDraws, as evaluate_guide returns them; got {draws!r}"
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
    # With few draws the verdict is "cannot tell": only cheap energies are fitted, for log_q.
    are_few = n < DRAWS_PER_DIMENSION * dim
    first = {
        family: cross_fit(part, orders[0], family, estimator)
        for family in FAMILIES
        if family.serves(n, dim)
        and not (family.kernel and are_few)
        and (draws.laplacian is not None or family.fixed)
    }
    best, rivals = _choose({family: np.asarray(fit.loss) for family, fit in first.items()})
    fits = [first[best], *(cross_fit(part, order, best, estimator) for order in orders[1:])]
    rows = [np.asarray(fit.log_weights, np.float64) for fit in fits]
    weights = np.mean(rows, axis=0)
    error = FOLD_SCALE * float(np.sqrt(np.mean(np.var(rows, axis=0, ddof=1))))
    bound = np.asarray(fits[0].fisher, np.float64) / dim
    doubt: KhatDoubt = ""
    if are_few:
        doubt = "few draws"
    elif not _least_variance(target.samples) > DEGENERATE:
        doubt = "flat draws"
    elif error > max(LARGE_ERROR, 0.5 * float(np.std(weights))):
        doubt = "large error"
    rival_weights = {
        family.name: np.asarray(first[family].log_weights, np.float64) for family in rivals
    }
    fisher = (float(np.mean(bound)), float(np.std(bound) / used**0.5))
    return _estimate(part, rows, best.name, rival_weights, fisher, doubt, error, num_bootstrap, rng)


def _estimate(
    draws: GuideDraws,
    rows: list[np.ndarray],
    energy: str,
    rivals: dict[str, np.ndarray],
    fisher: tuple[float, float],
    doubt: KhatDoubt,
    error: float,
    num_bootstrap: int,
    rng: np.random.Generator,
) -> KhatEstimate:
    """k̂ of the mean of log weights by foldings, (n,) each; verdict unless there is a doubt."""
    weights = np.mean(rows, axis=0)
    value = pareto_smooth(weights)[1]
    shapes = {name: _rival_shape(other, value) for name, other in rivals.items()}
    n, dim = draws.samples.shape
    replicates = []
    for _ in range(num_bootstrap):
        deviations = FOLD_SCALE * (rows[rng.integers(len(rows))] - weights)
        replicates.append(pareto_smooth((weights + deviations)[rng.integers(n, size=n)])[1])
    # Replicates of equal weights have no tail.
    finite = np.array(replicates)[np.isfinite(replicates)]
    spread = finite - np.mean(finite) if finite.size else np.zeros(1)
    tails = np.quantile(spread, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    ends = [value + tails[0], value + tails[1], *shapes.values()]
    low, high = float(min(ends)), float(max(ends))
    if not doubt and low <= GOOD_KHAT <= high:
        doubt = "interval"
    verdict: Verdict = "cannot tell" if doubt else "good" if high < GOOD_KHAT else "bad"
    log_q = np.asarray(draws.log_density, np.float64) - weights
    reason = khat_reason(doubt, energy, n, dim, error)
    return KhatEstimate(
        value, low, high, verdict, reason, weights, log_q, energy, error, shapes, fisher, doubt
    )


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
    is_equal = are_nearly_equal(weight_variation(log_weights))
    return min(shape, value) if is_equal else shape


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


def energy_estimator(estimator: Any = None) -> ScoreEstimator:
    """The estimator of the kernel part of an energy, checked."""
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
