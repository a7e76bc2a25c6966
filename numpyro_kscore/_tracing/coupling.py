"""Coordinates of latents whose size varies with that of others.

Where a latent θ is narrow for small values of another one ω and wide for large ones, as the
standardized effects of a non-centered model are under informative data, and the weights of a
horseshoe, the posterior is a funnel. In the coordinate v of

    θ = v exp(-Σ_j rate_j (ω_j - center_j))

it is less of one. The rates are found from the model's scores (``_starts.couplings``), not read off
its code: it does not matter how the model is written.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Coupling", "Form", "log_size"]


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
        centering: degrees of centering, by element (see ``centering``); None if it is centered.
        couplings: by the names of the other latents, which have none themselves.
    """

    centering: jax.Array | None = None
    couplings: dict[str, Coupling] = {}  # noqa: RUF012

    @property
    def is_plain(self) -> bool:
        """Whether the coordinate is the unconstrained value."""
        return self.centering is None and not self.couplings


def log_size(couplings: dict[str, Coupling], coordinates: dict[str, jax.Array]) -> jax.Array:
    """The logarithm of what the coordinate of a latent is multiplied by, element by element."""
    parts = [
        jnp.tensordot(rates, coordinates[name] - center, axes=jnp.ndim(center))
        for name, (rates, center) in couplings.items()
    ]
    return -sum(parts[1:], parts[0])
