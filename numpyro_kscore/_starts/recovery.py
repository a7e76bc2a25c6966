"""The numbers of a sparse symmetric matrix from its products with few vectors.

Columns without a row in common need one product together (Curtis, Powell and Reid 1974); rows of
the core come from its columns, since the matrix is symmetric (Coleman and Moré 1984). A person who
rates thirty of five hundred films makes all these films need a product each. But the row of that
person has only thirty numbers, which forty products with random vectors give by linear equations,
and what rows of persons give leaves few unknown in those of films (substitution; Powell and Toint
1979).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# Products of a peeling for each unknown of a row, and more: equations are then well conditioned.
PRODUCTS_EACH, PRODUCTS_MORE = 1.5, 8
# A peeling is worth its equations with this part of the products, so many turns, and numbers.
WORTH, MOST_TURNS, MOST_NUMBERS = 0.5, 16, 3e7


class Recovery(NamedTuple):
    """How a matrix with a known pattern comes from products.

    Attributes:
        seeds: vectors of products, (m, r).
        read: numbers of the pattern, in the order of its coordinates, from products (m, r).
    """

    seeds: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]


class _Turn(NamedTuple):
    """Rows whose unknown numbers are found at once.

    Attributes:
        rows: which, (n,).
        known: places among the numbers of those that are known, sparse (n, r).
        solve: from what is left of products to unknown numbers, (n, k, m).
        is_taken: which of the k are numbers of a row, (n, k).
        numbers: their places among those of the pattern.
    """

    rows: np.ndarray
    known: Any
    solve: np.ndarray
    is_taken: np.ndarray
    numbers: np.ndarray


def find_recovery(pattern: Any, core: np.ndarray) -> Recovery:
    """The recovery with fewest products.

    Args:
        pattern: where there are numbers, a symmetric sparse matrix (r, r).
        core: rows besides which only few have numbers in common, (c,).
    """
    colored = _by_colors(pattern, core)
    most = (WORTH * len(colored.seeds) - PRODUCTS_MORE) / PRODUCTS_EACH
    return _by_peeling(pattern, most) or colored


def _by_colors(pattern: Any, core: np.ndarray) -> Recovery:
    """Columns of a color have no row in common; columns of the core give its rows too."""
    size = pattern.shape[0]
    is_core = np.zeros(size, bool)
    is_core[core] = True
    rest = np.flatnonzero(~is_core)
    colors = np.zeros(size, int)
    colors[core] = _colored(pattern[:, core])
    if len(rest):
        # A product gives columns of the core or of others.
        colors[rest] = _colored(pattern[rest][:, rest])
        colors[rest] += colors[core].max() + 1 if len(core) else 0
    seeds = np.zeros((colors.max() + 1, size))
    seeds[colors, np.arange(size)] = 1.0
    row, column = coordinates(pattern)
    is_turned = is_core[row] & ~is_core[column]
    row, column = np.where(is_turned, column, row), np.where(is_turned, row, column)
    of_column = colors[column]
    return Recovery(seeds, lambda found: found[of_column, row])


def _colored(pattern: Any) -> np.ndarray:
    """Colors of columns such that no two of a color have a row in common, greedily."""
    if np.max(np.diff(pattern.tocsr().indptr), initial=0) == pattern.shape[1]:
        return np.arange(pattern.shape[1])
    conflicts = (pattern.astype(np.int32).T @ pattern.astype(np.int32)).tocsr()
    colors = np.full(conflicts.shape[0], -1)
    for column in np.argsort(-np.diff(conflicts.indptr), kind="stable"):
        near = conflicts.indices[conflicts.indptr[column] : conflicts.indptr[column + 1]]
        taken = np.zeros(len(near) + 1, bool)
        used = colors[near]
        taken[used[(used >= 0) & (used <= len(near))]] = True
        colors[column] = int(np.argmin(taken))
    return colors


def _by_peeling(pattern: Any, most: float) -> Recovery | None:
    """Rows of few unknown numbers first, until none are left; None if some have more than most."""
    order = _turns(pattern, int(most)) if most >= 1 else None
    if order is None:
        return None
    low, limit = 0, int(most)
    while limit - low > max(1, limit // 8):
        middle = (low + limit) // 2
        better = _turns(pattern, middle)
        low, limit, order = (middle, limit, order) if better is None else (low, middle, better)
    count = int(np.ceil(PRODUCTS_EACH * limit)) + PRODUCTS_MORE
    if count * pattern.nnz > MOST_NUMBERS:
        return None
    seeds = np.random.default_rng(pattern.nnz).choice((-1.0, 1.0), (count, pattern.shape[0]))
    mirror = _mirror(pattern)
    turns = [_turn(pattern, order, number, seeds) for number in range(order.max() + 1)]

    def read(found: np.ndarray) -> np.ndarray:
        numbers = np.zeros(pattern.nnz)
        for turn in turns:
            known = turn.known.copy()
            known.data = numbers[turn.known.data]
            left = found[:, turn.rows].T - known @ seeds.T
            solved = np.einsum("nkm,nm->nk", turn.solve, left)[turn.is_taken]
            numbers[turn.numbers] = solved
            # A number between two of these rows is found twice, and the second stays.
            numbers[mirror[turn.numbers]] = solved
        return numbers

    return Recovery(seeds, read)


def _turns(pattern: Any, limit: int) -> np.ndarray | None:
    """The turn in which each row has at most so many unknown numbers, (r,); None if there is none.

    A number is known once one of its two rows has had its turn.
    """
    order = np.full(pattern.shape[0], -1)
    for turn in range(MOST_TURNS):
        is_left = order < 0
        if not np.any(is_left):
            return order
        order[is_left & (pattern.astype(np.int32) @ is_left.astype(np.int32) <= limit)] = turn
    return None if np.any(order < 0) else order


def _turn(pattern: Any, order: np.ndarray, number: int, seeds: np.ndarray) -> _Turn:
    """The equations of a turn."""
    from scipy import sparse

    rows = np.flatnonzero(order == number)
    places = sparse.csr_matrix(
        (np.arange(pattern.nnz) + 1, pattern.indices, pattern.indptr), pattern.shape
    )[rows].tocoo()
    # Numbers of a sparse matrix that are zero could be lost, so that places are from 1 here.
    row, column, place = places.row, places.col, places.data - 1
    is_known = order[column] < number
    known = sparse.csr_matrix(
        (place[is_known], (row[is_known], column[is_known])), (len(rows), pattern.shape[0])
    )
    row, column, place = (a[~is_known] for a in (row, column, place))
    start = np.searchsorted(row, np.arange(len(rows)))
    inside = np.arange(len(row)) - start[row]
    is_taken = np.zeros((len(rows), int(inside.max()) + 1), bool)
    is_taken[row, inside] = True
    columns = np.zeros(is_taken.shape, int)
    columns[is_taken] = column
    vectors = np.where(is_taken[..., None], seeds.T[columns], 0.0)
    gram = vectors @ vectors.swapaxes(1, 2) + np.eye(is_taken.shape[1]) * ~is_taken[:, None, :]
    return _Turn(rows, known, np.linalg.solve(gram, vectors), is_taken, place)


def coordinates(pattern: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the numbers, in their order."""
    rows = np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr))
    return rows, pattern.indices


def _mirror(pattern: Any) -> np.ndarray:
    """For every number the place of that with row and column exchanged."""
    rows, columns = coordinates(pattern)
    # In order of columns, then rows, stand the numbers of the transpose in order of its rows.
    found = np.empty(len(rows), int)
    found[np.lexsort((rows, columns))] = np.arange(len(rows))
    return found
