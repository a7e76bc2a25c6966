"""Distances between two sets of draws, for comparing a guide with a reference posterior.

Both functions need draws only, never a density, so they rank implicit guides, flows and MCMC on
the same scale. Neither says much on its own: compare it with its *sampling floor*, the value
between two independent sets of reference draws of the same sizes.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_kscore._util.checks import as_points, check_count, check_positive
from numpyro_kscore._util.keys import check_key

ROWS_PER_BLOCK = 512  # 512 rows against a few thousand columns stay inside the last-level cache
MEDIAN_DRAWS = 2_000  # 2e6 pairs: the median is then good to about one part in a thousand


def sliced_wasserstein(x: ArrayLike, y: ArrayLike, key: Array, num_projections: int = 200) -> Array:
    """Sliced Wasserstein-1 distance: the mean over random directions u of W1(uᵀx, uᵀy).

    The one-dimensional distance between the two empirical measures is exact for any pair of sizes:
    W1 = ∫₀¹ |F⁻¹(t) - G⁻¹(t)| dt, where both quantile functions are steps. Nothing is interpolated.
    See Bonneel et al. (2015), "Sliced and Radon Wasserstein barycenters of measures".

    Args:
        x: draws, shape (n, d).
        y: draws, shape (m, d), in the same coordinates. Directions are uniform in these
            coordinates, so scale them first if they differ much in spread.
        key: random key for the directions. The same key gives the same directions: use one key for
            all the distances that will be compared.
        num_projections: number of directions, uniform on the unit sphere.

    Returns:
        Scalar, in units of the latent. Its sampling floor falls as (1/n + 1/m)^½; it is biased
        upwards by about that floor.

    Raises:
        TypeError: if the draws are not floating point, or the key is not a random key.
        ValueError: if shapes disagree, a set is empty or not finite, or ``num_projections`` < 1.

    Cost: O(p·(n log n + m log m) + p·(n + m)·d) time, O(p·(n + m)) memory for p projections.

    Example::

        from numpyro_kscore.diagnostics import sliced_wasserstein

        sliced_wasserstein(samples, samples + jnp.array([1.0, 0.0]), random.key(1))  # 0.64
    """
    x, y = _same_dimension(x, y, minimum=1)
    check_key("key", key)
    check_count("num_projections", num_projections)
    return _sliced_wasserstein(x, y, key, int(num_projections))


@partial(jax.jit, static_argnums=3)
def _sliced_wasserstein(x: Array, y: Array, key: Array, num_projections: int) -> Array:
    directions = jax.random.normal(key, (num_projections, x.shape[1]), x.dtype)
    directions /= jnp.linalg.norm(directions, axis=1, keepdims=True)
    # A common shift changes no distance, and without it projections of data far from 0 lose digits.
    shift = x.mean(0)
    x_sorted = jnp.sort(directions @ (x - shift).T, axis=1)
    y_sorted = jnp.sort(directions @ (y - shift).T, axis=1)
    if x.shape[0] == y.shape[0]:
        return jnp.abs(x_sorted - y_sorted).mean()
    x_index, y_index, weights = _merged_quantile_steps(x.shape[0], y.shape[0])
    gaps = jnp.abs(x_sorted[:, x_index] - y_sorted[:, y_index])
    return (gaps @ jnp.asarray(weights, x.dtype)).mean()


def _merged_quantile_steps(n: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices into sorted samples of n and of m, and the lengths of their common intervals.

    On each of these intervals of (0, 1), at most n + m - 1, both quantile functions are constant.
    """
    # Sizes are static, so this runs while tracing; in integers, so that equal levels merge exactly.
    jumps = np.union1d(np.arange(1, n + 1) * m, np.arange(1, m + 1) * n)
    weights = np.diff(jumps, prepend=0) / (n * m)
    return (jumps - 1) // m, (jumps - 1) // n, weights


