"""Kernel Stein discrepancy: how far draws are from a density of which only the score is known.

With the model's score s and the kernel k(x, y) = φ(|x - y|²), the Stein kernel ::

    u(x, y) = φ s(x)·s(y) - 2φ' (x - y)·(s(x) - s(y)) - 2dφ' - 4|x - y|²φ''

has mean ``E[φ Δ(x)·Δ(y)]`` over independent draws x, y of q, Δ being the difference of the scores
of q and of the model (Liu, Lee and Jordan 2016, theorem 3.6): a smoothed Fisher divergence, known
without the score of q. It vanishes only where q is the model.

A test of the hypothesis that draws are the model's has a p-value by wild bootstrap. It is blind to
regions without draws: a mode that the guide has dropped changes the score at its draws by next to
nothing.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_kscore._util.checks import as_scored, check_count
from numpyro_kscore._util.keys import check_key
from numpyro_kscore.estimators._base.standardization import whiten_samples
from numpyro_kscore.kernels._median import median_distance
from numpyro_kscore.kernels._pairwise import cancels, squared_distances
from numpyro_kscore.kernels._profiles import IMQ

NUM_BOOTSTRAP = 1_000


class Discrepancy(NamedTuple):
    """An estimate of the squared discrepancy of draws and a score.

    Attributes:
        value: unbiased, so that it may come out negative where the two agree.
        standard_error: its standard error.

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

    Other draws, (n, d), must be finite, such as copies of valid ones; they count in no pair.
    """
    return _stein_kernel(x, s, valid)[2]


def _stein_kernel(x: Array, s: Array, valid: Array) -> tuple[Array, Array, Discrepancy]:
    """The Stein kernel of all pairs of draws, the unit of the discrepancy, and the discrepancy.

    The kernel u is in whitened coordinates, (n, n), and the unit d times the mean of φ over pairs
    of different draws; the discrepancy is the U-statistic of u in that unit.
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


class SteinTest(NamedTuple):
    """A kernel Stein discrepancy and its test.

    Attributes:
        u_statistic: unbiased, in the units of
            :func:`~numpyro_kscore.diagnostics.stein_discrepancy`: may be negative where draws and
            model agree.
        v_statistic: the mean over all pairs, a draw's with itself included: never negative, but
            biased by 1/n.
        standard_error: standard error of the U-statistic.
        p_value: probability of a larger U-statistic if the draws are independent draws of the
            model.

    Example::

        from numpyro_kscore.diagnostics import ksd

        test = ksd(samples, -2 * samples)  # of draws that are too wide for the model
        test.p_value < 0.05  # True
        test.u_statistic, test.standard_error
    """

    u_statistic: Array
    v_statistic: Array
    standard_error: Array
    p_value: Array


def ksd(
    samples: ArrayLike,
    scores: ArrayLike,
    *,
    rng_key: Array | None = None,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> SteinTest:
    """Kernel Stein discrepancy of draws from a model, with a p-value.

    Kernel, coordinates and units are those of
    :func:`~numpyro_kscore.diagnostics.stein_discrepancy`. If the draws are from the model the
    U-statistic is degenerate, and ``Σ_{i≠j} ε_i ε_j u_ij`` with random signs ε has its distribution
    (Liu, Lee and Jordan 2016; Chwialkowski, Strathmann and Gretton 2016).

    Args:
        samples: independent draws, (n, d), n at least 10.
        scores: the model's score at them, (n, d).
        rng_key: random key for the signs; by default ``jax.random.key(0)``.
        num_bootstrap: number of replicates B, at least 19; the p-value is a multiple of 1/(B + 1).

    Returns:
        The squared discrepancy, in standard deviations squared, its standard error and p-value.

    Raises:
        TypeError: if draws or scores are not floating point, or the key is not a random key.
        ValueError: if the shapes differ, there are too few draws, or some are not finite.

    Cost: O(n² (d + num_bootstrap)) time, O(n (n + num_bootstrap)) memory.

    Example::

        from numpyro_kscore.diagnostics import ksd

        ksd(samples, -samples).p_value > 0.05  # True: the model is right
        ksd(samples, 0.5 - samples).p_value < 0.05  # True: its mean is 0.5 and not 0
    """
    x, s = as_scored(samples, scores, minimum=10)
    check_count("num_bootstrap", num_bootstrap, minimum=19)
    key = jax.random.key(0) if rng_key is None else rng_key
    check_key("rng_key", key)
    return _ksd(x, s, key, num_bootstrap)


@partial(jax.jit, static_argnames="num_bootstrap")
def _ksd(x: Array, s: Array, key: Array, num_bootstrap: int = NUM_BOOTSTRAP) -> SteinTest:
    """:func:`ksd` of draws that have been checked."""
    n = x.shape[0]
    kernel, unit, discrepancy = _stein_kernel(x, s, jnp.ones(n, bool))
    apart = kernel * (1.0 - jnp.eye(n, dtype=x.dtype))
    # The wild bootstrap: random signs of the rows.
    signs = jax.random.rademacher(key, (num_bootstrap, n), x.dtype)
    exceeding = jnp.sum(jnp.sum((signs @ apart) * signs, axis=1) >= jnp.sum(apart))
    p_value = (1 + exceeding) / (1 + num_bootstrap)
    value, error = discrepancy
    return SteinTest(value, jnp.mean(kernel) / unit, error, p_value)


def spread_ratios(samples: ArrayLike, scores: ArrayLike) -> Array:
    """Ratios of the guide's standard deviations to the model's, by direction.

    If the draws are from the model, ``-E[s zᵀ]`` is the identity in whitened coordinates, by
    Stein's identity. Its eigenvalues are the ratios of variances if both are Gaussian; in general
    they compare the guide's spread with the model's curvature, averaged over the guide. A ratio is
    the square root, or 0 for a negative eigenvalue: the model is not concave there on average.

    Args:
        samples: draws of the guide, (n, d).
        scores: the model's score at them, (n, d).

    Returns:
        Ratios, without units, ascending, (d,).

    Raises:
        TypeError: if they are not floating point.
        ValueError: if the shapes differ, there are fewer than 4 draws, or something is not finite.

    Cost: O(n d² + d³).

    Example::

        from numpyro_kscore.diagnostics import spread_ratios

        ratios = spread_ratios(samples, -samples / 2**2)  # of a model that is twice as wide
        ratios  # (2,): about 0.5, but for the noise of 200 draws
        max(abs(ratios - 0.5)) < 0.1  # True
    """
    return _spread_ratios(*as_scored(samples, scores, minimum=4))


@jax.jit
def _spread_ratios(x: Array, s: Array) -> Array:
    coordinates = whiten_samples(x)
    product = -coordinates.scores_to_kernel(s).T @ coordinates.to_kernel(x) / x.shape[0]
    return jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(0.5 * (product + product.T)), 0.0))
