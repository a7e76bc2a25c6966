"""The Hessian of a model with many latents: which of its numbers are zero, and the others.

The zeros are found once, from whole columns at two points: a number that the model does not depend
on is exactly zero there. Latents are then divided into a core, dense, and leaves, which depend on
each other only through the core (see ``_transports.arrow``). Few products of the Hessian give its
numbers then (``recovery``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numpyro_kscore._starts.recovery import Recovery, coordinates, find_recovery

# Products of the Hessian at a point (d,) with vectors (m, d); points (n, d) stand for the mean of
# their Hessians.
Products = Callable[[np.ndarray, np.ndarray], np.ndarray]
# Energies (n,) and gradients (n, d) at points (n, d) that share their scales. In the scales the
# mean of gradients over all points counts, if it is asked for.
Held = Callable[[np.ndarray, bool], tuple[np.ndarray, np.ndarray]]

# A number of a Hessian in units of curvatures that is rounding, and columns taken at a time.
ROUNDING, COLUMNS = 1e-9, 256
# Products that are equal but for rounding, and columns that are looked at for further numbers.
CLOSE, LOOKED_AT = 1e-6, 8
# Most numbers of a leaf that are tried, and how many floating-point operations a product of the
# Hessian costs, of which there are no more than core and leaf have latents, and a number kept.
LEAF_SIZES, COST_OF_PRODUCT, COST_OF_NUMBER = (1, 4, 16, 48, 128), 1e5, 50.0
# Part of the numbers of a matrix that is as good as all.
DENSE = 0.25
# Thresholds of degree beyond which latents are in the core: at gaps, and as many evenly.
MOST_THRESHOLDS = 16


class Structure(NamedTuple):
    """Where a Hessian of r latents has its numbers, and how products give them.

    Attributes:
        leaves: latents of every leaf, (B, b), -1 for empty places.
        core: latents of the core, (c,).
        pattern: where there are numbers, a sparse matrix (r, r).
        recovery: which products give these.
        of_leaves: for numbers within leaves, which of the pattern's they are, and places (3) in the
            blocks, (4, n).
        of_core: for columns of the core, which they are, row and place in the core, (3, n).
    """

    leaves: np.ndarray
    core: np.ndarray
    pattern: Any
    recovery: Recovery
    of_leaves: np.ndarray
    of_core: np.ndarray

    @property
    def seeds(self) -> np.ndarray:
        """Vectors whose products give all numbers, (m, r)."""
        return self.recovery.seeds

    @property
    def operations(self) -> float:
        """Floating-point operations of a factor of it, about."""
        count, size = self.leaves.shape
        return _operations(count, size, len(self.core))

    @property
    def is_dense(self) -> bool:
        """Whether it leaves out little that a whole matrix has."""
        return bool(self.pattern.nnz > DENSE * self.pattern.shape[0] ** 2)

    @property
    def places(self) -> tuple[int, ...]:
        """Places of the r latents among those of leaves, then core."""
        every = np.concatenate([self.leaves.ravel(), self.core])
        found = np.empty(self.pattern.shape[0], int)
        found[every[every >= 0]] = np.flatnonzero(every >= 0)
        return tuple(found.tolist())


class Blocks(NamedTuple):
    """The numbers of a symmetric matrix; empty places of leaves have a 1 on the diagonal.

    Attributes:
        leaves: shape (B, b, b).
        borders: between leaves and core, (B, b, c).
        core: shape (c, c).
    """

    leaves: np.ndarray
    borders: np.ndarray
    core: np.ndarray

    def times(self, structure: Structure, vector: np.ndarray) -> np.ndarray:
        """The product with a vector (r,)."""
        is_taken = structure.leaves >= 0
        of_leaves, of_core = np.zeros(is_taken.shape), vector[structure.core]
        of_leaves[is_taken] = vector[structure.leaves[is_taken]]
        found = np.empty_like(vector)
        moved = np.einsum("kij,kj->ki", self.leaves, of_leaves) + self.borders @ of_core
        found[structure.leaves[is_taken]] = moved[is_taken]
        across = np.einsum("kic,ki->c", self.borders, of_leaves)
        found[structure.core] = self.core @ of_core + across
        return found


def find_structure(products: Products, points: np.ndarray, others: np.ndarray) -> Structure:
    """The structure of the Hessian of some latents, from whole columns at points (n, d).

    Columns at the first point suffice if the Hessians at the others are the products that follow
    from them.

    Cost: a product for each latent, and for each seed at the other points; O(r) times the numbers
    of a row on the host.
    """
    pattern = _pattern(products, points[:1], others)
    structure = _structure(pattern, *_divide(pattern))
    if all(is_right(structure, products, point, others) for point in points[1:]):
        return structure
    pattern = _pattern(products, points, others)
    return _structure(pattern, *_divide(pattern))


def whole_structure(size: int) -> Structure:
    """The structure of a Hessian all of whose numbers may be other than zero."""
    from scipy import sparse

    pattern = sparse.csr_matrix(np.ones((size, size), bool))
    return _structure(pattern, np.full((0, 1), -1), np.arange(size))


def is_right(
    structure: Structure, products: Products, point: np.ndarray, others: np.ndarray
) -> bool:
    """Whether a product of the Hessian at a point (d,) is that of its structure."""
    seed = np.zeros((1, len(point)))
    seed[0, others] = np.random.default_rng(len(others)).choice((-1.0, 1.0), len(others))
    whole = products(point[None], seed)[0, others]
    known = blocks_at(structure, products, point[None], others).times(structure, seed[0, others])
    return np.allclose(known, whole, rtol=CLOSE, atol=CLOSE * np.max(np.abs(whole)))


def misses(structure: Structure, products: Products, point: np.ndarray, others: np.ndarray) -> bool:
    """Whether some columns of the Hessian at a point (d,) have numbers where it has none."""
    size = len(others)
    if structure.pattern.nnz == size**2:
        return False
    columns = np.random.default_rng(size).choice(size, min(LOOKED_AT, size), replace=False)
    seeds = np.zeros((len(columns), len(point)))
    seeds[np.arange(len(columns)), others[columns]] = 1.0
    found = np.abs(products(point[None], seeds)[:, others])
    is_new = found > CLOSE * found.max(axis=1, keepdims=True)
    return bool(np.any(is_new & ~structure.pattern[columns].toarray()))


def blocks_at(
    structure: Structure, products: Products, points: np.ndarray, others: np.ndarray
) -> Blocks:
    """The mean Hessian of latents at points (n, d).

    Cost: n products for each of the structure's seeds.
    """
    seeds = np.zeros((len(structure.seeds), points.shape[1]))
    seeds[:, others] = structure.seeds
    found = products(points, seeds)[:, others]
    count, size = structure.leaves.shape
    width = len(structure.core)
    if width == len(others) and structure.pattern.nnz == width**2:
        # Millions of places one by one would take longer than all else.
        return Blocks(np.zeros((0, 1, 1)), np.zeros((0, 1, width)), 0.5 * (found + found.T))
    numbers = structure.recovery.read(found)
    leaves = np.zeros((count, size, size))
    of_leaves, of_core = structure.of_leaves, structure.of_core
    leaves[of_leaves[1], of_leaves[2], of_leaves[3]] = numbers[of_leaves[0]]
    leaves = 0.5 * (leaves + leaves.swapaxes(1, 2))
    leaves[structure.leaves < 0] = 0
    leaf, place = np.nonzero(structure.leaves < 0)
    leaves[leaf, place, place] = 1.0
    columns = np.zeros((len(others), width))
    columns[of_core[1], of_core[2]] = numbers[of_core[0]]
    borders = np.zeros((count, size, width))
    borders[structure.leaves >= 0] = columns[structure.leaves[structure.leaves >= 0]]
    core = columns[structure.core]
    return Blocks(leaves, borders, 0.5 * (core + core.T))


def _pattern(products: Products, points: np.ndarray, others: np.ndarray) -> Any:
    """Which numbers of the Hessian are not zero at one of the points, a sparse matrix (r, r)."""
    from scipy import sparse

    size, dim = len(others), points.shape[1]
    found = sparse.csr_matrix((size, size), dtype=bool)
    for point in points:
        rows, columns, values = [], [], []
        for start in range(0, size, COLUMNS):
            free = others[start : start + COLUMNS]
            seeds = np.zeros((len(free), dim))
            seeds[np.arange(len(free)), free] = 1.0
            part = products(point[None], seeds)[:, others]
            column, row = np.nonzero(part)
            rows.append(row)
            columns.append(column + start)
            values.append(np.abs(part[column, row]))
        row, column, value = (np.concatenate(a) for a in (rows, columns, values))
        diagonal = np.zeros(size)
        diagonal[row[row == column]] = value[row == column]
        units = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
        kept = value > ROUNDING * units[row] * units[column]
        shape = (np.ones(kept.sum(), bool), (row[kept], column[kept]))
        found = found + sparse.csr_matrix(shape, (size, size))
    whole = (found + found.T + sparse.eye(size, dtype=bool, format="csr")).astype(bool).tocsr()
    whole.sort_indices()
    return whole


def _divide(pattern: Any) -> tuple[np.ndarray, np.ndarray]:
    """Leaves (B, b) and core (c,), of those tried the ones with which a factor is cheapest."""
    degrees = np.asarray(pattern.sum(axis=1)).ravel()
    levels = np.unique(degrees)
    # Latents of the core may have many times the degree of others.
    gaps = np.argsort(levels[:-1] / levels[1:], kind="stable")[:MOST_THRESHOLDS]
    even = np.linspace(0, len(levels) - 1, MOST_THRESHOLDS).round().astype(int)
    best, lowest = None, np.inf
    for level in [*levels[np.union1d(gaps, even)], 0]:
        for most in LEAF_SIZES:
            leaves, core = _cut(pattern, degrees > level, most)
            cost = _cost(leaves, len(core))
            if cost < lowest:
                best, lowest = (leaves, core), cost
    if best is None:
        raise ValueError("pattern: expected at least one latent; got none")
    leaves, core = best
    padded = np.full((len(leaves), max(map(len, leaves), default=1)), -1)
    for row, leaf in zip(padded, leaves, strict=True):
        row[: len(leaf)] = leaf
    return padded, core


def _cost(leaves: list[np.ndarray], width: int) -> float:
    """Operations of a factor, with what its numbers cost."""
    count, size = len(leaves), max(map(len, leaves), default=0)
    operations = _operations(count, size, width) + COST_OF_PRODUCT * (width + size)
    return operations + COST_OF_NUMBER * (count * size * (size + width) + width**2)


def _operations(count: int, size: int, width: int) -> float:
    """Those of a factor of so many leaves of one size, and a core."""
    return count * (size**3 + size**2 * width + size * width**2) + width**3 / 3


def _cut(pattern: Any, is_core: np.ndarray, most: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Leaves of at most so many latents, and the core: what is given, and what parts the rest."""
    from scipy.sparse import csgraph

    rest = np.flatnonzero(~is_core)
    if not len(rest):
        return [], np.flatnonzero(is_core)
    inside = pattern[rest][:, rest]
    _, labels = csgraph.connected_components(inside, directed=False)
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    leaves, parting = [], []
    for group in groups:
        if len(group) <= most:
            leaves.append(rest[group])
            continue
        pieces, between = _parted(inside[group][:, group], most)
        leaves += [rest[group[piece]] for piece in pieces]
        parting += [rest[group[between]]]
    return leaves, np.concatenate([np.flatnonzero(is_core), *parting])


