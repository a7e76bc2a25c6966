"""The log densities of single sites of a trace, and their sums by rows of plates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions.util import scale_and_mask

__all__ = ["site_log_prob", "sum_by_row"]


def site_log_prob(site: dict[str, Any]) -> jax.Array:
    """The log density of a site at its value, scaled by plates, one number a batch element."""
    return scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"])


def sum_by_row(values: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Sums over all axes but those of plates, of which each element is a row: (rows,).

    Args:
        values: their last axes are those of plates.
        dims: dimensions of the plates that are kept, negative.
    """
    kept = {jnp.ndim(values) + dim for dim in dims}
    others = tuple(axis for axis in range(jnp.ndim(values)) if axis not in kept)
    return jnp.ravel(jnp.sum(values, axis=others))
