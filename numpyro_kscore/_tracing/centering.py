"""Partially non-centered coordinates of latents whose prior is set by other latents.

Under a prior ``θ ~ Normal(μ, τ)`` whose location and scale are latents themselves, the
unconstrained value u of θ has a posterior that widens and narrows with τ: a funnel. In the
coordinate

    v = (u - (1 - c) μ) / τ^(1 - c)

it does so less. With centering c = 1 that is u, which is best where data say much about θ; c = 0 is
the non-centered form, best where they say little (Papaspiliopoulos, Roberts and Sköld 2007). For a
vector with scale matrix L = D W, D diagonal and W with ones on its diagonal, the divisor is
``D^(1-c) (c I + (1 - c) W)``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from numpyro.distributions import biject_to, transforms

from numpyro_kscore._tracing.dependencies import layers

__all__ = ["LocationScale", "from_centered", "location_and_scale", "to_centered"]

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


def from_centered(u: jax.Array, prior: LocationScale, centering: jax.Array) -> jax.Array:
    """The coordinate v of an unconstrained value u."""
    rest = u - (1 - centering) * prior.loc
    if not prior.is_matrix:
        return rest / prior.scale ** (1 - centering)
    diagonal, factor = _blended(prior, centering)
    rest = (rest / diagonal)[..., None]
    factor = jnp.broadcast_to(factor, rest.shape[:-1] + factor.shape[-1:])
    return solve_triangular(factor, rest, lower=True)[..., 0]


def to_centered(
    v: jax.Array, prior: LocationScale, centering: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The unconstrained value u of a coordinate v, and log |du/dv| element by element."""
    if not prior.is_matrix:
        scale = prior.scale ** (1 - centering)
        log_det = jnp.broadcast_to((1 - centering) * jnp.log(prior.scale), v.shape)
        return (1 - centering) * prior.loc + scale * v, log_det
    diagonal, factor = _blended(prior, centering)
    u = (1 - centering) * prior.loc + diagonal * (factor @ v[..., None])[..., 0]
    return u, jnp.broadcast_to(jnp.log(diagonal), v.shape)


def _blended(prior: LocationScale, centering: jax.Array) -> tuple[jax.Array, jax.Array]:
    """D^(1-c) and the unit triangle between W and the identity."""
    diagonal = jnp.diagonal(prior.scale, axis1=-2, axis2=-1)
    unit = prior.scale / diagonal[..., :, None]
    identity = jnp.eye(diagonal.shape[-1], dtype=unit.dtype)
    factor = identity + (1 - centering)[..., :, None] * (unit - identity)
    return diagonal ** (1 - centering), factor
