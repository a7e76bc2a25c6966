"""Copies among samples, and halves of samples that share none.

Draws with replacement, resampled particles and rounded data repeat samples, exactly or nearly. A
choice by held-out samples must not see them: with a copy of each held-out sample in the half that
was fitted, the least regularization looks best, and errors are a thousand times the score. So all
copies of a sample are dealt into one half. A sample that occurs m times counts m times in the fit
and in the loss, and once in the loss's standard error.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.estimators._base.standardization import whiten_samples
from numpyro_kscore.kernels._median import MEDIAN_POINTS, order_statistic
from numpyro_kscore.kernels._pairwise import cancels, squared_distances

# Blocks of samples in each half (benchmarks/results/2026-11-28-score-estimators.md).
BLOCKS = 25
# Near samples, each, up to which distances tell how pairs become fewer at smaller ones, and the
# largest fraction of all pairs that these may be.
NEAR_EACH, MOST_NEAR = 16, 0.2
# Halvings of this distance at which pairs are counted.
HALVINGS = 16
# Standard errors, and pairs a sample, by which near pairs exceed chance if there are copies.
SURELY, LEAST_EXCESS = 5.0, 0.02
# Copies are within this multiple of the distance that half of the pairs in excess are within.
REACH = 4.0
# Largest number of samples whose pairs are looked at.
MOST_PAIRED = 4096
# Error of a squared distance, in units of rounding of the largest square.
ROUNDING = 16
# Samples that are looked at for the share of distinct ones.
MOST_POINTS = 512
# Dimensions up to which distances are differences of coordinates: others lose half of the digits.
FEW_DIMENSIONS = 3
# Effective number of values below which a coordinate has no density, if that is below this
# fraction of the samples.
FEWEST_VALUES, MOST_TIED = 10.0, 0.25


def find_copies(points: jax.Array) -> jax.Array:
    """The first of the samples that each is a copy of, equal or nearly: (n, d) -> (n,).

    The number of pairs within a distance falls as a power of it, which is measured where a sample
    has sixteen others near it. Copies are a surplus of pairs at smaller distances; where there is
    none, each sample is its own. Copies with noise as large as the distance between neighbors
    cannot be told from draws; in one dimension and for 400 samples that is a hundredth of their
    spread. Among more than 4096 samples only equal ones are found.

    Points are whitened. Cost: O(n² d), of which counting is the most in few dimensions.
    """
    n, dim = points.shape
    itself = jnp.arange(n)
    if n < 4:
        return itself
    if n > MOST_PAIRED:
        return _equal_ones(points)
    # Computed before: within a larger program a point may be rounded in two ways.
    points = lax.optimization_barrier(lax.stop_gradient(points))
    eps = jnp.finfo(points.dtype).eps
    largest = jnp.max(jnp.sum(points**2, axis=1))
    direct = jnp.asarray(dim <= FEW_DIMENSIONS) | cancels(points)
    fraction = min(NEAR_EACH / n, MOST_NEAR)
    if dim > FEW_DIMENSIONS:
        # Where so many are equal up to rounding, differences tell which ones are.
        some = points[:: -(-n // MEDIAN_POINTS)]
        coarse = squared_distances(some, points, direct)
        direct = direct | (_quantile(coarse, fraction) <= ROUNDING * eps * largest)
    squared = squared_distances(points, points, direct)
    floor = jnp.where(direct, eps**2 if dim > 1 else 0.0, ROUNDING * eps) * largest
    floor = jnp.maximum(floor, 1e3 * jnp.finfo(points.dtype).tiny)
    squared = jnp.maximum(squared, floor)
    near = _quantile(squared[:: -(-n // MEDIAN_POINTS)], fraction)
    levels = jnp.maximum(near * 0.25 ** jnp.arange(-1.0, HALVINGS), floor).astype(points.dtype)

    def count(level: jax.Array) -> jax.Array:
        return 0.5 * (jnp.sum(squared <= level, dtype=points.dtype) - n)

    counts = lax.map(count, levels)
    # Pairs within twice this distance, over those within it: two to the power of the dimension.
    growth = jnp.maximum(counts[0] / jnp.maximum(counts[1], 1.0), 2**0.5)
    chance = counts[1] * growth ** (0.5 * jnp.log2(levels[1:] / levels[1]))
    excess = counts[1:] - chance
    sure = excess > SURELY * jnp.sqrt(chance) + LEAST_EXCESS * n
    surplus = jnp.where(sure, excess, 0.0)
    # The least distance that half of them are within.
    enough = surplus >= 0.5 * jnp.max(surplus)
    level = levels[1:][HALVINGS - 1 - jnp.argmax(enough[::-1])]
    level = jnp.where(level > floor, REACH**2 * level, floor)
    # Near ones that become more and more with the distance, as in a chain, are no copies.
    is_copied = jnp.any(sure) & (level < near)
    # Equal ones always are.
    near_ones = squared <= jnp.where(is_copied, level, floor)
    first = jnp.min(jnp.where(near_ones, itself, itself[:, None]), axis=1)
    for _ in range(2):
        first = first[first]
    return jnp.where(is_copied | direct, first, itself)


def _equal_ones(points: jax.Array) -> jax.Array:
    """:func:`find_copies` without noise: equal ones are neighbors in a random projection."""
    direction = random.normal(random.key(0), points.shape[1:], points.dtype)
    values = lax.stop_gradient(points) @ direction
    order = jnp.argsort(values, stable=True)
    ordered = values[order]
    apart = 4 * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values))
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] - ordered[:-1] > apart])
    runs = jnp.cumsum(starts) - 1
    first = jax.ops.segment_min(order, runs, order.shape[0])
    return jnp.zeros_like(order).at[order].set(first[runs])


def _quantile(squared: jax.Array, fraction: float) -> jax.Array:
    """A level that this fraction of squared distances of some to others is below, (k, n)."""
    return order_statistic(squared.ravel(), squared.shape[0] + round(fraction * squared.size) - 1)


def effective_number(own: jax.Array) -> jax.Array:
    """``n²/Σ m²`` for samples that occur m times, from the first of each, (n,)."""
    counts = jnp.bincount(own, length=own.shape[0])
    return own.shape[0] ** 2 / jnp.sum(jnp.square(counts.astype(float)))


@quick_jit
@full_precision
def distinct_share(samples: jax.Array) -> jax.Array:
    """The effective number of distinct samples, (n, d), over n."""
    n = samples.shape[0]
    stride = -(-n // MOST_POINTS)
    own = find_copies(whiten_samples(samples).to_kernel(samples)[::stride])
    # Among all samples each has so many times as many copies.
    copies = stride * (own.shape[0] / effective_number(own) - 1.0)
    return (1.0 / (1.0 + copies)).astype(samples.dtype)


def is_discrete(samples: jax.Array) -> jax.Array:
    """Whether a coordinate of samples, (n, d), takes few values: along it there is no score.

    One that does not vary at all counts as having none.
    """
    n = samples.shape[0]
    ordered = jnp.sort(lax.stop_gradient(samples), axis=0)
    starts = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    # Pairs of equal values: the place of each within its run.
    places = jnp.arange(n)[:, None]
    since = places - lax.cummax(jnp.where(starts, places, 0), axis=0)
    tied = (n + 2 * jnp.sum(since.astype(samples.dtype), axis=0)) / n**2
    varies = ordered[0] < ordered[-1]
    return jnp.any(varies & (tied > max(1 / FEWEST_VALUES, 1 / (MOST_TIED * n))))


class Halves(NamedTuple):
    """Rows of two halves of equal size, (m,) each, and which of them count in a loss, (2, m)."""

    first: jax.Array
    second: jax.Array
    counted: jax.Array


def deal(own: jax.Array, most: int = BLOCKS) -> Halves:
    """Two halves of samples, from the first that each is a copy of, (n,).

    Blocks of the samples, at most so many in each half, go to either in turn. Neighbors in a chain
    resemble each other: dealt one by one, each sample would find near copies of itself in the
    other half. Samples that come sorted, or in batches, look alike in both halves.

    Copies follow their first. Where the halves are then not of equal size, the last samples of one
    go to the other; the copies of a single sample may fall into both, where they do not count.
    """
    n = own.shape[0]
    m = n // 2
    ends = np.round(np.linspace(0, m, min(m, most) + 1)).astype(int)
    pairs = list(zip(ends[:-1], ends[1:], strict=True))
    blocks = [np.arange(2 * start, start + end) for start, end in pairs]
    blocks += [np.arange(start + end, 2 * end) for start, end in pairs]
    # An odd one comes last.
    place = np.argsort(np.concatenate([*blocks, np.arange(2 * m, n)]))
    places = jnp.asarray(place)[own]
    order = jnp.argsort(places, stable=True)
    ordered = places[order]
    last = ordered[max(m - 1, 0)]
    counted = ~((ordered == last) & (last == ordered[min(m, n - 1)]))
    return Halves(order[:m], order[m : 2 * m], counted[: 2 * m].reshape(2, m))
