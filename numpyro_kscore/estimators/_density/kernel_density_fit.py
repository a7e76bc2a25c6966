"""Compiled fits of kernel density estimates: bandwidth, centers and widths."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.estimators._base.coordinates import standardize_samples
from numpyro_kscore.estimators._density.kernel_density_score import (
    KernelDensityInfo,
    KernelDensityScore,
    divergence,
    divisor,
    log_norm,
)
from numpyro_kscore.estimators._density.reference import NormalReference, reference_bandwidth
from numpyro_kscore.estimators._fit.bandwidth import AutoBandwidth
from numpyro_kscore.estimators._fit.halves import deal
from numpyro_kscore.estimators._fit.path import FEWEST_POINTS
from numpyro_kscore.kernels._smoothing import Centers, smooth

__all__ = ["fit_density"]

# Largest number of samples the selection uses; each of its fits is to half of them.
SELECTION_POINTS = 4096


@quick_jit
@full_precision
def fit_density(
    samples: jax.Array,
    pilot_scores: jax.Array | None,
    bandwidth: Any,
    floor: Any,
    *,
    correction: str | None,
    loss: str,
    standardize: str,
) -> KernelDensityScore:
    """The estimate of :meth:`~numpyro_kscore.estimators.KernelDensity.fit`, from checked input."""
    n, dim = samples.shape
    coordinates = standardize_samples(samples, standardize)
    z = coordinates.to_kernel(samples)
    if pilot_scores is not None:
        pilot_scores = coordinates.scores_to_kernel(pilot_scores)
    reference = reference_bandwidth(n, dim, correction, pilot_scores is not None)
    bandwidths = losses = None
    if isinstance(bandwidth, AutoBandwidth):
        factors = jnp.asarray(bandwidth.factors, z.dtype)
        held_out = lax.stop_gradient((z, pilot_scores, factors, floor))
        bandwidths, losses = _held_out_losses(*held_out, correction=correction, loss=loss)
        best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
        bandwidth = NormalReference(factors[best])
    if isinstance(bandwidth, NormalReference):
        bandwidth = bandwidth.factor * reference
    h = jnp.asarray(bandwidth, z.dtype)
    centers, log_floor = _place(z, pilot_scores, h, floor, correction)
    placed = [h, *jax.tree.leaves(centers)]
    info = KernelDensityInfo(
        bandwidth=h,
        floor=jnp.asarray(floor, z.dtype) / float(n) ** 2,
        finite=jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in placed])),
        bandwidths=bandwidths,
        losses=losses,
    )
    return KernelDensityScore(
        centers,
        z / h if correction == "debiased" else None,
        dataclasses.replace(coordinates, bandwidth=h),
        log_floor,
        info,
        fourth_order=correction == "laplace",
    )


def _place(
    z: jax.Array,
    pilot_scores: jax.Array | None,
    h: jax.Array,
    floor: Any,
    correction: str | None,
) -> tuple[Centers, jax.Array]:
    """Centers in units of the bandwidth, and the logarithm of the floor in these units."""
    n, dim = z.shape
    points = z / h
    log_floor = jnp.log(jnp.asarray(floor, z.dtype)) - 2 * math.log(n) + dim * jnp.log(h)
    plain = Centers(points, None)
    if correction == "debiased":
        if pilot_scores is None:
            sums = smooth(plain, points)
            scores = sums.gradient / divisor(sums, log_floor, n)[0][:, None]
        else:
            scores = h * pilot_scores
        # h² s/2, with s in units of 1/h.
        return Centers(points + 0.5 * scores, None), log_floor
    if correction == "adaptive":
        sums = smooth(plain, points)
        log_pilot = sums.log_scale + jnp.log(sums.total)
        return Centers(points, jnp.exp(0.5 * (jnp.mean(log_pilot) - log_pilot))), log_floor
    return plain, log_floor


def _held_out_losses(
    z: jax.Array,
    pilot_scores: jax.Array | None,
    factors: jax.Array,
    floor: Any,
    *,
    correction: str | None,
    loss: str,
) -> tuple[jax.Array, jax.Array]:
    """Bandwidths of fits to halves of the samples, (b,), and their losses at the others, (b,)."""
    n, dim = z.shape
    stride = -(-n // SELECTION_POINTS)
    some = jax.tree.map(lambda a: a[::stride], (z, pilot_scores))
    halves = deal(some[0].shape[0])
    size = halves[0].size
    reference = reference_bandwidth(max(size, 1), dim, correction, pilot_scores is not None)
    bandwidths = factors * reference
    if n < FEWEST_POINTS:
        return bandwidths, jnp.full_like(factors, jnp.nan)
    both = jax.tree.map(lambda a: jnp.stack([a[rows] for rows in halves]), some)
    others = both[0][::-1]

    def held_out(arguments: Any) -> jax.Array:
        h, (own, scores), other = arguments
        centers, log_floor = _place(own, scores, h, floor, correction)
        sums = smooth(centers, other / h, fourth_order=correction == "laplace")
        below, slope = divisor(sums, log_floor, size)
        if loss == "likelihood":
            log_density = sums.log_scale + jnp.log(below) - log_norm(size, dim)
            return dim * jnp.log(h) - jnp.mean(log_density)
        square = jnp.sum(jnp.square(sums.gradient / below[:, None]), axis=1)
        return jnp.mean(0.5 * square + divergence(sums, below, slope)) / h**2

    def of_bandwidth(h: jax.Array) -> jax.Array:
        return jnp.mean(lax.map(lambda pair: held_out((h, *pair)), (both, others)))

    return bandwidths, lax.map(of_bandwidth, bandwidths)
