"""PSIS k̂ of a guide, from its density where it has one and from its energy where not.

What k̂ says is in :mod:`numpyro_kscore.diagnostics._pareto`; here is where its weights come from
when the guide has no density, and how far they can be trusted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.checks import check_count
from numpyro_kscore.diagnostics._draws import GuideDraws, whitening
from numpyro_kscore.diagnostics._energy import (
    FAMILIES,
    FOLDS,
    CrossFit,
    Family,
    Target,
    cross_fit,
    energy_estimator,
)
from numpyro_kscore.diagnostics._pareto import GOOD_KHAT, pareto_smooth, smoother

__all__ = ["KhatEstimate", "khat", "standardized_target"]

# Covariance and mean have d(d+3)/2 numbers; with fewer draws a dimension their noise alone makes
# log weights vary by half a nat and more.
DRAWS_PER_DIMENSION = 10
# Least variance of whitened draws in any direction: 1, but where draws lie in a plane, or coincide.
DEGENERATE = 0.1
# An energy whose error, in nats, is both larger than this and half of what it says is no evidence.
LARGE_ERROR = 0.5
LEVEL = 0.9


class KhatEstimate(NamedTuple):
    """A Pareto k̂ and how far it can be trusted.

    Attributes:
        value: the estimate; ``-inf`` where all weights are equal.
        low: lower end of a 90 % interval, the energy's own error included.
        high: upper end.
        verdict: ``"good"`` (the interval below 0.7), ``"bad"`` (above) or ``"cannot tell"``.
        reason: why, in words.
        log_weights: log p - log q at the draws up to a constant, (n,).
        log_q: the guide's log density up to a constant, (n,).
        energy: name of the features the energy was made of; ``"exact"`` where the guide has a
            density.
        energy_error: standard deviation over draws of the energy's error, in nats.
        alternatives: k̂ of the energies that fit the draws as well.
        fisher: lower bound of the Fisher divergence in whitened coordinates, in the mean over
            dimensions, and its standard error; see
            :func:`~numpyro_kscore.diagnostics.fisher_divergence`.
    """

    value: float
    low: float
    high: float
    verdict: str
    reason: str
    log_weights: np.ndarray
    log_q: np.ndarray
    energy: str
    energy_error: float
    alternatives: dict[str, float]
    fisher: tuple[float, float]

    def __str__(self) -> str:
        equal = " (all weights are equal)" if self.value == -np.inf else ""
        return (
            f"k̂ = {self.value:.2f}{equal}, 90 % interval {self.low:.2f} to {self.high:.2f}: "
            f"{self.verdict} ({self.reason})"
        )


def khat(
    draws: GuideDraws,
    *,
    num_repeats: int = 4,
    num_bootstrap: int = 100,
    seed: int = 0,
    exact: bool | None = None,
    estimator: Any = None,
) -> KhatEstimate:
    """PSIS k̂ of a guide against its model.

    Where the guide has a density the log weights are exact. Otherwise several energies
    (docs/diagnostics) are fitted to three quarters of the draws and
    evaluated on the rest, in turn; that with the least held-out score-matching loss is taken, and
    the log weights are averaged over several ways to fold the draws. The interval is the hull of

    * a bootstrap over draws, each replicate with the energy of another folding; their differences
      are those of a delete-a-quarter jackknife, √3 too small, and scaled accordingly;
    * k̂ by every other energy whose loss is within two standard errors of the least.

    The verdict is "cannot tell" where the interval holds 0.7, where there are too few draws for
    the dimension, where draws do not vary in some direction, or where the energy's error is large
    and no less than half of what it says.

    Args:
        draws: from :func:`~numpyro_kscore.evaluate_guide`; or made of arrays.
        num_repeats: foldings of the draws, at least 2.
        num_bootstrap: replicates behind the interval.
        seed: of foldings and bootstrap.
        exact: whether to use the guide's own density; by default where there is one.
        estimator: a :class:`~numpyro_kscore.ScoreEstimator` for the kernel part of an energy; its
            kernel must be curl-free. The default has an automatic step count.

    Returns:
        k̂, its interval and verdict, and the log weights behind it.

    Raises:
        TypeError: if the draws are no :class:`~numpyro_kscore.GuideDraws`, and for a kernel that
            has no energy.
        ValueError: for draws that do not fit together, or ``exact`` without a density.
        ImportError: without ArviZ.

    Cost: about 30 kernel fits of at most 1024 draws; nothing if exact.
    """
    if not isinstance(draws, GuideDraws):
        raise TypeError(
            f"draws: expected GuideDraws, as evaluate_guide returns them; got {draws!r}"
        )
    check_count("num_repeats", num_repeats, minimum=2)
    check_count("num_bootstrap", num_bootstrap, minimum=20)
    draws = draws.checked()
    if exact and draws.log_q is None:
        raise ValueError(
            "exact: expected a guide with a density; got one that can only be sampled. Leave "
            "exact out: the energy takes its place"
        )
    smoother()
    estimator = energy_estimator(estimator)
    rng = np.random.default_rng(seed)
    if draws.log_q is not None and exact is not False:
        return _exact_khat(draws, num_bootstrap, rng)
    return _energy_khat(draws, num_repeats, num_bootstrap, rng, estimator)


def _exact_khat(draws: GuideDraws, num_bootstrap: int, rng: np.random.Generator) -> KhatEstimate:
    log_q = np.asarray(draws.log_q, np.float64)
    weights = np.asarray(draws.log_density, np.float64) - log_q
    value = pareto_smooth(weights)[1]
    offsets = _bootstrap([weights], weights, 0.0, num_bootstrap, rng)
    low, high = _interval(value, offsets, {})
    verdict, reason = _verdict(low, high, "exact weights")
    missing = (float("nan"), float("nan"))
    return KhatEstimate(
        value, low, high, verdict, reason, weights, log_q, "exact", 0.0, {}, missing
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
    target = standardized_target(draws)
    part = jax.tree.map(lambda a: a[:used], target)
    orders = [jnp.asarray(rng.permutation(used)) for _ in range(num_repeats)]
    families = tuple(family for family in FAMILIES if family.serves(n, dim))
    few = n < DRAWS_PER_DIMENSION * dim
    if few:
        # No answer will come of it; what is cheap is fitted for the sake of log_q.
        families = tuple(family for family in families if not family.kernel)
    if draws.laplacian is None:
        families = tuple(family for family in families if family.model == "fixed")
    first = {family: cross_fit(part, orders[0], family, estimator) for family in families}
    best, rivals = _choose({family: np.asarray(fit.loss) for family, fit in first.items()})
    fits = [first[best], *(cross_fit(part, order, best, estimator) for order in orders[1:])]
    rows = [_weights(fit) for fit in fits]
    weights = np.mean(rows, axis=0)
    value = pareto_smooth(weights)[1]
    alternatives = {family.name: pareto_smooth(_weights(first[family]))[1] for family in rivals}
    scale = (FOLDS - 1.0) ** 0.5
    error = scale * float(np.sqrt(np.mean(np.var(rows, axis=0, ddof=1))))
    offsets = _bootstrap(rows, weights, scale, num_bootstrap, rng)
    low, high = _interval(value, offsets, alternatives)
    verdict, reason = _verdict(low, high, f"energy: {best.name}")
    spread = float(np.std(weights))
    if few:
        verdict = "cannot tell"
        reason = f"{n} draws in {dim} dimensions are too few for an energy"
    elif not _least_variance(target.points) > DEGENERATE:
        verdict = "cannot tell"
        reason = "the draws do not vary in some direction: such a guide has no density"
    elif error > max(LARGE_ERROR, 0.5 * spread):
        verdict = "cannot tell"
        reason = f"the energy's error, {error:.2g} nats, is as large as what it says"
    bound = np.asarray(fits[0].fisher, np.float64) / dim
    fisher = (float(np.mean(bound)), float(np.std(bound) / used**0.5))
    log_q = np.asarray(part.log_density, np.float64) - weights
    return KhatEstimate(
        value, low, high, verdict, reason, weights, log_q, best.name, error, alternatives, fisher
    )


@jax.jit
def standardized_target(draws: GuideDraws) -> Target:
    """Draws and model in coordinates whitened by the draws."""
    coordinates = whitening(draws.samples)
    laplacian = draws.laplacian
    if laplacian is None:
        laplacian = jnp.full_like(draws.log_density, 0.0)
    return Target(
        coordinates.to_kernel(draws.samples),
        draws.log_density - jnp.mean(draws.log_density),
        coordinates.scores_to_kernel(draws.scores),
        laplacian,
    )


@jax.jit
def _least_variance(points: jax.Array) -> jax.Array:
    centered = points - jnp.mean(points, axis=0)
    return jnp.linalg.eigvalsh(centered.T @ centered / points.shape[0])[0]


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
    """What k̂ of a replicate exceeds the replicates' mean by."""
    n = center.shape[0]
    found = []
    for _ in range(num_bootstrap):
        row = rows[rng.integers(len(rows))]
        values = center + scale * (row - center)
        found.append(pareto_smooth(values[rng.integers(n, size=n)])[1])
    # Replicates of equal weights have no tail.
    values = np.array(found)[np.isfinite(found)]
    return values - np.mean(values) if values.size else np.zeros(1)


def _interval(
    value: float, offsets: np.ndarray, alternatives: dict[str, float]
) -> tuple[float, float]:
    tails = np.quantile(offsets, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    ends = [value + tails[0], value + tails[1], *alternatives.values()]
    return float(min(ends)), float(max(ends))


def _verdict(low: float, high: float, evidence: str) -> tuple[str, str]:
    if high < GOOD_KHAT:
        return "good", evidence
    if low > GOOD_KHAT:
        return "bad", evidence
    return "cannot tell", f"{evidence}; the interval holds {GOOD_KHAT}"
