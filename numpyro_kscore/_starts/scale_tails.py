"""The evidence of scales far out, where polynomials of them say nothing any more.

Where data hardly tell a scale from zero a part of its distribution is many standard deviations out:
a thousandth of it may have a third of the variance of the scale's logarithm.
"""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.interpolation import Scales, Tails, evidences_at
from numpyro_kscore._starts.laplace import Given
from numpyro_kscore._starts.looks import Looks, look, mean_scores_at
from numpyro_kscore._starts.scale_distribution import limited

# Places on the axis of a scale that are looked at, as long as the density has not fallen to this
# part of the highest; and the nats by which it has fallen there, if it is a tail.
PLACES, BEYOND, LEAST_FALLEN = (4.5, 6.5, 10.0, 16.0, 25.0, 38.0), 1e-4, 1.0
# Nats that other scales gain, if they follow, for which one looks at where they go.
LEAST_GAIN = 0.5


def tails_at(seen: Looks, now: Scales, indices: np.ndarray) -> Tails:
    """The tails of scales whose others are known at the center.

    Cost: two values of the scales for each of them, or up to four times as many in long tails.
    """
    count = len(indices)
    known = seen._replace(nodes=seen.nodes[:1])
    highest = float(evidences_at(now, np.zeros((1, count)), known.nodes)[0])
    points, evidences = [], []
    for k in range(count):
        for sign in (-1.0, 1.0):
            for place in PLACES:
                point = sign * place * np.eye(count)[k]
                node = _looked_at(known, now, indices, point)
                evidence = np.inf if node is None else _highest(known, now, indices, point, node)
                if evidence > highest - LEAST_FALLEN:
                    break
                points.append(point)
                evidences.append(evidence)
                if evidence < highest + np.log(BEYOND):
                    break
    return Tails(np.array(points).reshape(-1, count), np.array(evidences))


def _looked_at(known: Looks, now: Scales, indices: np.ndarray, point: np.ndarray) -> Given | None:
    """The others at a point of the scales (k,); None where their mode is not found."""
    points = np.stack([np.zeros_like(point), point])
    there = look(known.others, now, indices, points, by_modes=False, known=known)
    # With another structure all that is known would be of no use.
    return there.nodes[1] if there.nodes and there.others is known.others else None


def _highest(
    known: Looks, now: Scales, indices: np.ndarray, point: np.ndarray, node: Given
) -> float:
    """The highest evidence where one scale has its place, and all others follow.

    It is that of a parabola through the evidence with its slope there, and the evidence after a
    step as long as the slope, which is right where the others are standard normal.
    """
    first = float(evidences_at(now, point[None], [node])[0])
    if node.scores is None:
        return first
    step = limited(np.where(point, 0.0, mean_scores_at(now, indices, point[None], [node])[0]))
    gain = float(step @ step)
    after = _looked_at(known, now, indices, point + step) if gain > LEAST_GAIN else None
    if after is None:
        return first
    bend = 2 * (first + gain - float(evidences_at(now, (point + step)[None], [after])[0]))
    return first + gain**2 / (2 * max(bend, 0.5 * gain))
