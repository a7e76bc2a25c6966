"""Spectral measures of radial profiles, and frequencies drawn from them.

Every profile with a name here is a scale mixture of Gaussians, ``φ(s) = φ(0) E exp(-τ s/2)``, so
``φ(|r|²) = φ(0) E cos(ω·r)`` with ``ω = √τ z`` and z standard normal. Frequencies of the curl-free
kernel have the density of its trace, that of ω times ``|ω|²`` (docs/theory): then ``|z|²`` is
chi-squared with d + 2 degrees of freedom, and τ has its own density times τ.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_kscore._util.linalg import qr
from numpyro_kscore.kernels._profiles import (
    IMQ,
    Gaussian,
    Matern,
    Mixture,
    RadialProfile,
    RationalQuadratic,
)


def check_spectral(profile: RadialProfile) -> None:
    """Raise ``TypeError`` for a profile whose spectral measure is not known."""
    parts = profile.profiles if isinstance(profile, Mixture) else (profile,)
    for part in parts:
        if isinstance(part, Mixture):
            check_spectral(part)
        elif not isinstance(part, IMQ | Gaussian | RationalQuadratic | Matern):
            raise TypeError(
                "profile: expected one whose spectral measure is known: IMQ, Gaussian, "
                f"RationalQuadratic, Matern, or a Mixture of these; got {part!r}. Use landmarks= "
                "or subset= with other profiles"
            )


def draw_frequencies(
    profile: RadialProfile, key: jax.Array, count: int, dim: int, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """``count`` frequencies in ``dim`` dimensions, of density ``|ω|²`` times the spectral measure.

    They are unit vectors, (k, d), and lengths in 1/bandwidth, (k,). Directions are orthonormal in
    blocks of d (Yu et al. 2016), so that ``Σ u uᵀ`` over whole blocks, and with it K(x, x), is
    exact.

    Cost: O(k d²).
    """
    key_scale, key_length, key_direction = random.split(key, 3)
    squares = 2.0 * _draw_gamma(key_length, 0.5 * dim + 1.0, count, dtype)
    lengths = jnp.sqrt(squares * _weighted_scales(profile, key_scale, count, dtype))
    blocks = random.normal(key_direction, (-(-count // dim), dim, dim), dtype)
    directions = lax.map(lambda block: qr(block)[0].T, blocks).reshape(-1, dim)[:count]
    return directions, lengths


def _weighted_scales(
    profile: RadialProfile, key: jax.Array, count: int, dtype: jnp.dtype
) -> jax.Array:
    """Draws of τ under its density times τ, (count,)."""
    if isinstance(profile, Gaussian):
        return jnp.ones(count, dtype)
    if isinstance(profile, IMQ):
        # τ/2 is gamma with shape β: (1 + s)^-β = E exp(-g s).
        return 2.0 * _draw_gamma(key, profile.exponent + 1.0, count, dtype)
    if isinstance(profile, RationalQuadratic):
        return _draw_gamma(key, profile.alpha + 1.0, count, dtype) / profile.alpha
    if isinstance(profile, Matern):
        # ω is Student t with 2ν degrees of freedom: τ = ν/g with g gamma of shape ν.
        return profile.nu / _draw_gamma(key, profile.nu - 1.0, count, dtype)
    if isinstance(profile, Mixture):
        return _weighted_scales_of_mixture(profile, key, count, dtype)
    check_spectral(profile)
    raise NotImplementedError


def _draw_gamma(key: jax.Array, shape: float, count: int, dtype: jnp.dtype) -> jax.Array:
    """Gamma variables, (count,)."""
    degrees = 2.0 * shape
    if degrees == int(degrees):
        # Half of a chi-squared variable: a general one takes seconds to compile.
        return 0.5 * jnp.sum(random.normal(key, (int(degrees), count), dtype) ** 2, axis=0)
    return random.gamma(key, shape, (count,), dtype)


def _weighted_scales_of_mixture(
    profile: Mixture, key: jax.Array, count: int, dtype: jnp.dtype
) -> jax.Array:
    """The same where each component has a share of the trace, ``-2 w φ'(0)/ℓ²``."""
    key, *keys = random.split(key, len(profile.profiles) + 1)
    weights, rates = (
        jnp.stack([jnp.asarray(value, dtype) for value in values or ()])
        for values in (profile.weights, profile.lengthscales)
    )
    rates = 1.0 / jnp.square(rates)
    zero = jnp.zeros((), dtype)
    slopes = jnp.stack([part.derivatives(zero, 1)[1] for part in profile.profiles])
    which = random.categorical(key, jnp.log(-weights * rates * slopes), shape=(count,))
    drawn = [
        rate * _weighted_scales(part, own, count, dtype)
        for part, own, rate in zip(profile.profiles, keys, rates, strict=True)
    ]
    return jnp.take_along_axis(jnp.stack(drawn), which[None], axis=0)[0]
