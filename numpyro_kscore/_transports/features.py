"""Polynomials of scales that end, of which all that changes with scales is made."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_kscore._util.namespace import namespace

# Powers of a scale, and most of two together, that entries of the Gaussian are polynomials of, for
# one, two or more scales.
ALONE, TOGETHER = {1: 6, 2: 6, 3: 5}, {1: 0, 2: 6, 3: 3}
# With more scales they are quadratic.
MANY = 8
# The Gaussian changes no more beyond so many standard deviations: there polynomials are wild.
REACH = 3.0


def features(points: Any) -> Any:
    """Powers of scales (..., k), which end beyond a few standard deviations; 0 at zero, (..., p).

    Many scales have themselves, without an end, and the products of two.
    """
    xp = namespace(points)
    count = points.shape[-1]
    if not count:
        return points
    t = REACH * xp.tanh(points / REACH)
    if count > MANY:
        one, other = np.triu_indices(count)
        return xp.concatenate([points, t[..., one] * t[..., other]], axis=-1)
    return xp.prod(t[..., None, :] ** exponents(count), axis=-1)


def through_features(points: Any, by_values: Any) -> Any:
    """The gradient in points (..., k) of a sum of their features with these factors, (..., p)."""
    xp = namespace(points, by_values)
    count = points.shape[-1]
    if not count:
        return points
    t = xp.tanh(points / REACH)
    slopes, t = 1 - t**2, REACH * t
    if count > MANY:
        by_points, by_products = by_values[..., :count], by_values[..., count:]
        # Places of the products in a symmetric matrix, whose diagonal counts twice.
        places = np.zeros((count, count), int)
        places[np.triu_indices(count)] = np.arange(count * (count + 1) // 2)
        places = np.maximum(places, places.T)
        matrix = by_products[..., places] * (1 + np.eye(count))
        return by_points + slopes * xp.einsum("...ij,...j->...i", matrix, t)
    powers = exponents(count)
    each = t[..., None, :] ** powers
    lowered = t[..., None, :] ** np.maximum(powers - 1, 0)
    derivatives = powers * lowered * slopes[..., None, :]
    columns = [np.delete(np.arange(count), j) for j in range(count)]
    others = xp.stack([xp.prod(each[..., rest], axis=-1) for rest in columns], axis=-1)
    return xp.einsum("...p,...pk->...k", by_values, derivatives * others)


def exponents(count: int) -> np.ndarray:
    """The exponents of every feature: all powers of one or two of few scales, (p, count)."""
    alone, together = (degrees[min(max(count, 1), 3)] for degrees in (ALONE, TOGETHER))
    found = [
        [i if k == a else j if k == b else 0 for k in range(count)]
        for a in range(count)
        for b in range(a, count)
        for i in range(1, (alone if a == b else together - 1) + 1)
        for j in ((0,) if a == b else range(1, together + 1 - i))
    ]
    return np.array(found, int).reshape(len(found), count)
