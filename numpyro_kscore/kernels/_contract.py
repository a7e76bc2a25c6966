"""The contract of kernels: scalar weights of pairs of points."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class FieldWeights(NamedTuple):
    """Weights of the field ``K(x, y) c`` and of the divergence term ζ, in the shape of ``s``.

    ``K(x, y) c = outer · r (rᵀc) + inner · c`` and ``ζ(x) = mean_j zeta_j · r_j``.

    Attributes:
        outer: weight of ``r rᵀ``; None where it vanishes.
        inner: weight of the identity.
        zeta: weight of r in ζ.

    Example::

        from numpyro_kscore.kernels import CurlFree

        r, c = samples[0] - samples[1], samples[2]
        weights = CurlFree().field_weights(jnp.sum(r**2), dim=2)
        field = weights.outer * r * jnp.dot(r, c) + weights.inner * c
        jnp.allclose(field, CurlFree()(samples[0], samples[1]) @ c, rtol=1e-4)  # True
    """

    outer: jax.Array | None
    inner: jax.Array
    zeta: jax.Array


class PotentialWeights(NamedTuple):
    """Weights of the potentials, in the shape of ``s``.

    Attributes:
        field: the potential of ``K(x, y) c`` is ``field · rᵀc``.
        zeta: the potential of ζ is ``mean_j zeta_j``.

    Example::

        from numpyro_kscore.kernels import CurlFree

        r, c = samples[0] - samples[1], samples[2]
        weights = CurlFree().potential_weights(jnp.sum(r**2), dim=2)
        potential = weights.field * jnp.dot(r, c)  # its gradient is K(x, y) c
        potential  # ()
    """

    field: jax.Array
    zeta: jax.Array


class DivergenceWeights(NamedTuple):
    """Weights of ``tr(A ∇)`` applied to ``K(·, y) c`` and to ζ, for a symmetric matrix A.

    ``tr(A ∇ K c) = (rᵀc)(along · rᵀA r + trace · tr A) + cross · rᵀA c``, and for ζ
    ``mean_j [zeta_along · rᵀA r + zeta · tr A]``.

    Attributes:
        along: weight of ``(rᵀc) rᵀA r``; None where it vanishes.
        trace: weight of ``(rᵀc) tr A``; None where it vanishes.
        cross: weight of ``rᵀA c``.
        zeta_along: weight of ``rᵀA r`` in ζ.
        zeta: weight of ``tr A`` in ζ.

    Example::

        from numpyro_kscore.kernels import CurlFree

        r, c = samples[0] - samples[1], samples[2]
        weights = CurlFree().divergence_weights(jnp.sum(r**2), dim=2)
        rate = (
            weights.along * jnp.sum(r**2) + 2 * weights.trace + weights.cross
        )  # A is the identity
        divergence = rate * jnp.dot(r, c)
        divergence  # ()
    """

    along: jax.Array | None
    trace: jax.Array | None
    cross: jax.Array
    zeta_along: jax.Array
    zeta: jax.Array


class Kernel:
    """A radial matrix-valued kernel; subclasses give the weights of pairs of points.

    Example::

        from numpyro_kscore.kernels import CurlFree, Kernel

        kernel: Kernel = CurlFree()
        kernel(samples[0], samples[1])  # (2, 2)
        kernel.trace(dim=2)  # 2.0
        kernel.has_potential  # True
    """

    #: The radial profile, a :class:`~numpyro_kscore.kernels.RadialProfile`.
    profile: Any
    #: Whether fields of this kernel are gradients, so that a log density exists.
    has_potential = False
    #: Whether K(x, y) is a multiple of the identity.
    is_scalar = False

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

        ``within`` is the part of ``s`` in the coordinates of the field, where the points also have
        those of a context (:meth:`~numpyro_kscore.ScoreEstimator.at_samples`); ``dim`` and r then
        refer to the coordinates of the field. None means all of ``s``.
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
