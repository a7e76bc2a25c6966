"""The KL gradient at the particles that one block contributes.

With ``q(z) = Π_b q(z_b | parents of b)`` the gradient of KL(q || p) in the guide's parameters is
``E[Σ_b (∇_b log q(z_b | parents) - ∇_b log p)ᵀ ∂z_b/∂φ]``, where the derivative of z_b is the total
one, through its parents too. The terms ``∇_a log q(z_b | a)`` at a parent a are left out: their
mean given a is zero, so they would only add noise. What remains of the entropy ``H(g) + Σ_i [H(g,
z_i) - H(g)]`` of global and local latents is one conditional score for each block and each element
of its plates, which :meth:`~numpyro_kscore.ScoreEstimator.at_samples` estimates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._model.layout import Part
from numpyro_kscore._objective.entropy import entropy
from numpyro_kscore._objective.objective_options import ObjectiveOptions
from numpyro_kscore.estimators._base.gaussian import moment_scores
from numpyro_kscore.estimators._base.standardization import whiten_samples

# The noise of the estimate: the residual's size at a converged fit, in units of the guide's own
# spread, times d sqrt(n): 44 to 154 for d = 1 to 100 and n = 32 to 512
# (benchmarks/results/2026-11-21-length-of-a-step.md).
NOISE = 85.0
# Floor on squared lengths relative to the longest, since some are zero; well above denormals, which
# compiled code may divide by as if they were zero.
LEAST_SQUARE = 1e-30
# Gradients of the local log density have no bound near a fold. They count up to this many times
# one plus the model's.
LARGEST_SCORE = 3.0
# Local log densities of a folded map are too low, and a guide that follows them folds it further.
# Their share falls by so many times the share of draws that lie behind a fold. With four times,
# guides covered rings in 4 and 5 dimensions less evenly than with the kernel alone.
LESS_BY_FOLDS = 16.0
# The order of the divergence in which local log densities are followed, that of Hellinger's
# distance. Logarithms of shares vary by so much at most. Far from the model they vary less and
# less: a few draws would count alone, and a cold start would run away.
ORDER, MOST_SPREAD = 0.5, 1.0
# Pairs of particles whose weights are held in memory at once, over the elements of a plate.
PAIRS_AT_ONCE = 4 * 1024 * 1024


class BlockGradient(NamedTuple):
    """The contribution of one block to the KL gradient and the guide's entropy.

    Attributes:
        direction: the KL gradient at its coordinates, (n, elements, d), scaled by plates.
        entropy: its part of the guide's entropy, in nats, scaled by plates; zero where a local log
            density gives it.
        local_share: the derivative in its local log density.
        state: the estimator's state for the next step, if it keeps one.
    """

    direction: jax.Array
    entropy: jax.Array
    local_share: jax.Array
    state: Any


def block_gradient(
    settings: ObjectiveOptions,
    part: Part,
    particles: jax.Array,
    model_scores: jax.Array,
    prior_scores: jax.Array | None = None,
    state: Any = None,
    key: jax.Array | None = None,
    local_scores: jax.Array | None = None,
    log_weights: jax.Array | None = None,
) -> BlockGradient:
    """Estimate the KL gradient and the entropy of one block with an unknown density.

    ``particles``, (n, D), are finite, with the model's scores at them. ``prior_scores``, (n, D),
    are given for a pooled part only: the elements of its plate are draws of one distribution, the
    aggregate, which is compared with the prior. ``state`` and ``key`` are for an estimator that
    keeps a state. ``local_scores`` are gradients of the local log density at the first m particles,
    (m, D), NaN behind folds; with ``log_weights`` there, (m,), the part of the gradient that they
    give is that of Hellinger's distance.
    """
    scores = _take(model_scores, part.columns)
    n, size, dim = scores.shape
    share = settings.local_share if part.has_local else 0.0
    given = None
    if share > 0 and part.has_local_score and local_scores is not None:
        given = _take(local_scores, part.columns)
    # The derivative in a density without a score is left to the loss.
    derivative = jnp.asarray(share if given is None else 0.0)
    local, x = -scores, _take(particles, part.columns)
    if share == 1:
        if given is not None:
            whitening = whiten_samples(x[:, 0])
            local = _along_paths(scores, given, whitening.scores_to_kernel, log_weights)
        return BlockGradient(local, jnp.zeros(()), derivative, state)
    target = scores / part.scale
    context = None if part.context is None else _take(particles, part.context)
    if prior_scores is not None:
        target = _take(prior_scores, part.columns) / part.scale
        x, target = (a.reshape(n * size, 1, dim) for a in (x, target))

    inputs = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (x, target, context))
    if x.shape[1] == 1:
        only = jax.tree.map(lambda a: a[0], inputs)
        element, state, to_unit = _element_gradient(settings, only, not part.has_local, state, key)
        directions, entropies, lengths = (a[None] for a in element)
        if given is not None:
            local = _along_paths(scores, given, to_unit, log_weights)
    else:
        at_once = max(1, PAIRS_AT_ONCE // x.shape[0] ** 2)
        directions, entropies, lengths = lax.map(
            lambda one: _element_gradient(settings, one, not part.has_local)[0],
            inputs,
            batch_size=min(at_once, x.shape[1]),
        )
    direction = part.scale * jnp.swapaxes(directions, 0, 1)
    total = part.scale * jnp.sum(entropies)
    if prior_scores is not None:
        # The likelihood moves every draw by itself; only the prior is compared with the aggregate.
        direction = direction.reshape(n, size, dim) + part.scale * target.reshape(n, size, dim)
        return BlockGradient(direction - scores, total * size, jnp.zeros(()), state)
    counted = share if given is None else share * _trust(given)
    direction = (1 - counted) * direction + counted * local
    if settings.clip is not None and settings.base == "model":
        # One factor for all elements: they may share parameters.
        longest = settings.clip * NOISE / (dim * n**0.5)
        length = typical_length(lengths[:, None])
        factor = longest / jnp.maximum(length, longest)
        direction, derivative = direction * factor, derivative * factor
    return BlockGradient(direction, total, derivative, state)


def _trust(local_scores: jax.Array) -> jax.Array:
    """How far gradients of local log densities (m, 1, d) may be believed, from 0 to 1."""
    is_folded = jnp.any(jnp.isnan(local_scores[:, 0]), axis=1)
    return jnp.maximum(1.0 - LESS_BY_FOLDS * jnp.mean(is_folded), 0.0)


def _along_paths(
    scores: jax.Array,
    local_scores: jax.Array,
    to_unit: Callable[[jax.Array], jax.Array],
    log_weights: jax.Array | None,
) -> jax.Array:
    """Compute the KL gradient by local log densities at the first m of n particles, (n, 1, d).

    At the same draws the two scores, (m, 1, d) and (n, 1, d), cancel as a fit converges, and with
    them the noise. ``to_unit`` maps scores (m, d) to units of the guide's own spread. With the
    logarithms of weights w = p/q, (m,), the gradient is that of ``-log ∫ pᵃ q¹⁻ᵃ / (a (1 - a))`` in
    place of the divergence, its limit for a = 0: every difference counts wᵃ times.
    """
    n, few = len(scores), len(local_scores)
    ours, theirs = local_scores[:, 0], scores[:few, 0]
    own, other = (jnp.sqrt(jnp.mean(jnp.square(to_unit(s)), axis=1)) for s in (ours, theirs))
    most = LARGEST_SCORE * (1.0 + other)
    ours = jnp.where(own > most, most / own, 1.0)[:, None] * ours
    # Scores are not known behind folds, and where noise is mapped to a point.
    is_known = jnp.isfinite(own)
    if log_weights is not None:
        is_known = is_known & jnp.isfinite(log_weights)
    shares = is_known / jnp.maximum(jnp.sum(is_known), 1)
    if log_weights is not None:
        shares = _tempered(log_weights, shares)
    difference = jnp.where(is_known[:, None], n * shares[:, None] * (ours - theirs), 0.0)
    return jnp.zeros_like(scores).at[:few, 0].set(difference)


def _tempered(log_weights: jax.Array, shares: jax.Array) -> jax.Array:
    """Shares of draws in the gradient of Hellinger's distance, (m,), from equal ones.

    A thin tail of the guide hardly counts in KL(q || p), since there are next to no draws in it,
    and spreads of log scales stay too low. Roots of weights have a finite variance whatever the
    tails, and count what a guide lacks as much as what it has too much of.
    """
    known = jnp.where(shares > 0, log_weights, 0.0)
    offset = jnp.where(shares > 0, known - shares @ known, 0.0)
    spread = jnp.sqrt(shares @ offset**2)
    power = ORDER / jnp.maximum(1.0, ORDER * spread / MOST_SPREAD) ** 2
    highest = jnp.max(jnp.where(shares > 0, power * offset, -jnp.inf))
    weights = shares * jnp.exp(power * offset - jnp.where(jnp.isfinite(highest), highest, 0.0))
    return weights / jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)


def _element_gradient(
    settings: ObjectiveOptions,
    inputs: tuple[jax.Array, jax.Array, jax.Array | None],
    with_entropy: bool,
    state: Any = None,
    key: Any = None,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Any, Callable[[jax.Array], jax.Array]]:
    """Estimate the KL gradient at one element's draws (n, d), not scaled by plates.

    ``inputs`` are the draws, the model's score at them, and values of the latents they depend on,
    (n, c), or None. Returned are the direction, the entropy and the direction's typical length in
    units of the guide's own spread; the estimator's state for the next step; and a map of scores to
    those units.
    """
    samples, target, context = inputs
    estimator = settings.estimator
    base_scores = None
    if settings.base == "model":
        base_scores = target
    elif settings.base == "moments":
        base_scores = moment_scores(samples, context)
    estimate, state = estimator.follow(
        state, key, samples, base_scores, debias=settings.debias, context=context
    )
    direction = estimate.residual if settings.base == "model" else estimate.scores - target
    # The whitening of a Gaussian base is that of the shrunk Gaussian.
    shrunk = settings.base == "gaussian" and estimator.standardize == "full"
    guide_entropy = jnp.zeros((), samples.dtype)
    if with_entropy:
        guide_entropy = entropy(
            estimate.nearest,
            estimate.coordinates,
            "gaussian" if shrunk else estimator.standardize,
            samples.shape[0],
            estimate.nearest_context,
            0 if context is None else context.shape[1],
        )
    coordinates = estimate.coordinates

    def to_unit(scores: jax.Array) -> jax.Array:
        return coordinates.scores_to_kernel(scores) / coordinates.bandwidth

    element = (direction, guide_entropy, typical_length(to_unit(direction)))
    return element, state, to_unit


def put_columns(values: jax.Array, columns: np.ndarray, new: jax.Array) -> jax.Array:
    """Replace a block's columns of values (n, D) by new ones, (n, elements, d)."""
    return new[:, 0] if _is_whole(values, columns) else values.at[:, columns].set(new)


def typical_length(directions: jax.Array) -> jax.Array:
    """Geometric mean of the lengths of rows (n, d), over √d.

    A particle deep in a neck or a tail may be asked to move a thousand times further than all
    others, which does not mean that the guide is far off. If steps with such a particle counted
    less than others, the guide would spread into that tail.
    """
    # Squares of the directions themselves may overflow.
    largest = jnp.max(jnp.abs(directions))
    scale = jnp.where(largest > 0, largest, 1.0)
    squares = jnp.mean(jnp.square(directions / scale), axis=1)
    return scale * jnp.exp(0.5 * jnp.mean(jnp.log(jnp.maximum(squares, LEAST_SQUARE))))


def _take(values: jax.Array, columns: np.ndarray) -> jax.Array:
    """Columns of (n, D) by element: (n, elements, d)."""
    return values[:, None, :] if _is_whole(values, columns) else values[:, columns]


def _is_whole(values: jax.Array, columns: np.ndarray) -> bool:
    """Whether a block has all columns, in one element and in order, so that none is moved."""
    return np.array_equal(columns, np.arange(values.shape[1])[None])
