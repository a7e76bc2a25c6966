"""Densities as functions of the points that a warped Gaussian pushes."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from numpyro_kscore._starts.batch_match import Evaluate

__all__ = ["Warp", "warped"]


class Warp(Protocol):
    """A Gaussian that changes with some of its latents."""

    def push(self, points: np.ndarray) -> np.ndarray:
        """Coordinates (m, d) at standard normal points (m, d)."""
        ...

    def log_volumes(self, points: np.ndarray) -> np.ndarray:
        """Logarithms of the determinants of the derivative of :meth:`push`, (m,)."""
        ...

    def pull(self, points: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients (m, d) of an energy by the coordinates as those by the points, less volume."""
        ...


def warped(evaluate: Evaluate, warp: Warp) -> Evaluate:
    """Energies and gradients as functions of the points."""

    def inside(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies, gradients = evaluate(warp.push(points))
        return energies - warp.log_volumes(points), warp.pull(points, gradients)

    return inside
