"""Polynomials of scales that end, of which all that changes with scales is made."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_kscore._util.namespace import namespace

# Powers of a scale, and most of two together, that entries of the Gaussian are polynomials of, for
# one, two or more scales.
ALONE, TOGETHER = {1: 6, 2: 6, 3: 5}, {1: 0, 2: 6, 3: 3}
# The Gaussian changes no more beyond so many standard deviations: there polynomials are wild.
REACH = 3.0


def features(points: Any) -> tuple[Any, Any]:
    """Powers of scales, which end beyond a few standard deviations, and their derivatives.

    They are 0 where all scales are, (..., p), and their derivatives have shape (..., p, k).
    """
    xp = namespace(points)
    t = xp.tanh(points / REACH)
    slopes, t = 1 - t**2, REACH * t
    count = points.shape[-1]
    if not count:
        return points, points[..., None]
    powers = exponents(count)
    each = t[..., None, :] ** powers
    lowered = t[..., None, :] ** np.maximum(powers - 1, 0)
    derivatives = powers * lowered * slopes[..., None, :]
    columns = [np.delete(np.arange(count), j) for j in range(count)]
    others = [xp.prod(each[..., rest], axis=-1) for rest in columns]
    return xp.prod(each, axis=-1), derivatives * xp.stack(others, axis=-1)


def exponents(count: int) -> np.ndarray:
    """The exponents of every feature: all powers of one or two of the scales, (p, count)."""
    alone, together = (degrees[min(max(count, 1), 3)] for degrees in (ALONE, TOGETHER))
    found = [
        [i if k == a else j if k == b else 0 for k in range(count)]
        for a in range(count)
        for b in range(a, count)
        for i in range(1, (alone if a == b else together - 1) + 1)
        for j in ((0,) if a == b else range(1, together + 1 - i))
    ]
    return np.array(found, int).reshape(len(found), count)
