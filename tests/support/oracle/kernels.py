"""Curl-free and diagonal kernels, the functions they span, and zeta."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .profiles import Array, RadialProfile


@dataclass(frozen=True)
class Kernel:
    """A matrix-valued kernel with profile ``phi(|x - y|^2 / bandwidth^2)``, over ``trace``."""

    curl_free: bool
    profile: RadialProfile
    bandwidth: float = 1.0
    trace: float = 1.0

    def normalized(self, dim: int) -> Kernel:
        """The same kernel divided by tr K(x, x)."""
        origin = np.zeros((1, dim))
        trace = float(np.trace(self.matrix(origin, origin)[0, 0]))
        return Kernel(self.curl_free, self.profile, self.bandwidth, self.trace * trace)

    def _differences(self, x: Array, y: Array) -> tuple[Array, Array]:
        r = x[:, None, :] - y[None, :, :]
        return r, np.sum(r**2, axis=-1)

    def _d(self, s: Array, order: int, power: int = 0) -> Array:
        """s^power times the derivative of ``s -> phi(s / h^2) / trace``."""
        h2 = self.bandwidth**2
        value = self.profile.times(s / h2, order, power)
        return value * h2 ** (power - order) / self.trace

    def _off_origin(self, s: Array, order: int) -> Array:
        """A derivative that is about to multiply components of r which outweigh its pole at 0."""
        positive = s > 0
        return np.where(positive, self._d(np.where(positive, s, 1.0), order), 0.0)

    def matrix(self, x: Array, y: Array) -> Array:
        """K(x_i, y_j), shape (m, n, d, d)."""
        r, s = self._differences(x, y)
        eye = np.eye(x.shape[1])
        if not self.curl_free:
            return self._d(s, 0)[..., None, None] * eye
        outer = r[..., :, None] * r[..., None, :]
        return (
            -4 * self._d(s, 2)[..., None, None] * outer - 2 * self._d(s, 1)[..., None, None] * eye
        )

    def gram(self, x: Array, y: Array | None = None) -> Array:
        """The (m d, n d) matrix of K over the rows of x and of y, points major; y is x if None."""
        y = x if y is None else y
        d = x.shape[1]
        return self.matrix(x, y).transpose(0, 2, 1, 3).reshape(len(x) * d, len(y) * d)

    def apply(self, x: Array, y: Array, c: Array) -> Array:
        """sum_j K(x_i, y_j) c_j."""
        return np.einsum("ijab,jb->ia", self.matrix(x, y), c)

    def zeta(self, x: Array, y: Array) -> Array:
        """(1/n) sum_j div_{y_j} K(y_j, x)^T.

        Curl-free: ``div_y`` of ``-grad grad^T psi(y - x)`` is ``-grad (Laplacian psi)(y - x)``, and
        the Laplacian ``2 d psi' + 4 s psi''`` is even, so this is its gradient in x.
        """
        r, s = self._differences(x, y)
        d = x.shape[1]
        if self.curl_free:
            weight = 4 * ((d + 2) * self._d(s, 2) + 2 * self._d(s, 3, 1))
        else:
            weight = -2 * self._d(s, 1)
        return np.mean(weight[..., None] * r, axis=1)

    def apply_potential(self, x: Array, y: Array, c: Array) -> Array:
        """The function whose gradient is ``apply`` (curl-free only)."""
        r, s = self._differences(x, y)
        return np.sum(-2 * self._d(s, 1) * np.einsum("ija,ja->ij", r, c), axis=1)

    def zeta_potential(self, x: Array, y: Array) -> Array:
        """The function whose gradient is ``zeta`` (curl-free only)."""
        _, s = self._differences(x, y)
        return np.mean(2 * x.shape[1] * self._d(s, 1) + 4 * self._d(s, 2, 1), axis=1)

    def apply_jacobian(self, x: Array, y: Array, c: Array) -> Array:
        """d (apply)_a / d x_b, shape (m, d, d)."""
        r, s = self._differences(x, y)
        along = np.einsum("ija,ja->ij", r, c)
        if not self.curl_free:
            return np.einsum("ij,ja,ijb->iab", 2 * self._d(s, 1), c, r)
        second = -4 * self._d(s, 2)
        jacobian = np.einsum("ij,ija,jb->iab", second, r, c)
        jacobian += np.einsum("ij,ja,ijb->iab", second, c, r)
        jacobian += np.einsum("ij,ab->iab", second * along, np.eye(x.shape[1]))
        third = -8 * self._off_origin(s, 3) * along
        return jacobian + np.einsum("ij,ija,ijb->iab", third, r, r)

    def zeta_jacobian(self, x: Array, y: Array) -> Array:
        """d zeta_a / d x_b, shape (m, d, d)."""
        r, s = self._differences(x, y)
        n, d = y.shape
        if self.curl_free:
            weight = 4 * ((d + 2) * self._d(s, 2) + 2 * self._d(s, 3, 1))
            slope = 4 * ((d + 4) * self._off_origin(s, 3) + 2 * self._off_origin(s, 4) * s)
        else:
            weight = -2 * self._d(s, 1)
            slope = -2 * self._off_origin(s, 2)
        jacobian = np.einsum("ij,ab->iab", weight, np.eye(d))
        return (jacobian + np.einsum("ij,ija,ijb->iab", 2 * slope, r, r)) / n

    # The second derivation: nothing but phi and automatic differentiation.

    def point_autodiff(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """K(x, y) for two points from the Hessian of phi."""

        def psi(x: jax.Array) -> jax.Array:
            return self.profile.traced(jnp.sum((x - y) ** 2) / self.bandwidth**2) / self.trace

        return -jax.hessian(psi)(x) if self.curl_free else psi(x) * jnp.eye(x.shape[0])

    def zeta_autodiff(self, x: jax.Array, samples: jax.Array) -> jax.Array:
        """zeta at one point, as the divergence of K in its first argument."""

        def divergence(sample: jax.Array) -> jax.Array:
            jacobian = jax.jacfwd(lambda y: self.point_autodiff(y, x).T)(sample)
            # Row a of K(y, x)^T is a vector field in y; its divergence contracts the last two axes.
            return jnp.trace(jacobian, axis1=1, axis2=2)

        return jnp.mean(jax.vmap(divergence)(samples), axis=0)
