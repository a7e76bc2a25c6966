"""Compiled fits: the estimate as a function, and at the samples only.

Each is compiled as a whole, from settings and samples that
:class:`~numpyro_kscore.ScoreEstimator` has checked.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.sharding import constrain_rows
from numpyro_kscore.estimators._base.base_scores import Base
from numpyro_kscore.estimators._fit.grouped_score import grouped
from numpyro_kscore.estimators._fit.guide_estimator import AtSamples
from numpyro_kscore.estimators._fit.info import ScoreInfo
from numpyro_kscore.estimators._fit.problem import Problem, make_problem
from numpyro_kscore.estimators._fit.score import Score
from numpyro_kscore.estimators._fit.settings import FitSettings
from numpyro_kscore.estimators._operators.features import FeatureExpansion
from numpyro_kscore.estimators._operators.subset import field_by_rows
from numpyro_kscore.kernels._pairwise import Expansion
from numpyro_kscore.solvers._operator import Solution

__all__ = ["fit_at_samples", "fit_score"]


@quick_jit
@full_precision
def fit_score(settings: FitSettings, samples: jax.Array, base: Base) -> Score:
    """The estimate as a function: :meth:`~numpyro_kscore.ScoreEstimator.fit`."""
    problem = make_problem(settings, samples, base)
    solution = problem.solve(problem.operator, problem.reduction.base_scores)
    rows, known = problem.operator.solved_rows, base.at_samples
    if rows is not None and known is not None:
        known = known[rows]
    estimate = _in_original_units(problem, solution, solution.values, known, rows)
    # Values at samples that the solve left out would cost more than the fit: made when asked for.
    stored = constrain_rows(estimate.scores, settings.sharding) if rows is None else None
    score = Score(
        settings.kernel,
        problem.coordinates,
        _expansion(problem, solution),
        base,
        stored,
        estimate.info,
        sharding=settings.sharding,
    )
    return score if problem.layout is None else grouped(score, problem.layout, samples)


@quick_jit
@full_precision
def fit_at_samples(
    settings: FitSettings,
    samples: jax.Array,
    base: Base,
    context: jax.Array | None,
    *,
    jackknife: bool,
) -> AtSamples:
    """The estimate at the samples: :meth:`~numpyro_kscore.ScoreEstimator.at_samples`."""
    problem = make_problem(settings, samples, base, context)
    solution = problem.solve(problem.operator, problem.reduction.base_scores)
    values = solution.values
    if problem.operator.solved_rows is not None:
        whole = _expansion(problem, solution)
        values = field_by_rows(settings.kernel, whole, problem.points, settings.sharding).T
    if jackknife:
        values = _jackknife(problem, values)
    return _in_original_units(problem, solution, values, base.at_samples, None)


def _expansion(problem: Problem, solution: Solution) -> Expansion | FeatureExpansion:
    """The residual as a function, in the kernel's coordinates."""
    expansion = problem.operator.expansion(
        problem.points,
        problem.base_scores,
        problem.reduction.expand(solution.coefficients),
        solution.zeta_weight,
    )
    if isinstance(expansion, FeatureExpansion):
        return expansion
    points, coefficients, zeta_weight = expansion
    points, coefficients = constrain_rows((points, coefficients), problem.settings.sharding)
    return Expansion(points, coefficients, zeta_weight)


def _jackknife(problem: Problem, values: jax.Array) -> jax.Array:
    """Values (d, n) of the fit to all samples, freed of their bias of order 1/n."""
    operator, base_scores = problem.operator, problem.reduction.base_scores
    # Two halves of equal size; they share the middle sample of an odd number.
    n = problem.points.shape[0]
    size = (n + 1) // 2
    halves = [
        (operator.restricted(rows), None if base_scores is None else base_scores[rows])
        for rows in (slice(0, size), slice(n - size, n))
    ]
    if operator.is_cached:
        batch = jax.tree.map(lambda *a: jnp.stack(a), *halves)
        first, second = jax.vmap(lambda *half: problem.solve(*half).values)(*batch)
    else:
        first, second = (problem.solve(*half).values for half in halves)
    parts = jnp.concatenate([first, second[:, 2 * size - n :]], axis=1)
    return values + size / (n - size) * (values - parts)


def _in_original_units(
    problem: Problem,
    solution: Solution,
    values: jax.Array,
    base_scores: jax.Array | None,
    rows: jax.Array | None,
) -> AtSamples:
    """The estimate from its residual in the kernel's coordinates, (d, n), reduced or not.

    It may be at some of the samples: at ``rows``.
    """
    residual = problem.frame(rows).scores_from_kernel(problem.reduction.expand(values))
    scores = residual if base_scores is None else base_scores + residual
    info = ScoreInfo(
        steps=solution.steps,
        residual=solution.residual,
        bandwidth=problem.coordinates.bandwidth,
        spectral_scale=solution.spectral_scale,
        finite=jnp.all(jnp.isfinite(scores)),
        path=problem.operator.path,
        selection=problem.selection,
    )
    return AtSamples(
        residual, scores, info, problem.coordinates, problem.nearest, problem.nearest_context
    )
