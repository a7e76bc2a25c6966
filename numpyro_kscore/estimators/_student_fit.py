"""A multivariate Student t distribution fitted to samples: a Gaussian, unless tails are heavier.

The scatter is that of a Gaussian shrunk by held-out score matching, fitted to samples whose
deviations are weighted as maximum likelihood weights them: with few samples for the dimension the
shrinkage matters more than the tails, and without heavy tails nothing changes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import gammaln

from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.estimators._coordinates import Coordinates
from numpyro_kscore.estimators._gaussian import fit_gaussian

__all__ = ["FittedStudent", "fit_student", "log_normalizer", "log_tail", "tail_weights"]

# Inverse degrees of freedom that are tried; 0 is a Gaussian.
INVERSE_DEGREES = (0.0, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.25, 0.33, 0.5, 0.75, 1.0)
# Gain in log likelihood for which the Gaussian is given up: Gaussian samples exceed it in 1 % of
# cases (half a χ² of one degree of freedom, and zero otherwise).
LEAST_GAIN = 2.7
# Rounds of weights and scatter, and of the scale within each: enough for scales to settle to 1 %.
ROUNDS = 4
SCALE_ROUNDS = 20


class FittedStudent(NamedTuple):
    """A Student t distribution fitted to samples.

    Attributes:
        coordinates: the map that makes its scatter the identity.
        held_out: factors (n,) that turn the score at each sample into that of the distribution
            fitted without this sample, up to O(1/n) of its shrinkage and degrees of freedom.
        inverse_degrees: 1/ν; 0 is the Gaussian.
    """

    coordinates: Coordinates
    held_out: jax.Array
    inverse_degrees: jax.Array


def tail_weights(inverse_degrees: jax.Array, squared: jax.Array, dim: int) -> jax.Array:
    """``(ν + d)/(ν + q)`` at squared distances q: by how much the score is less than a Gaussian's."""
    # The square of a far point may be infinite, and 0 · ∞ is NaN.
    tail = jnp.where(inverse_degrees > 0, squared * inverse_degrees, 0.0)
    return (1.0 + dim * inverse_degrees) / (1.0 + tail)


def log_normalizer(inverse_degrees: jax.Array, dim: int) -> jax.Array:
    """log of the density at the center, for unit scatter."""
    inverse = jnp.maximum(inverse_degrees, 1e-4)
    degrees = 1.0 / inverse
    student = gammaln(0.5 * (degrees + dim)) - gammaln(0.5 * degrees)
    student = student - 0.5 * dim * jnp.log(degrees * jnp.pi)
    return jnp.where(inverse_degrees > 0, student, -0.5 * dim * jnp.log(2 * jnp.pi))


def log_tail(inverse_degrees: jax.Array, squared: jax.Array, dim: int) -> jax.Array:
    """The log density at squared distances q less that at the center."""
    inverse = jnp.maximum(inverse_degrees, 1e-4)
    student = -0.5 * (1.0 / inverse + dim) * jnp.log1p(squared * inverse)
    return jnp.where(inverse_degrees > 0, student, -0.5 * squared)


@jax.jit
@full_precision
def fit_student(samples: jax.Array) -> FittedStudent:
    """The Student t distribution of samples (n, d), n ≥ 2.

    Cost: five times that of :func:`fit_gaussian`.
    """
    n, dim = samples.shape
    tried = jnp.asarray(INVERSE_DEGREES, samples.dtype)

    def refit(weighted: jax.Array) -> tuple[Coordinates, jax.Array]:
        gaussian = fit_gaussian(weighted)
        return gaussian.coordinates, gaussian.held_out

    def step(weighted: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        coordinates, held_out = refit(weighted)
        z = coordinates.to_kernel(samples)
        squared = jnp.sum(z * z, axis=1)
        # Seen from the other samples a sample is further out than from all.
        apart = lax.stop_gradient(squared * held_out * n / (n - 1))
        # Samples that are all the same have no scale.
        apart = jnp.where(jnp.max(apart) > jnp.finfo(apart.dtype).tiny, apart, 1.0)
        scale, gain = _best_scales(tried, apart, dim)
        best = jnp.argmax(gain)
        best = jnp.where(gain[best] - gain[0] > LEAST_GAIN, best, 0)
        inverse, scale = tried[best], scale[best]
        weights = tail_weights(inverse, squared / scale, dim)
        mean = weights @ samples / jnp.sum(weights)
        weighted = mean + jnp.sqrt(weights)[:, None] * (samples - mean)
        # To the last bit: with weights of one only rounding would be left.
        return jnp.where(inverse > 0, weighted, samples), (inverse, mean)

    weighted, (inverse, mean) = lax.scan(step, samples, None, length=ROUNDS)
    inverse, mean = inverse[-1], mean[-1]
    coordinates, held_out = refit(weighted)
    mean = jnp.where(inverse > 0, mean, coordinates.mean)
    coordinates = dataclasses.replace(coordinates, mean=mean)
    squared = jnp.sum(jnp.square(coordinates.to_kernel(samples)), axis=1)
    heavier = tail_weights(inverse, squared * held_out * n / (n - 1), dim)
    return FittedStudent(
        coordinates, held_out * heavier / tail_weights(inverse, squared, dim), inverse
    )


def _best_scales(tried: jax.Array, squared: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """For all inverse degrees the squared scale of greatest likelihood, and its logarithm."""

    def step(scale: jax.Array, _: None) -> tuple[jax.Array, None]:
        q = squared[None] / scale[:, None]
        weights = tail_weights(tried[:, None], q, dim)
        # Divided by the mean weight, which converges faster to the same scale.
        mean = jnp.mean(weights, axis=1)
        return scale * jnp.mean(weights * q, axis=1) / (dim * mean), None

    start = jnp.full_like(tried, jnp.mean(squared) / dim)
    scale = lax.scan(step, start, None, length=SCALE_ROUNDS)[0]
    tails = log_tail(tried[:, None], squared[None] / scale[:, None], dim)
    center = log_normalizer(tried, dim) - 0.5 * dim * jnp.log(scale)
    return scale, jnp.sum(tails, axis=1) + squared.shape[0] * center
