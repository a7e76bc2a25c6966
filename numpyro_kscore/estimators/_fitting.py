"""How an estimator is fitted: coordinates, bandwidth and strength, the operator, the solve.

Compiled as a whole, from a configuration and samples that
:class:`~numpyro_kscore.ScoreEstimator` has checked.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.sharding import by_rows, constrain_rows
from numpyro_kscore.estimators._base import Base, GaussianBase
from numpyro_kscore.estimators._contract import AtSamples
from numpyro_kscore.estimators._coordinates import (
    Coordinates,
    median_distance,
    regress_out,
    standardize_samples,
)
from numpyro_kscore.estimators._heldout import HeldOutProblem
from numpyro_kscore.estimators._info import ScoreInfo, Selection
from numpyro_kscore.estimators._landmarks import Compression, compress
from numpyro_kscore.estimators._score import Score
from numpyro_kscore.estimators._selection import AutoBandwidth, Median, choose
from numpyro_kscore.estimators._subset import Subsampled, field_by_rows, subsample
from numpyro_kscore.kernels._gram import Gram, Reduction, is_cached, make_gram, reduce_dimension
from numpyro_kscore.kernels._pairwise import Expansion, cancels, nearest_squared, squared_distances
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._operator import Solution
from numpyro_kscore.solvers._solvers import Dense, Krylov
from numpyro_kscore.solvers._spectrum import Solver

if TYPE_CHECKING:
    from numpyro_kscore.estimators._estimator import ScoreEstimator

__all__ = ["fit_at_samples", "fit_score"]

# Points whose distances are looked at where not all pairs are kept.
SOME_POINTS = 1024


class _Problem(NamedTuple):
    """Samples and base scores in the kernel's coordinates, with their Gram operator.

    ``points`` are those of the expansion: the samples, or landmarks among them.
    """

    coordinates: Coordinates
    points: jax.Array
    base_scores: jax.Array | None
    gram: Gram | Compression | Subsampled
    reduction: Reduction
    nearest: jax.Array
    nearest_context: jax.Array | None
    regularizer: Regularizer
    choice: Selection | None


@jax.jit
@full_precision
def fit_score(estimator: ScoreEstimator, samples: jax.Array, base: Base) -> Score:
    """The estimate as a function: :meth:`~numpyro_kscore.ScoreEstimator.fit`."""
    problem = _prepare(estimator, samples, base)
    gram, reduction = problem.gram, problem.reduction
    solution = _solve(estimator.solver, problem.regularizer, gram, reduction)
    expansion = _expansion(problem, solution, estimator.sharding)
    known, stored = base.at_samples, None
    if isinstance(gram, Subsampled) and known is not None:
        known = known[gram.rows]
    estimate = _in_original_units(problem, solution, solution.values, known)
    # From a subset, values at all samples cost more than the fit: made when asked for.
    if not isinstance(gram, Subsampled):
        stored = constrain_rows(estimate.scores, estimator.sharding)
    return Score(
        estimator.kernel,
        problem.coordinates,
        expansion,
        base,
        stored,
        estimate.info,
        sharding=estimator.sharding,
    )


def _expansion(problem: _Problem, solution: Solution, sharding: NamedSharding | None) -> Expansion:
    """The residual as a function, in the kernel's coordinates."""
    gram = problem.gram
    coefficients = problem.reduction.expand(solution.coefficients)
    zeta_weight = None
    if not isinstance(gram, Compression):
        zeta_weight = gram.scale * solution.zeta_weight
        if problem.base_scores is not None:
            # a ζ' + K c with ζ' = ζ + (1/n) K s0 is a ζ + K (c + (a/n) s0).
            share = solution.zeta_weight / problem.points.shape[0]
            coefficients = coefficients + share * problem.base_scores
    return Expansion(
        constrain_rows(problem.points, sharding),
        constrain_rows(gram.scale * coefficients, sharding),
        zeta_weight,
    )


@partial(jax.jit, static_argnames="jackknife")
@full_precision
def fit_at_samples(
    estimator: ScoreEstimator,
    samples: jax.Array,
    base: Base,
    context: jax.Array | None,
    jackknife: bool,
) -> AtSamples:
    """The estimate at the samples: :meth:`~numpyro_kscore.ScoreEstimator.at_samples`."""
    problem = _prepare(estimator, samples, base, context)
    gram, reduction = problem.gram, problem.reduction

    solve = partial(_solve, estimator.solver, problem.regularizer)
    solution = solve(gram, reduction)
    if isinstance(gram, Subsampled):
        expansion = _expansion(problem, solution, estimator.sharding)
        values = field_by_rows(estimator.kernel, expansion, expansion.points, estimator.sharding)
        return _in_original_units(problem, solution, values.T, base.at_samples)
    if not jackknife:
        return _in_original_units(problem, solution, solution.values, base.at_samples)

    # Two halves of equal size, solved as one batch; they share the middle one of an odd number.
    n = samples.shape[0]
    size = (n + 1) // 2
    halves = [
        (
            gram.restricted(rows),
            Reduction(None, *jax.tree.map(lambda a, rows=rows: a[rows], reduction[1:])),
        )
        for rows in (slice(0, size), slice(n - size, n))
    ]
    if gram.weights is not None:
        batch_gram, batch_part = jax.tree.map(lambda *a: jnp.stack(a), *halves)
        values = jax.vmap(lambda g, p: solve(g, p).values)(batch_gram, batch_part)
        first, second = values[0], values[1]
    else:
        first, second = (solve(*half).values for half in halves)
    parts = jnp.concatenate([first, second[:, 2 * size - n :]], axis=1)
    weight = size / (n - size)
    values = solution.values + weight * (solution.values - parts)
    return _in_original_units(problem, solution, values, base.at_samples)


