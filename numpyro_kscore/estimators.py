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
from jax.sharding import NamedSharding

from numpyro_kscore._pytree import (
    as_points,
    check_choice,
    check_positive,
    pytree,
    static,
    with_jax_leaves,
)
from numpyro_kscore.base import Base, GaussianBase, make_base
from numpyro_kscore.coordinates import (
    STANDARDIZE_CHOICES,
    Coordinates,
    median_distance,
    regress_out,
    standardize_samples,
)
from numpyro_kscore.gram import Gram, Reduction, is_cached, make_gram, reduce_dimension
from numpyro_kscore.heldout import HeldOut
from numpyro_kscore.iterations import NuMethod
from numpyro_kscore.kernels import CurlFree, Kernel
from numpyro_kscore.nystrom import Compression, Landmarks, compress
from numpyro_kscore.pairwise import (
    Expansion,
    cancels,
    field,
    nearest_squared,
    squared_distances,
)
from numpyro_kscore.precision import PRECISIONS, full_precision
from numpyro_kscore.profiles import RadialProfile
from numpyro_kscore.regularizers import Regularizer
from numpyro_kscore.score import FitInfo, Score
from numpyro_kscore.selection import AutoBandwidth, Choice, choose
from numpyro_kscore.sharding import (
    by_rows,
    check_sharding,
    constrain_rows,
    divides,
    num_shards,
    place,
    sharding_of,
)
from numpyro_kscore.solvers import Dense, Krylov, Solver
from numpyro_kscore.spectrum import Solution
from numpyro_kscore.subset import Subsampled, Subset, subsample

__all__ = ["AtSamples", "Median", "ScoreEstimator"]

