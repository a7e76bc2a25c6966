"""Block arrows: matrices of many small blocks that meet in a few rows and columns of their own.

Given the means of all groups, what is in one group is independent of what is in another. The
Hessian of such a model is dense between few latents, its *core*, and couples every other latent
only with the core and a small block of others, its *leaf* (persons and the questions they answer,
pieces of a time series and the days between them). Its Cholesky factor has the same shape, so that
products with it take as long as it has numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_kscore._util.linalg import solve_lower, solve_lower_transposed
from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.pytree import pytree, static


@pytree
class Arrow:
    """A lower triangle of leaves and core, or several: the first axis then counts them.

    The r numbers of a vector have places among B leaves of b numbers, followed by c of the core.
    Leaves with fewer numbers have empty places.

    Attributes:
        leaves: a lower triangle for each leaf, (..., B, b, b).
        borders: how leaves depend on the core, (..., B, b, c).
        core: a lower triangle, (..., c, c).
        places: of the r numbers of a vector, in the order above.
    """

    leaves: Any
    borders: Any
    core: Any
    places: tuple[int, ...] = static()

    def __getitem__(self, k: int) -> Arrow:
        """One of several."""
        return Arrow(self.leaves[k], self.borders[k], self.core[k], self.places)

    @property
    def diagonal(self) -> Any:
        """The numbers on the diagonal, (..., r)."""
        xp = namespace(self.core)
        of_leaves, of_core = (xp.diagonal(a, axis1=-2, axis2=-1) for a in (self.leaves, self.core))
        return self._joined(of_leaves, of_core)

    def times(self, vectors: Any) -> Any:
        """The product with vectors (..., r)."""
        xp, (leaves, core) = namespace(vectors), self._split(vectors)
        of_core = core @ self.core.T
        if not self.leaves.size:
            return self._joined(leaves, of_core)
        found = xp.einsum("kij,...kj->...ki", self.leaves, leaves)
        return self._joined(found + self._by_core(core), of_core)

    def columns(self, first: int, count: int) -> Any:
        """The products with unit vectors from the first one on, (count, r), on the host."""
        if self.leaves.size:
            return self.times(np.eye(count, len(self.places), first))
        chosen = self.core.T[np.array(self.places[first : first + count])]
        return self._joined(np.zeros((count, 0, 1)), chosen)

    def transposed(self, vectors: Any) -> Any:
        """The product of the transpose with vectors (..., r)."""
        xp, (leaves, core) = namespace(vectors), self._split(vectors)
        of_core = core @ self.core
        if not self.leaves.size:
            return self._joined(leaves, of_core)
        flat = leaves.reshape(*leaves.shape[:-2], -1)
        of_core = of_core + flat @ self._flat
        return self._joined(xp.einsum("kij,...ki->...kj", self.leaves, leaves), of_core)

    def solve_transposed(self, vectors: Any) -> Any:
        """The vectors whose product with the transpose is given, (..., r).

        There is one triangle, or one for every vector.
        """
        leaves, core = self._split(vectors)
        if not self.leaves.size:
            return self._joined(leaves, solve_lower_transposed(self.core, core))
        solved = solve_lower_transposed(self.leaves, leaves)
        across = namespace(vectors).einsum("...kic,...ki->...c", self.borders, solved)
        return self._joined(solved, solve_lower_transposed(self.core, core - across))

    def solve(self, vectors: Any) -> Any:
        """The vectors whose product is given, (..., r); on the host."""
        leaves, core = self._split(vectors)
        core = solve_lower(self.core, core)
        if leaves.size:
            rest = leaves - self._by_core(core)
            leaves = np.linalg.solve(self.leaves, rest[..., None])[..., 0]
        return self._joined(leaves, core)

    def followed_by(self, other: Arrow) -> Arrow:
        """The product with another triangle, on the host."""
        moved = self._flat @ other.core
        borders = self.leaves @ other.borders + moved.reshape(self.borders.shape)
        return Arrow(self.leaves @ other.leaves, borders, self.core @ other.core, self.places)

    def divided(self, other: Arrow) -> Arrow:
        """The triangle whose product with this one is another, on the host."""
        core = solve_lower(self.core, other.core.T).T
        moved = self._flat @ core
        borders = np.linalg.solve(self.leaves, other.borders - moved.reshape(self.borders.shape))
        return Arrow(np.linalg.solve(self.leaves, other.leaves), borders, core, self.places)

    def with_diagonal(self, diagonal: Any) -> Arrow:
        """The same with numbers (..., r) added to the diagonal; empty places get a 1."""
        xp = namespace(diagonal)
        of_leaves, of_core = self._split(diagonal, empty=1.0)
        size, count = self.leaves.shape[-1], self.core.shape[-1]
        return Arrow(
            self.leaves + of_leaves[..., None] * xp.eye(size, dtype=self.leaves.dtype),
            self.borders,
            self.core + of_core[..., None] * xp.eye(count, dtype=self.core.dtype),
            self.places,
        )

    def below_diagonal(self) -> Arrow:
        """The same with zeros on the diagonal, on the host."""
        return Arrow(np.tril(self.leaves, -1), self.borders, np.tril(self.core, -1), self.places)

    def in_single(self) -> Arrow:
        """The same in single precision, on the host: several of thousands of latents need room."""
        leaves, borders, core = (
            np.asarray(a, np.float32) for a in (self.leaves, self.borders, self.core)
        )
        return Arrow(leaves, borders, core, self.places)

    def combined(self, weights: Any) -> Arrow:
        """The sums of several by weights (..., q): arrays of shapes (..., B, b, b) and so on."""
        xp = namespace(weights)
        every = (self.leaves, self.borders, self.core)
        leaves, borders, core = (xp.tensordot(weights, a, axes=1) for a in every)
        return Arrow(leaves, borders, core, self.places)

    @property
    def _flat(self) -> Any:
        """The borders of one triangle as a matrix: NumPy would take a product for each leaf."""
        count, size, width = self.borders.shape
        return self.borders.reshape(count * size, width)

    def _by_core(self, core: Any) -> Any:
        """The part of leaves (..., B, b) that depends on the core (..., c)."""
        found = core @ self._flat.T
        return found.reshape(*core.shape[:-1], *self.borders.shape[:2])

    def _split(self, vectors: Any, empty: float = 0.0) -> tuple[Any, Any]:
        """Vectors (..., r) as leaves (..., B, b) and core (..., c)."""
        xp = namespace(vectors)
        count, size = self.leaves.shape[-3:-1]
        total = count * size + self.core.shape[-1]
        sources = np.full(total, len(self.places))
        sources[np.array(self.places)] = np.arange(len(self.places))
        if total > len(self.places):
            more = xp.full((*vectors.shape[:-1], 1), empty, vectors.dtype)
            vectors = xp.concatenate([vectors, more], axis=-1)
        padded = vectors[..., sources]
        leaves = padded[..., : count * size].reshape(*vectors.shape[:-1], count, size)
        return leaves, padded[..., count * size :]

    def _joined(self, leaves: Any, core: Any) -> Any:
        """The vectors (..., r) of leaves (..., B, b) and core (..., c)."""
        flat = leaves.reshape(*leaves.shape[:-2], -1)
        joined = namespace(core).concatenate([flat, core], axis=-1)
        return joined[..., np.array(self.places)]


def dense(triangle: Any) -> Arrow:
    """Lower triangles (..., c, c) without leaves."""
    xp, shape = namespace(triangle), triangle.shape
    empty = xp.zeros((*shape[:-2], 0, 1, 1), triangle.dtype)
    borders = xp.zeros((*shape[:-2], 0, 1, shape[-1]), triangle.dtype)
    return Arrow(empty, borders, triangle, tuple(range(shape[-1])))