def _parted(inside: Any, most: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Pieces of a connected graph, and what parts them: whole levels of distance from one end."""
    from scipy.sparse import csgraph

    def distances(start: int) -> np.ndarray:
        return csgraph.shortest_path(
            inside, method="D", directed=False, unweighted=True, indices=start
        )

    levels = distances(int(np.argmax(distances(0)))).astype(int)
    sizes = np.bincount(levels)
    pieces: list[list[int]] = [[]]
    between = []
    for level, size in enumerate(sizes):
        if size > most or (pieces[-1] and sum(sizes[pieces[-1]]) + size > most):
            between.append(level)
            pieces.append([])
        else:
            pieces[-1].append(level)
    parts = [np.flatnonzero(np.isin(levels, piece)) for piece in pieces if piece]
    return parts, np.flatnonzero(np.isin(levels, between))


def _structure(pattern: Any, leaves: np.ndarray, core: np.ndarray) -> Structure:
    """Where the numbers of the pattern belong."""
    size = pattern.shape[0]
    leaf_of, place_of = np.full(size, -1), np.full(size, -1)
    leaf, place = np.nonzero(leaves >= 0)
    leaf_of[leaves[leaf, place]], place_of[leaves[leaf, place]] = leaf, place
    place_of[core] = np.arange(len(core))
    row, column = coordinates(pattern)
    within = np.flatnonzero((leaf_of[row] == leaf_of[column]) & (leaf_of[row] >= 0))
    i, j = row[within], column[within]
    of_leaves = np.stack([within, leaf_of[i], place_of[i], place_of[j]])
    in_core = np.flatnonzero(leaf_of[column] < 0)
    of_core = np.stack([in_core, row[in_core], place_of[column[in_core]]])
    return Structure(leaves, core, pattern, find_recovery(pattern, core), of_leaves, of_core)
