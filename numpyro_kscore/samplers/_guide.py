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

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._chains import Density
from numpyro_kscore.diagnostics._fitted import (
    FittedGuide,
    check_mostly_finite,
    draw_fitted,
    fitted_guide,
    log_joint_and_score,
)

# Draws that a covariance is made of, and values that are computed at once.
NUM_DRAWS, BATCH = 10_000, 256


class Guide(NamedTuple):
    """A fitted guide with its draws.

    Attributes:
        fitted: guide and model at the fitted parameters.
        density: a point (d,) to the model's log density and its gradient, in the guide's
            coordinates.
        draws: finite draws in the guide's coordinates, (n, d).
        num_lost: draws that were left out.
    """

    fitted: FittedGuide
    density: Density
    draws: np.ndarray
    num_lost: int

    @property
    def unconstrained(self) -> Callable[[Array], Array]:
        """Points (n, d) in the guide's coordinates to unconstrained values of the latents, (n, d).

        They differ where a latent is partially non-centered, or of a size that varies with others.
        """
        return _unconstrained(self.fitted)

    def valid(self, count: int) -> np.ndarray:
        """Draws at which the density and its gradient are finite, (count, d).

        Raises:
            FloatingPointError: if fewer than half of the draws that are tried are.
        """
        tried = jnp.asarray(self.draws[: max(2 * count, BATCH)])
        value, gradient = quick_jit(partial(lax.map, self.density, batch_size=BATCH))(tried)
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient), axis=1)
        check_mostly_finite(int(jnp.sum(finite)), len(tried))
        return np.asarray(tried)[np.asarray(finite)][:count]


def open_guide(
    svi: SVI, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rng_key: Array | None
) -> Guide:
    """Draw from a fitted guide.

    Raises:
        TypeError: see :func:`~numpyro_kscore.evaluate_guide`.
        ValueError: see there.
        FloatingPointError: if fewer than half of the draws are finite.
    """
    key = jax.random.key(0) if rng_key is None else rng_key
    fitted = fitted_guide(svi, result, args, kwargs, key)
    draws = np.asarray(draw_fitted(fitted, NUM_DRAWS, key_apart(key, 1)))
    finite = np.isfinite(draws).all(axis=1)
    check_mostly_finite(int(finite.sum()), NUM_DRAWS)
    density = log_joint_and_score(fitted, key)
    return Guide(fitted, density, draws[finite], int(NUM_DRAWS - finite.sum()))


def _unconstrained(fitted: FittedGuide) -> Callable[[Array], Array]:
    if not fitted.layout.transformed:
        return lambda x: x
    return quick_jit(partial(lax.map, fitted.target.unconstrained, batch_size=BATCH))
