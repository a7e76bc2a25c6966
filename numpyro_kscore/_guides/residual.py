"""The residual map from noise to latents, and the density of what it makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax

from numpyro_kscore._guides.perceptron import GATE_RATE, Perceptron
from numpyro_kscore._util.linalg import log_abs_det, slogdet_and_inverse

__all__ = ["LocalDensity", "local_log_density", "push_residual", "standard_normal"]


class LocalDensity(NamedTuple):
    """The log density of a draw if no other noise were pushed there, and its gradient, (d,).

    The gradient is NaN where the map is known to be folded.
    """

    log_density: jax.Array
    score: jax.Array


# A fit traces the guide more than ten times, and this once. Most of the time of a first fit goes
# elsewhere, into the compiler.
@partial(jax.jit, static_argnames="with_density")
def push_residual(
    noise: jax.Array,
    labels: tuple[jax.Array, ...],
    network: Perceptron,
    affine: tuple[jax.Array, jax.Array, jax.Array],
    with_density: bool,
) -> tuple[jax.Array, LocalDensity | None]:
    """The residual network of :class:`AutoImplicit`, and the local log density of its output.

    Args:
        noise: standard normal, (noise_dim,).
        labels: vectors that the perceptron sees too.
        network: the perceptron, with an output of (d + noise_dim,).
        affine: location and scale, (d,), and mixing, (noise_dim, d).
        with_density: whether the density is wanted; otherwise it is None.
    """
    loc, scale, mixing = affine

    def push(noise: jax.Array) -> jax.Array:
        out = network(jnp.concatenate([noise, *labels]))
        shift, log_gate = jnp.split(out, [loc.shape[0]])
        return loc + scale * ((noise * jnp.exp(GATE_RATE * log_gate)) @ mixing + shift)

    return push(noise), local_density(push, noise) if with_density else None


def local_density(push: Callable[[jax.Array], jax.Array], noise: jax.Array) -> LocalDensity:
    """The local log density of what noise (d,) is pushed to, (d,), and its gradient there.

    A map that starts from positive scales keeps its orientation until it is folded. Behind a fold
    other noise is pushed to the same place, of which the local log density knows nothing.
    """
    jacobian = jax.jacfwd(push)
    orientation, log_volume, inverse = slogdet_and_inverse(jacobian(noise))
    slope = jax.grad(lambda noise: jnp.sum(inverse.T * jacobian(noise)))(noise)
    log_density = standard_normal(noise.shape[0]).log_prob(noise) - log_volume
    score = jnp.where(orientation > 0, -inverse.T @ (noise + slope), jnp.nan)
    return lax.stop_gradient(LocalDensity(log_density, score))


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
