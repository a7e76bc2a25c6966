"""Increasing functions of numbers, each by its slopes on intervals.

They turn a standard normal number into one of any shape with one mode: tails of scales may be
exponential on one side and normal on the other. The slopes go over into each other smoothly, so
that a density has a score everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_kscore._util.namespace import namespace

# Slopes change at these standard deviations, over this width.
KNOTS = np.arange(-4.0, 5.0)
WIDTH = 0.3


def stretched(points: Any, slopes: Any) -> Any:
    """Images of points (..., k) by functions with slopes (k, 10); that of 0 is 0."""
    xp = namespace(points, slopes)
    # The integral of a logistic function.
    rises = WIDTH * (
        xp.logaddexp(0.0, (points[..., None] - KNOTS) / WIDTH) - np.logaddexp(0.0, -KNOTS / WIDTH)
    )
    return slopes[..., 0] * points + xp.sum(rises * _steps(slopes), axis=-1)


def slopes_at(points: Any, slopes: Any) -> tuple[Any, Any]:
    """The slopes at points (..., k), and the derivatives of their logarithms."""
    xp = namespace(points, slopes)
    gates = 0.5 * (1 + xp.tanh((points[..., None] - KNOTS) / (2 * WIDTH)))
    steps = _steps(slopes)
    found = slopes[..., 0] + xp.sum(gates * steps, axis=-1)
    changes = xp.sum(gates * (1 - gates) * steps, axis=-1) / WIDTH
    return found, changes / found


def unstretched(count: int) -> np.ndarray:
    """The slopes of functions that change nothing."""
    return np.ones((count, len(KNOTS) + 1))


def _steps(slopes: Any) -> Any:
    return slopes[..., 1:] - slopes[..., :-1]
