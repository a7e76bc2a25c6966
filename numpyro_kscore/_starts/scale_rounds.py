"""Rounds that find where the scales of a model are, and the Gaussian of the others at each value.

Modes of all others are looked at around the distribution of the scales so far. The evidence there
says how it has to move, widen and bend (``scale_distribution``), until the scales have, in their
own coordinates, about a standard normal distribution. What is found at the last values is
interpolated (``_transports.conditional``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.best_given import Shared, best_given
from numpyro_kscore._starts.evidence_slopes import Bends, evidence_slopes
from numpyro_kscore._starts.interpolation import (
    Found,
    Scales,
    evidences_at,
    interpolated,
    last_move,
    to_features,
)
from numpyro_kscore._starts.laplace import Given, Others, mode_at
from numpyro_kscore._starts.scale_distribution import (
    MOST_CHANGE,
    Change,
    Tails,
    change_at_first,
    change_nearby,
)
from numpyro_kscore._starts.scale_tails import tails_of
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.features import MANY, features
from numpyro_kscore._transports.stretch import stretched
from numpyro_kscore._util.deadline import seconds_left

# Most numbers of scales.
MOST_SCALES = MANY
# Where scales are looked at while their own distribution is still far, and when it is near: on
# axes, and in pairs. One alone and two have more in the end, since there is time for it.
AT_FIRST, ON_AXES, IN_PAIRS = (1.5,), (1.0, 2.0, 3.0), (1.2,)
LAST = {1: ((0.8, 1.6, 2.4, 3.2), ()), 2: ((0.8, 1.6, 2.4, 3.2), (0.8, 1.6, 2.4))}
# Scales from the fifth on whose signs at the corners of a cube are products of those before.
CORNERS: dict[int, tuple[tuple[int, ...], ...]] = {
    5: ((0, 1, 2, 3),),
    6: ((0, 1, 2, 3, 4),),
    7: ((0, 1, 2, 3, 4, 5),),
    8: ((0, 1, 2, 3), (0, 1, 4, 5)),
}
# Changes of the distribution of scales after which it is near, and there, since a last move
# follows; and most rounds.
NEAR, THERE, ROUNDS = 0.5, 0.35, 10
# Noise of a mean score, in nats for each standard deviation of a scale, that is too much.
ROUGH = 0.5
# Nats by which a round may lower the evidence before it is taken back.
WORSE = 1.0


class Looks(NamedTuple):
    """The others at points of the scales, the center first.

    Attributes:
        others: with the structure that they have at all of these points.
        nodes: none where one of their modes is not found; the first ones if there was no time for
            more.
        shared: see :func:`~numpyro_kscore._starts.best_given.best_given`; None by modes alone.
    """

    others: Others
    nodes: list[Given]
    shared: Shared | None


def look(
    others: Others,
    now: Scales,
    indices: np.ndarray,
    points: np.ndarray,
    by_modes: bool,
    known: Looks | None = None,
) -> Looks:
    """The others at points of the scales (n, k), the center first; those have these indices.

    Those at the first points may be known, and what they share. ``by_modes`` says that modes are
    enough.
    """
    places = stretched(points, now.slopes)
    starts = np.zeros((len(points), len(indices) + len(others.indices)))
    starts[:, indices] = now.transport.push(points)
    starts[:, others.indices] = now.mode + places @ now.moves
    before, others = others, others.checked(starts)
    # Factors of another structure are of no use.
    known = known if others is before else None
    nodes, shared = ([], None) if known is None else (list(known.nodes), known.shared)
    expected = _expected(points, nodes)
    for number in range(len(nodes), len(points)):
        if number and seconds_left() <= 0:
            break
        start = starts[number]
        means = [start[others.indices], *(n.mean for n in nodes[:1])]
        at = _nearest(others, start, means if expected is None else [*means, expected[number]])
        node = mode_at(others, at, now.triangle, is_exact=by_modes)
        if node is not None and not by_modes:
            found = best_given(others, at, node, shared)
            node, shared = (None, None) if found is None else found
        if node is None:
            return Looks(others, [], shared)
        # All others are divided by the triangle of the center, which stays double.
        nodes.append(node._replace(triangle=node.triangle.in_single()) if nodes else node)
    return Looks(others, nodes, shared)


def _expected(points: np.ndarray, known: Sequence[Given]) -> np.ndarray | None:
    """Means of the others at points (n, k) by those at the first of them, the center first."""
    if not known:
        return None
    values = features(points)
    means = np.stack([node.mean - known[0].mean for node in known])
    return known[0].mean + values @ (to_features(values[: len(known)]) @ means)


def _nearest(others: Others, at: np.ndarray, means: Sequence[np.ndarray]) -> np.ndarray:
    """The point (d,) with the scales of one, and of some means of the others the one most likely.

    Where a mode moves along a curve, its tangent may end anywhere.
    """
    points = np.tile(at, (len(means), 1))
    points[:, others.indices] = means
    energies = others.held(points, False)[0] if len(means) > 1 else np.zeros(1)
    return points[int(np.argmin(np.where(np.isfinite(energies), energies, np.inf)))]


def find_scales(others: Others, now: Scales, indices: np.ndarray, is_small: bool) -> Found | None:
    """A Gaussian that changes with scales; None where a mode of the others is not found.

    One or two scales of a small model are looked at densely in the end, and all far out that may
    have long tails. A distribution of the scales that rounds have not settled is given all the
    same, and where time is up the Gaussian at their mean.
    """
    count = len(indices)
    if count:
        near = approached(others, now, indices)
        if near is None:
            return None
        others, now = near
    in_pairs, first = design(count, ON_AXES, IN_PAIRS), design(count, ON_AXES)
    is_denser = is_small and count in LAST
    last = design(count, *LAST[count]) if is_denser else np.concatenate([first, between(count)])
    seen: Looks | None = None
    for _ in range(ROUNDS if count else 0):
        seen = look(others, now, indices, first, False, seen and seen._replace(nodes=[]))
        if len(first) == len(seen.nodes) < len(in_pairs) and are_rough(now, indices, seen.nodes):
            first = last = in_pairs
            seen = look(seen.others, now, indices, first, False, seen)
        if not seen.nodes:
            return None
        if len(seen.nodes) < len(first):
            break
        others, nodes = seen.others, seen.nodes
        by_evidence = len(first) == len(in_pairs)
        gradients = None if by_evidence else mean_scores_at(now, indices, first, nodes)
        evidences = evidences_at(now, first, nodes)
        change = change_nearby(first, evidences, now.slopes, gradients, now.steepest)
        is_there = change.size < THERE
        if is_denser or not is_there:
            now, seen = moved(now, change, first, nodes), seen._replace(nodes=[])
        if is_there or seconds_left() <= 0:
            break
    seen = look(others, now, indices, last, False, seen)
    nodes = seen.nodes
    if not nodes:
        return None
    is_whole = len(nodes) == len(last)
    if not is_whole:
        last, nodes = last[:1], nodes[:1]
    found = interpolated(np.concatenate([indices, seen.others.indices]), now, last, nodes)
    if not (count and is_whole):
        return found
    tails = _tails(seen, now, indices)
    return found._replace(moved=last_move(now, last, nodes, tails))


def _tails(seen: Looks, now: Scales, indices: np.ndarray) -> Tails:
    """The tails of scales whose others are known at the center."""
    center = np.zeros(len(indices))
    known = seen._replace(nodes=seen.nodes[:1])

    def evidence_at(point: np.ndarray) -> tuple[float, np.ndarray] | None:
        there = look(known.others, now, indices, np.stack([center, point]), False, known)
        # With another structure all that is known would be of no use.
        if len(there.nodes) < 2 or there.others is not known.others:
            return None
        given = point[None], there.nodes[1:]
        return float(evidences_at(now, *given)[0]), mean_scores_at(now, indices, *given)[0]

    highest = float(evidences_at(now, center[None], known.nodes)[0])
    return tails_of(evidence_at, now.slopes, highest)


class _Round(NamedTuple):
    """A distribution of scales, the others at points of it, and how the evidence changes there."""

    now: Scales
    points: np.ndarray
    nodes: list[Given]
    gradients: np.ndarray

    def changed(self, most: float) -> tuple[Scales, float]:
        """The distribution after a change of it, by so many standard deviations, and its size."""
        evidences = evidences_at(self.now, self.points, self.nodes)
        change = change_at_first(self.points, evidences, self.gradients, most)
        return moved(self.now, change, self.points, self.nodes), change.size


def approached(others: Others, now: Scales, indices: np.ndarray) -> tuple[Others, Scales] | None:
    """The distribution of scales after rounds by modes that came near to it.

    A round that went too far, to a lower evidence, is taken back.
    """
    points, last = design(len(indices), AT_FIRST), None
    most = MOST_CHANGE * np.sqrt(max(1, len(indices) / MOST_SCALES))
    bends: Bends | None = None
    for _ in range(ROUNDS):
        others, nodes, _ = look(others, now, indices, points, by_modes=True)
        if 0 < len(nodes) < len(points):
            return others, now
        if not nodes or (last and nodes[0].evidence < last.nodes[0].evidence - WORSE):
            most /= 2
            if last is None:
                now = now._replace(gaussian=Affine(now.gaussian.mean, now.gaussian.factor / 2))
            else:
                now, _ = last.changed(most)
            continue
        gradients, bends = gradients_at(others, now, indices, points, nodes, bends)
        last = _Round(now, points, nodes, gradients)
        now, size = last.changed(most)
        if size < NEAR or seconds_left() <= 0:
            return others, now
    return None if last is None else (others, now)


def gradients_at(
    others: Others,
    now: Scales,
    indices: np.ndarray,
    points: np.ndarray,
    nodes: Sequence[Given],
    known: Bends | None = None,
) -> tuple[np.ndarray, Bends | None]:
    """Gradients of the evidence by modes at points (n, k) of scales.

    What axes told elsewhere is ``known``, and given back (see ``evidence_slopes``).
    """
    found = []
    for place, node in zip(now.transport.push(points), nodes, strict=True):
        at = np.zeros(len(indices) + len(others.indices))
        at[indices], at[others.indices] = place, node.mean
        slopes, known = evidence_slopes(others, at, node, known)
        found.append(slopes[indices])
    return -now.transport.pull(points, -np.stack(found)), known


def mean_scores_at(
    now: Scales, indices: np.ndarray, points: np.ndarray, nodes: Sequence[Given]
) -> np.ndarray:
    """Gradients (n, k) of the evidence at points of scales, by the mean scores of best densities.

    They are those of the bound, which is highest at the best density (Danskin's theorem).
    """
    scores = np.stack([node.scores[indices] for node in nodes if node.scores is not None])
    return -now.transport.pull(points, -scores)


def are_rough(now: Scales, indices: np.ndarray, nodes: Sequence[Given]) -> bool:
    """Whether the noise of mean scores hides how these change with the scales.

    What all of them share does not matter. Sums of a thousand moves have a score of the size of a
    move that varies by hundreds of nats.
    """
    noise = np.stack([n.noise_of_scores[indices] for n in nodes if n.noise_of_scores is not None])
    return bool(np.max(np.std(noise @ now.gaussian.factor, axis=0)) > ROUGH)


def design(count: int, on_axes: Sequence[float], in_pairs: Sequence[float] = ()) -> np.ndarray:
    """Points of scales at which the others are looked at, the center first, (n, count)."""
    unit = np.eye(count)
    points = [np.zeros((1, count)), *(sign * size * unit for size in on_axes for sign in (1, -1))]
    sides = [sign * size for size in in_pairs for sign in (1, -1)]
    points += [
        (x * unit[a] + y * unit[b])[None]
        for a in range(count)
        for b in range(a)
        for x in sides
        for y in sides
    ]
    return np.concatenate(points)


def between(count: int) -> np.ndarray:
    """Points of scales that lie between the axes, (n, count).

    Four scales are looked at in pairs, and more at corners of a cube, a part of them that tells all
    pairs apart (a fraction of resolution V; Box and Hunter 1961).
    """
    if count < min(CORNERS):
        return design(count, (), IN_PAIRS)[1:]
    words = CORNERS[count]
    whole = np.array(list(product((1.0, -1.0), repeat=count - len(words))))
    return np.column_stack([whole, *(whole[:, list(word)].prod(axis=1) for word in words)])


def moved(now: Scales, change: Change, points: np.ndarray, nodes: Sequence[Given]) -> Scales:
    """The distribution of the scales after a change of it."""
    # A product of lower triangles is one.
    gaussian = Affine(now.gaussian.push(change.mean[None])[0], now.gaussian.factor @ change.factor)
    modes = np.stack([node.mean for node in nodes]) - nodes[0].mean
    moves = np.linalg.lstsq(stretched(points, now.slopes), modes, rcond=None)[0]
    mode = nodes[0].mean + change.mean @ moves
    return now._replace(
        gaussian=gaussian,
        slopes=change.slopes,
        mode=mode,
        moves=change.factor.T @ moves,
        triangle=nodes[0].triangle,
    )
