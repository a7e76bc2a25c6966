"""Kernel Stein discrepancy: how far draws are from a density of which only the score is known.

With the model's score s and the kernel k(x, y) = φ(|x - y|²), the Stein kernel ::

    u(x, y) = φ s(x)·s(y) - 2φ' (x - y)·(s(x) - s(y)) - 2dφ' - 4|x - y|²φ''

has mean ``E[φ Δ(x)·Δ(y)]`` over independent draws x, y of q, Δ being the difference of the scores
of q and of the model (Liu, Lee and Jordan 2016, theorem 3.6): a smoothed Fisher divergence, known
without the score of q. It vanishes only where q is the model.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_kscore._util.checks import as_scored
from numpyro_kscore.estimators._base.coordinates import whiten_samples
from numpyro_kscore.kernels._median import median_distance
from numpyro_kscore.kernels._pairwise import cancels, squared_distances
from numpyro_kscore.kernels._profiles import IMQ

__all__ = ["Discrepancy", "masked_stein_discrepancy", "stein_discrepancy", "stein_kernel"]


class Discrepancy(NamedTuple):
    """An estimate of the squared discrepancy of draws and a score.

    Attributes:
        value: unbiased, so that it may come out negative where the two agree.
        standard_error: of the value.

    Example::

        from numpyro_kscore.diagnostics import stein_discrepancy

        found = stein_discrepancy(samples, -samples)  # draws and scores of the same Gaussian
        abs(found.value) < 3 * found.standard_error  # True
    """

    value: Array
    standard_error: Array


def stein_discrepancy(samples: ArrayLike, scores: ArrayLike) -> Discrepancy:
    """Squared kernel Stein discrepancy: the U-statistic with an inverse multiquadric kernel.

    Coordinates are whitened by the draws (beyond 256 dimensions only scaled), and the bandwidth h
    is their median distance. The mean of the Stein kernel over pairs of different draws is divided
    by the mean of φ over the same pairs and by the dimension: for a Gaussian guide in which only
    the means are wrong, the discrepancy is then their mean squared error, in standard deviations
    squared. It is invariant under affine maps of the draws, given two draws a dimension or more;
    with fewer, or beyond 256 dimensions, only under changes of scale.

    Args:
        samples: independent draws of q, (n, d) with n >= 3.
        scores: the model's score at them, (n, d), in units 1/latent.

    Returns:
        The value and its standard error. Near zero, where the statistic is degenerate, the error
        is up to a third too large.

    Raises:
        TypeError: if draws or scores are not floating point.
        ValueError: if the shapes differ, there are too few draws, or some are not finite.

    Cost: O(n² d) time, O(n²) memory.

    Example::

        from numpyro_kscore.diagnostics import stein_discrepancy

        found = stein_discrepancy(samples, 0.5 - samples)  # of a mean that is off by half an sd
        abs(found.value - 0.5**2) < 3 * found.standard_error  # True
    """
    x, s = as_scored(samples, scores, minimum=3)
    return masked_stein_discrepancy(x, s, jnp.ones(x.shape[0], bool))


@jax.jit
def masked_stein_discrepancy(x: Array, s: Array, valid: Array) -> Discrepancy:
    """:func:`stein_discrepancy` of the valid draws only; NaN if there are fewer than three.

    Other draws must be finite, such as copies of valid ones; they count in no pair.

    Args:
        x: draws, (n, d).
        s: the model's score at them, (n, d).
        valid: which draws count, (n,).
    """
    return stein_kernel(x, s, valid)[2]


def stein_kernel(x: Array, s: Array, valid: Array) -> tuple[Array, Array, Discrepancy]:
    """The Stein kernel of all pairs of draws, the unit of the discrepancy, and the discrepancy.

    Args:
        x: draws, (n, d).
        s: the model's score at them, (n, d).
        valid: which draws count, (n,).

    Returns:
        u in whitened coordinates, (n, n); the unit, d times the mean of φ over pairs of different
        draws; the U-statistic of u in that unit.
    """
    dim = x.shape[1]
    n = jnp.sum(valid).astype(x.dtype)
    coordinates = whiten_samples(x)
    z, s = coordinates.to_kernel(x), coordinates.scores_to_kernel(s)
    squared = squared_distances(z, z, cancels(z))
    h = median_distance(squared)
    # Kernel coordinates are z / h, and scores there h s: u is then h² times what it is in units
    # of the whitened coordinates.
    phi, first, second = IMQ().derivatives(squared / h**2, 2)
    inner = z @ s.T
    along = jnp.diag(inner)[:, None] + jnp.diag(inner)[None, :] - inner - inner.T
    every = phi * (s @ s.T) - 2 * first * along / h**2
    every = every - (2 * dim * first + 4 * squared * second / h**2) / h**2
    weight = valid.astype(x.dtype)
    apart = weight[:, None] * weight[None, :] * (1.0 - jnp.eye(x.shape[0], dtype=x.dtype))
    pairs = n * (n - 1)
    kernel = apart * every
    rows = jnp.sum(kernel, axis=1) / (n - 1)
    value = jnp.sum(rows) / n
    # Hoeffding: Var = 4ζ₁/n + 2ζ₂/n². The row means vary by ζ₁ + ζ₂/n, ζ₂ twice too much.
    # Products with the weights, which are in `apart` already, in place of sums over all pairs:
    # programs without long sums compile faster.
    pair_variance = weight @ jnp.sum(apart * (kernel - value) ** 2, axis=1) / pairs
    row_variance = jnp.sum(weight * (rows - value) ** 2) / (n - 1)
    degenerate = 2 * pair_variance / n**2
    variance = jnp.maximum(4 * row_variance / n - degenerate, degenerate)
    unit = jnp.where(n >= 3, dim * (weight @ jnp.sum(apart * phi, axis=1)) / pairs, jnp.nan)
    return every, unit, Discrepancy(value / unit, jnp.sqrt(variance) / unit)
