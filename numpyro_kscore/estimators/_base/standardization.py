"""Coordinates in which scores are estimated: centered, whitened, in units of the bandwidth.

A map ``x -> x~ = (x - mean) Wᵀ / h`` with W lower triangular takes samples to these coordinates;
scores, which are gradients, go the other way by the transpose: ``s_x = Wᵀ s_x~ / h``. Whitening
keeps estimates of strongly correlated targets right. With more than two samples a dimension, whose
covariance is not shrunk, and no base score fitted to them, it makes the whole procedure equivariant
under affine maps. With the Gaussian base it does not: its shrinkage depends on the axes.

Whitening by the covariance of all samples makes a radial kernel too wide along what separates
modes, and across a curved ridge: what counts is the spread within a mode, or across the ridge. The
directions in which near neighbors lie show it, whatever the global arrangement. For Gaussian
samples they are as spread out as all samples, and nothing changes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._util.linalg import cholesky, invert_lower
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.kernels._pairwise import cancels, squared_distances

STANDARDIZE_CHOICES = ("local", "full", "diagonal", "none")
# Choices with a factor of the correlations.
WHITENING_CHOICES = ("local", "full")
# Dimensions above which a covariance costs more than it is worth: coordinates are only scaled.
LARGEST_WHITENED = 256


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
        return dataclasses.replace(self, whitening=Whitening(factor, invert_lower(factor)))

    @full_precision
    def _whiten(self, x: jax.Array) -> jax.Array:
        return x if self.whitening is None else x @ self.whitening.inverse.T


def standardize_samples(x: jax.Array, how: str) -> Coordinates:
    """Mean, scale and whitening of samples (n, d), at bandwidth 1.

    ``"full"`` whitens with the sample covariance. With fewer than two samples a dimension that
    matrix is too noisy to invert, and the correlations are shrunk toward zero by the
    oracle-approximating factor of Chen, Wiesel, Eldar and Hero (2010), eq. 23; for
    more samples nothing is shrunk, which would leave stiff directions unresolved. Coordinates
    that do not vary keep scale 1. Cost: O(n d² + d³) for ``"full"``.
    """
    if how == "none":
        mean = jnp.mean(x, axis=0)
        return Coordinates(mean, jnp.ones_like(mean), None, jnp.ones((), x.dtype))
    coordinates = _scaled(x, how in WHITENING_CHOICES)
    return localized(coordinates, x) if how == "local" else coordinates


def _scaled(x: jax.Array, is_whitened: bool) -> Coordinates:
    """Coordinates in which samples (n, d) have variances of 1, and perhaps no correlations."""
    n, dim = x.shape
    eps = jnp.finfo(x.dtype).eps
    mean = jnp.mean(x, axis=0)
    centered = x - mean
    # Scaling by the largest deviation first keeps squares of 1e-30 or 1e30 finite in float32. The
    # result does not depend on it, and neither does its derivative.
    largest = lax.stop_gradient(jnp.max(jnp.abs(centered), axis=0))
    largest = jnp.where(largest > 0, largest, 1.0)
    variance = jnp.mean(jnp.square(centered / largest), axis=0)
    # d√/dv at 0 is infinite: the value that is not taken must not be 0 either.
    scale = largest * jnp.sqrt(jnp.where(variance > 0, variance, 1.0))
    # Spread at the level of rounding of the mean is noise, not scale.
    varies = scale > 4 * eps * jnp.abs(mean)
    scale = jnp.where(varies & (variance > 0), scale, 1.0)
    if not is_whitened or dim == 1:
        return Coordinates(mean, scale, None, jnp.ones((), x.dtype))

    z = centered / scale
    correlation = z.T @ z / n
    eye = jnp.eye(dim, dtype=x.dtype)
    # The diagonal is exact by construction, and 1 also where a coordinate does not vary.
    correlation = jnp.where(eye > 0, 1.0, correlation)
    if n < 2 * dim:
        square = jnp.sum(correlation * correlation)
        # tr(S)² = d² and tr(S)²/d = d for a correlation matrix.
        numerator = (1 - 2 / dim) * square + dim**2
        shrinkage = jnp.minimum(numerator / ((n + 1 - 2 / dim) * (square - dim) + 1e-30), 1.0)
    else:
        shrinkage = jnp.zeros((), x.dtype)
    matrix = (1.0 - shrinkage) * correlation + shrinkage * eye
    # Where coordinates are collinear the factor is rounding or NaN. A floor under the eigenvalues
    # prevents that; it is not always used, since it would bias stiff directions in float32. Decided
    # before factorizing: a NaN that is not taken would still reach the derivative.
    floor = 10 * dim * eps
    is_sound = jnp.min(jnp.diag(cholesky(lax.stop_gradient(matrix)))) ** 2 > floor
    factor = cholesky(jnp.where(is_sound, matrix, (1.0 - floor) * correlation + floor * eye))
    whitening = Whitening(factor, invert_lower(factor))
    return Coordinates(mean, scale, whitening, jnp.ones((), x.dtype))


# Measured in 2 to 32 dimensions (benchmarks/results/2026-11-25-bases-and-shapes.md): with fewer
# neighbors the shape is noisier, with fewer rounds it is not yet that of the neighbors.
NEIGHBORS = 8
ROUNDS = 5
# Samples that are looked at.
MOST_POINTS = 512
# Samples a neighbor, below which there are no near ones.
FEWEST_EACH = 4
# Bits of the mantissa of a squared distance that neighbors are told apart by.
DISTANCE_BITS = 16
# Fraction of the shape, times d/n, that is replaced by that of all samples.
SHRINKAGE = 0.5


@full_precision
def local_shape(z: jax.Array) -> jax.Array:
    """A factor L of the shape of near samples: in ``L⁻¹ z`` neighbors lie in all directions alike.

    A fixed point of ``S ← L mean(u uᵀ)² Lᵀ`` with u the unit vectors to the nearest neighbors in
    ``L⁻¹ z`` (Tyler's estimate of scatter, of differences of neighbors), shrunk to the identity.
    For whitened samples z, (n, d), it is lower triangular with determinant 1, and not
    differentiated.

    Cost: O(n² d + n d²) for each of 5 rounds, with n at most 512.
    """
    n, dim = z.shape
    z = lax.stop_gradient(z[:: -(-n // MOST_POINTS)])
    n = z.shape[0]
    eye = jnp.eye(dim, dtype=z.dtype)
    neighbors = min(NEIGHBORS, n // FEWEST_EACH)
    if dim == 1 or neighbors == 0:
        return eye
    itself = jnp.diag(jnp.full(n, jnp.inf, z.dtype))
    rho = min(1.0, SHRINKAGE * dim / n)

    def refine(root: jax.Array, _: None) -> tuple[jax.Array, None]:
        points = z @ invert_lower(root).T
        squared = squared_distances(points, points, cancels(points)) + itself
        # Coarsely, so that among samples at one distance the order decides, not rounding: on a
        # lattice the shape would otherwise depend on the units.
        squared = lax.reduce_precision(squared, jnp.finfo(z.dtype).nexp, DISTANCE_BITS)
        nearest = lax.top_k(-squared, neighbors)[1]
        apart = (points[:, None] - points[nearest]).reshape(-1, dim)
        # Lengths differ by how dense the samples are; directions do not. Copies have none.
        length = jnp.sum(apart * apart, axis=1, keepdims=True)
        apart = apart / jnp.sqrt(jnp.maximum(length, jnp.finfo(z.dtype).tiny))
        # Squared, since means of u uᵀ show a part of the difference between directions.
        step = root @ (apart.T @ apart)
        shape = step @ step.T
        total = jnp.trace(shape)
        shape = (1.0 - rho) * shape / jnp.where(total > 0, total, 1.0) + rho / dim * eye
        found = cholesky(shape)
        found = found / jnp.exp(jnp.mean(jnp.log(jnp.diag(found))))
        # Where all samples are one, or too far apart for squares, no direction is known.
        return jnp.where(jnp.all(jnp.isfinite(found)), found, root), None

    return lax.scan(refine, eye, None, length=ROUNDS)[0]


def localized(coordinates: Coordinates, x: jax.Array) -> Coordinates:
    """Whitening coordinates, turned so that neighbors lie in all directions alike.

    The determinant stays the same; the samples x are (n, d).
    """
    if coordinates.whitening is None:
        return coordinates
    return coordinates.turned(local_shape(coordinates.to_kernel(x)))


def whiten_samples(x: jax.Array) -> Coordinates:
    """:func:`standardize_samples`, (n, d): ``"full"`` up to 256 dimensions, else ``"diagonal"``."""
    return _scaled(x, x.shape[1] <= LARGEST_WHITENED)


def regress_out(x: jax.Array, context: jax.Array) -> jax.Array:
    """``x``, (n, d), less its linear regression on a whitened, centered context, (n, c).

    A shift by a function of the context changes no conditional score, and removes the correlation
    with the context, which whitening does not. With few samples for the size c of the context the
    coefficients are shrunk, by n/(n + c): the result is never zero.
    """
    n, size = context.shape
    slopes = context.T @ (x - jnp.mean(x, axis=0)) / (n + size)
    return x - context @ slopes
