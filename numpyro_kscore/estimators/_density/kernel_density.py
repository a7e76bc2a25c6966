"""Kernel density estimates of scores and densities: ``KernelDensity.fit(samples)``.

Where a :class:`~numpyro_kscore.ScoreEstimator` solves a regularized equation, the estimates here
are formulas: a smoothed empirical distribution, and the gradient of its logarithm. They cost one
pass over pairs, have a normalized density, and their rates are theorems (docs/theory).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial

from numpyro_kscore._util.checks import (
    as_points,
    as_scores,
    check_choice,
    check_positive,
    is_concrete,
)
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._base.copies import deal, distinct_share, find_copies
from numpyro_kscore.estimators._base.standardization import STANDARDIZE_CHOICES, standardize_samples
from numpyro_kscore.estimators._density.kernel_density_score import (
    KernelDensityInfo,
    KernelDensityScore,
    divergence,
    divisor,
    log_norm,
)
from numpyro_kscore.estimators._fit.path import FEWEST_POINTS
from numpyro_kscore.estimators._fit.settings import AutoBandwidth
from numpyro_kscore.kernels._smoothing import Centers, smooth


@pytree
class NormalReference:
    """A bandwidth rule: the best for the density of Gaussian samples, times a factor.

    It falls off as n^(-1/(d+4)), and as n^(-1/(d+8)) with a bias correction of fourth order;
    docs/theory has the constants.

    Args:
        factor: positive multiplier.

    Example::

        from numpyro_kscore.estimators import KernelDensity, NormalReference

        score = KernelDensity(NormalReference(0.8)).fit(samples)
        score.info.bandwidth  # 0.33
    """

    factor: Any = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)


def reference_bandwidth(n: Any, dim: int, correction: str | None, has_pilot: bool) -> Any:
    """The normal-reference bandwidth of n samples, in whitened units.

    It is the best one for the standard normal, whose mean integrated squared error is
    ``B h^(2r) + V/(n h^d)``; docs/theory has the table of r, B (``bias``) and V (``noise``).

    The adaptive correction has the bandwidth of none, since its expansion does not hold in a
    normal's tails. With a pilot, samples are shifted by a score from elsewhere.
    """
    square = dim * (dim + 2)
    order, noise, bias = 2, 1.0, square / 16
    if correction == "laplace":
        order, noise = 4, 1 + dim / 2 + square / 16
        bias = square * (dim + 4) * (dim + 6) / 1024
    elif correction == "debiased" and has_pilot:
        order, bias = 4, square / 256
    elif correction == "debiased":
        order, bias = 4, 25 * square / 256
        noise = 1 + dim / 3 * (2 / 3) ** (dim / 2) + square / 64 * 2 ** (-dim / 2)
    return (dim * noise / (2 * order * bias * n)) ** (1 / (2 * order + dim))


CORRECTIONS = (None, "debiased", "laplace", "adaptive")
LOSSES = ("score", "likelihood")
NUMBER_OR_RULE = "a positive finite number, or a rule such as NormalReference(0.5)"
# Multiples of the normal-reference bandwidth: it is too wide for most that is not Gaussian.
FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)


@pytree
class KernelDensity:
    """Kernel density estimator of the score ``∇ log q`` and of q, from samples of q.

    ``ρ̂(x) = (1/n) Σ_j N(x; c_j, h_j² S)`` with S the samples' covariance, and
    ``ŝ = ∇ρ̂/max(ρ̂, ε)`` (Wibisono, Wu and Yang 2024): for a subgaussian q with a Lipschitz score
    and h ~ n^(-1/(d+4)) its error ``E_q|ŝ - s|²`` falls as n^(-2/(d+4)) up to logarithms, and no
    estimator has a better rate.

    Args:
        bandwidth: ``"reference"``, the theorem's rate with the constant that is best for the
            density of Gaussian samples; a :class:`NormalReference` rule; ``"auto"``, the best of
            seven multiples of it by held-out loss, or an :class:`AutoBandwidth` rule; or a number
            in standardized units. Not differentiated when it comes from the samples.
        correction: what is done about the bias ``(h²/2) Δq`` of smoothing.
            None leaves it.
            ``"debiased"`` shifts each center by ``(h²/2) ŝ(x_j)`` (Choi and Hall 1999; SD-KDE,
            Epstein et al. 2025): bias O(h⁴), and the estimate stays a density.
            ``"laplace"`` subtracts ``(h²/2) Δρ̂``, a fourth-order kernel: bias O(h⁴); the estimate
            is negative in places, where its logarithm is -inf, and the score's divisor is a tenth
            of the uncorrected estimate.
            ``"adaptive"`` makes h_j proportional to ``ρ̃(x_j)^(-1/2)`` with a pilot ρ̃ of bandwidth
            h, and of geometric mean h (Abramson 1982): bias O(h⁴) where q is not small, and wider
            kernels in tails.
        floor: ``n² ε``, with ε in units of the density of the standardized samples: 1 is the ε of
            the theorem, 0 no floor, with which ŝ is the gradient of log ρ̂ everywhere.
        pilot: the score ŝ of ``"debiased"``: a fitted score or any function (m, d) -> (m, d), in
            1/units of the samples; None takes that of the estimate without the correction.
        loss: by which an automatic bandwidth is selected: ``"score"``, score matching, or
            ``"likelihood"``, minus the mean log density.
        standardize: ``"full"`` whitens the samples, ``"diagonal"`` scales each coordinate,
            ``"none"`` leaves them.

    Example::

        from numpyro_kscore.estimators import KernelDensity

        score = KernelDensity(correction="debiased").fit(samples)
        score(samples[:5])  # (5, 2)
        score.log_density(samples[:5])  # (5,)
    """

    bandwidth: Any = "reference"
    correction: str | None = static(default=None)
    floor: Any = 1.0
    pilot: Any = None
    loss: str = static(default="score")
    standardize: str = static(default="full")

    def __post_init__(self) -> None:
        if isinstance(self.bandwidth, str):
            check_choice("bandwidth", self.bandwidth, ("reference", "auto"), NUMBER_OR_RULE)
            rule = NormalReference() if self.bandwidth == "reference" else AutoBandwidth(FACTORS)
            object.__setattr__(self, "bandwidth", rule)
        check_positive("bandwidth", self.bandwidth)
        check_choice("correction", self.correction, CORRECTIONS)
        check_choice("loss", self.loss, LOSSES)
        check_choice("standardize", self.standardize, STANDARDIZE_CHOICES)
        if is_concrete(self.floor) and not (jnp.ndim(self.floor) == 0 and self.floor >= 0):
            raise ValueError(f"floor: expected a number of at least 0; got {self.floor}")
        if self.pilot is not None and self.correction != "debiased":
            raise ValueError(
                f"pilot: expected None with correction={self.correction!r}; got one. Use "
                "correction='debiased', or drop the pilot"
            )
        if callable(self.pilot) and jax.tree_util.all_leaves([self.pilot]):
            object.__setattr__(self, "pilot", Partial(self.pilot))

    def fit(self, samples: Any) -> KernelDensityScore:
        """Estimate score and density of the distribution the samples come from.

        Args:
            samples: i.i.d. draws, shape (n, d), n ≥ 2, in any units.

        Raises:
            ValueError: for a wrong shape, n < 2, samples or pilot scores that are not finite
                (outside ``jit``), or arrays where one number belongs.
            TypeError: for integer samples, or a pilot that is no function.

        Cost: O(n d²) as it is; one pass over all pairs, O(n² d), for ``"adaptive"`` and for
        ``"debiased"`` without a pilot; two passes over at most 4096 samples for each bandwidth that
        an automatic choice tries. Memory O(n d) beyond 2900 samples.
        """
        samples = as_points("samples", samples, minimum=2)
        for name, rule in (("bandwidth", self.bandwidth), ("floor", self.floor)):
            number = rule.factor if isinstance(rule, NormalReference) else rule
            if not isinstance(number, AutoBandwidth | float | int | np.ndarray | jax.Array):
                raise TypeError(
                    f"{name}: expected 'reference', 'auto', NormalReference(...), "
                    f"AutoBandwidth(...) or a number; got {number!r}"
                )
            if not isinstance(number, AutoBandwidth) and jnp.ndim(number):
                raise ValueError(
                    f"{name}: expected one number; got shape {jnp.shape(number)}. Several fits are "
                    "one jax.vmap"
                )
        pilot_scores = None
        if self.pilot is not None:
            if not callable(self.pilot):
                raise TypeError(f"pilot: expected a score function or None; got {self.pilot!r}")
            pilot_scores = as_scores("pilot(samples)", self.pilot(samples), samples)
        return _fit_density(dataclasses.replace(self, pilot=None), samples, pilot_scores)


# Largest number of samples the selection uses; each of its fits is to half of them.
SELECTION_POINTS = 4096


@quick_jit
@full_precision
def _fit_density(
    estimator: KernelDensity, samples: jax.Array, pilot_scores: jax.Array | None
) -> KernelDensityScore:
    """The estimate of :meth:`~numpyro_kscore.estimators.KernelDensity.fit`, from checked input."""
    n, dim = samples.shape
    bandwidth, correction = estimator.bandwidth, estimator.correction
    coordinates = standardize_samples(samples, estimator.standardize)
    z = coordinates.to_kernel(samples)
    if pilot_scores is not None:
        pilot_scores = coordinates.scores_to_kernel(pilot_scores)
    share = distinct_share(z)
    reference = reference_bandwidth(n * share, dim, correction, pilot_scores is not None)
    bandwidths = losses = None
    if isinstance(bandwidth, AutoBandwidth):
        factors = jnp.asarray(bandwidth.factors, z.dtype)
        held_out = lax.stop_gradient((estimator, z, pilot_scores, factors, share))
        bandwidths, losses = _held_out_losses(*held_out)
        best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
        bandwidth = NormalReference(factors[best])
    if isinstance(bandwidth, NormalReference):
        bandwidth = bandwidth.factor * reference
    h = jnp.asarray(bandwidth, z.dtype)
    centers, log_floor = _place(estimator, z, pilot_scores, h)
    placed = [h, *jax.tree.leaves(centers)]
    info = KernelDensityInfo(
        bandwidth=h,
        floor=jnp.asarray(estimator.floor, z.dtype) / float(n) ** 2,
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
    estimator: KernelDensity, z: jax.Array, pilot_scores: jax.Array | None, h: jax.Array
) -> tuple[Centers, jax.Array]:
    """Centers in units of the bandwidth, and the logarithm of the floor in these units."""
    n, dim = z.shape
    points = z / h
    floor = jnp.asarray(estimator.floor, z.dtype)
    log_floor = jnp.log(floor) - 2 * math.log(n) + dim * jnp.log(h)
    plain = Centers(points, None)
    if estimator.correction == "debiased":
        if pilot_scores is None:
            sums = smooth(plain, points)
            scores = sums.gradient / divisor(sums, log_floor, n)[0][:, None]
        else:
            scores = h * pilot_scores
        # h² s/2, with s in units of 1/h.
        return Centers(points + 0.5 * scores, None), log_floor
    if estimator.correction == "adaptive":
        sums = smooth(plain, points)
        log_pilot = sums.log_scale + jnp.log(sums.total)
        return Centers(points, jnp.exp(0.5 * (jnp.mean(log_pilot) - log_pilot))), log_floor
    return plain, log_floor


def _held_out_losses(
    estimator: KernelDensity,
    z: jax.Array,
    pilot_scores: jax.Array | None,
    factors: jax.Array,
    share: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Bandwidths of fits to halves of the samples, (b,), and their losses at the others, (b,)."""
    n, dim = z.shape
    correction = estimator.correction
    stride = -(-n // SELECTION_POINTS)
    some = jax.tree.map(lambda a: a[::stride], (z, pilot_scores))
    *halves, counted = deal(find_copies(some[0]))
    size = halves[0].size
    distinct = jnp.maximum(share * size, 1.0)
    reference = reference_bandwidth(distinct, dim, correction, pilot_scores is not None)
    bandwidths = factors * reference
    if n < FEWEST_POINTS:
        return bandwidths, jnp.full_like(factors, jnp.nan)
    both = jax.tree.map(lambda a: jnp.stack([a[rows] for rows in halves]), some)
    others = both[0][::-1], counted[::-1]

    def held_out(arguments: Any) -> jax.Array:
        h, (own, scores), (other, counts) = arguments
        centers, log_floor = _place(estimator, own, scores, h)
        sums = smooth(centers, other / h, fourth_order=correction == "laplace")
        below, slope = divisor(sums, log_floor, size)
        if estimator.loss == "likelihood":
            log_density = sums.log_scale + jnp.log(below) - log_norm(size, dim)
            return dim * jnp.log(h) - _mean(log_density, counts)
        square = jnp.sum(jnp.square(sums.gradient / below[:, None]), axis=1)
        return _mean(0.5 * square + divergence(sums, below, slope), counts) / h**2

    def of_bandwidth(h: jax.Array) -> jax.Array:
        return jnp.mean(lax.map(lambda pair: held_out((h, *pair)), (both, others)))

    return bandwidths, lax.map(of_bandwidth, bandwidths)


def _mean(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean of those that count, NaN without any."""
    return jnp.sum(jnp.where(counts, values, 0.0)) / jnp.sum(counts)
