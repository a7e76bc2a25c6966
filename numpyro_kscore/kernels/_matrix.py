"""Matrix-valued kernels on top of a radial profile, as scalar weights of pairs of points.

Every quantity a score estimator needs is a sum over pairs of scalar weights times three
geometric objects: the difference ``r = x - y``, the coefficient ``c`` and their inner product.
A kernel therefore only supplies the weights; :mod:`numpyro_kscore.kernels._pairwise` turns them
into matrix products. Sources: Zhou, Shi and Zhu (2020), Examples 3.2 and 3.5 (with ζ's sign
corrected) and Appendix C; the divergences are derived in ``docs/theory``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.kernels._contract import (
    DivergenceWeights,
    FieldWeights,
    Kernel,
    PotentialWeights,
)
from numpyro_kscore.kernels._profiles import IMQ, RadialProfile


def _check_smoothness(kernel: Kernel, needed: int) -> None:
    """Raise ``ValueError`` unless the profile has that many continuous derivatives."""
    if not isinstance(kernel.profile, RadialProfile):
        raise TypeError(
            f"profile: expected a radial profile such as IMQ(); got {kernel.profile!r}. A "
            "function of the squared distance is one as Profile(fn)"
        )
    if kernel.profile.differentiability < needed:
        raise ValueError(
            f"profile: expected at least {needed} continuous derivatives for "
            f"{type(kernel).__name__}; got {kernel.profile} with "
            f"{kernel.profile.differentiability:g}. Use a smoother profile, such as IMQ(), "
            "Gaussian() or Matern(2.5)"
        )


@pytree
class CurlFree(Kernel):
    """Curl-free kernel ``K(x, y) = -∇∇ᵀ φ(|x - y|²)``: its fields are gradients.

    Estimates are gradients of a log density, which diagonal kernels do not give, and stay
    accurate in high dimension (Zhou, Shi and Zhu 2020, section 3.4).

    Args:
        profile: φ, with at least four continuous derivatives of ``x -> φ(|x|²)``.

    Example::

        from numpyro_kscore.kernels import CurlFree, Gaussian

        kernel = CurlFree(Gaussian())
        kernel(samples[0], samples[1])  # (2, 2)
        estimator = ScoreEstimator(kernel)
    """

    profile: RadialProfile = IMQ()
    has_potential = True

    def check(self) -> None:
        _check_smoothness(self, 4)

    def trace(self, dim: int) -> jax.Array:
        return -2.0 * dim * self.profile.derivatives(jnp.zeros(()), 1)[1]

    def scale_exponent(self) -> int:
        return 2

    def field_weights(
        self, s: jax.Array, dim: int, within: jax.Array | None = None
    ) -> FieldWeights:
        _, d1, d2, d3 = self.profile.derivatives(s, 3)
        own = s if within is None else within
        return FieldWeights(-4.0 * d2, -2.0 * d1, 4.0 * (dim + 2) * d2 + 8.0 * own * d3)

    def potential_weights(self, s: jax.Array, dim: int) -> PotentialWeights:
        _, d1, d2 = self.profile.derivatives(s, 2)
        return PotentialWeights(-2.0 * d1, 2.0 * dim * d1 + 4.0 * s * d2)

    def divergence_weights(self, s: jax.Array, dim: int) -> DivergenceWeights:
        _, _, d2, d3, d4 = self.profile.derivatives(s, 4)
        return DivergenceWeights(
            along=-8.0 * d3,
            trace=-4.0 * d2,
            cross=-8.0 * d2,
            zeta_along=8.0 * (dim + 4) * d3 + 16.0 * s * d4,
            zeta=4.0 * (dim + 2) * d2 + 8.0 * s * d3,
        )


@pytree
class Diagonal(Kernel):
    """Diagonal kernel ``K(x, y) = φ(|x - y|²) I``: Stein and spectral (SSGE) estimators.

    Args:
        profile: φ, with at least two continuous derivatives of ``x -> φ(|x|²)``.

    Example::

        from numpyro_kscore.kernels import Diagonal, Matern
        from numpyro_kscore.regularizers import NuMethod

        score = ScoreEstimator(Diagonal(Matern(2.5)), NuMethod(45)).fit(samples)
        score(samples[:5])  # (5, 2)
    """

    profile: RadialProfile = IMQ()
    is_scalar = True

    def check(self) -> None:
        _check_smoothness(self, 2)

    def trace(self, dim: int) -> jax.Array:
        return dim * self.profile(jnp.zeros(()))

    def scale_exponent(self) -> int:
        return 0

    def field_weights(
        self, s: jax.Array, dim: int, within: jax.Array | None = None
    ) -> FieldWeights:
        value, d1 = self.profile.derivatives(s, 1)
        return FieldWeights(None, value, -2.0 * d1)

    def divergence_weights(self, s: jax.Array, dim: int) -> DivergenceWeights:
        _, d1, d2 = self.profile.derivatives(s, 2)
        return DivergenceWeights(None, None, 2.0 * d1, -4.0 * d2, -2.0 * d1)
