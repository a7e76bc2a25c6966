"""A fitted guide as samplers see it: valid draws, and the unconstrained values of its latents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.infer import SVI

from numpyro_kscore._model.layout import Layout, coordinate_names
from numpyro_kscore._model.particles import are_finite, check_mostly_finite, draw_finite
from numpyro_kscore._model.program import Program
from numpyro_kscore._model.target import Density, Target
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._fitted import fitted_guide

# Draws that a covariance is made of, and values that are computed at once.
NUM_DRAWS, BATCH = 10_000, 256


class Guide(NamedTuple):
    """A fitted guide with its draws.

    Attributes:
        program: guide and model at the fitted parameters.
        layout: the layout of their latents.
        names: names of the coordinates.
        target: the model alone.
        density: a point (d,) to the model's log density and its gradient, in the guide's
            coordinates.
        draws: finite draws in the guide's coordinates, (n, d).
        num_lost: draws that were left out.
        valid: the first of the draws at which the density and its gradient are finite.
        push: see :attr:`unconstrained`; None if the coordinates are the same.
    """

    program: Program
    layout: Layout
    names: tuple[str, ...]
    target: Target
    density: Density
    draws: np.ndarray
    num_lost: int
    valid: np.ndarray
    push: Callable[[Array], Array] | None

    @property
    def unconstrained(self) -> Callable[[Array], Array]:
        """Points (n, d) in the guide's coordinates to unconstrained values of the latents, (n, d).

        They differ where a latent is partially non-centered, or of a size that varies with others.
        """
        return (lambda x: x) if self.push is None else self.push


def open_guide(
    svi: SVI,
    result: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rng_key: Array | None,
    num_valid: int,
) -> Guide:
    """Draw from a fitted guide; ``num_valid`` draws have a finite density, as far as there are."""
    key = jax.random.key(0) if rng_key is None else rng_key
    fitted = fitted_guide(svi, result, args, kwargs, key)
    program, layout, target = fitted.program, fitted.layout, fitted.target
    draws, num_lost = draw_finite(key_apart(key, 1), program, layout, NUM_DRAWS)
    density = target._replace(key=key).scored_density(fitted.forward_mode)
    tried = draws[: max(2 * num_valid, BATCH)]
    values = quick_jit(partial(lax.map, density, batch_size=BATCH))(jnp.asarray(tried))
    finite = np.asarray(are_finite(*values))
    check_mostly_finite(finite)
    names, valid = coordinate_names(layout.sites), tried[finite][:num_valid]
    return Guide(program, layout, names, target, density, draws, num_lost, valid, fitted.push)
