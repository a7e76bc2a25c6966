"""The residual map from noise to latents, and the density of what it makes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_kscore._guides.perceptron import GATE_RATE
from numpyro_kscore._util.linalg import log_abs_det

__all__ = ["gated", "local_log_density", "standard_normal"]


@jax.jit
def gated(
    noise: jax.Array, out: jax.Array, loc: jax.Array, scale: jax.Array, mixing: jax.Array
) -> jax.Array:
    """The residual network of :class:`AutoImplicit`, from what its perceptron gives."""
    dim = loc.shape[0]
    shift, log_gate = out[:dim], GATE_RATE * out[dim:]
    return loc + scale * ((noise * jnp.exp(log_gate)) @ mixing + shift)


def local_log_density(push: Callable[[jax.Array], jax.Array], noise: jax.Array) -> jax.Array:
    """Log density of what noise (d,) is pushed to, (d,), if no other noise is pushed there."""
    jacobian = jax.jacfwd(push)(noise)
    # Without a loop where there is nothing to eliminate.
    is_single = noise.shape[0] == 1
    log_volume = jnp.log(jnp.abs(jacobian[0, 0])) if is_single else log_abs_det(jacobian)
    return standard_normal(noise.shape[0]).log_prob(noise) - log_volume


def standard_normal(dim: int) -> dist.Distribution:
    """The standard normal distribution of vectors (dim,)."""
    # By NumPy and unchecked: operations outside a compiled step are compiled one by one.
    zeros = jnp.asarray(np.zeros(dim))
    return dist.Normal(zeros, 1.0, validate_args=False).to_event(1)
