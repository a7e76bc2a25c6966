"""The log density of a model at many points, where its data are tall.

Markov chains take it a million times, and a pass over millions of rows takes 10 milliseconds. A
few rows with weights (:mod:`numpyro_kscore._tracing.coreset`) stand for all, and their expansion at
a point, to second order, is replaced by that of all rows. What is left is an error of third order,
and measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_kscore._tracing.control_variate import MOST_CURVED, center, controlled
from numpyro_kscore._tracing.coreset import (
    RowWeights,
    TallPlate,
    choose_rows,
    row_log_likelihoods,
    row_remainders,
    weighted_rows,
)
from numpyro_kscore._tracing.particles import are_finite
from numpyro_kscore._tracing.subsampling import with_rows
from numpyro_kscore._tracing.taylor import Taylor, taylor
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._chains import Density
from numpyro_kscore.diagnostics._decide import MEAN_LIMIT, SD_LIMIT
from numpyro_kscore.diagnostics._fitted import (
    FittedGuide,
    check_mostly_finite,
    draw_fitted,
    log_joint_and_score,
)
from numpyro_kscore.diagnostics._movement import make_frame
from numpyro_kscore.diagnostics._row_weights import fit_weights, score_remainders

__all__ = ["ModelDensity", "model_density"]

# Numbers of rows that are tried, as few as are accurate.
NUM_ROWS = (256, 1024, 4096, 16_384)
# Up to so many rows, weights are fitted.
MOST_FITTED = 1024
# Part of a verdict's limits that the error may be.
ACCURATE = 0.2
# Draws at which all rows are looked at, and those of them at which every row is.
NUM_DRAWS, NUM_ROW_DRAWS = 256, 16
# Draws to which weights are fitted, and those that tell the error. In many dimensions so many
# numbers are enough, but of so many draws.
FITTED, TOLD = slice(0, None, 2), slice(1, None, 2)
MOST_SCORES, LEAST_FITTED = 8192, 32


class ModelDensity(NamedTuple):
    """The log density of a model and its data.

    Attributes:
        evaluate: unconstrained latents (d,) to it and its score.
        shift: what its error does to means, in standard deviations, (d,) or zero.
        width: and to standard deviations, relative to them.
        exact: the log densities of all rows at points, (n, d) to (n,), if others stand for them.
    """

    evaluate: Density
    shift: np.ndarray | float = 0.0
    width: np.ndarray | float = 0.0
    exact: Callable[[Array], Array] | None = None

    @property
    def error(self) -> float:
        """The largest of both, as a part of the limits of a verdict."""
        shift, width = np.max(np.abs(self.shift)), np.max(np.abs(self.width))
        return float(max(shift / MEAN_LIMIT, width / SD_LIMIT))


def model_density(fitted: FittedGuide, key: Array) -> ModelDensity:
    """The model's log density, with all rows or with some that stand for them.

    Args:
        fitted: the model, and a guide near its posterior.
        key: random key.

    Raises:
        FloatingPointError: if fewer than half of the draws are finite.

    Cost: if rows stand for others, 300 gradients of all rows and two for each dimension up to 128.
    """
    exact = log_joint_and_score(fitted, key)
    tall = fitted.tall
    if tall is None:
        return ModelDensity(exact)
    draws = draw_fitted(fitted, NUM_DRAWS, key_apart(key, 5))
    is_finite = are_finite(draws)
    check_mostly_finite(int(jnp.sum(is_finite)), NUM_DRAWS)
    draws = jnp.where(is_finite[:, None], draws, center(draws))
    point = center(draws)
    is_curved = len(point) <= MOST_CURVED
    of_all = quick_jit(lambda x: taylor(exact, x, is_curved))(point)
    scores = quick_jit(partial(_scores, exact))(draws)
    values = quick_jit(partial(_values, exact))
    whole = partial(_rows_at, fitted, tall.name, key, fitted.program.model)
    sizes = np.asarray(quick_jit(partial(row_remainders, whole))(point, draws[:NUM_ROW_DRAWS]))
    fitter = _Fitter(fitted, tall, key, point, draws[FITTED])

    @quick_jit
    def expand_and_miss(chosen: RowWeights) -> tuple[Taylor, Array]:
        few = _of_rows(fitted, tall, chosen, key)
        of_few = taylor(few, point, is_curved)
        return of_few, _scores(_with_expansion(few, point, of_few, of_all), draws) - scores

    tried = []
    for count in NUM_ROWS:
        chosen = choose_rows(sizes, count)
        of_few, missed = expand_and_miss(chosen)
        if count <= MOST_FITTED:
            chosen = fitter.fitted(chosen, missed[FITTED])
            of_few, missed = expand_and_miss(chosen)
        few = _of_rows(fitted, tall, chosen, key)
        density = _with_expansion(few, point, of_few, of_all)
        # The weights are fitted to others of the draws.
        errors = _errors_of_moments(draws[TOLD], missed[TOLD])
        tried.append(ModelDensity(density, *errors, values))
        if tried[-1].error <= ACCURATE:
            break
    return min(tried, key=lambda one: one.error)


class _Fitter:
    """Fits the weights of rows to the scores of all.

    Args:
        fitted: the model, with all rows.
        tall: the model with some rows.
        key: random key.
        point: where the density is expanded, (d,).
        draws: at which weights are fitted, (n, d).
    """

    def __init__(
        self, fitted: FittedGuide, tall: TallPlate, key: Array, point: Array, draws: Array
    ) -> None:
        self._some = draws[: max(LEAST_FITTED, MOST_SCORES // len(point))]
        self._root = make_frame(draws).root

        @quick_jit
        def effects(rows: Array) -> Array:
            # The plate scales each row by the number of all over that of these.
            share = len(rows) / tall.size
            model = with_rows(tall.model, {tall.name: rows})
            rows_at = partial(_rows_at, fitted, tall.name, key, model)
            is_curved = len(point) <= MOST_CURVED
            return share * score_remainders(rows_at, point, self._some, self._root, is_curved)

        self._effects = effects

    def fitted(self, chosen: RowWeights, missed: Array) -> RowWeights:
        """The choice with other weights; ``missed`` is by how much the score is off, (n, d)."""
        whitened = np.asarray(missed[: len(self._some)] @ self._root)
        return fit_weights(chosen, np.asarray(self._effects(jnp.asarray(chosen.rows))), whitened)


def _errors_of_moments(draws: Array, missed: Array) -> tuple[np.ndarray, np.ndarray]:
    """What an error of the score, (n, d), does to means and standard deviations, to first order.

    An error e of the log density changes the mean of f by ``cov(e, f)``, which is the mean of
    ``C ∇e`` for f = x, and of twice ``(C ∇e) x`` for its square, with the covariance C (Stein).
    """
    x, e = (np.asarray(a, np.float64) for a in (draws, missed))
    centered = x - x.mean(0)
    moved = e @ (centered.T @ centered / len(x))
    variance = np.maximum(centered.var(0), np.finfo(float).tiny)
    return moved.mean(0) / variance**0.5, 0.5 * (moved * centered).mean(0) / variance


def _scores(density: Density, draws: Array) -> Array:
    # One point after another: a pass over all rows takes memory.
    return lax.map(lambda x: density(x)[1], draws)


def _values(density: Density, points: Array) -> Array:
    return lax.map(lambda x: density(x)[0], points)


def _with_expansion(few: Density, point: Array, of_rows: Taylor, of_all: Taylor) -> Density:
    def density(x: Array) -> tuple[Array, Array]:
        value, score = few(x)
        found = Taylor(value[None], score[None])
        corrected = controlled(found, (x - point)[None], of_rows, of_all)
        return corrected.value[0], corrected.slope[0]

    return density


def _of_rows(fitted: FittedGuide, tall: TallPlate, chosen: RowWeights, key: Array) -> Density:
    model = weighted_rows(tall, chosen)
    program = fitted.program._replace(model=model)
    return log_joint_and_score(fitted._replace(program=program), key)


def _rows_at(
    fitted: FittedGuide, plate: str, key: Array, model: Callable[..., Any], x: Array
) -> Array:
    """Log likelihoods of the rows of a plate that a model has, (rows,), at latents (d,)."""
    target = fitted.target._replace(key=key)
    return row_log_likelihoods(target._replace(model=model).trace(x), plate)
