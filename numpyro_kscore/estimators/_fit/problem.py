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

from numpyro_kscore._util.sharding import constrain_rows
from numpyro_kscore.estimators._base.base_scores import Base
from numpyro_kscore.estimators._base.copies import is_discrete
from numpyro_kscore.estimators._base.mixture import GroupLayout, MixtureBase, lay_out
from numpyro_kscore.estimators._base.standardization import (
    WHITENING_CHOICES,
    Coordinates,
    localized,
    regress_out,
    standardize_samples,
)
from numpyro_kscore.estimators._fit.feature_selection import span_features
from numpyro_kscore.estimators._fit.info import Selection
from numpyro_kscore.estimators._fit.path import PathMember, without_discrete
from numpyro_kscore.estimators._fit.selection import choose, pair_distances
from numpyro_kscore.estimators._fit.settings import AutoBandwidth, FitSettings, Median
from numpyro_kscore.estimators._operators.features import Rows
from numpyro_kscore.estimators._operators.fit_operator import FitOperator, Full, subsample
from numpyro_kscore.estimators._operators.landmarks import compress
from numpyro_kscore.kernels._gram import Reduction, is_cached, make_gram, reduce_dimension
from numpyro_kscore.kernels._median import median_distance
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared
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
        rows: the samples.
        reduction: the same in the span of their own vectors, which the operator acts in.
        operator: the operator.
        layout: the maps of groups and of their samples, or None: then ``coordinates`` is all.
        nearest: squared distance of samples to their nearest other, in standardized units.
        nearest_context: the same of the context alone, or None.
    """

    settings: FitSettings
    regularizer: Regularizer
    selection: Selection | None
    coordinates: Coordinates
    rows: Rows
    reduction: Reduction
    operator: FitOperator
    layout: GroupLayout | None
    nearest: jax.Array
    nearest_context: jax.Array | None

    def solve(self, operator: FitOperator, base_scores: jax.Array | None) -> Solution:
        """The estimate less its base by an operator: that of all samples, or of some."""
        solver = self.settings.solver
        return operator.solve(lambda gram, h: solver.solve(gram, h, self.regularizer), base_scores)

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
    rows: Rows
    context: jax.Array | None
    layout: GroupLayout | None = None
    together: jax.Array | None = None


def make_problem(
    settings: FitSettings, samples: jax.Array, base: Base, context: jax.Array | None = None
) -> Problem:
    """The problem of a fit to samples, (n, d), given a context, (n, c), or None."""
    n, dim = samples.shape
    standardized = _standardize(settings, samples, base, context)
    rows = standardized.rows
    reduction = Reduction(None, rows.points, rows.base_scores)
    keeps_space = settings.subset is not None or settings.features is not None
    if is_cached(n) and not keeps_space and not isinstance(settings.solver, Dense):
        reduction = reduce_dimension(rows.points, rows.base_scores)
    reduced = Rows(reduction.points, reduction.base_scores, rows.left_out)
    distances = _measure(rows.points, standardized.context, settings.sharding)
    bandwidths = _bandwidth_candidates(
        settings.bandwidth, _within_groups(settings, standardized, distances)
    )
    regularizer, selection = settings.regularizer, None
    span: FitOperator | None = None
    if settings.features is not None:
        selection, regularizer, span = span_features(settings, reduced, bandwidths)
    elif settings.is_auto:
        num_samples = n if settings.subset is None else settings.subset.check(n)
        selection, regularizer = choose(settings, reduced, dim, bandwidths, num_samples)
    if selection is not None and isinstance(regularizer, PathMember):
        selection, regularizer = without_discrete(selection, regularizer, is_discrete(samples))
    bandwidth = bandwidths[0] if selection is None else selection.bandwidth
    reduced = reduced.in_units(bandwidth)
    return Problem(
        settings,
        regularizer,
        selection,
        dataclasses.replace(standardized.coordinates, bandwidth=bandwidth),
        rows.in_units(bandwidth),
        Reduction(reduction.basis, reduced.points, reduced.base_scores),
        span or _make_operator(settings, reduced.points, dim, distances, bandwidth),
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
    base_scores = None if known is None else frame.scores_to_kernel(known)
    points, base_scores = constrain_rows((frame.to_kernel(samples), base_scores), sharding)
    rows = Rows(points, base_scores, base.held_out)
    return _Standardized(coordinates, rows, context, layout, together)


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


def _make_operator(
    settings: FitSettings,
    points: jax.Array,
    dim: int,
    distances: _Distances,
    bandwidth: jax.Array,
) -> FitOperator:
    """The operator of the samples, which are in units of the bandwidth."""
    n = points.shape[0]
    gram = make_gram(
        settings.kernel,
        points,
        distances.joint / bandwidth**2 if is_cached(n) else None,
        settings.scale(dim, bandwidth),
        dim,
        settings.normalize,
        None if distances.within is None else distances.within / bandwidth**2,
        settings.sharding,
        # Other solvers' recurrences would go on without end at a residual they cannot reach.
        settings.precision if isinstance(settings.solver, Krylov) else "float32",
    )
    if settings.landmarks is not None:
        return compress(gram, settings.landmarks.select(n))
    if settings.subset is not None:
        return subsample(gram, settings.subset.select(n), settings.normalize)
    return Full(gram)


def _measure(
    points: jax.Array, context: jax.Array | None, sharding: NamedSharding | None
) -> _Distances:
    """Squared distances of samples, (n, d), with those of a context, (n, c), added."""
    n = points.shape[0]
    some = points if is_cached(n) else points[:: -(-n // SOME_POINTS)]
    own = pair_distances(some, cancels(some), sharding)
    if context is None:
        return _Distances(own, None, None)
    apart = pair_distances(context, cancels(context), sharding)
    return _Distances(own + apart, own, nearest_squared(apart))


def _bandwidth_candidates(bandwidth: Any, squared: jax.Array) -> jax.Array:
    """The candidates for the bandwidth, (b,), from a rule or number and squared distances."""
    dtype = squared.dtype
    if isinstance(bandwidth, Median):
        bandwidth = bandwidth.factor * median_distance(squared)
    elif isinstance(bandwidth, AutoBandwidth):
        bandwidth = jnp.asarray(bandwidth.factors, dtype) * median_distance(squared)
    return jnp.atleast_1d(jnp.asarray(bandwidth, dtype))
