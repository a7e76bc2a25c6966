"""The Gram operator ``K/n`` on the samples: the one linear operator that solvers see.

Two regimes, chosen by size: *cached* keeps the n by n weights, which a solver uses at every
step; *streamed* recomputes them tile by tile in O(n d) memory. Where the dimension exceeds the
number of vectors a problem is made of, :func:`reduce_dimension` first rotates everything into
their span, after which a product costs O(n³) whatever the dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_kscore import pairwise
from numpyro_kscore._pytree import pytree, static
from numpyro_kscore.kernels import FieldWeights, Kernel
from numpyro_kscore.pairwise import Expansion

__all__ = ["Gram", "Reduction", "make_gram", "pair_weights", "reduce_dimension"]


@pytree
class Gram:
    """``K/n`` on n points, where K is the kernel times ``scale``.

    Attributes:
        points: shape (n, d), centred, in units of the bandwidth.
        kernel: the kernel at unit bandwidth.
        scale: factor on the kernel.
        weights: weights of all pairs, with ``scale/n`` in them; None where streamed.
        dim: dimension of the kernel's space; more than ``points`` have once reduced.
    """

    points: jax.Array
    kernel: Kernel
    scale: jax.Array
    weights: FieldWeights | None
    dim: int = static()

    def __matmul__(self, v: jax.Array) -> jax.Array:
        """``K v / n``, (n, d) -> (n, d), by three matrix products: O(n² d)."""
        if self.weights is None:
            expansion = Expansion(self.points, v, None)
            total = pairwise.field(self.kernel, expansion, self.points)
            return self.scale / self.points.shape[0] * total
        out = self.weights.inner @ v
        if self.weights.outer is not None:
            x = self.points
            inner_products = x @ v.T - jnp.sum(x * v, axis=1)[None, :]
            out = out + pairwise.along_differences(self.weights.outer * inner_products, x, x)
        return out

    def zeta(self) -> jax.Array:
        """The divergence term ζ at the points, (n, d)."""
        if self.weights is None:
            expansion = Expansion(self.points, None, self.scale)
            return pairwise.field(self.kernel, expansion, self.points)
        return pairwise.along_differences(self.weights.zeta, self.points, self.points)

    def dense(self) -> jax.Array:
        """The matrix of ``K/n``: (n d, n d), or (n, n) if the kernel is scalar. For small n d."""
        if self.weights is None:
            raise ValueError(
                f"solver: expected at most {pairwise.CACHED_PAIRS} pairs of points for a dense "
                f"matrix; got {self.points.shape[0]} points. Use Krylov()"
            )
        if self.weights.outer is None:
            return self.weights.inner
        n, dim = self.points.shape
        r = self.points[:, None, :] - self.points[None, :, :]
        blocks = jnp.einsum("ij,ija,ijb->iajb", self.weights.outer, r, r)
        eye = jnp.eye(dim, dtype=r.dtype)
        blocks = blocks + self.weights.inner[:, None, :, None] * eye[None, :, None, :]
        return blocks.reshape(n * dim, n * dim)


def make_gram(kernel: Kernel, points: jax.Array, scale: jax.Array) -> Gram:
    """The Gram operator at ``points`` (n, d): cached up to about 2900 points, else streamed."""
    n, dim = points.shape
    if n * n > pairwise.CACHED_PAIRS:
        return Gram(points, kernel, scale, None, dim)
    s = pairwise.squared_distances(points, points, pairwise.cancels(points))
    # Rounding leaves the expanded square of a point's distance to itself a little off zero.
    s = s * (1.0 - jnp.eye(n, dtype=s.dtype))
    weights = kernel.field_weights(s, dim)
    weights = jax.tree.map(lambda w: w * (scale / n), weights)
    return Gram(points, kernel, scale, weights, dim)


def pair_weights(sizes: tuple[int, ...]) -> jax.Array:
    """Factors that turn the Gram operator of all points into those of disjoint blocks.

    Multiplied into the weights of :class:`Gram`, they leave a block-diagonal operator: each
    block of consecutive points sees itself only, averaged over its own size.

    Args:
        sizes: sizes of the blocks, in the order of the points.

    Returns:
        Shape (n, n): n/size within a block, 0 between blocks.
    """
    n = sum(sizes)
    block = jnp.repeat(jnp.arange(len(sizes)), jnp.asarray(sizes), total_repeat_length=n)
    size = jnp.asarray(sizes)[block]
    return jnp.where(block[:, None] == block[None, :], n / size[:, None], 0.0)


class Reduction(NamedTuple):
    """Coordinates of a problem in the span of its own vectors.

    Attributes:
        basis: orthonormal columns, (d, k), or None where nothing was reduced.
        points: (n, k).
        base_scores: (n, k) or None.
    """

    basis: jax.Array | None
    points: jax.Array
    base_scores: jax.Array | None

    def expand(self, v: jax.Array) -> jax.Array:
        """Back to the original coordinates: (n, k) -> (n, d)."""
        return v if self.basis is None else v @ self.basis.T


def reduce_dimension(points: jax.Array, base_scores: jax.Array | None) -> Reduction:
    """Rotate a problem into the span of its points and base scores, if that is smaller.

    Every vector of the problem, ζ and ``K v`` included, is a combination of the rows of points
    and base scores, and kernels are equivariant under rotation, so this is exact. A Householder
    factorisation keeps it so in float32 where the rows are nearly dependent, which a
    factorisation of their inner products would not. Cost: O(d k²), once.
    """
    n, dim = points.shape
    rows = points if base_scores is None else jnp.concatenate([points, base_scores])
    if dim <= rows.shape[0]:
        return Reduction(None, points, base_scores)
    basis, triangle = jnp.linalg.qr(rows.T)
    coordinates = triangle.T
    return Reduction(basis, coordinates[:n], None if base_scores is None else coordinates[n:])
