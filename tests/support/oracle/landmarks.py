"""Estimates in the span of landmarks (Nyström)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.linalg

from .filters import Filter
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
