"""Coordinates in which near samples, not all samples, have the same spread in all directions.

Whitening by the covariance of all samples makes a radial kernel too wide along what separates
modes, and across a curved ridge: what counts is the spread within a mode, or across the ridge. The
directions in which near neighbors lie show it, whatever the global arrangement. For Gaussian
samples they are as spread out as all samples, and nothing changes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._util.linalg import cholesky, invert_lower
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.kernels._pairwise import cancels, squared_distances

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
