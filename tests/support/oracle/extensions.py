"""Estimates that go on in a way of their own: on the span of landmarks, and by refitting."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.linalg

from .estimators import estimate
from .filters import Filter, tikhonov
from .kernels import Kernel
from .profiles import Array


class Combination(NamedTuple):
    """``Σ_l K(·, z_l) c_l`` and, where they apply, its potential and divergence."""

    kernel: Kernel
    nodes: Array
    weights: Array

    def residual(self, x: Array) -> Array:
        return self.kernel.apply(x, self.nodes, self.weights)

    def residual_potential(self, x: Array) -> Array:
        return self.kernel.apply_potential(x, self.nodes, self.weights)

    def residual_divergence(self, x: Array) -> Array:
        return np.trace(self.kernel.apply_jacobian(x, self.nodes, self.weights), axis1=1, axis2=2)


def nystrom(
    kernel: Kernel,
    samples: Array,
    rows: Array,
    filt: Filter,
    base: Array | None = None,
    part: slice = slice(None),
) -> Combination:
    """``-g(P L P) P zeta'`` on the span of landmarks, by a generalized eigenproblem.

    With ``B = K_ZX K_XZ / n``, the eigenfunctions of P L P are ``K(., Z) u`` with
    ``B u = s K_ZZ u`` and ``u^T K_ZZ u = 1``, and a function f has the coordinates ``u^T f(Z)`` in
    them. ``part`` are the samples that L averages over.
    """
    z, x = samples[rows], samples[part]
    cross = kernel.gram(z, x)
    h = kernel.zeta(z, x).ravel()
    if base is not None:
        h = h + cross @ base[part].ravel() / len(x)
    spectrum, u = scipy.linalg.eigh(cross @ cross.T / len(x), kernel.gram(z))
    weights = -u @ (filt.g(np.maximum(spectrum, 0)) * (u.T @ h))
    return Combination(kernel, z, weights.reshape(z.shape))


class Refit(NamedTuple):
    """The score at a point as that of a fit to the samples and the point."""

    kernel: Kernel
    samples: Array
    lam: float
    base: Callable[[Array], Array] | None = None
    whitener: Array | None = None

    def residual(self, x: Array) -> Array:
        def at(point: Array) -> Array:
            samples = np.concatenate([self.samples, point[None]])
            base = None if self.base is None else self.base(samples)
            filt = tikhonov(self.lam)
            fitted = estimate(self.kernel, samples, filt, base, self.whitener)
            return fitted.in_sample[-1]

        return np.stack([at(point) for point in x])

    def residual_divergence(self, x: Array, step: float = 1e-4) -> Array:
        """Fourth-order differences: an error of about 1e-11 here."""
        total = 0.0
        for axis in np.eye(x.shape[1]) * step:
            near, far = (
                (self.residual(x + k * axis) - self.residual(x - k * axis)) @ axis / step
                for k in (1, 2)
            )
            total = total + (8 * near - far) / (12 * step)
        return total
