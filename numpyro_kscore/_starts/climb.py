"""The loop of a search: match, bound, keep the best, stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from numpyro_kscore._starts.batch_match import match_far, match_near
from numpyro_kscore._starts.candidates import (
    Candidate,
    bounded,
    highest,
    in_form,
    is_noncentered,
    lower_bound,
    preferred,
)
from numpyro_kscore._starts.fit_centering import recentered
from numpyro_kscore._starts.search import Search
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.transport import Evaluate

# Gains in nats for which another round follows, and of a Gaussian that has far to go.
LEAST_GAIN, FAR = 0.1, 1.0
# Most rounds in all forms of coordinates together, and steps of one far from the best Gaussian.
MOST_ROUNDS, FAR_STEPS = 25, 20
# Steps that refine each of several separate modes.
MODE_STEPS = 10

# From the best candidate and the number of rounds before to new candidates.
Step = Callable[[Candidate, int], Sequence[Candidate]]


def climb(
    best: Candidate,
    step: Step,
    most_rounds: int,
    least_gain: float,
    patience: int = 0,
    choose: Callable[[Sequence[Candidate]], Candidate] = highest,
    measure: Callable[[Candidate], float] = lower_bound,
) -> tuple[Candidate, int]:
    """The best candidate of several rounds, and their number.

    The last round gains less than ``least_gain``, in nats. The first ``patience`` rounds may gain
    less all the same.
    """
    for count in range(most_rounds):
        before, best = best, choose([best, *step(best, count)])
        if count >= patience and measure(best) - measure(before) < least_gain:
            return best, count + 1
    return best, most_rounds


def climb_near(
    evaluate: Evaluate,
    start: Affine,
    best: Candidate,
    search: Search,
    most_rounds: int,
    patience: int = 0,
) -> Candidate:
    """The best Gaussian of rounds of batch and match, and the best so far, in any coordinates.

    Every round goes on from the round before, the first one from ``start``.
    """
    now = [start]

    def step(best: Candidate, count: int) -> list[Candidate]:
        now.append(match_near(evaluate, now.pop(), search.rng, count)[-1])
        return [bounded(evaluate, now[0], search.noise, best.centering)]

    return climb(best, step, most_rounds, LEAST_GAIN, patience)[0]


def climb_in_forms(search: Search, found: Sequence[Candidate]) -> list[Candidate]:
    """The best Gaussians of batch and match, from the best one in each form of coordinates.

    Rounds of steps follow while the bound rises by more than it matters. In hierarchical models
    each goes on both in the coordinates so far and in those that suit what was found. After the
    best Gaussian comes the best one in non-centered coordinates, where that is another.
    """
    # In the order of a dict, which is the same in every process: draws follow from it.
    by_form: dict[bytes, list[Candidate]] = {}
    for one in found:
        by_form.setdefault(np.stack(one.centering).tobytes(), []).append(one)
    firsts = [highest(same) for same in by_form.values()]
    matches = [_matched(search, first) for first in firsts]
    best = preferred(matches)
    is_far = lower_bound(best) - max(map(lower_bound, firsts)) > FAR
    may_change = bool(np.any(search.latents.is_hierarchical))
    best = _climbed(search, best, may_change, is_far)
    noncentered = [match for match in matches if is_noncentered(match)]
    if not noncentered or is_noncentered(best):
        return [best]
    # Rounds in coordinates that suit a Gaussian too narrow in a scale keep it so.
    return [best, _climbed(search, highest(noncentered), may_change=False, is_far=False)]


def _climbed(search: Search, best: Candidate, may_change: bool, is_far: bool) -> Candidate:
    """A Gaussian after as many rounds as pay, in other coordinates too where those may change."""

    def candidates(best: Candidate, near: int | None) -> list[Candidate]:
        starts = [best]
        if may_change:
            suited = recentered(search, best.gaussian, best.centering)
            starts.append(best if suited is None else in_form(search, *suited))
        return [_matched(search, start, near) for start in starts]

    used, climb_preferred = 0, partial(climb, choose=preferred)
    if is_far:
        best, used = climb_preferred(best, lambda one, _: candidates(one, None), MOST_ROUNDS, FAR)
    return climb_preferred(best, candidates, MOST_ROUNDS - used, LEAST_GAIN)[0]


def _matched(
    search: Search, start: Candidate, near: int | None = None, num_steps: int = FAR_STEPS
) -> Candidate:
    """The best Gaussian of some steps of batch and match, the start included.

    ``near`` is the number of rounds near the best Gaussian before this one, None while it is far.
    """
    given = search.model.in_form(start.centering), start.gaussian, search.rng
    steps = match_far(*given, num_steps) if near is None else match_near(*given, near)
    spaced = steps[-1 :: -max(1, len(steps) // 3)][:3]
    return highest([start, *(in_form(search, one, start.centering) for one in spaced)])


def match_mode(search: Search, start: Candidate) -> Candidate:
    """The Gaussian of one of several separate modes, after some steps of batch and match."""
    # Its bound along a path is from few draws, by which it looked best: no other would exceed it.
    start = in_form(search, start.gaussian, start.centering)
    return _matched(search, start, num_steps=MODE_STEPS)
