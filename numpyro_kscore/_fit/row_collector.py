"""The rows of a loader that matter most, found in a pass over all batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._model.control_variate import KeptRows

__all__ = ["RowCollector", "no_rows"]

# Rows whose sizes differ by less, relatively, may matter the same up to rounding.
ROUNDING = 1e-3


def no_rows(batch: Any, count: int) -> KeptRows:
    """Return ``count`` rows shaped like those of a batch, of which none is kept."""
    rows = jax.tree.map(lambda a: jnp.zeros((count, *a.shape[1:]), a.dtype), batch)
    return KeptRows(rows, jnp.zeros(count, jnp.result_type(float)))


class RowCollector:
    """A collector of the rows that matter most, each with the number of rows that equal it.

    A row that is drawn in a batch is known to be kept by its numbers alone, since a loader may
    shuffle its rows. All rows with the same numbers matter the same, and are kept together. At most
    ``count`` different rows are kept; none, if the pass does not come upon half of the rows of the
    ``first`` batch, since the rows of such a loader are not the same twice.
    """

    def __init__(self, first: Any, count: int) -> None:
        self._like, self._count = first, count
        self._first = set(_contents([_plain(leaf) for leaf in jax.tree.leaves(first)]))
        self._again: set[bytes] = set()
        self._found: dict[bytes, _Found] = {}
        self._left_out, self._seen = 0.0, 0

    def add(self, batches: Any, sizes: np.ndarray) -> None:
        """Look at more rows; ``sizes``, (batches, rows), say how much each matters."""
        leaves = [_plain(leaf) for leaf in jax.tree.leaves(batches)]
        leaves = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves]
        sizes = np.nan_to_num(np.asarray(sizes, np.float64).ravel(), posinf=0.0)
        contents = _contents(leaves)
        self._seen += len(sizes)
        self._again |= self._first.intersection(contents)
        for k in np.flatnonzero(sizes > self._left_out):
            if contents[k] in self._found:
                self._found[contents[k]].count += 1
            else:
                self._found[contents[k]] = _Found(sizes[k], [leaf[k].copy() for leaf in leaves])
        ranked = sorted(self._found.items(), key=lambda item: -item[1].size)
        for content, row in ranked[self._count :]:
            self._left_out = max(self._left_out, row.size)
            del self._found[content]

    def kept(self) -> KeptRows:
        """Return the most important rows of all batches."""
        none = no_rows(self._like, self._count)
        # Copies of a row that was left out were counted before or after, not both.
        least = self._left_out * (1 + ROUNDING)
        rows = [row for row in self._found.values() if row.size > least]
        if not rows or 2 * len(self._again) < len(self._first):
            return none
        shares = np.zeros(self._count)
        shares[: len(rows)] = [row.count / self._seen for row in rows]
        leaves, structure = jax.tree.flatten(none.batch)
        filled = [
            leaf.at[: len(rows)].set(np.stack([row.leaves[k] for row in rows]))
            for k, leaf in enumerate(leaves)
        ]
        batch = jax.tree.unflatten(structure, filled)
        return KeptRows(batch, jnp.asarray(shares, none.shares.dtype))


class _Found:
    """A row: how much it matters, its numbers, and how many rows have these."""

    def __init__(self, size: float, leaves: list[np.ndarray]) -> None:
        self.size, self.leaves, self.count = float(size), leaves, 1


def _plain(leaf: Any) -> np.ndarray:
    """Return the array with one kind of zero and of NaN, so that equal numbers have equal bytes."""
    leaf = np.asarray(leaf)
    if leaf.dtype.kind not in "fc":
        return leaf
    return np.where(np.isnan(leaf), np.nan, leaf + 0).astype(leaf.dtype)


def _contents(leaves: list[np.ndarray]) -> list[bytes]:
    """Return the bytes of each row of arrays (n, ...)."""
    flat = [np.ascontiguousarray(leaf).reshape(len(leaf), -1).view(np.uint8) for leaf in leaves]
    return [row.tobytes() for row in np.concatenate(flat, axis=1)]
