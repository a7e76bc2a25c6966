"""Affine maps to the coordinates that scores are estimated in."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_kscore._util.linalg import invert_lower
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree


class Whitening(NamedTuple):
    """A lower triangular factor of a correlation matrix, with its inverse: both (d, d)."""

    factor: jax.Array
    inverse: jax.Array


@pytree
class Coordinates:
    """The affine map to the kernel's coordinates.

    Attributes:
        mean: (d,).
        scale: standard deviations (d,), the diagonal part of the map; ones if not standardized.
        whitening: a factor of the correlation matrix and its inverse, or None if not whitened.
        bandwidth: h, a scalar, in standardized units.
    """

    mean: jax.Array
    scale: jax.Array
    whitening: Whitening | None
    bandwidth: jax.Array

    def to_kernel(self, x: jax.Array) -> jax.Array:
        """Points (m, d) to kernel coordinates."""
        # Center before dividing: uncentered data at mean 1e3 lose five digits in float32.
        return self._whiten((x - self.mean) / self.scale) / self.bandwidth

    @full_precision
    def scores_to_kernel(self, s: jax.Array) -> jax.Array:
        """Scores (m, d) in the original coordinates to kernel coordinates."""
        s = s * self.scale
        return self.bandwidth * (s if self.whitening is None else s @ self.whitening.factor)

    @full_precision
    def scores_from_kernel(self, s: jax.Array) -> jax.Array:
        """Scores (m, d) in kernel coordinates to the original ones."""
        if self.whitening is not None:
            s = s @ self.whitening.inverse
        return s / (self.scale * self.bandwidth)

    def factor(self) -> jax.Array:
        """F, (d, d), with ``div_x s = tr(F Fᵀ ∇~ s~)``: the linear part of :meth:`to_kernel`."""
        return self._whiten(jnp.diag(1.0 / self.scale)).T / self.bandwidth

    def root(self) -> jax.Array:
        """L, (d, d), with ``x = mean + L x~`` for whitened x~: of covariance ``L Lᵀ``."""
        if self.whitening is None:
            return jnp.diag(self.scale)
        return self.scale[:, None] * self.whitening.factor

    def log_det(self) -> jax.Array:
        """log |det| of the map from whitened coordinates to ``x``, without the bandwidth."""
        total = jnp.sum(jnp.log(self.scale))
        if self.whitening is not None:
            total = total + jnp.sum(jnp.log(jnp.diag(self.whitening.factor)))
        return total

    @full_precision
    def turned(self, root: jax.Array) -> Coordinates:
        """With whitened coordinates mapped by the inverse of a lower triangular factor, (d, d)."""
        if self.whitening is None:
            return self
        factor = self.whitening.factor @ root
        return replace(self, whitening=Whitening(factor, invert_lower(factor)))

    @full_precision
    def _whiten(self, x: jax.Array) -> jax.Array:
        return x if self.whitening is None else x @ self.whitening.inverse.T
