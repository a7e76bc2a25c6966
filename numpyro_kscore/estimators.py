"""Score estimation: ``ScoreEstimator.fit(samples) -> Score``.

An estimator is a configuration (kernel, regulariser, solver, coordinates, base score) and
changes nothing when it fits. The fitted :class:`~numpyro_kscore.score.Score` is a pytree of
arrays, which can be returned from ``jit`` and mapped over by ``vmap``.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_kscore._pytree import as_points, check_choice, check_positive, pytree, static
from numpyro_kscore.base import Base, make_base
from numpyro_kscore.coordinates import (
    STANDARDIZE_CHOICES,
    Coordinates,
    median_distance,
    standardize_samples,
)
from numpyro_kscore.gram import Gram, Reduction, make_gram, pair_weights, reduce_dimension
from numpyro_kscore.kernels import CurlFree, Kernel
from numpyro_kscore.pairwise import Expansion
from numpyro_kscore.regularizers import NuMethod, Regularizer
from numpyro_kscore.score import FitInfo, Score
from numpyro_kscore.solvers import Dense, Krylov, Solution, Solver

__all__ = ["AtSamples", "Median", "ScoreEstimator"]


@pytree
class Median:
    """Bandwidth rule: the median distance between samples, times a factor.

    Args:
        factor: positive multiplier.
    """

    factor: Any = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)


class AtSamples(NamedTuple):
    """An estimate at the samples.

    Attributes:
        residual: ``ŝ - s0``, (n, d).
        scores: ŝ, (n, d).
        info: how the fit went.
    """

    residual: jax.Array
    scores: jax.Array
    info: FitInfo


class _Problem(NamedTuple):
    """Samples and base scores in the kernel's coordinates, with their Gram operator."""

    coordinates: Coordinates
    points: jax.Array
    base_scores: jax.Array | None
    gram: Gram
    reduction: Reduction


@pytree
class ScoreEstimator:
    """Nonparametric estimator of the score ``∇ log q`` from samples of q.

    ``ŝ = s0 - g(L̂) ζ'`` with ``ζ' = ζ + L̂ s0`` (Zhou, Shi and Zhu 2020, eq. 9, extended by the
    base score s0): the kernel says what functions are considered, the regulariser g how far the
    estimate may leave the base score, the solver how g is applied.

    Args:
        kernel: :class:`CurlFree` (has a log density) or :class:`Diagonal`.
        regularizer: the filter g, on eigenvalues of K/n.
        solver: how it is applied; :class:`Krylov` serves all continuous filters.
        bandwidth: ``"median"``, a :class:`Median` rule, or a number in standardised units. Not
            differentiated when it comes from the samples.
        standardize: ``"full"`` whitens the samples, ``"diagonal"`` scales each coordinate,
            ``"none"`` leaves them (always centred, which a radial kernel does not notice).
        base: what the estimate is shrunk to: None is zero (the paper), ``"gaussian"`` the score
            of the Gaussian with the samples' mean and covariance, a callable (m, d) -> (m, d) a
            score function, a NumPyro distribution with event shape (d,) its score.
        normalize: divide the kernel by tr K(x, x), so that λ and step counts mean the same at
            every dimension and bandwidth. False is the paper's scale.

    Example::

        score = ScoreEstimator(base="gaussian").fit(draws)      # (n, d)
        score(x), score.log_density(x), score.info
    """

    kernel: Kernel = CurlFree()
    regularizer: Regularizer = NuMethod(50)
    solver: Solver = Krylov(16)
    bandwidth: Any = "median"
    standardize: str = static(default="full")
    base: Any = static(default=None)
    normalize: bool = static(default=True)

    def __post_init__(self) -> None:
        if isinstance(self.bandwidth, str):
            check_choice("bandwidth", self.bandwidth, ("median",))
            object.__setattr__(self, "bandwidth", Median())
        check_positive("bandwidth", self.bandwidth)
        check_choice("standardize", self.standardize, STANDARDIZE_CHOICES)

    def fit(self, samples: Any, base_scores: Any = None) -> Score:
        """Estimate the score of the distribution the samples come from.

        Args:
            samples: i.i.d. draws, shape (n, d), n ≥ 2, in any units.
            base_scores: values of the base score at the samples, (n, d), in 1/units; replaces
                ``base``. Away from the samples only the residual ``ŝ - s0`` is then known.

        Returns:
            The fitted score. Numerical trouble is reported in ``score.info``, never raised.

        Raises:
            ValueError: for shapes that do not fit, n < 2, samples that are not finite (outside
                ``jit``), or a profile too rough for the kernel.
            TypeError: for integer samples or a regulariser the solver cannot apply.

        Cost: O(n² d) a solver step, O(n²) memory up to about 2900 samples and O(n d) beyond.
        """
        samples = as_points("samples", samples, minimum=2)
        self.kernel.check()
        self.solver.check(self.regularizer)
        base = make_base(self.base, samples, base_scores)
        return _fit(dataclasses.replace(self, base=None), samples, base)

    def at_samples(
        self, samples: Any, base_scores: Any = None, *, debias: str | None = None
    ) -> AtSamples:
        """The estimate at the samples only, optionally freed of its leading bias.

        Fitting and evaluating on the same n samples lets each one's own base score leak into
        its own residual, an error of order 1/n. With f_n the residual of the fit to all and f_m
        that of fits to two disjoint parts, each evaluated on itself, ``debias="jackknife"``
        returns ``f_n + m/(n - m) (f_n - f_m)``, which cancels it: ``2 f_n - f_(n/2)`` for equal
        halves. The fits share coordinates and bandwidth. Fewer than 8 samples are not split.

        Args:
            samples: shape (n, d), exchangeable in their order.
            base_scores: as for :meth:`fit`.
            debias: None or ``"jackknife"``, at twice the cost.

        Raises:
            ValueError: as :meth:`fit`.
            TypeError: as :meth:`fit`.
        """
        check_choice("debias", debias, (None, "jackknife"))
        samples = as_points("samples", samples, minimum=2)
        self.kernel.check()
        self.solver.check(self.regularizer)
        base = make_base(self.base, samples, base_scores)
        jackknife = debias == "jackknife" and samples.shape[0] >= 8
        return _at_samples(dataclasses.replace(self, base=None), samples, base, jackknife)


