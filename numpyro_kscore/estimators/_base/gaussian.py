"""A Gaussian fitted to samples, with the covariance shrunk by held-out score matching.

Inverting a sample covariance is what ruins a Gaussian score in more than a few dimensions: with
128 draws in 32 dimensions its error is as large as the score itself. Here the standard deviations
are shrunk toward each other, the correlations toward zero, and the precision is scaled, by as
much as minimizes the score-matching loss ``E[½ sᵀM s + div(M s)]`` with every draw left out once,
in a metric M between the covariance, for many samples, and the identity. The families have that
loss in closed form, from one eigendecomposition, so nothing is re-fitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.linalg import cholesky, eigh, invert_lower, qr
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.estimators._base.standardization import (
    Coordinates,
    Whitening,
    standardize_samples,
)

# Fractions τ that are tried, by which log variances move to their mean.
EVENINGS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Fractions ρ of shrinkage that are tried; 0 is one, since a stiff posterior needs none.
SHRINKAGES = (
    *(0.0, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.06),
    *(0.1, 0.16, 0.25, 0.4, 0.6, 0.8, 1.0),
)
# Weight of parameters over samples in the metric that errors are measured in.
PARAMETERS_WEIGHT = 4.0
# Safety cap on γ; the largest value seen for samples that vary was 1.3.
MOST_SHARPNESS = 4.0


class FittedGaussian(NamedTuple):
    """A Gaussian fitted to samples.

    Attributes:
        coordinates: the map that whitens it.
        held_out: factors (n,) that turn the score at each sample into that of the Gaussian fitted
            without this sample, up to O(1/n) of its shrinkage.
        shrinkage: fraction ρ of the correlation matrix that was replaced by the identity.
    """

    coordinates: Coordinates
    held_out: jax.Array
    shrinkage: jax.Array


@quick_jit
@full_precision
def fit_gaussian(samples: jax.Array, members: Any = None, share: Any = 1.0) -> FittedGaussian:
    """The Gaussian whose score predicts left-out samples best, of a family with three parameters.

    First the standard deviations D: τ moves their logarithms to the mean, as the best Gaussian
    without correlations has it. Then, with R the covariance in those units, the precision is
    ``γ D⁻¹ ((1-ρ) R + ρ I)⁻¹ D⁻¹``. Leaving sample i out changes R by a multiple of ``x_i x_iᵀ``,
    which the Sherman-Morrison formula turns into weights of ``x_iᵀ B⁻¹ x_i`` and
    ``x_iᵀ B⁻¹ M B⁻¹ x_i``, with ``M = (R + c I)/(1 + c)`` and c = 4 k²/n for k coordinates that
    vary; the best γ for each ρ is a ratio of two means. D stays that of all samples in this step.
    ``members`` are 1 for the samples, (n, d), that it is fitted to and 0 for others. Of copies,
    which are left out together, a ``share`` is distinct: n is that of so many samples.

    Cost: O(n d² + d³), the eigendecomposition O(min(n, d)³).
    """
    dim = samples.shape[1]
    n: Any = samples.shape[0]
    average = partial(jnp.mean, axis=0)
    if members is not None:
        n = jnp.maximum(jnp.sum(members), 2.0)
        average = partial(jnp.tensordot, members / n, axes=1)
        # Others are moved to the mean, where they add nothing.
        samples = jnp.where(members[:, None] > 0, samples, average(samples))
    distinct = jnp.maximum(share * n, 2.0).astype(samples.dtype)
    diagonal = standardize_samples(samples, "diagonal")
    if members is not None:
        scale = diagonal.scale * jnp.sqrt(samples.shape[0] / n)
        diagonal = dataclasses.replace(diagonal, scale=scale)
    # Coordinates that do not vary have scale 1 by definition, and at most rounding in them. They
    # say nothing about the others, and are left out.
    varies = jnp.sum(jnp.square(diagonal.to_kernel(samples)), axis=0) > 0.5 * n
    diagonal = _even(samples, diagonal, varies, distinct, average)
    x = jnp.where(varies, diagonal.to_kernel(samples), 0.0)
    covariance = x.T @ x / n + jnp.diag(jnp.where(varies, 0.0, 1.0).astype(samples.dtype))
    eigenvalues, counts, squares = _spectrum(lax.stop_gradient(x), varies, n)

    # Without sample i, whose own deviation is then n/(n-1) times as large:
    # (1-ρ) R_(-i) + ρ I = B - b x_i x_iᵀ with B = (1-ρ) n/(n-1) R + ρ I, b = (1-ρ) n/(n-1)².
    rho = jnp.asarray(SHRINKAGES if dim > 1 else (1.0,), samples.dtype)
    larger = distinct / (distinct - 1)
    b = (1.0 - rho) * (distinct / (distinct - 1) ** 2)
    spectrum = ((1.0 - rho) * larger)[:, None] * eigenvalues + rho[:, None]
    floor = 10 * dim * jnp.finfo(samples.dtype).eps * jnp.max(spectrum, axis=1)
    is_sound = jnp.min(spectrum, axis=1) > floor
    inverse = 1.0 / jnp.maximum(spectrum, floor[:, None])
    # In units of the samples' spread, errors along all directions count alike. That is safe where
    # the covariance is known; where it is not, directions of no spread at all must count too.
    unknown = PARAMETERS_WEIGHT * jnp.square(jnp.sum(varies)) / distinct
    metric = (eigenvalues + unknown) / (1.0 + unknown)
    once, twice = squares @ inverse.T, squares @ (metric * jnp.square(inverse)).T
    remaining = 1.0 - b * once
    is_sound = is_sound & (jnp.min(remaining, axis=0) > 1e-3)
    remaining = jnp.maximum(remaining, 1e-3)
    # The loss is γ² square/2 - γ trace.
    square = average(larger**2 * twice / remaining**2)
    trace = average(inverse @ (metric * counts) + b * twice / remaining)
    # Samples that do not vary have no square; their scale is 1 by definition, and stays near it.
    ratio = trace / jnp.where(square > 0, square, jnp.inf)
    sharpness = jnp.clip(jnp.where(square > 0, ratio, 1.0), 1e-6, MOST_SHARPNESS)
    # Judged with the γ that is taken: a large one makes up for shrinkage in a stiff direction.
    gain = sharpness * (trace - 0.5 * sharpness * square)
    best = jnp.argmax(jnp.where(is_sound, gain, -jnp.inf))
    shrinkage, sharpness = rho[best], sharpness[best]
    shrunk = (1.0 - shrinkage) * covariance
    factor = None if dim == 1 else cholesky(shrunk + shrinkage * jnp.eye(dim, dtype=shrunk.dtype))
    coordinates = dataclasses.replace(
        diagonal,
        scale=jnp.where(varies, diagonal.scale / jnp.sqrt(sharpness), diagonal.scale),
        whitening=None if factor is None else Whitening(factor, invert_lower(factor)),
    )
    # B is this multiple of (1-ρ) R + ρ I where eigenvalues are 1, and for ρ = 0 everywhere.
    whole = (1.0 - shrinkage) * larger + shrinkage
    return FittedGaussian(coordinates, larger / (whole * remaining[:, best]), shrinkage)


@full_precision
def moment_scores(samples: jax.Array, context: jax.Array | None = None) -> jax.Array:
    """Scores at samples of the Gaussian with exactly their mean and covariance S: -S⁻¹ (x - mean).

    As a score this is a poor one, too long by n/(n - d - 2). As the gradient of an entropy it has
    no bias: over samples ``x_i(φ)`` it is that of ``½ log det S``, and for Gaussian samples the
    mean of ``log det S`` is the log determinant of the true covariance plus a number that depends
    on n and d alone. Shrinking S would spoil that.

    With a context, (n, c), it is the Gaussian of the rest of a linear regression on the context.
    Samples are (n, d) with n > d + c; directions in which they do not vary beyond rounding get a
    finite score.

    Cost: O(n (d + c)²).
    """
    diagonal = standardize_samples(samples, "diagonal")
    z = diagonal.to_kernel(samples)
    if context is not None:
        directions = qr(standardize_samples(context, "diagonal").to_kernel(context))[0]
        z = z - directions @ (directions.T @ z)
    # A factor of the samples, not of S: squaring them would cost half of the digits.
    n = samples.shape[0]
    basis, factor = qr(z)
    pivots = jnp.diag(factor)
    floor = 10 * jnp.finfo(z.dtype).eps * n
    safe = jnp.where(pivots < 0, -1.0, 1.0) * jnp.maximum(jnp.abs(pivots), floor)
    factor = factor + jnp.diag(safe - pivots)
    return -n * (basis @ invert_lower(factor.T)) / diagonal.scale


def _spectrum(x: jax.Array, varies: jax.Array, n: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Eigenvalues of ``xᵀx/n`` (k,), how many varying coordinates each stands for, squares (m, k).

    The squares are those of x's components along the eigenvectors. Where there are more
    coordinates than samples, all but n eigenvalues are zero and the others those of ``x xᵀ/n``.
    Not differentiated: the shrinkage is selected by it, and equal eigenvalues have no derivative.
    """
    count, dim = x.shape
    if dim <= count:
        fixed = jnp.diag(jnp.where(varies, 0.0, 1.0).astype(x.dtype))
        eigenvalues, vectors = eigh(x.T @ x / n + fixed)
        counts = jnp.sum(jnp.square(vectors) * varies[:, None], axis=0)
        return jnp.maximum(eigenvalues, 0.0), counts, jnp.square(x @ vectors)
    eigenvalues, vectors = eigh(x @ x.T / n)
    eigenvalues = jnp.concatenate([jnp.zeros_like(x[:1, 0]), jnp.maximum(eigenvalues, 0.0)])
    others = jnp.sum(varies.astype(x.dtype)) - count
    counts = jnp.concatenate([others[None], jnp.ones_like(x[:, 0])])
    squares = n * eigenvalues * jnp.pad(jnp.square(vectors), ((0, 0), (1, 0)))
    return eigenvalues, counts, squares


