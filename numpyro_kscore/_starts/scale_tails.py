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
# Least curvature of the evidence along a step, that of a standard normal distribution being 1.
LEAST_BEND = 0.5
# Slope at the end of what is known, that of a normal distribution being 1, from which on a tail may
# be long.
LONG = 1.2


# The evidence at a point of the scales (k,) and its slope, (k,); None where it is not found.
Evidence = Callable[[np.ndarray], tuple[float, np.ndarray] | None]


def tails_of(evidence_at: Evidence, slopes: np.ndarray, highest: float) -> Tails:
    """The tails of scales stretched by slopes (k, 10), whose evidence is highest at zero.

    Cost: two values of the evidence for each tail that may be long, or up to six times as many.
    """
    count, points, evidences = len(slopes), [], []
    for k in range(count):
        for sign, slope in ((-1.0, slopes[k, 0]), (1.0, slopes[k, -1])):
            if slope < LONG:
                continue
            for place in PLACES:
                point = sign * place * np.eye(count)[k]
                evidence = _alone(evidence_at, point)
                if evidence is None or evidence > highest - LEAST_FALLEN:
                    break
                points.append(point)
                evidences.append(evidence)
                if evidence < highest + np.log(BEYOND):
                    break
    return Tails(np.array(points).reshape(-1, count), np.array(evidences))


def _alone(evidence_at: Evidence, point: np.ndarray) -> float | None:
    """The evidence where one scale has its place and all others follow, integrated over these.

    It is that of a parabola through the evidence with its slope there, and the evidence after a
    step along it, which ends at the top where the others are standard normal. Along the step they
    may be narrower, or wider, than at the center.
    """
    found = evidence_at(point)
    if found is None:
        return None
    first, slope = found
    slope = np.where(point, 0.0, slope)
    step = limited(slope)
    rise, size = float(slope @ step), float(step @ step)
    after = evidence_at(point + step) if size > LEAST_GAIN else None
    if after is None:
        return first
    bend = max(2 * (first + rise - after[0]), LEAST_BEND * size)
    return first + rise**2 / (2 * bend) - 0.5 * float(np.log(bend / size))
