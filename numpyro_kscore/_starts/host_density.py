"""A density at many points, as a search on the host sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.transport import Evaluate


class AtPoints(NamedTuple):
    """A model at points (m, d).

    Attributes:
        energies: minus log densities, (m,).
        gradients: gradients of the energy, (m, d).
        moved: the points in the other coordinates, (m, d).
        values: unconstrained values there, (m, d).
        locs: locations of their priors, (m, d); 0 for those that are not hierarchical.
        log_scales: logarithms of the scales of their priors, likewise.
    """

    energies: np.ndarray
    gradients: np.ndarray
    moved: np.ndarray
    values: np.ndarray
    locs: np.ndarray
    log_scales: np.ndarray


# The model at points (m, d) in the coordinates of a centering; the points are also given in those
# of another one.
Density = Callable[[np.ndarray, Centering, Centering], AtPoints]


class CountedDensity:
    """The density at points, with a count of its gradients.

    Attributes:
        count: gradients so far.
    """

    def __init__(self, density: Density) -> None:
        self._density, self.count = density, 0

    def at(self, points: np.ndarray, centering: Centering, other: Centering) -> AtPoints:
        """The density at points (n, d) in one form of coordinates, and the points in another."""
        self.count += len(points)
        return self._density(points, centering, other)

    def in_form(self, centering: Centering) -> Evaluate:
        """Energies and gradients as functions of the points alone."""

        def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            found = self.at(points, centering, centering)
            return found.energies, found.gradients

        return evaluate
