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
from numpyro_kscore._util.linalg import factorize, log_abs_det, slogdet_and_inverse

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

    if not with_density:
        return push(noise), None
    fixed = lax.stop_gradient((noise, labels, network, affine))
    if network.bottleneck < noise.shape[0]:
        return push(noise), low_rank_density(*fixed)
    return push(noise), full_density(*fixed)


def full_density(
    noise: jax.Array,
    labels: tuple[jax.Array, ...],
    network: Perceptron,
    affine: tuple[jax.Array, jax.Array, jax.Array],
) -> LocalDensity:
    """:func:`local_density` of the residual map."""
    loc, scale, mixing = affine

    def slopes(noise: jax.Array) -> jax.Array:
        out, slopes = network.with_slopes(jnp.concatenate([noise, *labels]), noise.shape[0])
        of_shift, of_gate = jnp.split(slopes, [loc.shape[0]], axis=1)
        gate = jnp.exp(GATE_RATE * out[loc.shape[0] :])
        gated = GATE_RATE * of_gate * (noise * gate) + jnp.diag(gate)
        return (gated @ mixing + of_shift) * scale

    return local_density(slopes, noise)


def low_rank_density(
    noise: jax.Array,
    labels: tuple[jax.Array, ...],
    network: Perceptron,
    affine: tuple[jax.Array, jax.Array, jax.Array],
) -> LocalDensity:
    """:func:`full_density` of a map whose network has fewer units than dimensions.

    With the last hidden layer h(ε), its derivative H (h, d), gates ``e = exp(g(ε))`` and the mixing
    M, the derivative of the map is ``diag(scale) Mᵀ (E + U H)``, with ``E = diag(e)`` and U (d, h)
    from the weights of the last layer. Its determinant takes that of ``I + H E⁻¹ U`` (h, h) and one
    of M for all draws: O(h² (d + h)) for a draw in place of O(d³).
    """
    loc, scale, mixing = affine
    dim = noise.shape[0]
    weight, bias = network.readout
    mixing_sign, mixing_volume, unmix = factorize(mixing)
    of_shift = weight[:, : loc.shape[0]] @ unmix
    of_gate, gate_bias = GATE_RATE * weight[:, loc.shape[0] :], GATE_RATE * bias[loc.shape[0] :]

    def parts(noise: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        inputs = jnp.concatenate([noise, *labels])
        features, slopes = network.features_with_slopes(inputs, dim)
        log_gate = features @ of_gate + gate_bias
        gate = jnp.exp(log_gate)
        slopes = slopes.T / gate
        across = of_gate * (noise * gate) + of_shift
        core = jnp.eye(len(across), dtype=noise.dtype) + across @ slopes.T
        return (core, log_gate), (slopes, across)

    (core, log_gate), transpose, (slopes, across) = jax.vjp(parts, noise, has_aux=True)
    orientation, log_volume, inverse = slogdet_and_inverse(core)
    (slope,) = transpose((inverse.T, jnp.ones_like(log_gate)))
    pull = (noise + slope) * jnp.exp(-log_gate)
    pull = pull - slopes.T @ (inverse @ (across @ pull))
    scales = jnp.sum(jnp.log(jnp.abs(scale)))
    orientation = orientation * mixing_sign * jnp.prod(jnp.sign(scale))
    log_volume = log_volume + jnp.sum(log_gate) + mixing_volume + scales
    score = jnp.where(orientation > 0, -(unmix @ pull) / scale, jnp.nan)
    log_density = standard_normal(dim).log_prob(noise) - log_volume
    return LocalDensity(log_density, score)


def local_density(slopes: Callable[[jax.Array], jax.Array], noise: jax.Array) -> LocalDensity:
    """The local log density of what noise (d,) is pushed to, (d,), and its gradient there.

    A map that starts from positive scales keeps its orientation until it is folded. Behind a fold
    other noise is pushed to the same place, of which the local log density knows nothing.

    Args:
        slopes: the derivative of the map, a row for each number of the noise, (d, d).
        noise: standard normal, (d,).
    """
    matrix, transpose = jax.vjp(slopes, noise)
    orientation, log_volume, inverse = slogdet_and_inverse(matrix)
    (slope,) = transpose(inverse.T)
    log_density = standard_normal(noise.shape[0]).log_prob(noise) - log_volume
    score = jnp.where(orientation > 0, -inverse @ (noise + slope), jnp.nan)
    return LocalDensity(log_density, score)


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
