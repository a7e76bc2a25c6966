"""The evidence of scales far out, where polynomials of them say nothing any more.

Where data hardly tell a scale from zero a part of its distribution is many standard deviations out:
a thousandth of it may have a third of the variance of the scale's logarithm.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from numpyro_kscore._starts.scale_distribution import Tails, limited

# Places on the axis of a scale that are looked at, as long as the density has not fallen to this
# part of the highest; and the nats by which it has fallen there, if it is a tail.
PLACES, BEYOND, LEAST_FALLEN = (4.5, 6.5, 10.0, 16.0, 25.0, 38.0), 1e-4, 1.0
# Nats that other scales gain, if they follow, for which one looks at where they go.
LEAST_GAIN = 0.5


# The evidence at a point of the scales (k,) and its slope, (k,); None where it is not found.
Evidence = Callable[[np.ndarray], tuple[float, np.ndarray] | None]


def tails_of(evidence_at: Evidence, count: int, highest: float) -> Tails:
    """The tails of so many scales whose evidence is highest at zero.

    Cost: two values of the evidence for each of them, or up to twelve times as many in long tails.
    """
    points, evidences = [], []
    for k in range(count):
        for sign in (-1.0, 1.0):
            for place in PLACES:
                point = sign * place * np.eye(count)[k]
                evidence = _highest(evidence_at, point)
                if evidence is None or evidence > highest - LEAST_FALLEN:
                    break
                points.append(point)
                evidences.append(evidence)
                if evidence < highest + np.log(BEYOND):
                    break
    return Tails(np.array(points).reshape(-1, count), np.array(evidences))


def _highest(evidence_at: Evidence, point: np.ndarray) -> float | None:
    """The highest evidence where one scale has its place, and all others follow.

    It is that of a parabola through the evidence with its slope there, and the evidence after a
    step as long as the slope, which is right where the others are standard normal.
    """
    found = evidence_at(point)
    if found is None:
        return None
    first, slope = found
    step = limited(np.where(point, 0.0, slope))
    gain = float(step @ step)
    after = evidence_at(point + step) if gain > LEAST_GAIN else None
    if after is None:
        return first
    bend = 2 * (first + gain - after[0])
    return first + gain**2 / (2 * max(bend, 0.5 * gain))
