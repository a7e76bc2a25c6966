"""The log density of a model at many points, where its data are tall.

Markov chains take it a million times, and a pass over millions of rows takes 10 milliseconds. A
few rows with weights (:mod:`numpyro_kscore._model.coreset`) stand for all, and their expansion at
a point, to second order, is replaced by that of all rows. What is left is an error of third order,
and measured.

A choice of rows at random is right on average, and off by its noise. The rows of a likelihood are
much alike, so that others can take over what is missed: their weights are fitted to the scores of
all rows, near those of the choice (Campbell and Broderick 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_kscore._model.control_variate import MOST_CURVED, Taylor, center, controlled, taylor
from numpyro_kscore._model.coreset import (
    RowWeights,
    TallPlate,
    choose_rows,
    row_log_likelihoods,
    row_remainders,
    weighted_rows,
)
from numpyro_kscore._model.subsampling import with_rows
from numpyro_kscore._model.target import Density, Target
from numpyro_kscore._util.compiling import quick_jit

# Numbers of rows that are tried, as few as are accurate.
NUM_ROWS = (256, 1024, 4096, 16_384)
# Weights of more rows are not fitted.
MOST_FITTED = 1024
# Part of the limits that the error may be.
ACCURATE = 0.2
# Draws at which the score of all rows is computed, and that of every single row.
NUM_DRAWS, NUM_ROW_DRAWS = 256, 16
# Draws to which weights are fitted, and draws that measure the error. In many dimensions fewer
# draws suffice: so many numbers, but at least so many draws.
FITTED, TOLD = slice(0, None, 2), slice(1, None, 2)
MOST_SCORES, LEAST_FITTED = 8192, 32
# Inverse variances of the relative changes of weights; held-out draws choose one.
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# Weights are changed only if that lowers the mean square error of the score to this part of it.
WORTH = 0.5


class ModelDensity(NamedTuple):
    """The log density of a model and its data.

    Attributes:
        evaluate: coordinates of the latents (d,) to it and its score.
        shift: errors of means that its error causes, in standard deviations, (d,) or zero.
        width: errors of standard deviations, relative to them.
        exact: the log densities of all rows at points, (n, d) to (n,), if others stand for them.
        push: points (n, d) in these coordinates to unconstrained values, if they differ.
    """

    evaluate: Density
    shift: np.ndarray | float = 0.0
    width: np.ndarray | float = 0.0
    exact: Callable[[Array], Array] | None = None
    push: Callable[[Array], Array] | None = None

    def error(self, limits: tuple[float, float]) -> float:
        """The largest error of a mean or a standard deviation, as a part of its limit."""
        errors = zip((self.shift, self.width), limits, strict=True)
        return max(float(np.max(np.abs(error))) / limit for error, limit in errors)


def tall_density(
    target: Target,
    tall: TallPlate,
    draws: Array,
    root: Array,
    limits: tuple[float, float],
    forward_mode: bool = False,
) -> ModelDensity:
    """The density of a model near its posterior, by a few rows that stand for all.

    Args:
        target: the model.
        tall: its plate of many rows.
        draws: finite draws near the posterior, (n, d).
        root: a factor of the covariance of the draws ``FITTED``, (d, d).
        limits: limits of errors of means and of standard deviations, in standard deviations; rows
            are enough if the errors are a fifth of these.
        forward_mode: whether the model is differentiated in forward mode.

    Cost: n gradients of all rows, 65 values, and two gradients for each dimension up to 128.
    """
    exact, point = target.scored_density(forward_mode), center(draws)
    is_curved = len(point) <= MOST_CURVED
    some = draws[FITTED][: max(LEAST_FITTED, MOST_SCORES // len(point))]

    def rows_at(model: Callable[..., Any], x: Array) -> Array:
        return row_log_likelihoods(target._replace(model=model).trace(x), tall.name)

    def controlled_density(chosen: RowWeights, of_few: Taylor | None) -> tuple[Density, Taylor]:
        few = target._replace(model=weighted_rows(tall, chosen)).scored_density(forward_mode)
        known = taylor(few, point, is_curved) if of_few is None else of_few

        def density(x: Array) -> tuple[Array, Array]:
            value, score = few(x)
            found = Taylor(value[None], score[None])
            corrected = controlled(found, (x - point)[None], known, of_all)
            return corrected.value[0], corrected.slope[0]

        return density, known

    @quick_jit
    def expand_and_miss(chosen: RowWeights) -> tuple[Taylor, Array]:
        density, of_few = controlled_density(chosen, None)
        return of_few, lax.map(lambda x: density(x)[1], draws) - scores

    @quick_jit
    def effects(rows: Array) -> Array:
        # The plate scales each row by the number of all over that of these.
        model = with_rows(tall.model, {tall.name: rows})
        share = len(rows) / tall.size
        return share * score_remainders(partial(rows_at, model), point, some, root, is_curved)

    of_all = quick_jit(lambda x: taylor(exact, x, is_curved))(point)
    # One point after another: a pass over all rows takes memory.
    scores = quick_jit(lambda draws: lax.map(lambda x: exact(x)[1], draws))(draws)
    values = quick_jit(lambda points: lax.map(lambda x: exact(x)[0], points))
    remainders = quick_jit(partial(row_remainders, partial(rows_at, target.model)))
    sizes = np.asarray(remainders(point, draws[:NUM_ROW_DRAWS]))
    tried = []
    for count in NUM_ROWS:
        chosen = choose_rows(sizes, count)
        of_few, missed = expand_and_miss(chosen)
        if count <= MOST_FITTED:
            whitened = np.asarray(missed[FITTED][: len(some)] @ root)
            chosen = fit_weights(chosen, np.asarray(effects(jnp.asarray(chosen.rows))), whitened)
            of_few, missed = expand_and_miss(chosen)
        density, _ = controlled_density(chosen, of_few)
        # The weights are fitted to others of the draws.
        tried.append(ModelDensity(density, *errors_of_moments(draws[TOLD], missed[TOLD]), values))
        if tried[-1].error(limits) <= ACCURATE:
            break
    return min(tried, key=lambda one: one.error(limits))


def errors_of_moments(draws: Array, missed: Array) -> tuple[np.ndarray, np.ndarray]:
    """Errors of means and standard deviations by errors of the score, (n, d), to first order.

    An error e of the log density changes the mean of f by ``cov(e, f)``, which is the mean of
    ``C ∇e`` for f = x, and of twice ``(C ∇e) x`` for its square, with the covariance C (Stein).
    """
    x, e = (np.asarray(a, np.float64) for a in (draws, missed))
    centered = x - x.mean(0)
    moved = e @ (centered.T @ centered / len(x))
    variance = np.maximum(centered.var(0), np.finfo(float).tiny)
    return moved.mean(0) / variance**0.5, 0.5 * (moved * centered).mean(0) / variance


def score_remainders(
    rows_at: Callable[[Array], Array], point: Array, draws: Array, root: Array, is_curved: bool
) -> Array:
    """Score of every row less its expansion at a point (d,), whitened, (draws, rows, d).

    ``rows_at`` goes from coordinates (d,) to log likelihoods of the rows, (rows,); ``root`` is a
    factor of the covariance of the draws. The expansion is of second order if ``is_curved``.

    Cost: a pass over the rows and a derivative of it, both forward, for each draw and dimension.
    """
    scores = jax.jacfwd(rows_at)
    here, bend = jax.linearize(scores, point)

    def at(x: Array) -> Array:
        left = scores(x) - here
        return (left - bend(x - point) if is_curved else left) @ root

    return lax.map(at, draws)


def fit_weights(chosen: RowWeights, of_rows: np.ndarray, missed: np.ndarray) -> RowWeights:
    """The choice with weights that are fitted to the score of all rows.

    ``of_rows`` are :func:`score_remainders`, and ``missed`` the errors of the score with the
    weights of the choice, which are right on average, at the same draws, whitened, (draws, d).

    Cost: O(draws d rows²).
    """
    weights = np.asarray(chosen.weights, np.float64)
    effects = np.asarray(of_rows, np.float64).transpose(0, 2, 1) * weights
    missed = np.asarray(missed, np.float64)
    is_finite = np.isfinite(effects).all(axis=(1, 2)) & np.isfinite(missed).all(axis=1)
    effects, missed = effects[is_finite], missed[is_finite]
    if len(missed) < 2 or not missed.any():
        return chosen
    # Unknown are the relative changes; those of even draws are chosen by the odd ones.
    scale = np.mean(missed**2)
    best, least = np.zeros(len(weights)), WORTH * np.mean(missed[1::2] ** 2)
    flat = effects[0::2].reshape(-1, len(weights))
    gram, target = flat.T @ flat, -flat.T @ missed[0::2].ravel()
    for penalty in PENALTIES:
        ridge = penalty * scale * missed[0::2].size * np.eye(len(weights))
        changes = np.maximum(np.linalg.solve(gram + ridge, target), -1.0)
        loss = np.mean((missed[1::2] + effects[1::2] @ changes) ** 2)
        if loss < least:
            best, least = changes, loss
    return chosen._replace(weights=weights * (1 + best))
