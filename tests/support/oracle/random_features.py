"""Estimates in the span of given random features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .filters import Filter
from .profiles import Array


@dataclass(frozen=True)
class FeatureFields:
    """Gradients of ``a cos(ω_j·x + b_j)/|ω_j|`` for the phases b = 0 and -π/2 of each frequency.

    One field a row: first those of b = 0.
    """

    omega: Array  # (k, d)
    amplitude: float

    def _waves(self, x: Array) -> tuple[Array, Array, Array]:
        omega = np.concatenate([self.omega, self.omega])
        phases = x @ omega.T + np.repeat([0.0, -np.pi / 2], len(self.omega))
        return omega, np.linalg.norm(omega, axis=1), phases

    def potentials(self, x: Array) -> Array:
        """(n, 2k)."""
        _, lengths, phases = self._waves(x)
        return self.amplitude * np.cos(phases) / lengths

    def fields(self, x: Array) -> Array:
        """J, (n, 2k, d)."""
        omega, lengths, phases = self._waves(x)
        return -self.amplitude * np.sin(phases)[:, :, None] * (omega / lengths[:, None])

    def jacobians(self, x: Array) -> Array:
        """(n, 2k, d, d)."""
        omega, lengths, phases = self._waves(x)
        outer = omega[:, :, None] * omega[:, None, :] / lengths[:, None, None]
        return -self.amplitude * np.cos(phases)[:, :, None, None] * outer

    def moments(self, x: Array, base: Array | None = None) -> tuple[Array, Array]:
        """``mean J Jᵀ`` and ``mean (div J + J s0)``."""
        fields = self.fields(x)
        target = np.trace(self.jacobians(x), axis1=2, axis2=3).mean(axis=0)
        if base is not None:
            target = target + np.einsum("nmd,nd->m", fields, base) / len(x)
        return np.einsum("nmd,nkd->mk", fields, fields) / len(x), target

    def coefficients(self, x: Array, filt: Filter, base: Array | None = None) -> Array:
        """``-g(mean J Jᵀ) mean (div J + J s0)``, (2k,)."""
        return filtered(*self.moments(x, base), filt)


def filtered(matrix: Array, target: Array, filt: Filter) -> Array:
    """``-g(A) h``."""
    spectrum, vectors = np.linalg.eigh(matrix)
    return -vectors @ (filt.g(np.maximum(spectrum, 0)) * (vectors.T @ target))
