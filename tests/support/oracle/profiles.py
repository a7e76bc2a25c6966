"""Radial profiles: phi of the squared distance, by explicit derivatives and for autodiff."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

Array = np.ndarray


@dataclass(frozen=True)
class RadialProfile:
    """phi(s) and its derivatives; ``traced`` is the same phi for automatic differentiation."""

    derivative: Callable[[Array, int], Array]
    traced: Callable[[jax.Array], jax.Array]

    def times(self, s: Array, order: int, power: int = 0) -> Array:
        """``s**power * phi^(order)(s)``, the limit 0 at s = 0 when ``power > 0``.

        A Matern profile has derivatives that blow up at 0 more slowly than the powers of s that
        multiply them in the estimator, so the product needs its limit there, not 0 * inf.
        """
        s = np.asarray(s, np.float64)
        if power == 0:
            return self.derivative(s, order)
        positive = s > 0
        safe = np.where(positive, s, 1.0)
        return np.where(positive, safe**power * self.derivative(safe, order), 0.0)


def imq(exponent: float = 0.5) -> RadialProfile:
    """(1 + s)^-exponent."""

    def derivative(s: Array, order: int) -> Array:
        scale = (-1) ** order * special.poch(exponent, order)
        return scale * (1 + s) ** (-exponent - order)

    return RadialProfile(derivative, lambda s: (1 + s) ** (-exponent))


def gaussian() -> RadialProfile:
    """exp(-s / 2)."""
    return RadialProfile(
        lambda s, order: (-0.5) ** order * np.exp(-0.5 * s), lambda s: jnp.exp(-0.5 * s)
    )


def rational_quadratic(alpha: float = 1.0) -> RadialProfile:
    """(1 + s / (2 alpha))^-alpha."""

    def derivative(s: Array, order: int) -> Array:
        scale = special.poch(alpha, order) * (-0.5 / alpha) ** order
        return scale * (1 + 0.5 * s / alpha) ** (-alpha - order)

    return RadialProfile(derivative, lambda s: (1 + 0.5 * s / alpha) ** (-alpha))


def _bessel(z: Array, mu: float) -> Array:
    """z^mu K_mu(z), with its limit at z = 0 (infinite for mu <= 0)."""
    z = np.asarray(z, np.float64)
    at_zero = 2 ** (mu - 1) * math.gamma(mu) if mu > 0 else np.inf
    safe = np.where(z > 0, z, 1.0)
    return np.where(z > 0, safe**mu * special.kv(abs(mu), safe), at_zero)


def matern(nu: float = 2.5) -> RadialProfile:
    """2^(1-nu) / Gamma(nu) z^nu K_nu(z) with z = sqrt(2 nu s).

    ``(1/z d/dz) z^nu K_nu = -z^(nu-1) K_(nu-1)`` and ``d/ds = nu (1/z) d/dz`` give all derivatives.
    """
    scale = 2 ** (1 - nu) / math.gamma(nu)

    def derivative(s: Array, order: int) -> Array:
        return (-nu) ** order * scale * _bessel(np.sqrt(2 * nu * np.asarray(s)), nu - order)

    def traced(s: jax.Array) -> jax.Array:
        z = jnp.sqrt(2 * nu * s)
        polynomial = {
            1.5: 1 + z,
            2.5: 1 + z + z**2 / 3,
            3.5: 1 + z + 2 * z**2 / 5 + z**3 / 15,
        }[nu]
        return polynomial * jnp.exp(-z)

    return RadialProfile(derivative, traced)


def shifted_exponential() -> RadialProfile:
    """exp(1 - sqrt(1 + s)): completely monotone and in no list of named profiles."""
    scale = math.e * math.sqrt(2 / math.pi)

    def derivative(s: Array, order: int) -> Array:
        return (-0.5) ** order * scale * _bessel(np.sqrt(1 + np.asarray(s)), 0.5 - order)

    return RadialProfile(derivative, lambda s: jnp.exp(1 - jnp.sqrt(1 + s)))


def mixture(profiles: tuple, weights: tuple, lengthscales: tuple) -> RadialProfile:
    """sum_i w_i phi_i(s / l_i^2)."""
    parts = tuple(zip(profiles, weights, lengthscales, strict=True))
    return RadialProfile(
        lambda s, order: sum(
            w * p.derivative(np.asarray(s) / ell**2, order) / ell ** (2 * order)
            for p, w, ell in parts
        ),
        lambda s: sum(w * p.traced(s / ell**2) for p, w, ell in parts),
    )
