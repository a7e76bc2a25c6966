"""Fits to samples that come in batches, by the moments of random features.

Coordinates, bandwidth, base score and features are those of the first batch. From then on a batch
only adds to moments, and the estimate is a function of these: that of one fit to all samples in the
same coordinates, up to rounding and to the samples the operator is averaged over.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_kscore._util.checks import as_points
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.estimators._base.base_scores import Base, ZeroBase
from numpyro_kscore.estimators._base.coordinates import Coordinates
from numpyro_kscore.estimators._fit.feature_selection import choose_for_span, some_rows
from numpyro_kscore.estimators._fit.info import ScoreInfo
from numpyro_kscore.estimators._fit.problem import make_problem
from numpyro_kscore.estimators._fit.score import Score
from numpyro_kscore.estimators._fit.settings import FitSettings
from numpyro_kscore.estimators._operators.feature_span import FeatureSpan
from numpyro_kscore.estimators._operators.features import (
    FeatureExpansion,
    FeatureMoments,
    FeatureRows,
    Features,
    add_rows,
)

__all__ = ["StreamState", "add_batch", "finish_stream", "start_stream"]


@pytree
class StreamState:
    """What is kept of the samples seen so far; its size does not depend on how many they are.

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
    some: FeatureRows

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


def add_batch(state: StreamState, batch: Any, operator_samples: int | None) -> StreamState:
    """The state after one more batch, (n, d).

    Raises:
        ValueError: for another dimension than that of the first batch.
        TypeError: for a batch of another dtype.
    """
    mean = state.coordinates.mean
    points = as_points("batch", batch, dim=mean.shape[0])
    if points.dtype != mean.dtype:
        raise TypeError(
            f"batch: expected {mean.dtype}, as the first batch has; got {points.dtype}. Convert "
            f"it with .astype('{mean.dtype}')"
        )
    return _add(state, points, operator_samples=operator_samples)


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
    solution = span.solve_coefficients(settings.solver, regularizer)
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
def _add(state: StreamState, points: jax.Array, *, operator_samples: int | None) -> StreamState:
    base_scores = None
    if not isinstance(state.base, ZeroBase):
        scores = state.base.score(points).astype(points.dtype)
        base_scores = state.coordinates.scores_to_kernel(scores)
    rows = FeatureRows(state.coordinates.to_kernel(points), base_scores, None)
    halves = add_rows(state.halves, state.features, rows, operator_samples)
    return dataclasses.replace(state, halves=halves)
