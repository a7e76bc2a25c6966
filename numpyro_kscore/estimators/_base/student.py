"""Multivariate Student t distributions; 1/ν = 0 is a Gaussian.

:func:`fit_student` fits one to samples: a Gaussian, unless tails are heavier. The scatter is that
of a Gaussian shrunk by held-out score matching, fitted to samples whose deviations are weighted as
maximum likelihood weights them: with few samples for the dimension the shrinkage matters more than
the tails, and without heavy tails nothing changes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.linalg import cholesky
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.estimators._base.base_scores import (
    EllipticalBase,
    log_normalizer,
    log_tail,
    tail_weights,
)
from numpyro_kscore.estimators._base.gaussian import fit_gaussian

# Inverse degrees of freedom that are tried; 0 is a Gaussian.
INVERSE_DEGREES = (0.0, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.25, 0.33, 0.5, 0.75, 1.0)
# Gain in log likelihood for which the Gaussian is given up: Gaussian samples exceed it in 1 % of
# cases (half a χ² of one degree of freedom, and zero otherwise).
LEAST_GAIN = 2.7
# Rounds of weights and scatter, and of the scale within each: enough for scales to settle to 1 %.
ROUNDS = 4
SCALE_ROUNDS = 20


@quick_jit
@full_precision
def fit_student(
    samples: jax.Array, members: jax.Array | None = None, share: jax.Array | float = 1.0
) -> EllipticalBase:
    """The Student t distribution of samples (n, d), n ≥ 2, or of those with ``members`` 1.

    A ``share`` of them is distinct, see :func:`fit_gaussian`.

    Cost: five times that of :func:`fit_gaussian`.
    """
    dim = samples.shape[1]
    n: Any = samples.shape[0]
    counted = jnp.ones_like(samples[:, 0])
    if members is not None:
        n, counted = jnp.sum(members), members
    # Likelihoods and what a sample weighs among others are those of distinct samples.
    n, counted = jnp.maximum(share * n, 2.0).astype(samples.dtype), share * counted
    tried = jnp.asarray(INVERSE_DEGREES, samples.dtype)

    # Carried on: samples with deviations in the last round's weights, its inverse degrees and mean.
    def step(carry: tuple[jax.Array, jax.Array, jax.Array], _: None) -> tuple[Any, Any]:
        last_samples, last_inverse, last_mean = carry
        gaussian = fit_gaussian(last_samples, members, share)
        coordinates, held_out = gaussian.coordinates, gaussian.held_out
        z = coordinates.to_kernel(samples)
        squared = jnp.sum(z * z, axis=1)
        # Seen from the other samples a sample is further out than from all.
        apart = lax.stop_gradient(squared * held_out * n / (n - 1))
        # Samples that are all the same have no scale.
        apart = jnp.where(jnp.max(counted * apart) > jnp.finfo(apart.dtype).tiny, apart, 1.0)
        scale, gain = _best_scales(tried, apart, dim, counted)
        best = jnp.argmax(gain)
        best = jnp.where(gain[best] - gain[0] > LEAST_GAIN, best, 0)
        inverse, scale = tried[best], scale[best]
        weights = tail_weights(inverse, squared / scale, dim)
        mean = (counted * weights) @ samples / jnp.sum(counted * weights)
        weighted = mean + jnp.sqrt(weights)[:, None] * (samples - mean)
        # Keep the samples bit for bit: with weights of one only rounding would be left.
        weighted = jnp.where(inverse > 0, weighted, samples)
        fitted = coordinates, held_out, last_inverse, last_mean
        return (weighted, inverse, mean), fitted

    start = samples, tried[0], samples[0]
    # The scatter is that of the last weights, so there is one round more, whose own weights are
    # not used: outside of the loop it would be a second copy of its program.
    rounds = lax.scan(step, start, None, length=ROUNDS + 1)[1]
    coordinates, held_out, inverse, mean = jax.tree.map(lambda a: a[-1], rounds)
    mean = jnp.where(inverse > 0, mean, coordinates.mean)
    coordinates = dataclasses.replace(coordinates, mean=mean)
    squared = jnp.sum(jnp.square(coordinates.to_kernel(samples)), axis=1)
    heavier = tail_weights(inverse, squared * held_out * n / (n - 1), dim)
    held_out = held_out * heavier / tail_weights(inverse, squared, dim)
    return EllipticalBase(coordinates, inverse, held_out=held_out)


def _best_scales(
    tried: jax.Array, squared: jax.Array, dim: int, counted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """For all inverse degrees the squared scale of greatest likelihood, and its logarithm."""
    total = jnp.sum(counted)

    def step(scale: jax.Array, _: None) -> tuple[jax.Array, None]:
        q = squared[None] / scale[:, None]
        weights = tail_weights(tried[:, None], q, dim)
        # Divided by the sum of the weights, which converges faster to the same scale.
        return scale * ((weights * q) @ counted) / (dim * (weights @ counted)), None

    start = jnp.full_like(tried, squared @ counted / total / dim)
    scale = lax.scan(step, start, None, length=SCALE_ROUNDS)[0]
    tails = log_tail(tried[:, None], squared[None] / scale[:, None], dim)
    center = log_normalizer(tried, dim) - 0.5 * dim * jnp.log(scale)
    return scale, tails @ counted + total * center


# Enough for weights to settle to about 1e-3 with two degrees of freedom.
STEPS = 40


@full_precision
def student_log_density(z: jax.Array, points: jax.Array, degrees: float) -> jax.Array:
    """log density at ``points``, (m, d) -> (m,), of the t distribution of greatest likelihood.

    Location and scatter come from whitened samples, (n, d), by the EM algorithm (Liu and Rubin
    1995) for given degrees of freedom.

    Cost: O(n d² + d³) for each of 40 steps.
    """
    dim = z.shape[1]
    eye = jnp.eye(dim, dtype=z.dtype)

    def distances(x: jax.Array, mean: jax.Array, root: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(solve_triangular(root, (x - mean).T, lower=True)), axis=0)

    def step(state: tuple[jax.Array, jax.Array], _: None) -> Any:
        mean, root = state
        weights = tail_weights(1.0 / degrees, distances(z, mean, root), dim)
        mean = weights @ z / jnp.sum(weights)
        # Divided by the sum of the weights, which converges faster than by n to the same scatter.
        centered = z - mean
        scatter = (weights[:, None] * centered).T @ centered / jnp.sum(weights)
        # A floor of rounding, for samples in a plane.
        floor = 10 * dim * jnp.finfo(z.dtype).eps * jnp.trace(scatter) / dim + 1e-30
        return (mean, cholesky(scatter + floor * eye)), None

    (mean, root), _ = lax.scan(step, (jnp.mean(z, axis=0), eye), None, length=STEPS)
    log_det = jnp.sum(jnp.log(jnp.diag(root)))
    tails = log_tail(1.0 / degrees, distances(points, mean, root), dim)
    return log_normalizer(1.0 / degrees, dim) - log_det + tails
