"""The search for a start on a subset of the data, and then with few passes over all.

First comes the posterior of the subset alone, each row of which counts once: it is proper where the
posterior of all data is. A subset that stands for all is not, where a group has a row or two in it.

Let f be the energy of the subset, standing for all, and F that of all. Near a point a ::

    f(x) + (F - f)(a) + (F - f)'(a) (x - a) + (x - a)ᵀ (F - f)''(a) (x - a) / 2

is a surrogate that differs from F by third order in x - a, with a factor that is small where the
subset is like the rest. A Gaussian is matched to it without looking at all data again, and its mean
is the next a. The rounds converge as Newton's method does, and keep what is not Gaussian in the
posterior (the surrogate likelihood of Jordan, Lee and Yang 2019, here to second order). Where the
bound by all data is another than the surrogate's, steps follow with scores of all data.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from numpyro_kscore._model.control_variate import Taylor
from numpyro_kscore._starts.batch_match import Bound, match_far
from numpyro_kscore._starts.candidates import Candidate, bounded, lower_bound
from numpyro_kscore._starts.climb import climb, climb_near
from numpyro_kscore._starts.fit_centering import recentered
from numpyro_kscore._starts.fit_sizes import fit_sizes
from numpyro_kscore._starts.modes import counting, distinct
from numpyro_kscore._starts.noise import balanced
from numpyro_kscore._starts.search import CountedDensity, Latents, Search
from numpyro_kscore._starts.start import GaussianStart
from numpyro_kscore._starts.subset_density import AllData, DataSubset, corrected
from numpyro_kscore._transports.affine import Affine, antithetic, with_moments
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.transport import Chain, Evaluate, pulled_back

# Most rounds with surrogates, or with scores of all data; steps of batch and match in each, and
# draws for a bound after it.
MOST_ROUNDS, MATCH_STEPS, BOUND_DRAWS = 8, 3, 32
# A round with scores of all data leaves a hundredth of the nats that it brought.
MUCH = 10.0
# Draws for each dimension that tell which coordinates suit a Gaussian; gradients of all data cost
# much more than draws.
DRAWS_EACH = 64
# Most rounds with the last surrogate.
MOST_NEAR = 10
# Rounds end when the mean moves by less than this, in root mean square standard deviations.
NEAR = 0.1
# Largest difference between the bounds of a surrogate and of all data, in nats.
LARGEST_ERROR = 1.0


class _Moved(NamedTuple):
    """A Gaussian near the posterior of all data.

    Attributes:
        candidate: the Gaussian, and its bound by all data.
        by_surrogate: its bound by the surrogate.
        surrogate: energies and gradients in the Gaussian's coordinates.
    """

    candidate: Candidate
    by_surrogate: Bound
    surrogate: Evaluate

    @property
    def is_sound(self) -> bool:
        """Whether the surrogate tells what all data would."""
        return abs(self.by_surrogate.value - self.candidate.bound.value) < LARGEST_ERROR


@np.errstate(all="ignore")  # numbers that overflow are told by their not being finite
def moved_to_all_data(
    found: GaussianStart,
    subset: DataSubset,
    every: AllData,
    latents: Latents,
    rng: np.random.Generator,
    with_sizes: bool,
) -> GaussianStart:
    """A Gaussian near the posterior of all data, from the start of a subset alone.

    In that start every row counts once, and sizes do not vary: whether they do is looked for where
    all data place the posterior.

    Raises:
        FloatingPointError: if no bound with all data is finite.

    Cost: three to nine passes over all data, each with two gradients for each dimension up to 128,
    for every mode; where the subset cannot stand for all, 4 to 64 more.
    """
    mover = _Mover(subset, every, latents, rng)
    firsts = found.parts or (found.gaussian,)
    moved = [mover.by_surrogate(first, found.centering, not found.parts) for first in firsts]
    candidates = [one.candidate for one in moved]
    for k, first in enumerate(firsts):
        # A surrogate of rows that stand for too many others may have no bound at all.
        if not moved[k].is_sound:
            by_scores = mover.by_scores(first, found.centering, not found.parts)
            candidates[k] = max(candidates[k], by_scores, key=lower_bound)
    if with_sizes and not found.parts and moved[0].is_sound:
        candidates[0] = mover.with_sizes(moved[0])
    if not any(np.isfinite(one.bound.value) for one in candidates):
        raise FloatingPointError("expected a finite bound with all data; got none")
    # Modes of the subset may be one for all data, or have no weight there.
    candidates = distinct(candidates)
    bounds = np.array([one.bound.value for one in candidates])
    candidates, weights = counting(candidates, bounds)
    parts = tuple(one.gaussian for one in candidates)
    spent = subset.share * (found.num_gradients + mover.of_subset.count)
    return GaussianStart(
        Chain((with_moments(parts, weights) if len(parts) > 1 else parts[0],)),
        centering=candidates[0].centering,
        elbo=float(np.max(bounds) - np.log(np.max(weights))),
        num_gradients=int(np.ceil(spent)) + mover.count,
        modes=np.stack([part.mean for part in parts]),
        weights=weights,
        parts=parts if len(parts) > 1 else (),
        sizes=candidates[0].sizes,
    )


class _Mover:
    """Moves Gaussians to the posterior of all data.

    Attributes:
        of_subset: the density of the subset.
        count: gradients of all data that were taken.
    """

    def __init__(
        self, subset: DataSubset, every: AllData, latents: Latents, rng: np.random.Generator
    ) -> None:
        self.of_subset, self.count = CountedDensity(subset.density), 0
        self._subset, self._every, self._rng = subset, every, rng
        self._noise = balanced(antithetic(rng, BOUND_DRAWS, len(latents.first)))
        self._search = Search(self.of_subset, latents, rng, self._noise)

    def by_surrogate(self, first: Affine, centering: Centering, may_change: bool) -> _Moved:
        """A Gaussian after rounds with a surrogate each, and rounds with the last one.

        Its coordinates may change where priors depend on other latents.
        """
        gaussian = first
        last = gaussian, centering, self.of_subset.in_form(centering)
        for _ in range(MOST_ROUNDS):
            difference = self._difference(gaussian.mean, centering)
            if not all(np.all(np.isfinite(a)) for a in jax.tree.leaves(difference)):
                break
            inside = corrected(self.of_subset.in_form(centering), gaussian.mean, difference)
            after = match_far(inside, gaussian, self._rng, MATCH_STEPS)[-1]
            move = np.linalg.solve(after.factor, after.mean - gaussian.mean)
            gaussian = after
            last = gaussian, centering, inside
            if np.mean(move**2) < NEAR**2:
                break
            if may_change:
                gaussian, centering = self._suited(gaussian, centering)
        gaussian, centering, inside = last
        first_bound = bounded(inside, gaussian, self._noise, centering)
        best = climb_near(inside, gaussian, first_bound, self._search, MOST_NEAR)
        return _Moved(self._by_all(best), best.bound, inside)

    def by_scores(self, first: Affine, centering: Centering, may_change: bool) -> Candidate:
        """The same after steps with scores of all data."""
        found = self._climbed(first, centering)
        if not may_change:
            return found
        gaussian, suiting = self._suited(found.gaussian, centering)
        if suiting is centering:
            return found
        other = self._climbed(gaussian, suiting)
        # Coordinates that know where all data place the latents, unless they are clearly worse.
        return found if lower_bound(found) > other.bound.value else other

    def with_sizes(self, known: _Moved) -> Candidate:
        """A Gaussian whose sizes vary with others; the known one if it is no better."""
        by_surrogate = known.candidate._replace(bound=known.by_surrogate)
        best = fit_sizes(known.surrogate, self._search, by_surrogate)
        if best.sizes is None:
            return known.candidate
        candidate = self._by_all(best)
        return max(known.candidate, candidate, key=lower_bound)

    def _climbed(self, first: Affine, centering: Centering) -> Candidate:
        """The best Gaussian of rounds with scores of all data, while they bring much."""
        evaluate = self._in_form(centering)

        def value(candidate: Candidate) -> float:
            return candidate.bound.value

        def step(best: Candidate, _: int) -> list[Candidate]:
            after = match_far(evaluate, best.gaussian, self._rng, MATCH_STEPS)[-1]
            return [bounded(evaluate, after, self._noise, centering)]

        start = bounded(evaluate, first, self._noise, centering)
        highest = partial(max, key=value)
        return climb(start, step, MOST_ROUNDS, MUCH, choose=highest, measure=value)[0]

    def _difference(self, point: np.ndarray, centering: Centering) -> Taylor:
        """The expansion of the energy of all data less that of the subset."""
        few, every = (data.expand(point, centering) for data in (self._subset, self._every))
        self.count += 1 if every.curvature is None else 1 + 2 * len(point)
        return jax.tree.map(lambda a, b: a - b, every, few)

    def _suited(self, gaussian: Affine, centering: Centering) -> tuple[Affine, Centering]:
        """The Gaussian in coordinates that suit it: the subset had it elsewhere."""
        if not np.any(self._search.latents.is_hierarchical):
            return gaussian, centering
        count = DRAWS_EACH * len(gaussian.mean)
        found = recentered(self._search.with_own_draws(), gaussian, centering, count)
        return found or (gaussian, centering)

    def _in_form(self, centering: Centering) -> Evaluate:
        """Energies and gradients of all data."""

        def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            self.count += len(points)
            return self._every.evaluate(points, centering)

        return evaluate

    def _by_all(self, found: Candidate) -> Candidate:
        """A Gaussian with its bound by all data."""
        evaluate = self._in_form(found.centering)
        if found.sizes is not None:
            evaluate = pulled_back(evaluate, found.sizes)
        by_all = bounded(evaluate, found.gaussian, self._noise, found.centering)
        return by_all._replace(sizes=found.sizes)
