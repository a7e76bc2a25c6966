"""A guide whose density is known, by its importance weights.

Averages of a guide's draws with and without weights are compared: weights put right whatever the
guide has draws for. Whether they do so for a mean or a variance, the Pareto shape of the weights
tells, times the squared distance from the mean: it is above 0.7 where a tail of the model has too
few draws, though weights themselves may hardly vary (Vehtari et al. 2024, section 3.2.5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numpyro_kscore._model.draws import WeightedDraws
from numpyro_kscore._util.pareto import (
    GOOD_KHAT,
    are_nearly_equal,
    are_reliable,
    pareto_smooth,
    weight_ess,
    weight_variation,
)

# A region without draws may have 3/n of the guide's probability, by the rule of three. It weighs at
# least as much as the largest weight, times the mean excess of a Pareto tail, of this shape at
# most.
UNSEEN, LARGEST_SHAPE = 3.0, 0.9
# Shapes of weights between these are looked at again, with four times the draws: tails that 10 000
# draws hardly reach had shapes of .5 to .65, and more beyond; and a shape of 300 tail draws has an
# error of .1. Sixteen times as many have errors a quarter as large.
IN_DOUBT, TIMES = (0.5, 0.85), (4, 16)
# Nats by which a draw may be farther from the model than most: one that is thousands of nats down
# would be all of the divergence, and says nothing of the others.
FARTHEST = 100.0
# Numbers of draws that are looked at together.
PIECE = 2_000_000
# A weighted tail that is heavier than a guide's own by so much shows that the guide's is thin.
HEAVIER = 0.1


class Evidence(NamedTuple):
    """The logarithm of the evidence, the density of the data under the model.

    Attributes:
        value: in nats.
        error: its standard error, from the variance of the weights, with what may be beyond the
            largest of them, where no draw is, and with the rounding of log densities.
        khat: Pareto shape of the weights; from 0.7 on value and error are not to be trusted.
        num_effective: effective number of weighted draws.
        num_draws: number of draws.
        variation: standard deviation of the weights over their mean, beyond that of a guide that is
            the model.

    Example::

        from numpyro_kscore import log_evidence

        evidence = log_evidence(svi, result, y)
        evidence.value - 2 * evidence.error  # a lower end, in nats
        evidence.is_reliable  # True
    """

    value: float
    error: float
    khat: float
    num_effective: float
    num_draws: int
    variation: float

    @property
    def is_reliable(self) -> bool:
        """Whether weights can be averaged, since k̂ is below 0.7 or they are nearly equal."""
        return are_reliable(self.khat, self.variation)

    @property
    def is_poor(self) -> bool:
        """Whether weights are not to be trusted, and few of the draws have most of them."""
        return not self.is_reliable and 2 * self.num_effective < self.num_draws

    def __str__(self) -> str:
        trust = "" if self.is_reliable else ": not to be trusted"
        return (
            f"log evidence {self.value:.3f} ± {self.error:.3f} nats, {self.num_effective:.0f} "
            f"effective draws of {self.num_draws}, k̂ = {self.khat:.2f}{trust}"
        )


class Weighing(NamedTuple):
    """A guide by its importance weights.

    Attributes:
        evidence: the log evidence, with k̂ and the effective number of draws.
        divergence: divergence from the guide to the model, KL(q || p), in nats, to which no draw
            adds more than 100 nats beyond the median. For a guide whose
            density is known given its noise it is that of a mixture over some values of the noise,
            which on average is larger.
        folded: part of the draws that other noise of the guide is pushed to as well.
        shift: mean of the guide less that of the weighted draws, in their standard deviations,
            (d,).
        shift_error: its standard error, (d,).
        ratio: standard deviation of the guide over that of the weighted draws, (d,).
        ratio_error: its standard error, relative to the ratio, (d,).
        shapes: Pareto shape of the weights times squared deviations, (d,).
        own_shapes: that of squared deviations alone, (d,).

    Example::

        from numpyro_kscore import diagnose

        weights = diagnose(svi, result, y).weights
        weights.evidence.khat < 0.7  # True
        weights.is_known  # (2,)
    """

    evidence: Evidence
    divergence: float
    folded: float
    shift: np.ndarray
    shift_error: np.ndarray
    ratio: np.ndarray
    ratio_error: np.ndarray
    shapes: np.ndarray
    own_shapes: np.ndarray

    @property
    def is_thin(self) -> np.ndarray:
        """Whether a tail of a coordinate has too few draws, (d,).

        Weights must make it heavier than it is: the model's own may be as heavy.
        """
        return (self.shapes >= GOOD_KHAT) & (self.shapes > self.own_shapes + HEAVIER)

    @property
    def is_known(self) -> np.ndarray:
        """Whether weights tell the mean and the standard deviation of each coordinate, (d,)."""
        return ~self.is_thin & self.evidence.is_reliable

    @property
    def knows_all(self) -> bool:
        """Whether weights tell the mean and the standard deviation of all coordinates."""
        return bool(np.all(self.is_known))

    @property
    def largest_shape(self) -> float:
        """The largest Pareto shape, of the weights and of these times squared deviations."""
        return max(self.evidence.khat, float(np.max(self.shapes)))

    @property
    def is_poor(self) -> bool:
        """Whether weights are not to be trusted, and few of the draws have most of them."""
        return self.evidence.is_poor

    @property
    def lacks_draws(self) -> bool:
        """Whether a part of the model has too few draws, of those that weights can tell of."""
        return self.is_poor or bool(np.any(self.is_thin))

    @property
    def is_in_doubt(self) -> bool:
        """Whether more draws may tell if a part of the model has too few."""
        heavier = self.shapes[self.shapes > self.own_shapes + HEAVIER]
        shape = float(np.max(heavier, initial=-np.inf))
        if not are_nearly_equal(self.evidence.variation):
            shape = max(shape, self.evidence.khat)
        return not self.is_poor and IN_DOUBT[0] <= shape < IN_DOUBT[1]

    def __str__(self) -> str:
        folds = f"; {self.folded:.1%} of the draws are folded" if self.folded else ""
        return f"{self.evidence}; {max(self.divergence, 0.0):.3f} nats from the model{folds}"


def weigh(draws: WeightedDraws) -> Weighing:
    """Compare moments of draws with and without their weights."""
    log_weights = draws.log_weights
    evidence = evidence_of(log_weights, draws.rounding, draws.log_shares)
    weights = np.exp(pareto_smooth(log_weights)[0])
    # Some coordinates at a time: ten copies of draws of thousands of them would be gigabytes.
    parts = np.array_split(draws.samples, -(-draws.samples.size // PIECE), axis=1)
    found = [_moments(np.asarray(x, np.float64), weights, draws) for x in parts]
    columns = (np.concatenate(column) for column in zip(*found, strict=True))
    apart = evidence.value - draws.log_ratios
    divergence = float(draws.shares @ np.minimum(apart, np.median(apart) + FARTHEST))
    return Weighing(evidence, divergence, draws.folded, *columns)


def _moments(
    samples: np.ndarray, weights: np.ndarray, draws: WeightedDraws
) -> tuple[np.ndarray, ...]:
    """Shift, its error, ratio, its error, shapes and own shapes of some coordinates (n, k)."""
    shares = draws.shares
    center = shares @ samples
    own = samples - center
    spread = shares @ own**2
    mean = weights @ samples
    moved = samples - mean
    tiny = np.finfo(float).tiny
    spread, variance = (np.maximum(v, tiny) for v in (spread, weights @ moved**2))
    # The errors come from the influence of every draw on the difference.
    shift = shares[:, None] * own - weights[:, None] * moved
    log_ratio = shares[:, None] * (own**2 / spread - 1)
    log_ratio = log_ratio - weights[:, None] * (moved**2 / variance - 1)
    sd = np.sqrt(variance)
    return (
        (center - mean) / sd,
        np.sqrt(np.sum(shift**2, axis=0)) / sd,
        np.sqrt(spread / variance),
        0.5 * np.sqrt(np.sum(log_ratio**2, axis=0)),
        second_moment_shapes(moved, draws.log_weights),
        second_moment_shapes(own, np.log(shares)),
    )


def weigh_closely(
    draw: Callable[[int], WeightedDraws],
    unconstrained: Callable[[WeightedDraws], WeightedDraws],
    count: int,
    seconds: float,
    is_open: Callable[[Weighing], bool] = lambda weights: False,
) -> tuple[WeightedDraws, Weighing]:
    """Weigh so many draws, or four times as many where these leave a tail in doubt.

    ``draw`` takes their number; more than there are ``seconds`` for are not asked of it. As long as
    a question ``is_open``, up to sixteen times as many answer it. The draws are in the guide's
    coordinates, and the weights compare ``unconstrained`` values.
    """
    draws = draw(count)
    weights = weigh(unconstrained(draws))
    for times in TIMES:
        is_in_doubt = weights.is_in_doubt and times == TIMES[0]
        if not (is_in_doubt or is_open(weights)) or times * count * draws.seconds > seconds:
            break
        draws = draw(times * count)
        weights = weigh(unconstrained(draws))
    return draws, weights


def second_moment_shapes(deviations: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
    """Pareto shapes of the weights times squared deviations (n, d) from the mean, (d,)."""
    squares = 2 * np.log(np.maximum(np.abs(deviations), np.finfo(float).tiny))
    return np.array([pareto_smooth(log_weights + column)[1] for column in squares.T])


def evidence_of(log_weights: np.ndarray, rounding: float = 0.0, log_shares: Any = 0.0) -> Evidence:
    """The evidence by importance weights, whose logarithms are normalized, (n,).

    Shares of the guide in what the draws are from have a mean of 1, but for noise, most of which
    the weights of a guide near the model have too: their ratio has next to none.

    The variance of weights alone is too small an error where a guide has thin tails: it has next to
    no draws where weights are large, so that nearly all samples of weights have too low a mean.
    """
    n, highest = len(log_weights), np.max(log_weights)
    mean = float(np.mean(np.exp(log_weights - highest)))
    share = float(np.mean(np.exp(log_shares)))
    khat, variation = pareto_smooth(log_weights)[1], weight_variation(log_weights, log_shares)
    # The largest ratio is 1.
    unseen = UNSEEN / n / (1 - min(max(khat, 0.0), LARGEST_SHAPE)) / mean
    error = float(np.hypot(np.hypot(variation / n**0.5, unseen), rounding))
    value = float(np.log(mean / share) + highest)
    return Evidence(value, error, khat, weight_ess(log_weights), n, variation)
