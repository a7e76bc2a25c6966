"""Rows that matter most, which every step takes besides its batch from a loader."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["KeptRows", "with_kept_rows"]


class KeptRows(NamedTuple):
    """Rows of batches.

    Attributes:
        batch: arguments and keyword arguments of a batch of these rows, leaves (k, ...).
        shares: part of all rows that are equal to each, (k,); zero for one that is not kept.
    """

    batch: Any
    shares: Array


def with_kept_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], kept: KeptRows, size: int
) -> tuple[tuple[Any, ...], dict[str, Any], Array]:
    """Arguments of a model with the rows of its batch, and those that are kept.

    Args:
        args: its arguments, first those of the batch.
        kwargs: its keyword arguments, those of the batch among them.
        kept: the rows.
        size: number of all rows.

    Returns:
        The arguments, with k rows more; and how many of all rows each stands for, none if it is in
        the batch and kept.
    """
    count = len(kept.batch[0])
    drawn = args[:count], {name: kwargs[name] for name in kept.batch[1]}
    pairs = zip(jax.tree.leaves(drawn), jax.tree.leaves(kept.batch), strict=True)
    is_same: Any = kept.shares > 0
    num_drawn = 0
    for one, other in pairs:
        is_same, num_drawn = is_same & _are_equal(one, other), len(one)
    stands_for = jnp.where(jnp.any(is_same, axis=1), 0.0, size / num_drawn)
    weights = jnp.concatenate([stands_for, size * kept.shares])
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), drawn, kept.batch)
    return (*joined[0], *args[count:]), {**kwargs, **joined[1]}, weights


def _are_equal(rows: Array, others: Array) -> Array:
    """Which of some rows (n, ...) equal which others (k, ...): (n, k)."""
    rows, others = rows.reshape(len(rows), 1, -1), others.reshape(1, len(others), -1)
    are_equal = rows == others
    if jnp.issubdtype(rows.dtype, jnp.inexact):
        are_equal = are_equal | (jnp.isnan(rows) & jnp.isnan(others))
    return jnp.all(are_equal, axis=-1)
