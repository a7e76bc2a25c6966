"""The fitted kernel density estimate: a score and a normalized log density at any points."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_kscore._util.checks import as_points
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._base.standardization import Coordinates
from numpyro_kscore.estimators._fit.score import at_points
from numpyro_kscore.kernels._smoothing import Centers, Smoothed, smooth

# The score of the Laplace-corrected estimate is never divided by less than this share of the
# uncorrected one: in tails the corrected one passes through zero while its gradient does not.
SHARE = 0.1


class KernelDensityInfo(NamedTuple):
    """The report of a kernel density estimate, as data: nothing raises under ``jit``.

    Attributes:
        bandwidth: in standardized units.
        floor: ε, in units of the density of the standardized samples; 0 without a floor.
        finite: whether all centers, widths and the bandwidth are finite.
        bandwidths: that were tried, (b,), for fits to half of the samples that the selection used;
            None for a bandwidth that was not selected.
        losses: their held-out losses, (b,), in standardized units; NaN for fewer than 4 samples,
            too few to hold any out. None likewise.

    Example::

        from numpyro_kscore.estimators import KernelDensity

        score = KernelDensity().fit(samples)
        score.info.raise_if_failed()
        score.info.bandwidth  # ()
    """

    bandwidth: jax.Array
    floor: jax.Array
    finite: jax.Array
    bandwidths: jax.Array | None = None
    losses: jax.Array | None = None

    def raise_if_failed(self) -> None:
        """Raise ``FloatingPointError`` if the fit failed. Call it outside ``jit``."""
        if not bool(self.finite):
            raise FloatingPointError(
                "kernel density fit: expected finite centers and widths; got NaN or infinity. "
                "Look for samples or pilot scores that are not finite"
            )


@pytree
class KernelDensityScore:
    """A kernel density estimate ρ̂ of n samples and its score, callable at any points.

    Attributes:
        centers: of the kernels, in units of the bandwidth.
        samples: the samples in the same units, (n, d); None where they are the centers.
        coordinates: the map to these units.
        log_floor: log ε, in the same units; -inf without a floor.
        info: how the fit went.
        fourth_order: whether the kernel is the Laplace-corrected one, with negative parts.

    Example::

        from numpyro_kscore.estimators import KernelDensity

        score = KernelDensity().fit(samples)
        score(samples[:5])  # (5, 2)
        score.at_samples  # (200, 2)
    """

    centers: Centers
    samples: jax.Array | None
    coordinates: Coordinates
    log_floor: jax.Array
    info: KernelDensityInfo
    fourth_order: bool = static(default=False)

    @at_points
    def __call__(self, x: Any) -> jax.Array:
        """``∇ρ̂/max(ρ̂, ε)`` at ``x``: (m, d) -> (m, d), in 1/units of the samples.

        Where ρ̂ > ε it is ``∇ log ρ̂``; where not, as far from all samples, it falls off to zero.
        The Laplace-corrected ρ̂ is replaced in the divisor by a tenth of the uncorrected one where
        it is less than that or negative.

        Raises:
            ValueError: for a wrong shape.

        Cost: O(m n d) time; O(m n) memory up to 8 million pairs, O((m + n) d) beyond.
        """
        return self._score(x)

    @property
    def at_samples(self) -> jax.Array:
        """The score at each sample from the kernels of the others, (n, d), in 1/units.

        Each sample's own kernel is left out, which would pull the score toward zero there. Shifts
        and widths of the other kernels, and the bandwidth, stay those of the fit to all samples.
        """
        return _score(self, None)

    @at_points
    def log_density(self, x: Any) -> jax.Array:
        """log ρ̂ at ``x``, (m, d) -> (m,); ρ̂ integrates to one, and the floor does not enter.

        The Laplace-corrected ρ̂ is negative in places, mostly in tails: the value there is -inf,
        and the positive part integrates to slightly more than one.
        """
        return self._log_density(x)

    @property
    def log_density_at_samples(self) -> jax.Array:
        """log ρ̂ at each sample from the kernels of the others, (n,), as :attr:`at_samples`."""
        return _log_density(self, None)

    @at_points
    def density(self, x: Any) -> jax.Array:
        """ρ̂ at ``x``, (m, d) -> (m,), in 1/units^d: also where it is negative."""
        sums, count = self._sums(x)
        return jnp.exp(sums.log_scale - self._log_norm(count)) * sums.total

    @at_points
    def divergence(self, x: Any) -> jax.Array:
        """The divergence of the score at ``x``: (m, d) -> (m,), in 1/units²."""
        factor = self.coordinates.factor()
        sums, count = self._sums(x, factor)
        return divergence(sums, *divisor(sums, self.log_floor, count), factor)

    def _points(self, x: Any) -> jax.Array:
        points = as_points("x", x, dim=self.centers.points.shape[1])
        return jnp.asarray(points, self.centers.points.dtype)

    def _sums(self, x: jax.Array | None, factor: jax.Array | None = None) -> tuple[Smoothed, int]:
        """Sums of kernels at ``x``, or at the samples, and the number of kernels in them."""
        n, fourth_order = self.centers.points.shape[0], self.fourth_order
        if x is not None:
            z = self.coordinates.to_kernel(x)
            return smooth(self.centers, z, fourth_order=fourth_order, factor=factor), n
        z = self.centers.points if self.samples is None else self.samples
        return smooth(self.centers, z, fourth_order=fourth_order, leave_out=True), n - 1

    def _score(self, x: jax.Array | None) -> jax.Array:
        sums, count = self._sums(x)
        below, _ = divisor(sums, self.log_floor, count)
        return self.coordinates.scores_from_kernel(sums.gradient / below[:, None])

    def _log_density(self, x: jax.Array | None) -> jax.Array:
        sums, count = self._sums(x)
        is_positive = sums.total > 0
        log_total = jnp.log(jnp.where(is_positive, sums.total, 1.0))
        value = sums.log_scale + log_total - self._log_norm(count)
        return jnp.where(is_positive, value, -jnp.inf)

    def _log_norm(self, count: int) -> jax.Array:
        """log of the divisor of a sum of kernels, in the units of the samples."""
        dim = self.centers.points.shape[1]
        log_unit = self.coordinates.log_det() + dim * jnp.log(self.coordinates.bandwidth)
        return log_norm(count, dim) + log_unit


def log_norm(count: int, dim: int) -> float:
    """log of the divisor of a sum of ``count`` kernels, in units of the bandwidth."""
    return math.log(count) + 0.5 * dim * math.log(2 * math.pi)


def divisor(sums: Smoothed, log_floor: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The divisor of the gradient in units of the sums, (m,), and its gradient, (m, d).

    ``log_floor`` is in units of the bandwidth; ``count`` kernels are in the sums.
    """
    dim = sums.gradient.shape[1]
    # Where the floor is far above, the score is below rounding anyway: it must not overflow.
    floor = jnp.exp(jnp.minimum(log_floor + log_norm(count, dim) - sums.log_scale, 80.0))
    is_corrected = sums.total >= SHARE * sums.mass
    value = jnp.where(is_corrected, sums.total, SHARE * sums.mass)
    gradient = jnp.where(is_corrected[:, None], sums.gradient, SHARE * sums.mass_gradient)
    # Never zero: a billion bandwidths away all terms may be lost to rounding.
    floor = jnp.maximum(floor, jnp.finfo(floor.dtype).tiny)
    is_above = value > floor
    return jnp.where(is_above, value, floor), jnp.where(is_above[:, None], gradient, 0.0)


def divergence(
    sums: Smoothed, below: jax.Array, slope: jax.Array, factor: jax.Array | None = None
) -> jax.Array:
    """``tr(A ∇)`` of the score, (m,), from the divisor and its gradient; A as in :func:`smooth`."""
    gradient = sums.gradient / below[:, None]
    slope = slope / below[:, None]
    if factor is not None:
        gradient, slope = gradient @ factor, slope @ factor
    return sums.curvature / below - jnp.sum(gradient * slope, axis=1)


_score = quick_jit(full_precision(KernelDensityScore._score))
_log_density = quick_jit(full_precision(KernelDensityScore._log_density))
