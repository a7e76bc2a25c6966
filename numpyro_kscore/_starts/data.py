"""A part of the data, and all of them, as a search for a start sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Evaluate
from numpyro_kscore._starts.candidates import Density
from numpyro_kscore._tracing.coupling import Centering

__all__ = ["Expand", "Part", "Quadratic", "Whole", "corrected"]


class Quadratic(NamedTuple):
    """An energy near a point.

    Attributes:
        value: at the point.
        slope: (d,).
        bend: the Hessian, (d, d); None beyond the dimensions in which it is computed.
    """

    value: np.ndarray
    slope: np.ndarray
    bend: np.ndarray | None


# From a point (d,) and its centering.
Expand = Callable[[np.ndarray, Centering], Quadratic]


class Part(NamedTuple):
    """A part of the data.

    Attributes:
        once: the density of its rows alone.
        density: that in which they stand for all.
        expand: expansions of the latter.
        share: how large a part it is.
    """

    once: Density
    density: Density
    expand: Expand
    share: float


class Whole(NamedTuple):
    """All data.

    Attributes:
        expand: expansions of the density.
        evaluate: energies (m,) and gradients (m, d) at points (m, d), with their centering.
    """

    expand: Expand
    evaluate: Callable[[np.ndarray, Centering], tuple[np.ndarray, np.ndarray]]


def corrected(evaluate: Evaluate, point: np.ndarray, difference: Quadratic) -> Evaluate:
    """Energies and gradients with a quadratic function added."""

    def inside(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies, gradients = evaluate(points)
        moves = points - point
        bends = np.zeros_like(moves) if difference.bend is None else moves @ difference.bend
        changes = difference.value + np.sum(moves * (difference.slope + 0.5 * bends), axis=1)
        return energies + changes, gradients + difference.slope + bends

    return inside
