"""Latents whose size varies with that of others, as the search for a start has them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Evaluate
from numpyro_kscore._tracing.coupling import LARGEST_SHARE, SMALLEST_SHARE

__all__ = ["Couplings", "coupled"]


class Couplings(NamedTuple):
    """How the sizes of latents vary with others, which have no rates themselves.

    Attributes:
        rates: rates[i, j] is that of coordinate i with coordinate j, (d, d).
        center: (d,).
        basis: what coordinates, after their sizes, are multiplied by, (d, d), of determinant 1 or
            -1, with the coordinates that sizes vary with left as they are; None for all of them.
    """

    rates: np.ndarray
    center: np.ndarray
    basis: np.ndarray | None = None

    def latents(self, coordinates: np.ndarray) -> np.ndarray:
        """The latents at coordinates (m, d), (m, d)."""
        scaled = coordinates * np.exp(self.log_sizes(coordinates))
        return scaled if self.basis is None else scaled @ self.basis.T

    def log_sizes(self, coordinates: np.ndarray) -> np.ndarray:
        """Logarithms of what coordinates (m, d) are multiplied by, (m, d)."""
        share = self.shares
        return -0.5 * np.logaddexp(np.log1p(-share), np.log(share) + self._moves(coordinates))

    @property
    def shares(self) -> np.ndarray:
        """The largest rates of every latent, between their bounds, (d,)."""
        return np.clip(np.max(np.abs(self.rates), axis=1), SMALLEST_SHARE, LARGEST_SHARE)

    def slopes(self, coordinates: np.ndarray) -> np.ndarray:
        """By what factors the rates at coordinates (m, d) are those at the center, (m, d)."""
        share = self.shares
        rest = np.log1p(-share) - np.log(share) - self._moves(coordinates)
        return 1 / (share * (1 + np.exp(np.minimum(rest, 500.0))))

    def _moves(self, coordinates: np.ndarray) -> np.ndarray:
        return 2 * (coordinates - self.center) @ self.rates.T / self.shares


def coupled(evaluate: Evaluate, couplings: Couplings) -> Evaluate:
    """Energies and gradients as functions of coordinates with couplings."""

    def inside(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        log_sizes = couplings.log_sizes(points)
        sizes = np.exp(log_sizes)
        energies, gradients = evaluate(couplings.latents(points))
        if couplings.basis is not None:
            gradients = gradients @ couplings.basis
        # Latents with rates vary with the others' coordinates, and so does their volume.
        through = (gradients * points * sizes - 1) * couplings.slopes(points)
        return energies - np.sum(log_sizes, axis=1), gradients * sizes - through @ couplings.rates

    return inside
