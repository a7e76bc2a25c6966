"""The estimator by dense ``eigh``, and by literal steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .filters import Filter, nu_coefficients
from .kernels import Kernel
from .profiles import Array


@dataclass(frozen=True)
class Estimate:
    """The estimator in the coordinates ``u = whitener (x - mean)``; results in those of x.

    Gradients pull back by the transpose, ``s_x = whitener^T s_u``; divergences are taken in x.
    """

    kernel: Kernel
    nodes: Array  # the samples in u
    whitener: Array
    mean: Array
    g0: float
    weights: Array  # residual = -g0 zeta + sum_j K(., u_j) weights_j, in u
    spectrum: Array
    in_sample: Array  # residual at the samples by the spectral calculus of K / n, in x

    def _to_u(self, x: Array) -> Array:
        return (np.asarray(x, np.float64) - self.mean) @ self.whitener.T

    def residual(self, x: Array) -> Array:
        u = self._to_u(x)
        value = -self.g0 * self.kernel.zeta(u, self.nodes)
        return (value + self.kernel.apply(u, self.nodes, self.weights)) @ self.whitener

    def residual_potential(self, x: Array) -> Array:
        u = self._to_u(x)
        value = -self.g0 * self.kernel.zeta_potential(u, self.nodes)
        return value + self.kernel.apply_potential(u, self.nodes, self.weights)

    def residual_autodiff(self, x: jax.Array) -> jax.Array:
        """The residual at one point off the samples, by automatic differentiation of phi alone."""
        u = self.whitener @ (x - self.mean)
        nodes = jnp.asarray(self.nodes)
        matrices = jax.vmap(lambda y: self.kernel.point_autodiff(u, y))(nodes)
        value = jnp.einsum("jab,jb->a", matrices, jnp.asarray(self.weights))
        return self.whitener.T @ (value - self.g0 * self.kernel.zeta_autodiff(u, nodes))

    def residual_divergence(self, x: Array) -> Array:
        """tr(d residual / dx)."""
        u = self._to_u(x)
        jacobian = self.kernel.apply_jacobian(u, self.nodes, self.weights)
        jacobian = jacobian - self.g0 * self.kernel.zeta_jacobian(u, self.nodes)
        return np.einsum("ba,ibc,ca->i", self.whitener, jacobian, self.whitener)


def _krylov_space(operator: Array, start: Array, size: int) -> Array:
    """Orthonormal basis of span{v, A v, ..., A^(size-1) v}, one column a vector."""
    columns = [start / np.linalg.norm(start)]
    while len(columns) < size:
        new, basis = operator @ columns[-1], np.stack(columns, axis=1)
        for _ in range(2):
            new = new - basis @ (basis.T @ new)
        columns.append(new / np.linalg.norm(new))
    return np.stack(columns, axis=1)


def estimate(
    kernel: Kernel,
    samples: Array,
    make_filter: Filter | Callable[[Array], Filter],
    base_scores: Array | None = None,
    whitener: Array | None = None,
    normalize: bool = False,
    krylov_steps: int | None = None,
) -> Estimate:
    """Solve by dense ``eigh``.

    Args:
        kernel: the kernel in the coordinates u.
        samples: shape (n, d), coordinates x.
        make_filter: a filter, or a function from the spectrum of K/n to one.
        base_scores: s0 at the samples in x, zero when None.
        whitener: ``u = whitener (x - mean)``, the identity when None.
        normalize: divide K by tr K(x, x).
        krylov_steps: restrict K/n to its Krylov space of this size from the right-hand side; for
            Tikhonov that is what conjugate gradients reach in as many steps.
    """
    samples = np.asarray(samples, np.float64)
    n, d = samples.shape
    whitener = np.eye(d) if whitener is None else np.asarray(whitener, np.float64)
    mean = samples.mean(axis=0)
    nodes = (samples - mean) @ whitener.T
    kernel = kernel.normalized(d) if normalize else kernel
    base = np.zeros((n, d)) if base_scores is None else np.asarray(base_scores, np.float64)
    base = base @ np.linalg.inv(whitener)  # s0_u = whitener^-T s0_x, row by row

    operator = kernel.gram(nodes) / n
    rhs = kernel.zeta(nodes, nodes).reshape(-1) + operator @ base.reshape(-1)
    space = np.eye(n * d) if krylov_steps is None else _krylov_space(operator, rhs, krylov_steps)
    spectrum, vectors = np.linalg.eigh(space.T @ operator @ space)
    spectrum, vectors = np.maximum(spectrum, 0.0), space @ vectors
    filt = make_filter if isinstance(make_filter, Filter) else make_filter(spectrum)
    projected = vectors.T @ rhs
    in_sample = -(vectors @ (filt.g(spectrum) * projected)).reshape(n, d)
    calculus = (vectors @ (filt.r(spectrum) * projected)).reshape(n, d)
    weights = -(filt.g0 * base + calculus) / n
    return Estimate(kernel, nodes, whitener, mean, filt.g0, weights, spectrum, in_sample @ whitener)


def literal_nu_steps(
    kernel: Kernel, nodes: Array, num_steps: int, nu: float = 1.0, base: Array | None = None
) -> Array:
    """The residual at the samples by num_steps literal steps with the dense matrix."""
    n, d = nodes.shape
    operator = kernel.gram(nodes) / n
    base = np.zeros((n, d)) if base is None else base
    rhs = kernel.zeta(nodes, nodes).reshape(-1) + operator @ base.reshape(-1)
    value, before = np.zeros(n * d), np.zeros(n * d)
    for step in range(1, num_steps + 1):
        mu, omega = nu_coefficients(step, nu)
        value, before = value + mu * (value - before) - omega * (rhs + operator @ value), value
    return value.reshape(n, d)
