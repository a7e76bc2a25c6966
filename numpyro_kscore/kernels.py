"""Matrix-valued kernels on top of a radial profile, as scalar weights of pairs of points.

Every quantity a score estimator needs is a sum over pairs of scalar weights times three
geometric objects: the difference ``r = x - y``, the coefficient ``c`` and their inner product.
A kernel therefore only says which weights; :mod:`numpyro_kscore.pairwise` turns them into matrix
products. Sources: Zhou, Shi and Zhu (2020), Examples 3.2 and 3.5 (with ζ's sign corrected) and
Appendix C; the divergences are derived in ``docs/theory``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_kscore._pytree import pytree
from numpyro_kscore.profiles import IMQ, RadialProfile

__all__ = ["CurlFree", "Diagonal", "Kernel"]


class FieldWeights(NamedTuple):
    """Weights of the field ``K(x, y) c`` and of the divergence term ζ.

    ``K(x, y) c = outer · r (rᵀc) + inner · c`` and ``ζ(x) = mean_j zeta_j · r_j``. ``outer`` is
    None where it vanishes.
    """

    outer: jax.Array | None
    inner: jax.Array
    zeta: jax.Array


class PotentialWeights(NamedTuple):
    """Weights of the potentials: of ``K(x, y) c`` it is ``field · rᵀc``, of ζ ``mean_j zeta_j``."""

    field: jax.Array
    zeta: jax.Array


class DivergenceWeights(NamedTuple):
    """Weights of ``tr(A ∇)`` applied to ``K(·, y) c`` and to ζ, for a symmetric matrix A.

    ``tr(A ∇ K c) = (rᵀc)(along · rᵀA r + trace · tr A) + cross · rᵀA c``, and for ζ
    ``mean_j [zeta_along · rᵀA r + zeta · tr A]``.
    """

    along: jax.Array | None
    trace: jax.Array | None
    cross: jax.Array
    zeta_along: jax.Array
    zeta: jax.Array


class Kernel:
    """A radial matrix-valued kernel; subclasses give the weights of pairs of points."""

    profile: RadialProfile

    @property
    def has_potential(self) -> bool:
        """Whether fields of this kernel are gradients, so that a log density exists."""
        return False

    @property
    def is_scalar(self) -> bool:
        """Whether K(x, y) is a multiple of the identity."""
        return False

    def check(self) -> None:
        """Raise ``ValueError`` if the profile is too rough for this kernel."""
        raise NotImplementedError

    def trace(self, dim: int) -> jax.Array:
        """tr K(x, x) at unit bandwidth, in ``dim`` dimensions."""
        raise NotImplementedError

    def scale_exponent(self) -> int:
        """p such that K at bandwidth h is ``h^-p`` times K of the points divided by h."""
        raise NotImplementedError

    def field_weights(
        self, s: jax.Array, dim: int, within: jax.Array | None = None
    ) -> FieldWeights:
        """Weights of the field and of ζ at squared distances ``s``.

        ``within`` is the share of ``s`` in the coordinates the field has, where the points have
        others besides: a context, see :meth:`~numpyro_kscore.ScoreEstimator.at_samples`. Then
        ``dim`` and r are of those coordinates. None is all of ``s``.
        """
        raise NotImplementedError

    def potential_weights(self, s: jax.Array, dim: int) -> PotentialWeights:
        """Weights of the potentials at ``s``; only where :attr:`has_potential`."""
        raise TypeError(
            f"log_density: expected a curl-free kernel; got {type(self).__name__}, whose fields "
            "are not gradients. Use kernel=CurlFree(...)"
        )

    def divergence_weights(self, s: jax.Array, dim: int) -> DivergenceWeights:
        """Weights of the divergences at ``s``."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """K(x, y), shape (d, d), for two points of shape (d,) in units of the bandwidth."""
        r = x - y
        dim = r.shape[-1]
        weights = self.field_weights(jnp.sum(r * r), dim)
        matrix = weights.inner * jnp.eye(dim, dtype=r.dtype)
        if weights.outer is not None:
            matrix = matrix + weights.outer * jnp.outer(r, r)
        return matrix

    def _check_smoothness(self, needed: int) -> None:
        if not isinstance(self.profile, RadialProfile):
            raise TypeError(
                f"profile: expected a radial profile such as IMQ(); got {self.profile!r}. A "
                "function of the squared distance is one as Profile(fn)"
            )
        if self.profile.differentiability < needed:
            raise ValueError(
                f"profile: expected at least {needed} continuous derivatives for "
                f"{type(self).__name__}; got {self.profile} with "
                f"{self.profile.differentiability:g}. Use a smoother profile, such as IMQ(), "
                "Gaussian() or Matern(2.5)"
            )


@pytree
class CurlFree(Kernel):
    """Curl-free kernel ``K(x, y) = -∇∇ᵀ φ(|x - y|²)``: its fields are gradients.

    Estimates are gradients of a log density, which diagonal kernels do not give, and stay
    accurate in high dimension (Zhou, Shi and Zhu 2020, section 3.4).

    Args:
        profile: φ, with at least four continuous derivatives of ``x -> φ(|x|²)``.

    Raises:
        ValueError: at a fit, for a profile with fewer.
    """

    profile: RadialProfile = IMQ()

    @property
    def has_potential(self) -> bool:
        return True

    def check(self) -> None:
        self._check_smoothness(4)

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

    Raises:
        ValueError: at a fit, for a profile with fewer.
    """

    profile: RadialProfile = IMQ()

    @property
    def is_scalar(self) -> bool:
        return True

    def check(self) -> None:
        self._check_smoothness(2)

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
