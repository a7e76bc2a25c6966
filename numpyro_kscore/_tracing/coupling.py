"""Coordinates of latents whose size varies with that of others.

Where a latent θ narrows as another one ω grows, as the standardized effects of a non-centered model
do under informative data, or widens with it, the posterior is a funnel. In the coordinate v of

    θ = v √(1 - r + r exp(2 t))⁻¹,  t = Σ_j rate_j (ω_j - center_j) / r

it is less of one. The logarithm of the size falls at ``rate_j`` where ω is at its center, and the
largest of the rates is r. On one side it becomes constant: where ω is the logarithm of the effects'
scale and data and prior are normal, this is the posterior width of an effect given ω, with r the
share of the data in its precision. For negative rates the effects are centered ones. Where a prior
is not independent, as for a smooth curve, no element of θ has such a size, but combinations of them
do: then ``θ = B v √(...)⁻¹`` with a matrix B of determinant 1, whose columns they are. Rates and
matrix are found from the model's scores (``_starts.couple``), not read off its code: it does not
matter how the model is written.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["LARGEST_SHARE", "SMALLEST_SHARE", "Centering", "Coupling", "Form", "log_size"]

# Bounds on r: at 1 there would be nothing but the exponential.
SMALLEST_SHARE, LARGEST_SHARE = 1e-3, 0.98


class Centering(NamedTuple):
    """What is taken out of latents whose prior is set by others, in arrays of one shape.

    Attributes:
        degrees: of centering, in [0, 1].
        log_scales: logarithms of typical scales of the prior, in units of the unconstrained values.
        locs: where the data alone would place the unconstrained values.
    """

    degrees: Any
    log_scales: Any
    locs: Any


class Coupling(NamedTuple):
    """How the size of a latent varies with another latent.

    Attributes:
        rates: shape of the latent's coordinate + shape of the other's.
        center: of the other's shape.
    """

    rates: jax.Array
    center: jax.Array


class Form(NamedTuple):
    """How the coordinate of a latent is related to its unconstrained value.

    Attributes:
        centering: what of its prior is taken out (see ``centering``); None if nothing is.
        couplings: by the names of the other latents, which have none themselves.
        basis: what the coordinate, after its size, is multiplied by, of determinant 1 or -1 and of
            its shape twice; None if it is not.
    """

    centering: Centering | None = None
    couplings: dict[str, Coupling] = {}  # noqa: RUF012
    basis: jax.Array | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the coordinate is the unconstrained value."""
        return self.centering is None and not self.couplings and self.basis is None


def log_size(couplings: dict[str, Coupling], coordinates: dict[str, jax.Array]) -> jax.Array:
    """The logarithm of what the coordinate of a latent is multiplied by, element by element."""
    moves, sizes = [], []
    for name, (rates, center) in couplings.items():
        ndim = jnp.ndim(center)
        moves.append(jnp.tensordot(rates, coordinates[name] - center, axes=ndim))
        sizes.append(
            jnp.max(jnp.abs(rates), axis=tuple(range(jnp.ndim(rates) - ndim, jnp.ndim(rates))))
        )
    share = jnp.clip(reduce(jnp.maximum, sizes), SMALLEST_SHARE, LARGEST_SHARE)
    move = 2 * sum(moves[1:], moves[0]) / share
    # log(1 - r + r exp(x)), without overflow.
    return -0.5 * jnp.logaddexp(jnp.log1p(-share), jnp.log(share) + move)
