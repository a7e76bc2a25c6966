"""Compiled fits: the estimate as a function, at the samples only, and of samples in batches.

Each is compiled as a whole, from settings and samples that
:class:`~numpyro_kscore.ScoreEstimator` has checked. In a stream, coordinates, bandwidth, base score
and features are those of the first batch. From then on a batch only adds to moments, and the
estimate is a function of these: that of one fit to all samples in the same coordinates, up to
rounding and to the samples the operator is averaged over.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree
from numpyro_kscore._util.sharding import constrain_rows
from numpyro_kscore.estimators._base.base_scores import Base, ZeroBase
from numpyro_kscore.estimators._base.standardization import Coordinates
from numpyro_kscore.estimators._fit.feature_selection import choose_for_span, some_rows
from numpyro_kscore.estimators._fit.grouped_score import grouped
from numpyro_kscore.estimators._fit.guide_estimator import AtSamples
from numpyro_kscore.estimators._fit.info import ScoreInfo
from numpyro_kscore.estimators._fit.problem import Problem, make_problem
from numpyro_kscore.estimators._fit.score import Score
from numpyro_kscore.estimators._fit.settings import FitSettings
from numpyro_kscore.estimators._operators.feature_span import FeatureSpan
from numpyro_kscore.estimators._operators.features import (
    FeatureExpansion,
    FeatureMoments,
    Features,
    Rows,
    add_rows,
)
from numpyro_kscore.estimators._operators.fit_operator import field_by_rows
from numpyro_kscore.kernels._pairwise import Expansion
from numpyro_kscore.solvers._operator import Solution


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
        values = field_by_rows(settings.kernel, whole, problem.rows.points, settings.sharding).T
    if jackknife:
        values = _jackknife(problem, values)
    return _in_original_units(problem, solution, values, base.at_samples, None)


def _expansion(problem: Problem, solution: Solution) -> Expansion | FeatureExpansion:
    """The residual as a function, in the kernel's coordinates."""
    whole = solution._replace(coefficients=problem.reduction.expand(solution.coefficients))
    expansion = problem.operator.expansion(problem.rows, whole)
    if isinstance(expansion, FeatureExpansion):
        return expansion
    points, coefficients = constrain_rows(expansion[:2], problem.settings.sharding)
    return expansion._replace(points=points, coefficients=coefficients)


def _jackknife(problem: Problem, values: jax.Array) -> jax.Array:
    """Values (d, n) of the fit to all samples, freed of their bias of order 1/n."""
    operator, base_scores = problem.operator, problem.reduction.base_scores
    # Two halves of equal size; they share the middle sample of an odd number.
    n = problem.rows.points.shape[0]
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


@pytree
class StreamState:
    """The moments of the samples seen so far; its size does not depend on how many they are.

    Attributes:
        coordinates: the map to the kernel's coordinates.
        base: the base score.
        features: the features, at unit bandwidth.
        halves: moments of even and odd samples.
        some: at most 2048 samples of the first batch, for the errors of held-out losses.

    Example::

        from numpyro_kscore.estimators import RandomFeatures
        from numpyro_kscore.regularizers import NuMethod

        estimator = ScoreEstimator(regularizer=NuMethod(45), features=RandomFeatures(256))
        state = estimator.init_stream(samples[:100])
        state = estimator.partial_fit(state, samples[100:])
        state.num_samples  # 200
        score = estimator.finish(state)
    """

    coordinates: Coordinates
    base: Base
    features: Features
    halves: FeatureMoments
    some: Rows

    @property
    def num_samples(self) -> jax.Array:
        """How many samples are in it."""
        return jnp.sum(self.halves.targets.number)


@quick_jit
@full_precision
def start_stream(settings: FitSettings, samples: jax.Array, base: Base) -> StreamState:
    """The state after the first batch, (n, d)."""
    problem = make_problem(settings, samples, base)
    span: Any = problem.operator
    # Values at the samples stay behind.
    base = dataclasses.replace(base, at_samples=None, held_out=None)
    return StreamState(problem.coordinates, base, span.features, span.halves, some_rows(span.rows))


@quick_jit
@full_precision
def finish_stream(settings: FitSettings, state: StreamState) -> Score:
    """The estimate from all samples of a stream."""
    options: Any = settings.features
    span = FeatureSpan(
        state.features, state.some, state.halves, options.operator_samples, settings.normalize
    )
    regularizer, selection = settings.regularizer, None
    if regularizer.is_auto:
        bandwidth = state.coordinates.bandwidth[None]
        selection, regularizer = choose_for_span(settings, span, state.some, bandwidth)
    solution = span.solve_coefficients(lambda gram, h: settings.solver.solve(gram, h, regularizer))
    info = ScoreInfo(
        steps=solution.steps,
        residual=solution.residual,
        bandwidth=state.coordinates.bandwidth,
        spectral_scale=solution.spectral_scale,
        finite=jnp.all(jnp.isfinite(solution.values)),
        path=span.path,
        selection=selection,
    )
    expansion = FeatureExpansion(state.features, solution.values.reshape(2, -1))
    return Score(settings.kernel, state.coordinates, expansion, state.base, None, info)


@quick_jit
@full_precision
def add_batch(
    state: StreamState, points: jax.Array, *, operator_samples: int | None
) -> StreamState:
    """The state after one more batch, (n, d)."""
    base_scores = None
    if not isinstance(state.base, ZeroBase):
        scores = state.base.score(points).astype(points.dtype)
        base_scores = state.coordinates.scores_to_kernel(scores)
    rows = Rows(state.coordinates.to_kernel(points), base_scores)
    halves = add_rows(state.halves, state.features, rows, operator_samples)
    return dataclasses.replace(state, halves=halves)