def mmd_squared(x: ArrayLike, y: ArrayLike, bandwidth: ArrayLike | None = None) -> Array:
    """Unbiased squared maximum mean discrepancy with a Gaussian kernel.

    The kernel is k(a, b) = exp(-|a - b|² / 2h²), and the estimator the U-statistic of Gretton et
    al. (2012), "A kernel two-sample test", equation (3): the within-sample means leave out each
    draw's pair with itself. Its expectation is zero for equal distributions, so it may come out
    negative.

    Args:
        x: draws, shape (n, d) with n >= 2.
        y: draws, shape (m, d) with m >= 2, in the same coordinates.
        bandwidth: h, in units of the latent. ``None`` takes the median distance between different
            draws of the pooled set; above 2000 pooled draws, between 2000 evenly spaced ones.
            Distances are compared fairly only at one bandwidth: pass a number when that matters.

    Returns:
        Scalar, without units, at most 2.

    Raises:
        TypeError: if the draws are not floating point.
        ValueError: if shapes disagree, a set has fewer than two draws or is not finite, or the
            bandwidth is a concrete number that is not positive and finite.

    Cost:
        O((n + m)²·d) time; O(n + m) memory times a block of 512 rows, plus the 2·10⁶ distances of
        the median.

    Example::

        from numpyro_kscore.diagnostics import mmd_squared

        x, y = samples[:100], samples[100:]
        noise, shift = (mmd_squared(x, z, bandwidth=1.0) for z in (y, y + 1.0))
        shift > 10 * noise  # True
    """
    x, y = _same_dimension(x, y, minimum=2)
    if bandwidth is None:
        return _mmd_squared(x, y, _median_distance(x, y))
    check_positive("bandwidth", bandwidth)
    if jnp.ndim(bandwidth) != 0:
        raise ValueError(f"bandwidth: expected a scalar; got shape {jnp.shape(bandwidth)}")
    return _mmd_squared(x, y, jnp.asarray(bandwidth, x.dtype))


@jax.jit
def _mmd_squared(x: Array, y: Array, bandwidth: Array) -> Array:
    n, m = x.shape[0], y.shape[0]
    shift = jnp.concatenate([x, y]).mean(0)
    x, y = (x - shift) / bandwidth, (y - shift) / bandwidth

    # k(x, y) is summed twice, by rows and by columns, so that the large means cancel draw by draw:
    # in float32 the difference of three means near 0.5 would leave three digits of an MMD² of 1e-4.
    def witness(own: Array, other: Array, point: Array) -> Array:
        within = (_kernel_sum(point, own) - 1) / (len(own) - 1)
        return within - _kernel_sum(point, other) / len(other)

    at_x = lax.map(partial(witness, x, y), x, batch_size=min(n, ROWS_PER_BLOCK))
    at_y = lax.map(partial(witness, y, x), y, batch_size=min(m, ROWS_PER_BLOCK))
    return at_x.mean() + at_y.mean()


def _kernel_sum(point: Array, draws: Array) -> Array:
    return jnp.exp(-0.5 * _squared_distances(point, draws)).sum()


def _squared_distances(point: Array, draws: Array) -> Array:
    # |a|² + |b|² - 2aᵀb is a matrix product once mapped over points; rounding may leave it below 0.
    return jnp.maximum((point**2).sum() + (draws**2).sum(1) - 2 * draws @ point, 0)


@jax.jit
def _median_distance(x: Array, y: Array) -> Array:
    pooled = jnp.concatenate([x, y])
    count = min(pooled.shape[0], MEDIAN_DRAWS)
    draws = pooled[np.linspace(0, pooled.shape[0] - 1, count).round().astype(int)]
    draws -= draws.mean(0)
    rows, columns = np.triu_indices(count, k=1)
    squared = jax.vmap(_squared_distances, (0, None))(draws, draws)[rows, columns]
    # A scale, not a parameter to learn through; and the square root has no derivative at 0.
    median = jnp.sqrt(lax.stop_gradient(jnp.median(squared)))
    return jnp.where(median > 0, median, 1)  # most draws coincide: any bandwidth will do


def _same_dimension(x: ArrayLike, y: ArrayLike, minimum: int) -> tuple[Array, Array]:
    x, y = as_points("x", x, minimum=minimum), as_points("y", y, minimum=minimum)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"expected shapes (n, d) and (m, d); got {x.shape} and {y.shape}")
    dtype = jnp.result_type(x, y)
    return x.astype(dtype), y.astype(dtype)