@jax.jit
def _fit(estimator: ScoreEstimator, samples: jax.Array, base: Base) -> Score:
    problem = _prepare(estimator, samples, base.at_samples)
    gram, reduction = problem.gram, problem.reduction
    solution = estimator.solver.solve(gram, _target(gram, reduction), estimator.regularizer)
    coefficients = reduction.expand(solution.coefficients)
    if problem.base_scores is not None:
        # a ζ' + K c with ζ' = ζ + (1/n) K s0 is a ζ + K (c + (a/n) s0).
        share = solution.zeta_weight / samples.shape[0]
        coefficients = coefficients + share * problem.base_scores
    expansion = Expansion(
        problem.points, gram.scale * coefficients, gram.scale * solution.zeta_weight
    )
    estimate = _in_original_units(problem, solution, solution.values, base)
    return Score(
        estimator.kernel,
        problem.coordinates,
        expansion,
        base,
        estimate.scores,
        estimate.info,
    )


@partial(jax.jit, static_argnames="jackknife")
def _at_samples(
    estimator: ScoreEstimator, samples: jax.Array, base: Base, jackknife: bool
) -> AtSamples:
    problem = _prepare(estimator, samples, base.at_samples)
    gram, reduction = problem.gram, problem.reduction

    def solve(gram: Gram, part: Reduction) -> Solution:
        return estimator.solver.solve(gram, _target(gram, part), estimator.regularizer)

    if not jackknife:
        solution = solve(gram, reduction)
        return _in_original_units(problem, solution, solution.values, base)

    n = samples.shape[0]
    sizes = ((n + 1) // 2, n // 2)
    if gram.weights is not None:
        # The two parts are one block-diagonal problem, solved beside the whole.
        def solve_blocks(factors: jax.Array) -> Solution:
            weights = jax.tree.map(lambda w: w * factors, gram.weights)
            return solve(dataclasses.replace(gram, weights=weights), reduction)

        factors = jnp.stack([pair_weights((n,)), pair_weights(sizes)]).astype(samples.dtype)
        both = jax.vmap(solve_blocks)(factors)
        solution: Solution = jax.tree.map(lambda a: a[0], both)
        parts = both.values[1]
    else:
        solution = solve(gram, reduction)
        rows = (slice(None, sizes[0]), slice(sizes[0], None))
        halves = [
            solve(
                dataclasses.replace(gram, points=gram.points[part]),
                jax.tree.map(lambda a, part=part: a[part], reduction),
            )
            for part in rows
        ]
        parts = jnp.concatenate([half.values for half in halves])
    size = jnp.repeat(jnp.asarray(sizes), jnp.asarray(sizes), total_repeat_length=n)
    weight = (size / (n - size)).astype(samples.dtype)[:, None]
    values = solution.values + weight * (solution.values - parts)
    return _in_original_units(problem, solution, values, base)


def _prepare(
    estimator: ScoreEstimator, samples: jax.Array, base_scores: jax.Array | None
) -> _Problem:
    """Standardise, choose the bandwidth and form the Gram operator."""
    kernel, bandwidth = estimator.kernel, estimator.bandwidth
    coordinates = standardize_samples(samples, estimator.standardize)
    points = coordinates.to_kernel(samples)
    if isinstance(bandwidth, Median):
        bandwidth = bandwidth.factor * median_distance(points)
    bandwidth = jnp.asarray(bandwidth, samples.dtype)
    coordinates = dataclasses.replace(coordinates, bandwidth=bandwidth)
    points = points / bandwidth
    if base_scores is not None:
        base_scores = coordinates.scores_to_kernel(base_scores)
    if estimator.normalize:
        scale = 1.0 / kernel.trace(samples.shape[1]).astype(samples.dtype)
    else:
        scale = bandwidth ** -kernel.scale_exponent()
    gram = make_gram(kernel, points, scale)
    if gram.weights is None or isinstance(estimator.solver, Dense):
        reduction = Reduction(None, points, base_scores)
    else:
        reduction = reduce_dimension(points, base_scores)
        gram = dataclasses.replace(gram, points=reduction.points)
    return _Problem(coordinates, points, base_scores, gram, reduction)


def _in_original_units(
    problem: _Problem, solution: Solution, values: jax.Array, base: Base
) -> AtSamples:
    residual = problem.coordinates.scores_from_kernel(problem.reduction.expand(values))
    scores = residual if base.at_samples is None else base.at_samples + residual
    info = FitInfo(
        steps=solution.steps,
        residual=solution.residual,
        bandwidth=problem.coordinates.bandwidth,
        spectral_scale=solution.spectral_scale,
        finite=jnp.all(jnp.isfinite(scores)),
    )
    return AtSamples(residual, scores, info)


def _target(gram: Gram, problem: Reduction) -> jax.Array:
    """h' = ζ'(X) = ζ(X) + (K/n) s0(X)."""
    zeta = gram.zeta()
    return zeta if problem.base_scores is None else zeta + gram @ problem.base_scores
