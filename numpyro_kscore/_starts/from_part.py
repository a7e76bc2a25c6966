"""The search for a start on a part of the data, and then with few passes over all.

First comes the posterior of the part alone, each row of which counts once: it is proper where that
of all data is. A part that stands for all is not, where a group has a row or two in it.

Let f be the energy of the part, standing for all, and F that of all. Near a point a ::

    f(x) + (F - f)(a) + (F - f)'(a) (x - a) + (x - a)ᵀ (F - f)''(a) (x - a) / 2

is a surrogate that differs from F by third order in x - a, with a factor that is small where the
part is like the rest. A Gaussian is matched to it without looking at all data again, and its mean
is the next a. The rounds converge as Newton's method does, and keep what is not Gaussian in the
posterior (the surrogate likelihood of Jordan, Lee and Yang 2019, here to second order). Where the
bound by all data is another than the surrogate's, steps follow with scores of all data.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Bound, Evaluate, Gaussian, elbo
from numpyro_kscore._starts.candidates import CountedModel, Judged, Latents, surely
from numpyro_kscore._starts.couple import couple
from numpyro_kscore._starts.couplings import Couplings, coupled
from numpyro_kscore._starts.data import Part, Quadratic, Whole, corrected
from numpyro_kscore._starts.gaussian_start import GaussianStart, find_gaussian
from numpyro_kscore._starts.modes import LEAST_MASS, distinct, spanning
from numpyro_kscore._starts.refinement import LEAST_GAIN, in_suited_form, match_near
from numpyro_kscore._starts.whole import (
    MOST_ROUNDS,
    match_all,
    match_round,
    noise_for_bounds,
    telling_draws,
)
from numpyro_kscore._tracing.coupling import Centering

__all__ = ["find_from_part"]

# Most rounds with the last surrogate.
MOST_NEAR = 10
# Rounds end when the mean moves by less than this, in root mean square standard deviations.
NEAR = 0.1
# By how much the bound of a surrogate may differ from that of all data, in nats.
LARGEST_ERROR = 1.0


class _Moved(NamedTuple):
    """A Gaussian near the posterior of all data.

    Attributes:
        judged: the Gaussian, and its bound by all data.
        by_surrogate: its bound by the surrogate.
        surrogate: energies and gradients in the Gaussian's coordinates.
    """

    judged: Judged
    by_surrogate: Bound
    surrogate: Evaluate

    @property
    def is_sound(self) -> bool:
        """Whether the surrogate tells what all data would."""
        return abs(self.by_surrogate.value - self.judged.bound.value) < LARGEST_ERROR


@np.errstate(all="ignore")  # numbers that overflow are told by their not being finite
def find_from_part(
    part: Part,
    whole: Whole,
    latents: Latents,
    rng: np.random.Generator,
    with_couplings: bool,
) -> GaussianStart:
    """A Gaussian near the posterior of all data, see :func:`find_gaussian`.

    Args:
        part: a part of the data.
        whole: all of them.
        latents: what is known of the latents.
        rng: for draws.
        with_couplings: whether sizes of latents may vary with others in its coordinates.

    Raises:
        FloatingPointError: if the density is finite at no start.

    Cost: a search on the part, and three to nine passes over all data, each with two gradients for
    each dimension up to 128, for every mode; where the part cannot stand for all, 4 to 64 more.
    """
    # Sizes that vary with others are looked for where all data place the posterior.
    found = find_gaussian(part.once, latents, rng, with_couplings=False)
    mover = _Mover(part, whole, latents, rng)
    firsts = found.parts or (found.gaussian,)
    moved = [mover.by_surrogate(first, found.centering, not found.parts) for first in firsts]
    judged = [one.judged for one in moved]
    for k, first in enumerate(firsts):
        # A surrogate of rows that stand for too many others may have no bound at all.
        if not moved[k].is_sound:
            by_scores = mover.by_scores(first, found.centering, not found.parts)
            judged[k] = max(judged[k], by_scores, key=surely)
    couplings = None
    if with_couplings and not found.parts and moved[0].is_sound:
        judged[0], couplings = mover.coupled(moved[0])
    if not any(np.isfinite(one.bound.value) for one in judged):
        raise FloatingPointError("expected a finite bound with all data; got none")
    # Modes of the part may be one for all data, or have no weight there.
    judged = distinct(judged)
    bounds = np.array([one.bound.value for one in judged])
    weights = np.exp(bounds - np.max(bounds))
    counts = weights >= LEAST_MASS * np.sum(weights)
    weights = weights[counts] / np.sum(weights[counts])
    gaussians = tuple(one.gaussian for one, count in zip(judged, counts, strict=True) if count)
    spent = part.share * (found.num_gradients + mover.of_part.count)
    return GaussianStart(
        gaussian=spanning(gaussians, weights) if len(gaussians) > 1 else gaussians[0],
        centering=judged[0].centering,
        elbo=float(np.max(bounds) - np.log(np.max(weights))),
        num_gradients=int(np.ceil(spent)) + mover.count,
        modes=np.stack([gaussian.mean for gaussian in gaussians]),
        weights=weights,
        parts=gaussians if len(gaussians) > 1 else (),
        couplings=couplings,
    )


class _Mover:
    """Moves Gaussians to the posterior of all data.

    Attributes:
        of_part: the density of the part.
        count: gradients of all data that were taken.

    Args:
        part: a part of the data, which stands for all.
        whole: all of them.
        latents: what is known of the latents.
        rng: for draws.
    """

    def __init__(
        self, part: Part, whole: Whole, latents: Latents, rng: np.random.Generator
    ) -> None:
        self.of_part, self.count = CountedModel(part.density), 0
        self._part, self._whole = part, whole
        self._latents, self._rng = latents, rng
        self._noise = noise_for_bounds(rng, len(latents.first))

    def by_surrogate(self, first: Gaussian, centering: Centering, may_change: bool) -> _Moved:
        """A Gaussian after rounds with a surrogate each, and rounds with the last one.

        Args:
            first: the first Gaussian.
            centering: of its coordinates.
            may_change: whether these may change, where priors depend on other latents.
        """
        gaussian = first
        last = gaussian, centering, self.of_part.in_form(centering)
        for _ in range(MOST_ROUNDS):
            difference = self._difference(gaussian.mean, centering)
            if not all(np.all(np.isfinite(a)) for a in difference if a is not None):
                break
            inside = corrected(self.of_part.in_form(centering), gaussian.mean, difference)
            after = match_round(inside, gaussian, self._rng)
            move = np.linalg.solve(after.factor, after.mean - gaussian.mean)
            gaussian = after
            last = gaussian, centering, inside
            if np.mean(move**2) < NEAR**2:
                break
            if may_change:
                gaussian, centering = self._suited(gaussian, centering)
        gaussian, centering, inside = last
        bound, gaussian = self._near(inside, gaussian)
        return _Moved(self._judged(gaussian, centering), bound, inside)

    def by_scores(self, first: Gaussian, centering: Centering, may_change: bool) -> Judged:
        """The same after steps with scores of all data."""
        given = self._rng, self._noise
        found = Judged(*match_all(self._in_form(centering), first, *given), centering)
        if not may_change:
            return found
        gaussian, suiting = self._suited(found.gaussian, centering)
        if suiting is centering:
            return found
        other = Judged(*match_all(self._in_form(suiting), gaussian, *given), suiting)
        # Coordinates that know where all data place the latents, unless they are surely worse.
        return found if surely(found) > other.bound.value else other

    def coupled(self, known: _Moved) -> tuple[Judged, Couplings | None]:
        """A Gaussian whose sizes vary with others; the known one and None if it is no better."""
        by_surrogate = known.judged._replace(bound=known.by_surrogate)
        given = known.surrogate, self._latents, by_surrogate, self._rng, self._noise
        best, couplings = couple(*given)
        if couplings is not None:
            judged = self._judged(best.gaussian, best.centering, couplings)
            if surely(judged) > surely(known.judged):
                return judged, couplings
        return known.judged, None

    def _near(self, evaluate: Evaluate, gaussian: Gaussian) -> tuple[Bound, Gaussian]:
        """A Gaussian after as many rounds near it as pay."""

        def judged(one: Gaussian) -> tuple[Bound, Gaussian]:
            return elbo(one, self._noise, evaluate(one.push(self._noise))[0]), one

        best = judged(gaussian)
        for count in range(MOST_NEAR):
            gaussian = match_near(evaluate, gaussian, self._rng, count)
            before, best = best, max(best, judged(gaussian), key=lambda pair: pair[0].surely)
            if best[0].surely < before[0].surely + LEAST_GAIN:
                break
        return best

    def _difference(self, point: np.ndarray, centering: Centering) -> Quadratic:
        """Of the energy of all data and that of the part."""
        few, every = (data.expand(point, centering) for data in (self._part, self._whole))
        self.count += 1 if every.bend is None else 1 + 2 * len(point)
        bend = None if every.bend is None or few.bend is None else every.bend - few.bend
        return Quadratic(every.value - few.value, every.slope - few.slope, bend)

    def _suited(self, gaussian: Gaussian, centering: Centering) -> tuple[Gaussian, Centering]:
        """The Gaussian in coordinates that suit it: the part had it elsewhere."""
        is_hierarchical = self._latents.is_hierarchical
        if not np.any(is_hierarchical):
            return gaussian, centering
        draws = telling_draws(gaussian, self._rng)
        found = in_suited_form(self.of_part, draws, centering, is_hierarchical)
        return found or (gaussian, centering)

    def _in_form(self, centering: Centering) -> Evaluate:
        """Energies and gradients of all data."""

        def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            self.count += len(points)
            return self._whole.evaluate(points, centering)

        return evaluate

    def _judged(
        self, gaussian: Gaussian, centering: Centering, couplings: Couplings | None = None
    ) -> Judged:
        """A Gaussian with its bound by all data."""
        evaluate = self._in_form(centering)
        if couplings is not None:
            evaluate = coupled(evaluate, couplings)
        energies = evaluate(gaussian.push(self._noise))[0]
        return Judged(elbo(gaussian, self._noise, energies), gaussian, centering)
