"""The KL gradient at the particles, block by block.

With ``q(z) = Π_b q(z_b | parents of b)`` the gradient of KL(q || p) in the guide's parameters is
``E[Σ_b (∇_b log q(z_b | parents) - ∇_b log p)ᵀ ∂z_b/∂φ]``, the derivative of z_b being the total
one, through its parents too. The terms ``∇_a log q(z_b | a)`` at a parent a are not there: given a
their mean is zero, so they would be noise. What is left of the entropy ``H(g) + Σ_i [H(g, z_i) -
H(g)]`` of global and local latents is therefore one conditional score for each block and each
element of its plates, which is what :meth:`~numpyro_kscore.ScoreEstimator.at_samples` estimates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_kscore._objective.entropy import entropy
from numpyro_kscore._tracing.layout import Part
from numpyro_kscore.estimators._estimator import ScoreEstimator
from numpyro_kscore.estimators._gaussian import moment_scores

__all__ = ["Descent", "descend", "put_columns", "typical_length"]

# Size of the residual at a converged fit, in units of the guide's own spread, times d sqrt(n): the
# noise of the estimate (docs/accuracy: 44 to 154 for d = 1 to 100 and n = 32 to 512).
NOISE = 85.0
# Of a direction's length over the longest: some are zero. Far from where floats lose digits, where
# compiled code may divide by what it takes for zero.
LEAST_SQUARE = 1e-30
# Pairs of particles whose weights are held at once, over the elements of a plate.
PAIRS_AT_ONCE = 4 * 1024 * 1024


class Descent(NamedTuple):
    """What one block contributes.

    Attributes:
        direction: the KL gradient at its coordinates, (n, elements, d), scaled by plates.
        entropy: its share of the guide's entropy, in nats, scaled by plates.
    """

    direction: jax.Array
    entropy: jax.Array


def descend(
    estimator: ScoreEstimator,
    part: Part,
    particles: jax.Array,
    model_scores: jax.Array,
    *,
    base: str | None,
    debias: str | None,
    clip: float | None = None,
    prior_scores: jax.Array | None = None,
) -> Descent:
    """The KL gradient and the entropy of one block with an unknown density.

    Args:
        estimator: of conditional scores.
        part: which coordinates.
        particles: all particles, (n, D), finite.
        model_scores: the model's score at them, (n, D).
        base: ``"model"``, ``"moments"``, ``"gaussian"`` or None, see
            :class:`~numpyro_kscore.ImplicitELBO`.
        debias: None or ``"jackknife"``.
        clip: typical length that directions may have, in multiples of the noise of a converged
            fit; None for any.
        prior_scores: of the priors of aggregated sites, (n, D); where given, the elements of the
            block's plates are draws of one distribution, the aggregate, held against the prior.
    """
    scores = _take(model_scores, part.rows)
    n, size, dim = scores.shape
    target = scores / part.scale
    x = _take(particles, part.rows)
    context = None if part.context is None else _take(particles, part.context)
    if prior_scores is not None:
        target = _take(prior_scores, part.rows) / part.scale
        x, target = (a.reshape(n * size, 1, dim) for a in (x, target))

    def estimate(inputs: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[Descent, Any]:
        values, goal, given = inputs
        base_scores = None
        if base == "model":
            base_scores = goal
        elif base == "moments":
            base_scores = moment_scores(values, given)
        found = estimator.at_samples(values, base_scores, debias=debias, context=given)
        away = found.residual if base == "model" else found.scores - goal
        # The whitening of a Gaussian base is that of the shrunk Gaussian.
        shrunk = base == "gaussian" and estimator.standardize == "full"
        guide_entropy = entropy(
            found.nearest,
            found.coordinates,
            "gaussian" if shrunk else estimator.standardize,
            values.shape[0],
            found.nearest_context,
            0 if given is None else given.shape[1],
        )
        # In the coordinates that make the guide's own spread one.
        whitened = found.coordinates.scores_to_kernel(away) / found.coordinates.bandwidth
        return Descent(away, guide_entropy), typical_length(whitened)

    inputs = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (x, target, context))
    if x.shape[1] == 1:
        result = jax.tree.map(lambda a: a[None], estimate(jax.tree.map(lambda a: a[0], inputs)))
    else:
        at_once = max(1, PAIRS_AT_ONCE // x.shape[0] ** 2)
        result = lax.map(estimate, inputs, batch_size=min(at_once, x.shape[1]))
    found, lengths = result
    direction = part.scale * jnp.swapaxes(found.direction, 0, 1)
    if clip is not None:
        # One factor for all elements: they may share parameters.
        longest = clip * NOISE / (dim * n**0.5)
        length = typical_length(lengths[:, None])
        direction = direction * (longest / jnp.maximum(length, longest))
    total = part.scale * jnp.sum(found.entropy)
    if prior_scores is not None:
        # The likelihood moves every draw by itself; only the prior is held against the aggregate.
        direction = direction.reshape(n, size, dim) + part.scale * target.reshape(n, size, dim)
        return Descent(direction - scores, total * size)
    return Descent(direction, total)


def put_columns(values: jax.Array, columns: np.ndarray, new: jax.Array) -> jax.Array:
    """(n, D) with the columns of a block replaced by what it has by element, (n, elements, d)."""
    return new[:, 0] if _is_whole(values, columns) else values.at[:, columns].set(new)


def typical_length(directions: jax.Array) -> jax.Array:
    """Geometric mean of the lengths of rows (n, d), over √d.

    A particle deep in a neck or a tail may be asked to move a thousand times further than all
    others. That is no sign of a guide far off, and steps with such a particle must not count less
    than others: the guide would spread into that tail.
    """
    # Squares may overflow.
    largest = jnp.max(jnp.abs(directions))
    scale = jnp.where(largest > 0, largest, 1.0)
    squares = jnp.mean(jnp.square(directions / scale), axis=1)
    return scale * jnp.exp(0.5 * jnp.mean(jnp.log(jnp.maximum(squares, LEAST_SQUARE))))


def _take(values: jax.Array, columns: np.ndarray) -> jax.Array:
    """Columns of (n, D) by element: (n, elements, d)."""
    return values[:, None, :] if _is_whole(values, columns) else values[:, columns]


def _is_whole(values: jax.Array, columns: np.ndarray) -> bool:
    """Whether columns are all there are, in one element and in order: nothing is to be moved."""
    return np.array_equal(columns, np.arange(values.shape[1])[None])
