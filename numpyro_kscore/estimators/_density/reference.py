"""The normal-reference bandwidth: the best one where the samples are Gaussian.

In whitened coordinates the reference is the standard normal in d dimensions. The mean integrated
squared error of a kernel density estimate is asymptotically ``B h^(2r) + V/(n h^d)``, and least at
``h^(2r + d) = d V/(2 r B n)``. For the standard normal, in units of ``(4π)^(-d/2)``:

* the Gaussian kernel has bias ``(h²/2) Δρ``: r = 2, V = 1, B = d(d+2)/16;
* samples shifted by (h²/2) s with the exact score s are those of a normal of variance
  ``1 + h⁴/4`` after smoothing: r = 4, V = 1, B = d(d+2)/256;
* with the score of the estimate itself that variance is ``1 + 5h⁴/4``, so B = 25 d(d+2)/256, and
  V = 1 + (d/3)(2/3)^(d/2) + d(d+2)/64 · 2^(-d/2) to first order in the noise;
* the fourth-order kernel has bias ``-(h⁴/8) Δ²ρ``: r = 4, V = 1 + d/2 + d(d+2)/16,
  B = d(d+2)(d+4)(d+6)/1024.
"""

from __future__ import annotations

from typing import Any

from numpyro_kscore._util.checks import check_positive
from numpyro_kscore._util.pytree import pytree

__all__ = ["NormalReference", "reference_bandwidth"]


@pytree
class NormalReference:
    """A bandwidth rule: the best for the density of Gaussian samples, times a factor.

    It falls off as n^(-1/(d+4)), and as n^(-1/(d+8)) with a bias correction of fourth order;
    docs/theory has the constants.

    Args:
        factor: positive multiplier.

    Raises:
        ValueError: for a factor that is concrete and not positive.

    Example::

        from numpyro_kscore.estimators import KernelDensity, NormalReference

        score = KernelDensity(NormalReference(0.8)).fit(samples)
        score.info.bandwidth  # 0.33
    """

    factor: Any = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)


def reference_bandwidth(n: int, dim: int, correction: str | None, has_pilot: bool) -> float:
    """The normal-reference bandwidth, in whitened units.

    Args:
        n: number of samples.
        dim: d.
        correction: as :class:`~numpyro_kscore.estimators.KernelDensity` takes it; the adaptive one
            has the bandwidth of none, since its expansion does not hold in a normal's tails.
        has_pilot: whether samples are shifted by a score from elsewhere.
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
