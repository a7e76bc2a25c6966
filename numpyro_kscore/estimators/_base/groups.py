"""Separate groups of samples, found by a mixture of Student t distributions of one shape.

The modes of a distribution are its groups where they hardly overlap. In coordinates that make
neighbors lie in all directions alike (:func:`local_shape`) what separates modes is a direction of
large spread, so groups are found by splitting one of them along its longest axis, again and again.
Heavy tails keep outliers from becoming groups, and one shape keeps the likelihood bounded.

A better fit by several components does not mean several modes: a curved ridge is fitted better by
two. Groups count as separate only if they hardly overlap, if samples are seen to be rarer between
any two of them than at both, and if they are sparse where groups meet: around a ring that is cut in
two they are as dense at the cuts as anywhere.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.linalg import cholesky, eigh, invert_lower
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore.estimators._base.base_scores import log_normalizer, log_tail, tail_weights
from numpyro_kscore.estimators._base.standardization import localized, whiten_samples
from numpyro_kscore.kernels._pairwise import cancels, squared_distances

_T = TypeVar("_T")

MOST_GROUPS = 4
# Numbers of groups in a row that may be no better before the search ends.
LOOK_AHEAD = 2
# Samples that are looked at.
MOST_POINTS = 512
# Samples whose neighbors show the shape of groups: so many, or so many a dimension. Neighbors among
# more are much nearer than groups are wide, where all directions look alike.
SHAPE_POINTS, SHAPE_POINTS_EACH = 128, 8
# Degrees of freedom of the t distributions.
DEGREES = 4.0
# Steps of the EM algorithm for each number of groups.
STEPS = 30
# Gain in log likelihood, less half of log n for each parameter (Schwarz 1978), for which one more
# group is taken: strong evidence in the words of Kass and Raftery (1995).
LEAST_GAIN = 3.0
# Largest expected fraction of a group's samples that another group claims.
MOST_OVERLAP = 0.08
# Standard errors by which samples must be rarer between two groups than at both, counted along the
# line through their centers, each time over a quarter of its length.
VALLEY = 2.0
# Neighbors that tell the density at a sample, the fraction of samples that are nearest to where
# groups meet, how much of the mixture's decline in log density must be seen there, and standard
# errors by which less than that counts.
NEIGHBORS, AT_BOUNDARY, LEAST_DECLINE, SURELY = 4, 0.1, 0.6, 2.0
# Odds of a sample's own group against the next, up to which it is between them.
LARGEST_ODDS = 20.0
# Samples a dimension, below which neighbors are too far to tell a density.
DENSE_EACH = 16
# Fewest samples of a group: this many, and this many a dimension.
FEWEST, FEWEST_EACH = 8, 1
# Fraction of the shape, times d/n, that is replaced by a multiple of the identity.
SHRINKAGE = 0.5


class Groups(NamedTuple):
    """The group of each sample, (n,), and the number of groups, at least 1."""

    own: jax.Array
    number: jax.Array


class _TMixture(NamedTuple):
    """t distributions of one shape ``L Lᵀ``, (d, d); log weights are -inf for unused ones."""

    means: jax.Array
    log_weights: jax.Array
    factor: jax.Array


class _Posterior(NamedTuple):
    """A mixture at samples: log shares and squared distances (n, K), log densities (n,)."""

    log_shares: jax.Array
    squared: jax.Array
    log_density: jax.Array


class _Search(NamedTuple):
    """The largest number of groups tried, its mixture, and the best so far."""

    tried: jax.Array
    mixture: _TMixture
    best: _TMixture
    found: jax.Array
    criterion: jax.Array


def are_enough_for_groups(size: int, dim: int) -> bool:
    """Whether so many samples could be two groups."""
    return size >= 2 * _fewest(dim)


def _fewest(dim: int) -> int:
    """The fewest samples of a group."""
    return max(FEWEST, FEWEST_EACH * dim)


@quick_jit
@full_precision
def find_groups(samples: jax.Array, share: jax.Array | float = 1.0) -> Groups:
    """Groups of samples (n, d), at most four; not differentiated.

    Cost: O(n d²) for each of 30 steps and 2 to 3 numbers of groups, with n at most 512.
    """
    z = lax.stop_gradient(samples)
    size, dim = z.shape
    if not are_enough_for_groups(size, dim):
        return Groups(jnp.zeros(size, jnp.int32), jnp.asarray(1))
    few = _evenly(z, max(SHAPE_POINTS, SHAPE_POINTS_EACH * dim))
    z = localized(whiten_samples(z), few).to_kernel(z)
    some = _evenly(z, MOST_POINTS)
    n = some.shape[0]

    def proceed(state: _Search) -> jax.Array:
        return (state.tried < MOST_GROUPS) & (state.tried < state.found + LOOK_AHEAD)

    def step(state: _Search) -> _Search:
        is_first = state.tried == 0
        split = _split(state.mixture, some, state.tried)
        mixture = _fitted(_either(is_first, state.mixture, split), some)
        posterior = _posterior(mixture, some)
        # Half of log n for every mean and weight; the shape is common to all.
        parameters = jnp.sum(mixture.log_weights > -jnp.inf) * (dim + 1)
        criterion = share * jnp.sum(posterior.log_density)
        criterion = criterion - 0.5 * parameters * jnp.log(share * n)
        tried = state.tried + 1
        better = criterion > state.criterion + LEAST_GAIN
        fewest = _fewest(dim) * n / (share * size)
        better = better & _are_separate(mixture, posterior, some, fewest, share)
        # A split begins with the shape of neighbors, which the spread between groups is not in.
        onward = _either(is_first, state.mixture, mixture)
        taken = _Search(tried, onward, mixture, tried, criterion)
        left = state._replace(tried=tried, mixture=onward)
        return _either(is_first | better, taken, left)

    none = jnp.asarray(0)
    one = _one(some)
    found = lax.while_loop(
        proceed, step, _Search(none, one, one, none, jnp.asarray(-jnp.inf, some.dtype))
    )
    return Groups(jnp.argmax(_posterior(found.best, z).log_shares, axis=1), found.found)


def _either(first: jax.Array, one: _T, other: _T) -> _T:
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


def _evenly(z: jax.Array, most: int) -> jax.Array:
    """At most so many of samples, evenly spaced."""
    return z[:: -(-z.shape[0] // most)]


def _one(z: jax.Array) -> _TMixture:
    """A single group with the shape of neighbors, as wide as samples are along most axes."""
    n, dim = z.shape
    scale = jnp.sqrt(eigh(z.T @ z / n)[0][(dim - 1) // 2])
    log_weights = jnp.full(MOST_GROUPS, -jnp.inf, z.dtype).at[0].set(0.0)
    means = jnp.zeros((MOST_GROUPS, dim), z.dtype)
    return _TMixture(means, log_weights, scale * jnp.eye(dim, dtype=z.dtype))


def _posterior(mixture: _TMixture, z: jax.Array) -> _Posterior:
    dim = z.shape[1]
    inverse = invert_lower(mixture.factor)
    apart = (z @ inverse.T)[:, None] - mixture.means @ inverse.T
    squared = jnp.sum(jnp.square(apart), axis=2)
    each = log_tail(1.0 / DEGREES, squared, dim) + mixture.log_weights
    total = jax.nn.logsumexp(each, axis=1)
    center = log_normalizer(1.0 / DEGREES, dim) - jnp.sum(jnp.log(jnp.diag(mixture.factor)))
    return _Posterior(each - total[:, None], squared, total + center)


def _fitted(start: _TMixture, z: jax.Array) -> _TMixture:
    """The mixture of greatest likelihood near another, by the EM algorithm."""
    n, dim = z.shape
    rho = min(1.0, SHRINKAGE * dim / n)
    eye = jnp.eye(dim, dtype=z.dtype)

    def step(mixture: _TMixture, _: None) -> tuple[_TMixture, None]:
        posterior = _posterior(mixture, z)
        shares = jnp.exp(posterior.log_shares)
        weights = shares * tail_weights(1.0 / DEGREES, posterior.squared, dim)
        totals = jnp.sum(weights, axis=0)
        means = (weights.T @ z) / jnp.where(totals > 0, totals, 1.0)[:, None]
        scatter = jnp.sum(_scatters(weights, z, means), axis=0) / jnp.sum(totals)
        scatter = (1.0 - rho) * scatter + rho / dim * jnp.trace(scatter) * eye
        log_weights = jnp.log(jnp.mean(shares, axis=0))
        return _TMixture(means, log_weights, cholesky(scatter)), None

    return lax.scan(step, start, None, length=STEPS)[0]


def _split(mixture: _TMixture, z: jax.Array, number: jax.Array) -> _TMixture:
    """One group more: the one with the largest spread beyond its shape is split along it."""
    shares = jnp.exp(_posterior(mixture, z).log_shares)
    inverse = invert_lower(mixture.factor)
    spreads, axes = jax.vmap(eigh)(_scatters(shares, z @ inverse.T, mixture.means @ inverse.T))
    widest = jnp.argmax(spreads[:, -1])
    length = jnp.sqrt(spreads[widest, -1] / jnp.sum(shares[:, widest]))
    move = length * mixture.factor @ axes[widest, :, -1]
    center = mixture.means[widest]
    means = mixture.means.at[number].set(center + move).at[widest].set(center - move)
    half = mixture.log_weights[widest] - jnp.log(2.0)
    log_weights = mixture.log_weights.at[number].set(half).at[widest].set(half)
    return _TMixture(means, log_weights, mixture.factor)


def _scatters(weights: jax.Array, z: jax.Array, means: jax.Array) -> jax.Array:
    """``Σ_i w_ik (z_i - m_k)(z_i - m_k)ᵀ`` for weights (n, K): (K, d, d)."""

    def one(weights: jax.Array, mean: jax.Array) -> jax.Array:
        apart = z - mean
        return (weights[:, None] * apart).T @ apart

    return jax.vmap(one)(weights.T, means)


def _are_separate(
    mixture: _TMixture,
    posterior: _Posterior,
    z: jax.Array,
    fewest: jax.Array | float,
    share: jax.Array | float,
) -> jax.Array:
    """Whether all groups are large enough, hardly overlap, and are rare and sparse between."""
    shares = jnp.exp(posterior.log_shares)
    used = mixture.log_weights > -jnp.inf
    own = jnp.argmax(shares, axis=1)[:, None] == jnp.arange(MOST_GROUPS)
    sizes = jnp.where(used, jnp.sum(shares, axis=0), jnp.inf)
    overlaps = jnp.sum(jnp.where(own, 0.0, shares), axis=0) / sizes
    pairs = used[:, None] & used & ~jnp.eye(MOST_GROUPS, dtype=bool)
    depths = jnp.where(pairs, _valley_depths(mixture, z, own, share), jnp.inf)
    shallow = (jnp.max(overlaps) > MOST_OVERLAP) | (jnp.min(depths) < VALLEY)
    may_be = (jnp.min(sizes) >= fewest) & ~shallow
    # For most samples this is known to be false, and the longest computation is left out.
    return lax.cond(may_be, lambda: _declines(mixture, posterior, z), lambda: jnp.asarray(False))


def _declines(mixture: _TMixture, posterior: _Posterior, z: jax.Array) -> jax.Array:
    """Whether samples (n, d) may be as sparse where groups meet as the mixture says.

    A part of it suffices: the density seen at a sample, from the distance to a near neighbor, is
    that of its surroundings, which levels valleys in many dimensions.
    """
    n, dim = z.shape
    if n < DENSE_EACH * dim:
        return jnp.asarray(True)
    count = max(FEWEST, round(AT_BOUNDARY * n))
    y = z @ invert_lower(mixture.factor).T
    squared, apart = squared_distances(y, y, cancels(y)), jnp.zeros((n, 1), y.dtype)
    # top_k takes ten times as long. Copies of a sample are no neighbors.
    for _ in range(NEIGHBORS):
        further = jnp.where(squared > apart, squared, jnp.inf)
        apart = jnp.min(further, axis=1, keepdims=True)
    seen = -0.5 * dim * jnp.log(apart[:, 0])
    first, second = lax.top_k(posterior.log_shares, 2)[0].T
    log_odds = first - second
    order = jnp.argsort(log_odds)
    beyond = (seen - LEAST_DECLINE * posterior.log_density)[order]
    # Where groups are far apart few samples are between them, or none.
    between = (log_odds[order[:count]] < jnp.log(LARGEST_ODDS)).astype(z.dtype)
    number = jnp.sum(between)
    mean = between @ beyond[:count] / number
    error = jnp.sqrt(between @ jnp.square(beyond[:count] - mean)) / number
    # "Not denser", since with too few samples this is not finite.
    denser = mean - jnp.median(beyond[count:]) > SURELY * error
    return (number < FEWEST) | ~denser


def _valley_depths(
    mixture: _TMixture, z: jax.Array, own: jax.Array, share: jax.Array | float
) -> jax.Array:
    """Standard errors by which samples of two groups are rarer between them than at both, (K, K).

    Between them is where they are equally dense; ``own`` says which samples are whose, (n, K).
    """
    inverse = invert_lower(mixture.factor)
    y, centers = z @ inverse.T, mixture.means @ inverse.T
    toward = centers[None] - centers[:, None]
    apart = jnp.sqrt(jnp.maximum(jnp.sum(toward * toward, axis=2), jnp.finfo(z.dtype).tiny))
    along = jnp.einsum("nad,abd->nab", y[:, None] - centers, toward) / apart
    log_weights = jnp.where(mixture.log_weights > -jnp.inf, mixture.log_weights, 0.0)
    between = 0.5 * apart + (log_weights[:, None] - log_weights) / apart
    either = own[:, :, None] | own[:, None, :]

    def count(at: jax.Array | float) -> jax.Array:
        within = either & (jnp.abs(along - at) <= 0.125 * apart)
        return share * jnp.sum(within, axis=0).astype(z.dtype)

    first, valley = count(0.0), count(between)
    least = jnp.minimum(first, first.T)
    return (least - valley) / jnp.sqrt(least + valley + 1.0)