# Points whose distances are looked at where not all pairs are kept.
SOME_POINTS = 1024


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
        coordinates: the coordinates of the fit.
        nearest: squared distance of samples to their nearest other, in standardised units and
            with the context in it; of 1024 samples, evenly spaced, where there are too many for
            all pairs.
        nearest_context: the same of the context alone, or None without one.
    """

    residual: jax.Array
    scores: jax.Array
    info: FitInfo
    coordinates: Coordinates
    nearest: jax.Array
    nearest_context: jax.Array | None = None


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
    choice: Choice | None


@pytree
class ScoreEstimator:
    """Nonparametric estimator of the score ``∇ log q`` from samples of q.

    ``ŝ = s0 - g(L̂) ζ'`` with ``ζ' = ζ + L̂ s0`` (Zhou, Shi and Zhu 2020, eq. 9, extended by the
    base score s0): the kernel says what functions are considered, the regulariser g how far the
    estimate may leave the base score, the solver how g is applied.

    Args:
        kernel: :class:`CurlFree` (has a log density) or :class:`Diagonal`.
        regularizer: the filter g, on eigenvalues of K/n. A strength ``"auto"`` is chosen from the
            samples by held-out score matching, see :mod:`numpyro_kscore.selection`.
        solver: how it is applied; :class:`Krylov` serves all continuous filters.
        bandwidth: ``"median"``, a :class:`Median` rule, ``"auto"`` (the best of three multiples
            of the median by held-out loss), an :class:`AutoBandwidth` rule, or a number in
            standardised units. Not differentiated when it comes from the samples.
        standardize: ``"full"`` whitens the samples, ``"diagonal"`` scales each coordinate,
            ``"none"`` leaves them (always centred, which a radial kernel does not notice).
        base: what the estimate is shrunk to: ``"gaussian"`` is the score of a Gaussian fitted to
            the samples (:func:`~numpyro_kscore.gaussian.fit_gaussian`), None is zero (the paper),
            a callable (m, d) -> (m, d) a score function, a NumPyro distribution with event shape
            (d,) its score.
        normalize: divide the kernel by tr K(x, x), so that λ and step counts mean the same at
            every dimension and bandwidth. False is the paper's scale.
        landmarks: :class:`Landmarks`, samples whose span the estimate is sought in (Nyström), at
            O(n m d) a solver step and O(m d) an evaluated point; None is all samples.
        subset: :class:`Subset`, samples that the Gram operator is averaged over: for very many
            samples, at O(n b d) once, O(b² d) a solver step and O(n d) an evaluated point.
        sharding: how samples are divided over devices, ``NamedSharding(mesh, P("samples"))``:
            each works on the pairs of its own samples with all (docs/scaling). None follows
            samples that are so divided already, and is one device otherwise.
        precision: of products of a Krylov space with the Gram operator, where the hardware has
            coarser ones than ``"float32"``: ``"tensorfloat32"`` (errors below 2 % of the
            statistical one, docs/performance) or ``"bfloat16"``. All else is in float32.

    Example::

        score = ScoreEstimator().fit(draws)      # (n, d)
        score(x), score.log_density(x), score.info
    """

    kernel: Kernel = CurlFree()
    regularizer: Regularizer = NuMethod("auto")
    solver: Solver = Krylov()
    bandwidth: Any = "median"
    standardize: str = static(default="full")
    base: Any = static(default="gaussian")
    normalize: bool = static(default=True)
    landmarks: Landmarks | None = None
    subset: Subset | None = None
    sharding: NamedSharding | None = static(default=None, kw_only=True)
    precision: str = static(default="tensorfloat32", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharding", check_sharding(self.sharding))
        if isinstance(self.bandwidth, str):
            check_choice("bandwidth", self.bandwidth, ("median", "auto"))
            rule = Median() if self.bandwidth == "median" else AutoBandwidth()
            object.__setattr__(self, "bandwidth", rule)
        check_positive("bandwidth", self.bandwidth)
        check_choice("standardize", self.standardize, STANDARDIZE_CHOICES)
        check_choice("precision", self.precision, PRECISIONS)

    @property
    def is_auto(self) -> bool:
        """Whether the strength or the bandwidth is chosen by held-out loss."""
        return self.regularizer.is_auto or isinstance(self.bandwidth, AutoBandwidth)

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
        return _fit(*self._checked(samples, base_scores))

    def at_samples(
        self,
        samples: Any,
        base_scores: Any = None,
        *,
        debias: str | None = None,
        context: Any = None,
    ) -> AtSamples:
        """The estimate at the samples only, optionally freed of its leading bias.

        Fitting and evaluating on the same n samples lets each one's own base score leak into
        its own residual, an error of order 1/n. With f_n the residual of the fit to all and f_m
        that of fits to the two halves of size m, each evaluated on itself, ``debias="jackknife"``
        returns ``f_n + m/(n - m) (f_n - f_m)``, which cancels it: ``2 f_n - f_(n/2)`` for an even
        n. The fits share coordinates, bandwidth and landmarks. Fewer than 8 samples are not
        split.

        With a context w the estimate is of the *conditional* score ``∇_x log q(x | w)``, from
        joint draws: the fields are partial gradients of functions of (x, w), which is the
        curl-free kernel of the joint space restricted to the coordinates of x, and Stein's
        identity in x holds for them given w.

        Args:
            samples: shape (n, d), exchangeable in their order.
            base_scores: as for :meth:`fit`.
            debias: None or ``"jackknife"``, at 1.5 times the cost.
            context: values drawn jointly with the samples, (n, c).

        Raises:
            ValueError: as :meth:`fit`; with a context, for landmarks, a base from the samples
                and more samples than all pairs are kept of.
            TypeError: as :meth:`fit`; with a context, for an automatic choice.
        """
        check_choice("debias", debias, (None, "jackknife"))
        estimator, samples, base = self._checked(samples, base_scores)
        if debias is not None and self.subset is not None:
            raise ValueError(
                f"debias: expected None with a subset, whose halves would be other operators; got "
                f"{debias!r}"
            )
        jackknife = debias == "jackknife" and samples.shape[0] >= 8
        if context is not None:
            context = self._checked_context(context, samples.shape[0])
            context = place(context, estimator.sharding)
        return _at_samples(estimator, samples, base, context, jackknife)

    def _checked_context(self, context: Any, num_samples: int) -> jax.Array:
        context = as_points("context", context)
        if context.shape[0] != num_samples:
            raise ValueError(
                f"context: expected {num_samples} rows, as the samples have; got shape "
                f"{context.shape}"
            )
        if self.is_auto:
            raise TypeError(
                "context: expected a fixed strength and bandwidth beside one; got 'auto'. Give "
                "both as numbers, e.g. NuMethod(45) and Median(0.8)"
            )
        if self.landmarks is not None or self.subset is not None or isinstance(self.base, str):
            raise ValueError(
                "context: expected no landmarks, no subset and no base fitted to the samples "
                f"beside one; got landmarks={self.landmarks!r}, subset={self.subset!r}, "
                f"base={self.base!r}"
            )
        if not is_cached(num_samples):
            raise ValueError(
                f"context: expected few enough samples to keep all pairs of; got {num_samples}"
            )
        return context

    def _checked(self, samples: Any, base_scores: Any) -> tuple[ScoreEstimator, jax.Array, Base]:
        """The input of a fit, checked, and the configuration that is left to compile."""
        sharding = self.sharding or sharding_of(samples)
        samples = place(as_points("samples", samples, minimum=2), sharding)
        for leaf in jax.tree.leaves(self):
            if isinstance(leaf, Kernel | RadialProfile | Regularizer | Solver):
                raise TypeError(
                    f"{type(leaf).__name__}: expected a pytree; got a class JAX does not know. "
                    "Decorate it with @numpyro_kscore.pytree"
                )
        self.kernel.check()
        regularizer = self.regularizer
        if self.landmarks is not None:
            if not isinstance(self.landmarks, Landmarks):
                raise TypeError(
                    "landmarks: expected None or Landmarks(count), Landmarks(share=…) or "
                    f"Landmarks(indices=…); got {self.landmarks!r}"
                )
            self.landmarks.check(samples.shape[0])
            if sharding is not None and not divides(sharding, samples.shape[0]):
                raise ValueError(
                    f"samples: expected a multiple of {num_shards(sharding)} with landmarks, as "
                    f"many for every device; got {samples.shape[0]}. Leave some out"
                )
            regularizer = regularizer.on_range()
        if self.subset is not None:
            if not isinstance(self.subset, Subset):
                raise TypeError(
                    "subset: expected None or Subset(count), Subset(share=…) or "
                    f"Subset(indices=…); got {self.subset!r}"
                )
            if self.landmarks is not None:
                raise ValueError("subset: expected None beside landmarks; got both. Drop one")
            self.subset.check(samples.shape[0])
        self.solver.check(regularizer)
        if self.is_auto and not isinstance(self.solver, Krylov):
            raise TypeError(
                "solver: expected Krylov() for an automatic choice, which reads a whole path off "
                f"one Krylov space; got {type(self.solver).__name__}(). Use Krylov(), or give the "
                "strength and the bandwidth as numbers"
            )
        if base_scores is not None:
            base_scores = place(as_points("base_scores", base_scores), sharding)
        base = make_base(self.base, samples, base_scores)
        estimator = dataclasses.replace(self, base=None, regularizer=regularizer, sharding=sharding)
        return with_jax_leaves(estimator), samples, base


@jax.jit
@full_precision
def _fit(estimator: ScoreEstimator, samples: jax.Array, base: Base) -> Score:
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
def _at_samples(
    estimator: ScoreEstimator,
    samples: jax.Array,
    base: Base,
    context: jax.Array | None,
    jackknife: bool,
) -> AtSamples:
    problem = _prepare(estimator, samples, base, context)
    gram, reduction = problem.gram, problem.reduction

    solve = partial(_solve, estimator.solver, problem.regularizer)
    solution = solve(gram, reduction)
    if isinstance(gram, Subsampled):
        expansion = _expansion(problem, solution, estimator.sharding)

        def own(rows: jax.Array, whole: Expansion) -> jax.Array:
            return field(estimator.kernel, whole, rows)

        values = by_rows(own, estimator.sharding, expansion.points, expansion)
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
    """Standardise, choose bandwidth and strength, and form the Gram operator."""
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
        problem = HeldOut(reduction.points, reduction.base_scores, base.held_out, dim)
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
    info = FitInfo(
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