def _even(
    samples: jax.Array,
    diagonal: Coordinates,
    varies: jax.Array,
    n: Any,
    average: Callable[[jax.Array], jax.Array],
) -> Coordinates:
    """Standard deviations moved toward their geometric mean."""
    weights = varies / jnp.maximum(jnp.sum(varies), 1).astype(samples.dtype)
    z = diagonal.to_kernel(samples)
    # Leaving sample i out: variances, and its deviation from the others' mean.
    remaining = jnp.maximum(1.0 - z * z / (n - 1), 1e-3)
    log_variances = 2 * jnp.log(diagonal.scale) + jnp.log(n / (n - 1) * remaining)
    deviations = n / (n - 1) * z

    def loss(tau: jax.Array) -> jax.Array:
        log_mean = (log_variances @ weights)[:, None]
        # In units of the standard deviations of all samples.
        relative = tau * (log_mean - log_variances) + log_variances - 2 * jnp.log(diagonal.scale)
        inverse = jnp.exp(-relative)
        # The scale of the precision is free; its best value is a ratio.
        square = average(jnp.square(inverse * deviations) @ weights)
        return -(average(inverse @ weights) ** 2) / square

    taus = jnp.asarray(EVENINGS, samples.dtype)
    losses = lax.map(loss, taus)
    tau = taus[jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))]
    log_scale = jnp.log(diagonal.scale)
    scale = jnp.exp(log_scale + tau * (log_scale @ weights - log_scale))
    # Keep the scale bit for bit where τ = 0.
    scale = jnp.where(varies & (tau > 0), scale, diagonal.scale)
    return dataclasses.replace(diagonal, scale=scale)
