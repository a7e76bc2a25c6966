"""Location and scale of a prior, as one of unconstrained values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import biject_to, transforms

from numpyro_kscore._model.dependencies import layers
from numpyro_kscore._transports.prior import LocationScale

__all__ = ["location_and_scale"]

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
