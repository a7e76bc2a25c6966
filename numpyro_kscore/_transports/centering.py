"""Partially non-centered coordinates of latents whose prior is set by other latents.

Under a prior ``θ ~ Normal(μ, τ)`` whose location and scale are latents themselves, the
unconstrained value u of θ has a posterior that widens and narrows with τ: a funnel. If the data say
of it what one normal observation y would say, the posterior given μ and τ is normal, with

    mean  (1 - k) μ + k y,      k = c r² / (1 - c + c r²),      r = τ / τ₀,
    standard deviation in proportion to  r / √(1 - c + c r²),

where τ₀ is a typical τ, and c, the degree of centering, is the share of the data in the precision
there. In the coordinate v of ``u = mean + v r / √(1 - c + c r²)`` there is no funnel then, from the
smallest τ, where the prior decides, to the largest. With c = 1 and y = 0 that is u, which is best
where data say much about θ; c = 0 and τ₀ = 1 is the non-centered form, best where they say little
(Papaspiliopoulos, Roberts and Sköld 2007). For a vector with scale matrix L = D W, D diagonal and W
with ones on its diagonal, D takes the place of τ, and ``(c I + (1 - c) W) v`` that of v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_kscore._util.pytree import pytree


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


class Centering(NamedTuple):
    """Degrees of centering of latents whose prior is set by others, in arrays of one shape.

    Attributes:
        degrees: degrees of centering, in [0, 1].
        log_scales: logarithms of typical scales of the prior, in units of the unconstrained values.
        locs: where the data alone would place the unconstrained values.
    """

    degrees: Any
    log_scales: Any
    locs: Any


@pytree
class Centered:
    """Coordinates (..., d) to unconstrained values, given the location and scale of the prior.

    Attributes:
        mean: the unconstrained value at zero, (..., d).
        log_size: logarithm of what every coordinate is multiplied by, (..., d).
        triangle: what coordinates are multiplied by before that, a lower triangle with ones on its
            diagonal, (..., d, d); None for the identity.
    """

    mean: Any
    log_size: Any
    triangle: Any = None

    def push(self, x: jax.Array) -> jax.Array:
        if self.triangle is not None:
            x = (self.triangle @ x[..., None])[..., 0]
        return self.mean + jnp.exp(self.log_size) * x

    def invert(self, y: jax.Array) -> jax.Array:
        """The coordinates of unconstrained values."""
        return self._solve((y - self.mean) * jnp.exp(-self.log_size), trans=0)

    def log_volumes(self, x: jax.Array) -> jax.Array:
        """The logarithm of every coordinate's share in the volume, of the shape of ``x``."""
        return jnp.broadcast_to(self.log_size, x.shape)

    def log_volume(self, x: jax.Array) -> jax.Array:
        return jnp.sum(self.log_volumes(x), axis=-1)

    def pull(self, x: jax.Array, gradients: jax.Array) -> jax.Array:
        del x
        scaled = gradients * jnp.exp(self.log_size)
        if self.triangle is None:
            return scaled
        return (jnp.swapaxes(self.triangle, -1, -2) @ scaled[..., None])[..., 0]

    def push_score(self, x: jax.Array, score: jax.Array) -> jax.Array:
        del x
        return self._solve(score, trans=1) * jnp.exp(-self.log_size)

    def _solve(self, rest: jax.Array, trans: int) -> jax.Array:
        if self.triangle is None:
            return rest
        column = rest[..., None]
        triangle = jnp.broadcast_to(self.triangle, column.shape[:-1] + self.triangle.shape[-1:])
        return solve_triangular(triangle, column, trans=trans, lower=True)[..., 0]


def centered(prior: LocationScale, centering: Centering) -> Centered:
    """The map from coordinates with some degrees of centering to unconstrained values."""
    move = jnp.log(prior.diagonal) - centering.log_scales
    of_data = jnp.log(centering.degrees) + 2 * move
    total = jnp.logaddexp(of_data, jnp.log1p(-centering.degrees))
    share, log_size = jnp.exp(of_data - total), move - 0.5 * total
    mean = (1 - share) * prior.loc + share * centering.locs
    if not prior.is_matrix:
        return Centered(mean, log_size)
    # Between the triangle W and the identity.
    unit = prior.scale / prior.diagonal[..., :, None]
    identity = jnp.eye(unit.shape[-1], dtype=unit.dtype)
    blended = identity + (1 - centering.degrees)[..., :, None] * (unit - identity)
    return Centered(mean, log_size, blended)


def of_degrees(degrees: np.ndarray) -> Centering:
    """Centering of degrees 0 and 1, (d,), for which no scale and no location count."""
    return Centering(degrees, np.zeros_like(degrees), np.zeros_like(degrees))


def is_same(one: Centering, other: Centering) -> bool:
    """Whether two kinds of coordinates are one."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
