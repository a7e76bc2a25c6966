"""The multivariate Student t distribution by squared distances; 1/ν = 0 is a Gaussian."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

__all__ = ["log_normalizer", "log_tail", "tail_weights"]


def tail_weights(inverse_degrees: Any, squared: jax.Array, dim: int) -> jax.Array:
    """``(ν + d)/(ν + q)`` at squared distances q: the score over that of a Gaussian."""
    # Where the square overflows, infinity times zero would be NaN.
    squared = jnp.minimum(squared, jnp.finfo(squared.dtype).max)
    return (1.0 + dim * inverse_degrees) / (1.0 + squared * inverse_degrees)


def log_normalizer(inverse_degrees: Any, dim: int) -> jax.Array:
    """log of the density at the center, for unit scatter."""
    inverse = jnp.maximum(inverse_degrees, 1e-4)
    degrees = 1.0 / inverse
    student = gammaln(0.5 * (degrees + dim)) - gammaln(0.5 * degrees)
    student = student - 0.5 * dim * jnp.log(degrees * jnp.pi)
    return jnp.where(inverse_degrees > 0, student, -0.5 * dim * jnp.log(2 * jnp.pi))


def log_tail(inverse_degrees: Any, squared: jax.Array, dim: int) -> jax.Array:
    """The log density at squared distances q less that at the center."""
    inverse = jnp.maximum(inverse_degrees, 1e-4)
    student = -0.5 * (1.0 / inverse + dim) * jnp.log1p(squared * inverse)
    return jnp.where(inverse_degrees > 0, student, -0.5 * squared)
