"""Partially non-centered coordinates of latents whose prior is set by other latents.

Under a prior ``θ ~ Normal(μ, τ)`` whose location and scale are latents themselves, the
unconstrained value u of θ has a posterior that widens and narrows with τ: a funnel. If the data say
of it what one normal observation y would say, the posterior given μ and τ is normal, with

    mean  (1 - k) μ + k y,      k = c r² / (1 - c + c r²),      r = τ / τ₀,
    standard deviation in proportion to  r / √(1 - c + c r²),

where τ₀ is a typical τ, and c, the degree of centering, is the share of the data in the precision
there. In the coordinate v of ``u = mean + v r / √(1 - c + c r²)`` there is no funnel then, from the
smallest τ, where the prior decides, to the largest. With c = 1 and y = 0 that is u, which is best
where data say much about θ; c = 0 and τ₀ = 1 is the non-centered form, best where they say little
(Papaspiliopoulos, Roberts and Sköld 2007). For a vector with scale matrix L = D W, D diagonal and W
with ones on its diagonal, D takes the place of τ, and ``(c I + (1 - c) W) v`` that of v.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from numpyro.distributions import biject_to, transforms

from numpyro_kscore._tracing.coupling import Centering
from numpyro_kscore._tracing.dependencies import layers

__all__ = [
    "LocationScale",
    "from_centered",
    "location_and_scale",
    "share_and_log_size",
    "to_centered",
]

# Families u = loc + scale * noise.
LOCATION_SCALE = (
    dist.Normal,
    dist.StudentT,
    dist.Laplace,
    dist.Cauchy,
    dist.Logistic,
    dist.Gumbel,
    dist.SoftLaplace,
)
# Distributions of a transformed value.
TRANSFORMED = (dist.TransformedDistribution, dist.LogNormal)


class LocationScale(NamedTuple):
    """Location and scale of a prior, as one of unconstrained values.

    Attributes:
        loc: of the shape of the unconstrained value, or one that broadcasts to it.
        scale: positive, likewise; or lower triangular, batch + (k, k), with a positive diagonal.
        is_matrix: whether the scale is a matrix.
    """

    loc: jax.Array
    scale: jax.Array
    is_matrix: bool = False

    @property
    def diagonal(self) -> jax.Array:
        """The scale, or the diagonal of its matrix."""
        if not self.is_matrix:
            return self.scale
        return jnp.diagonal(self.scale, axis1=-2, axis2=-1)


def location_and_scale(fn: dist.Distribution) -> LocationScale | None:
    """Location and scale of a prior in unconstrained coordinates; None if its family has none."""
    # A wrapper that moves values, such as a truncated distribution, makes another family; those
    # that expand, mask or reinterpret axes keep it.
    keeps = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)
    family = next(layer for layer in layers(fn) if not isinstance(layer, keeps))
    if type(family) in TRANSFORMED:
        return _of_image(family.transforms, layers(family)[-1])
    return _of_family(family)


def _of_family(base: dist.Distribution) -> LocationScale | None:
    if isinstance(base, LOCATION_SCALE):
        return LocationScale(jnp.asarray(base.loc), jnp.asarray(base.scale))
    if isinstance(base, dist.MultivariateNormal | dist.MultivariateStudentT):
        return LocationScale(base.loc, base.scale_tril, is_matrix=True)
    if isinstance(base, dist.GaussianRandomWalk):
        steps = jnp.tril(jnp.ones((base.num_steps, base.num_steps)))
        scale = jnp.asarray(base.scale)[..., None, None] * steps
        return LocationScale(jnp.zeros(()), scale, is_matrix=True)
    size = _size_of_positive(base)
    if size is not None and isinstance(biject_to(base.support), transforms.ExpTransform):
        return LocationScale(jnp.log(size), jnp.ones_like(size))
    return None


def _size_of_positive(base: dist.Distribution) -> jax.Array | None:
    """A scale parameter of a distribution of positive numbers."""
    if isinstance(base, dist.HalfNormal | dist.HalfCauchy | dist.Weibull):
        return jnp.asarray(base.scale)
    if isinstance(base, dist.Exponential):
        return 1 / jnp.asarray(base.rate)
    if isinstance(base, dist.Gamma):
        return base.concentration / base.rate
    if isinstance(base, dist.InverseGamma):
        return base.rate / base.concentration
    return None


def _of_image(steps: list[transforms.Transform], base: dist.Distribution) -> LocationScale | None:
    """The family of ``loc + scale * base``, or of its exponential, whose logarithm it is."""
    if steps and isinstance(steps[-1], transforms.ExpTransform):
        steps = steps[:-1]
    if not isinstance(base, LOCATION_SCALE):
        return None
    loc, scale = jnp.asarray(base.loc), jnp.asarray(base.scale)
    for step in steps:
        if not isinstance(step, transforms.AffineTransform):
            return None
        loc, scale = step.loc + step.scale * loc, jnp.abs(step.scale) * scale
    return LocationScale(loc, scale)


def from_centered(u: jax.Array, prior: LocationScale, centering: Centering) -> jax.Array:
    """The coordinate v of an unconstrained value u."""
    mean, log_size = _given_prior(prior, centering)
    rest = (u - mean) * jnp.exp(-log_size)
    if not prior.is_matrix:
        return rest
    factor = _blended(prior, centering)
    rest = rest[..., None]
    factor = jnp.broadcast_to(factor, rest.shape[:-1] + factor.shape[-1:])
    return solve_triangular(factor, rest, lower=True)[..., 0]


def to_centered(
    v: jax.Array, prior: LocationScale, centering: Centering
) -> tuple[jax.Array, jax.Array]:
    """The unconstrained value u of a coordinate v, and log |du/dv| element by element."""
    mean, log_size = _given_prior(prior, centering)
    log_det = jnp.broadcast_to(log_size, v.shape)
    if prior.is_matrix:
        v = (_blended(prior, centering) @ v[..., None])[..., 0]
    return mean + jnp.exp(log_size) * v, log_det


def _given_prior(prior: LocationScale, centering: Centering) -> tuple[jax.Array, jax.Array]:
    """The mean of unconstrained values given their prior, and the logarithm of their size."""
    move = jnp.log(prior.diagonal) - centering.log_scales
    share, log_size = share_and_log_size(move, centering.degrees)
    return (1 - share) * prior.loc + share * centering.locs, log_size


def share_and_log_size(move: jax.Array, degrees: jax.Array) -> tuple[jax.Array, jax.Array]:
    """k, and the logarithm of r / √(1 - c + c r²), at ``move = log r`` and degrees c."""
    of_data = jnp.log(degrees) + 2 * move
    total = jnp.logaddexp(of_data, jnp.log1p(-degrees))
    return jnp.exp(of_data - total), move - 0.5 * total


def _blended(prior: LocationScale, centering: Centering) -> jax.Array:
    """The unit triangle between W and the identity."""
    unit = prior.scale / prior.diagonal[..., :, None]
    identity = jnp.eye(unit.shape[-1], dtype=unit.dtype)
    return identity + (1 - centering.degrees)[..., :, None] * (unit - identity)
