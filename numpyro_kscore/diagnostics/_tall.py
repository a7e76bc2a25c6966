"""The log density of a model at many points, where its data are tall.

Markov chains take it a million times, and a pass over millions of rows takes 10 milliseconds. A
few rows with weights (:mod:`numpyro_kscore._tracing.coreset`) stand for all, and their expansion at
a point, to second order, is replaced by that of all rows. What is left is an error of third order,
and measured.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro import handlers

from numpyro_kscore._tracing.anchor import Expansion, center, replaced
from numpyro_kscore._tracing.coordinates import trace_at
from numpyro_kscore._tracing.coreset import (
    TallPlate,
    choose_rows,
    row_log_likelihoods,
    row_remainders,
    weighted_rows,
)
from numpyro_kscore._tracing.particles import are_finite
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._chains import Density
from numpyro_kscore.diagnostics._fitted import (
    FittedGuide,
    check_mostly_finite,
    draw_fitted,
    log_joint_and_score,
)

__all__ = ["ModelDensity", "model_density"]

# Numbers of rows that are tried, as few as are accurate.
NUM_ROWS = (1024, 4096, 16_384)
# Error of a mean, in standard deviations, and relative error of one of these, that is accurate.
ACCURATE = 0.03
# Draws at which all rows are looked at, and those of them at which every row is.
NUM_DRAWS, NUM_ROW_DRAWS = 256, 16
# Most dimensions of an expansion to second order.
MOST_CURVED = 128


class ModelDensity(NamedTuple):
    """The log density of a model and its data.

    Attributes:
        evaluate: unconstrained latents (d,) to it and its score.
        shift: what its error does to means, in standard deviations, (d,) or zero.
        width: and to standard deviations, relative to them.
    """

    evaluate: Density
    shift: np.ndarray | float = 0.0
    width: np.ndarray | float = 0.0

    @property
    def error(self) -> float:
        """The largest of both."""
        return float(np.max([np.abs(self.shift), np.abs(self.width)]))


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
    of_all = quick_jit(partial(_expand, exact))(point)
    scores = quick_jit(partial(_scores, exact))(draws)
    remainders = quick_jit(partial(_row_remainders, fitted, tall.name, key))
    sizes = np.asarray(remainders(point, draws[:NUM_ROW_DRAWS]))
    tried = []
    for count in NUM_ROWS:
        few = _of_rows(fitted, tall, sizes, count, key)
        density = _with_expansion(few, point, quick_jit(partial(_expand, few))(point), of_all)
        missed = quick_jit(partial(_scores, density))(draws) - scores
        tried.append(ModelDensity(density, *_errors_of_moments(draws, missed)))
        if tried[-1].error <= ACCURATE:
            break
    return min(tried, key=lambda one: one.error)


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


def _expand(density: Density, point: Array) -> Expansion:
    """Value, score and, in few dimensions, Hessian at a point."""
    value, score = density(point)
    curvature = None
    if len(point) <= MOST_CURVED:
        directions = jnp.eye(len(point), dtype=point.dtype)
        curvature = lax.map(
            lambda v: jax.jvp(lambda x: density(x)[1], (point,), (v,))[1], directions
        )
    return Expansion(value, score, {}, curvature)


def _with_expansion(few: Density, point: Array, of_rows: Expansion, of_all: Expansion) -> Density:
    def density(x: Array) -> tuple[Array, Array]:
        value, score = few(x)
        found = Expansion(value[None], score[None], {})
        corrected = replaced(found, (x - point)[None], of_rows, of_all)
        return corrected.values[0], corrected.scores[0]

    return density


def _of_rows(
    fitted: FittedGuide, tall: TallPlate, sizes: np.ndarray, count: int, key: Array
) -> Density:
    model = weighted_rows(tall, choose_rows(sizes, count))
    program = fitted.program._replace(model=model)
    return log_joint_and_score(fitted._replace(program=program), key)


def _row_remainders(
    fitted: FittedGuide, plate: str, key: Array, point: Array, draws: Array
) -> Array:
    """Size of what an expansion to second order at a point leaves of every row, (rows,)."""
    program = fitted.program
    model = handlers.substitute(handlers.seed(program.model, key), data=dict(program.params))

    def rows_at(x: Array) -> Array:
        latents = fitted.layout.unravel(x)
        trace = trace_at(model, program.args, program.kwargs, latents, program.forms)
        return row_log_likelihoods(trace, plate)

    return row_remainders(rows_at, point, draws)
