"""The part of a prior that coordinates depend on."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LocationScale(NamedTuple):
    """Location and scale of a prior, as one of unconstrained values.

    Attributes:
        loc: of the shape of the unconstrained value, or one that broadcasts to it.
        scale: positive, likewise; or lower triangular, batch + (k, k), with a positive diagonal.
        is_matrix: whether the scale is a matrix.
    """

    loc: jax.Array
    scale: jax.Array
    is_matrix: bool = False

    @property
    def diagonal(self) -> jax.Array:
        """The scale, or the diagonal of its matrix."""
        if not self.is_matrix:
            return self.scale
        return jnp.diagonal(self.scale, axis1=-2, axis2=-1)