def _prepare(
    estimator: ScoreEstimator, samples: jax.Array, base: Base, context: jax.Array | None = None
) -> _Problem:
    """Standardize, choose bandwidth and strength, and form the Gram operator."""
    n, dim = samples.shape
    if context is not None:
        context = standardize_samples(context, estimator.standardize).to_kernel(context)
        if estimator.standardize == "full":
            samples = regress_out(samples, context)
    kernel, regularizer = estimator.kernel, estimator.regularizer
    if isinstance(base, GaussianBase) and estimator.standardize == "full":
        # One estimate of the covariance, the better one, serves both.
        coordinates = base.whitening()
    else:
        coordinates = standardize_samples(samples, estimator.standardize)
    sharding = estimator.sharding
    z = constrain_rows(coordinates.to_kernel(samples), sharding)
    base_scores = None
    if base.at_samples is not None:
        base_scores = coordinates.scores_to_kernel(base.at_samples)
        base_scores = constrain_rows(base_scores, sharding)
    if not is_cached(n) or isinstance(estimator.solver, Dense) or estimator.subset is not None:
        reduction = Reduction(None, z, base_scores)
    else:
        reduction = reduce_dimension(z, base_scores)
    some = z if is_cached(n) else z[:: -(-n // SOME_POINTS)]
    s = _all_squared_distances(some, sharding)
    within, nearest_context = None, None
    if context is not None:
        apart = _all_squared_distances(context, sharding)
        nearest_context = nearest_squared(apart)
        within, s = s, s + apart

    bandwidth, choice = estimator.bandwidth, None
    if isinstance(bandwidth, Median):
        bandwidth = bandwidth.factor * median_distance(s)
    elif isinstance(bandwidth, AutoBandwidth):
        bandwidth = jnp.asarray(bandwidth.factors, samples.dtype) * median_distance(s)
    bandwidth = jnp.asarray(bandwidth, samples.dtype)
    if estimator.is_auto:
        problem = HeldOutProblem(reduction.points, reduction.base_scores, base.held_out, dim)
        choice, regularizer = choose(
            kernel,
            regularizer,
            estimator.solver,  # type: ignore[arg-type]
            problem,
            jnp.atleast_1d(bandwidth),
            estimator.normalize,
            sharding,
        )
        bandwidth = choice.bandwidth

    coordinates = dataclasses.replace(coordinates, bandwidth=bandwidth)
    if estimator.normalize:
        scale = 1.0 / kernel.trace(dim).astype(samples.dtype)
    else:
        scale = bandwidth ** -kernel.scale_exponent()
    points = reduction.points / bandwidth
    pairs = s / bandwidth**2 if is_cached(n) else None
    if within is not None:
        within = within / bandwidth**2
    # The other solvers' recurrences would go on without end at a residual they cannot reach.
    precision = estimator.precision if isinstance(estimator.solver, Krylov) else "float32"
    gram = make_gram(
        kernel, points, pairs, scale, dim, estimator.normalize, within, sharding, precision
    )
    in_bandwidths = Reduction(
        reduction.basis,
        points,
        None if reduction.base_scores is None else reduction.base_scores * bandwidth,
    )
    points = z / bandwidth
    operator: Gram | Compression | Subsampled = gram
    if estimator.landmarks is not None:
        rows = estimator.landmarks.select(n)
        operator, points = compress(gram, rows), points[rows]
    elif estimator.subset is not None:
        operator = subsample(gram, estimator.subset.select(n), estimator.normalize)
    return _Problem(
        coordinates,
        points,
        None if base_scores is None else base_scores * bandwidth,
        operator,
        in_bandwidths,
        nearest_squared(s),
        nearest_context,
        regularizer,
        choice,
    )


def _all_squared_distances(points: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    def own(rows: jax.Array, whole: tuple[jax.Array, jax.Array]) -> jax.Array:
        return squared_distances(rows, *whole)

    return by_rows(own, sharding, points, (points, cancels(points)))


def _solve(
    solver: Solver,
    regularizer: Regularizer,
    gram: Gram | Compression | Subsampled,
    problem: Reduction,
) -> Solution:
    """Apply the filter to h' = ζ'(X) = ζ(X) + (K/n) s0(X)."""
    if not isinstance(gram, Gram):
        return gram.solve(solver, regularizer, problem.base_scores)
    target = gram.zeta()
    if problem.base_scores is not None:
        # The filter multiplies what is wrong here by up to g(0).
        exactly = dataclasses.replace(gram, precision="float32")
        target = target + exactly @ problem.base_scores.T
    return solver.solve(gram, target, regularizer)


def _in_original_units(
    problem: _Problem, solution: Solution, values: jax.Array, base_scores: jax.Array | None
) -> AtSamples:
    residual = problem.coordinates.scores_from_kernel(problem.reduction.expand(values))
    scores = residual if base_scores is None else base_scores + residual
    info = ScoreInfo(
        steps=solution.steps,
        residual=solution.residual,
        bandwidth=problem.coordinates.bandwidth,
        spectral_scale=solution.spectral_scale,
        finite=jnp.all(jnp.isfinite(scores)),
        choice=problem.choice,
    )
    return AtSamples(
        residual, scores, info, problem.coordinates, problem.nearest, problem.nearest_context
    )
