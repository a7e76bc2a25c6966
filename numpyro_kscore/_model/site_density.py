"""The log densities of single sites of a trace, and their sums by rows of plates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to
from numpyro.distributions.util import scale_and_mask, sum_rightmost


def site_log_prob(site: dict[str, Any]) -> jax.Array:
    """The log density of a site at its value, scaled by plates, one number a batch element."""
    return scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"])


def sum_by_row(values: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Sums over all axes but the plates' negative dimensions ``dims``, (rows,)."""
    kept = {jnp.ndim(values) + dim for dim in dims}
    others = tuple(axis for axis in range(jnp.ndim(values)) if axis not in kept)
    return jnp.ravel(jnp.sum(values, axis=others))


def unscaled_log_prob(site: dict[str, Any]) -> jax.Array:
    """The log density of a site at its value, with what its distribution kept of the draw."""
    intermediates = [site["intermediates"]] if site["intermediates"] else []
    return site["fn"].log_prob(site["value"], *intermediates)


def site_log_density(
    name: str, unconstrained: jax.Array, trace: dict[str, Any], model_trace: dict[str, Any]
) -> jax.Array:
    """Log density of a site, as one of its unconstrained value, scaled by plates."""
    site = trace[name]
    log_prob = unscaled_log_prob(site)
    transform = biject_to(model_trace[name]["fn"].support)
    log_det = transform.log_abs_det_jacobian(unconstrained, site["value"])
    # An event dimension of the guide may be a batch dimension of the model, and vice versa.
    ndim = min(jnp.ndim(log_det), jnp.ndim(log_prob))
    log_prob, log_det = (sum_rightmost(a, jnp.ndim(a) - ndim) for a in (log_prob, log_det))
    return jnp.sum(scale_and_mask(log_prob + log_det, site["scale"]))
