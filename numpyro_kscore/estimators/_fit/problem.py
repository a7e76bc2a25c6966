"""The problem a fit solves: samples in the kernel's coordinates, and the operator on them.

:func:`make_problem` standardizes the samples, measures their distances, settles bandwidth and
strength, and forms the operator.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from numpyro_kscore._util.sharding import by_rows, constrain_rows
from numpyro_kscore.estimators._base.base_scores import Base
from numpyro_kscore.estimators._base.mixture import GroupLayout, MixtureBase, lay_out
from numpyro_kscore.estimators._base.standardization import (
    WHITENING_CHOICES,
    Coordinates,
    localized,
    regress_out,
    standardize_samples,
)
from numpyro_kscore.estimators._fit.bandwidth import AutoBandwidth, Median
from numpyro_kscore.estimators._fit.feature_selection import span_features
from numpyro_kscore.estimators._fit.info import Selection
from numpyro_kscore.estimators._fit.selection import HeldOutProblem, choose
from numpyro_kscore.estimators._fit.settings import FitSettings
from numpyro_kscore.estimators._operators.fit_operator import FitOperator, Full, subsample
from numpyro_kscore.estimators._operators.landmarks import compress
from numpyro_kscore.kernels._gram import Gram, Reduction, is_cached, make_gram, reduce_dimension
from numpyro_kscore.kernels._median import median_distance
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared, squared_distances
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._operator import Solution
from numpyro_kscore.solvers._solvers import Dense, Krylov

# Number of samples whose distances are measured where not all pairs are kept.
SOME_POINTS = 1024


class _Distances(NamedTuple):
    """Squared distances of all pairs, or of 1024 samples where not all pairs are kept, (k, k).

    Those of a context are added in ``joint``; without one, the other two are None.
    """

    joint: jax.Array
    within: jax.Array | None
    nearest_context: jax.Array | None


class Problem(NamedTuple):
    """Samples and base scores in the kernel's coordinates, with their operator.

    Attributes:
        settings: the settings of the fit.
        regularizer: the filter, its strength selected.
        selection: of strength and bandwidth where one was automatic, otherwise None.
        coordinates: the map to the kernel's coordinates.
        points: the samples, (n, d).
        base_scores: base scores at the samples, (n, d), or None.
        reduction: the same two in the span of their own vectors, which the operator acts in.
        operator: the operator.
        layout: the maps of groups and of their samples, or None: then ``coordinates`` is all.
        nearest: squared distance of samples to their nearest other, in standardized units.
        nearest_context: the same of the context alone, or None.
    """

    settings: FitSettings
    regularizer: Regularizer
    selection: Selection | None
    coordinates: Coordinates
    points: jax.Array
    base_scores: jax.Array | None
    reduction: Reduction
    operator: FitOperator
    layout: GroupLayout | None
    nearest: jax.Array
    nearest_context: jax.Array | None

    def solve(self, operator: FitOperator, base_scores: jax.Array | None) -> Solution:
        """The estimate less its base by an operator: that of all samples, or of some."""
        return operator.solve(self.settings.solver, self.regularizer, base_scores)

    def frame(self, rows: jax.Array | None) -> Coordinates | GroupLayout:
        """The map of scores at the samples, or at some of them."""
        if self.layout is None:
            return self.coordinates
        return self.layout if rows is None else self.layout.restricted(rows)


class _Standardized(NamedTuple):
    """A :class:`Problem` before a bandwidth is known, the context in its own coordinates.

    Where there is a layout, ``together`` are the samples with all groups at one place, (n, d).
    """

    coordinates: Coordinates
    points: jax.Array
    base_scores: jax.Array | None
    context: jax.Array | None
    layout: GroupLayout | None = None
    together: jax.Array | None = None


def make_problem(
    settings: FitSettings, samples: jax.Array, base: Base, context: jax.Array | None = None
) -> Problem:
    """The problem of a fit to samples, (n, d), given a context, (n, c), or None."""
    n, dim = samples.shape
    standardized = _standardize(settings, samples, base, context)
    z, base_scores, context = standardized[1:4]
    reduction = Reduction(None, z, base_scores)
    keeps_space = settings.subset is not None or settings.features is not None
    if is_cached(n) and not keeps_space and not isinstance(settings.solver, Dense):
        reduction = reduce_dimension(z, base_scores)
    distances = _measure(z, context, settings.sharding)
    bandwidths = _bandwidth_candidates(
        settings.bandwidth, _within_groups(settings, standardized, distances)
    )
    held_out = HeldOutProblem(reduction.points, reduction.base_scores, base.held_out, dim)
    operator: FitOperator
    if settings.features is not None:
        chosen, operator = span_features(settings, held_out, bandwidths)
        bandwidth, regularizer, selection = chosen
        points = operator.rows.points
    else:
        bandwidth, regularizer, selection = _choose(settings, held_out, bandwidths)
        gram = _make_gram(settings, reduction.points, dim, distances, bandwidth)
        operator, points = _make_operator(settings, gram), gram.points
    in_bandwidths = Reduction(reduction.basis, points, _times(reduction.base_scores, bandwidth))
    return Problem(
        settings,
        regularizer,
        selection,
        dataclasses.replace(standardized.coordinates, bandwidth=bandwidth),
        z / bandwidth,
        _times(base_scores, bandwidth),
        in_bandwidths,
        operator,
        None if standardized.layout is None else standardized.layout.with_bandwidth(bandwidth),
        nearest_squared(distances.joint),
        distances.nearest_context,
    )


def _standardize(
    settings: FitSettings, samples: jax.Array, base: Base, context: jax.Array | None
) -> _Standardized:
    how, sharding = settings.standardize, settings.sharding
    if context is not None:
        context = standardize_samples(context, how).to_kernel(context)
        if how in WHITENING_CHOICES:
            samples = regress_out(samples, context)
    fitted = base.whitening()
    if fitted is not None and how in WHITENING_CHOICES:
        # One estimate of the covariance, the better one, serves both.
        coordinates = fitted
        if how == "local":
            coordinates = localized(coordinates, samples)
    else:
        coordinates = standardize_samples(samples, how)
    layout, together, known = None, None, base.at_samples
    if isinstance(base, MixtureBase) and how in WHITENING_CHOICES:
        layout, together = lay_out(samples, base.layout(), local=how == "local")
        # Each group is fitted by itself, with the score of its own component.
        known = base.own_scores(samples)
    frame = coordinates if layout is None else layout
    points = constrain_rows(frame.to_kernel(samples), sharding)
    base_scores = None
    if known is not None:
        base_scores = frame.scores_to_kernel(known)
        base_scores = constrain_rows(base_scores, sharding)
    return _Standardized(coordinates, points, base_scores, context, layout, together)


def _within_groups(
    settings: FitSettings, standardized: _Standardized, distances: _Distances
) -> jax.Array:
    """Squared distances that the bandwidth is taken from: without those between groups."""
    layout, together = standardized.layout, standardized.together
    if layout is None or together is None:
        return distances.joint
    return lax.cond(
        layout.number > 1,
        lambda: _measure(together, None, settings.sharding).joint,
        lambda: distances.joint,
    )


def _choose(
    settings: FitSettings, problem: HeldOutProblem, bandwidths: jax.Array
) -> tuple[jax.Array, Regularizer, Selection | None]:
    """Bandwidth and regularizer, and how they were selected if they were."""
    if not settings.is_auto:
        return bandwidths[0], settings.regularizer, None
    n = problem.points.shape[0]
    num_samples = n if settings.subset is None else settings.subset.check(n)
    selection, regularizer = choose(
        settings.kernel,
        settings.regularizer,
        settings.solver,  # type: ignore[arg-type]
        problem,
        bandwidths,
        settings.normalize,
        num_samples,
        settings.sharding,
    )
    return selection.bandwidth, regularizer, selection


def _make_gram(
    settings: FitSettings,
    points: jax.Array,
    dim: int,
    distances: _Distances,
    bandwidth: jax.Array,
) -> Gram:
    """The Gram operator on the samples, in units of the bandwidth."""
    scale = settings.scale(dim, bandwidth)
    pairs, within = None, None
    if is_cached(points.shape[0]):
        pairs = distances.joint / bandwidth**2
    if distances.within is not None:
        within = distances.within / bandwidth**2
    # The other solvers' recurrences would go on without end at a residual they cannot reach.
    precision = settings.precision if isinstance(settings.solver, Krylov) else "float32"
    return make_gram(
        settings.kernel,
        points / bandwidth,
        pairs,
        scale,
        dim,
        settings.normalize,
        within,
        settings.sharding,
        precision,
    )


def _make_operator(settings: FitSettings, gram: Gram) -> FitOperator:
    n = gram.points.shape[0]
    if settings.landmarks is not None:
        return compress(gram, settings.landmarks.select(n))
    if settings.subset is not None:
        return subsample(gram, settings.subset.select(n), settings.normalize)
    return Full(gram)


def _times(base_scores: jax.Array | None, bandwidth: jax.Array) -> jax.Array | None:
    """Base scores in units of the inverse bandwidth."""
    return None if base_scores is None else base_scores * bandwidth


def _measure(
    points: jax.Array, context: jax.Array | None, sharding: NamedSharding | None
) -> _Distances:
    """Squared distances of samples, (n, d), with those of a context, (n, c), added."""
    n = points.shape[0]
    some = points if is_cached(n) else points[:: -(-n // SOME_POINTS)]
    own = _all_squared_distances(some, sharding)
    if context is None:
        return _Distances(own, None, None)
    apart = _all_squared_distances(context, sharding)
    return _Distances(own + apart, own, nearest_squared(apart))


def _all_squared_distances(points: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    def own(rows: jax.Array, whole: tuple[jax.Array, jax.Array]) -> jax.Array:
        return squared_distances(rows, *whole)

    return by_rows(own, sharding, points, (points, cancels(points)))


def _bandwidth_candidates(bandwidth: Any, squared: jax.Array) -> jax.Array:
    """The candidates for the bandwidth, (b,), from a rule or number and squared distances."""
    dtype = squared.dtype
    if isinstance(bandwidth, Median):
        bandwidth = bandwidth.factor * median_distance(squared)
    elif isinstance(bandwidth, AutoBandwidth):
        bandwidth = jnp.asarray(bandwidth.factors, dtype) * median_distance(squared)
    return jnp.atleast_1d(jnp.asarray(bandwidth, dtype))
