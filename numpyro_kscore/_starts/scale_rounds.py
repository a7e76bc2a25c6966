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

from numpyro_kscore._starts.interpolation import (
    Found,
    Scales,
    evidences_at,
    interpolated,
    last_move,
)
from numpyro_kscore._starts.laplace import Given, Others
from numpyro_kscore._starts.looks import Looks, are_rough, gradients_at, look, mean_scores_at
from numpyro_kscore._starts.scale_distribution import (
    MOST_CHANGE,
    Change,
    change_at_first,
    change_nearby,
)
from numpyro_kscore._starts.scale_tails import tails_at
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.features import MANY
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
# Nats by which a round may lower the evidence before it is taken back.
WORSE = 1.0


def find_scales(others: Others, now: Scales, indices: np.ndarray, is_small: bool) -> Found | None:
    """A Gaussian that changes with scales; None where a mode of the others is not found.

    Of a small model one or two scales are looked at densely in the end, and all of them far out. A
    distribution of the scales that rounds have not settled is given all the same.
    """
    count = len(indices)
    if count:
        near = approached(others, now, indices)
        if near is None:
            return None
        others, now = near
    in_pairs, first = design(count, ON_AXES, IN_PAIRS), design(count, ON_AXES)
    is_smallr = is_small and count in LAST
    last = design(count, *LAST[count]) if is_smallr else np.concatenate([first, between(count)])
    seen: Looks | None = None
    for _ in range(ROUNDS if count else 0):
        seen = look(others, now, indices, first, False, seen and seen._replace(nodes=[]))
        if len(first) < len(in_pairs) and seen.nodes and are_rough(now, indices, seen.nodes):
            first = last = in_pairs
            seen = look(seen.others, now, indices, first, False, seen)
        if not seen.nodes:
            return None
        others, nodes = seen.others, seen.nodes
        by_evidence = len(first) == len(in_pairs)
        gradients = None if by_evidence else mean_scores_at(now, indices, first, nodes)
        evidences = evidences_at(now, first, nodes)
        change = change_nearby(first, evidences, now.slopes, gradients, now.steepest)
        is_there = change.size < THERE
        if is_smallr or not is_there:
            now, seen = moved(now, change, first, nodes), seen._replace(nodes=[])
        if is_there or seconds_left() <= 0:
            break
    seen = look(others, now, indices, last, False, seen)
    nodes = seen.nodes
    if not nodes:
        return None
    found = interpolated(np.concatenate([indices, seen.others.indices]), now, last, nodes)
    if not count:
        return found
    tails = tails_at(seen, now, indices) if is_small else None
    return found._replace(moved=last_move(now, last, nodes, tails))


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
    for _ in range(ROUNDS):
        others, nodes, _ = look(others, now, indices, points, by_modes=True)
        if not nodes or (last and nodes[0].evidence < last.nodes[0].evidence - WORSE):
            most /= 2
            if last is None:
                now = now._replace(gaussian=Affine(now.gaussian.mean, now.gaussian.factor / 2))
            else:
                now, _ = last.changed(most)
            continue
        last = _Round(now, points, nodes, gradients_at(others, now, indices, points, nodes))
        now, size = last.changed(most)
        if size < NEAR or seconds_left() <= 0:
            return others, now
    return None if last is None else (others, now)


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
