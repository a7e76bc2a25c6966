"""Score estimation: ``ScoreEstimator.fit(samples) -> Score``.

An estimator is a configuration (kernel, regularizer, solver, coordinates, base score) and
changes nothing when it fits. The fitted :class:`~numpyro_kscore.estimators.Score` is a pytree of
arrays, which can be returned from ``jit`` and mapped over by ``vmap``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
from jax.sharding import NamedSharding

from numpyro_kscore._util.checks import as_points, check_choice, check_positive
from numpyro_kscore._util.precision import PRECISIONS
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore._util.sharding import check_sharding, place, sharding_of
from numpyro_kscore.estimators._base.base_scores import Base
from numpyro_kscore.estimators._base.fitted_base import make_base
from numpyro_kscore.estimators._base.standardization import STANDARDIZE_CHOICES
from numpyro_kscore.estimators._fit.fitting import (
    StreamState,
    add_batch,
    finish_stream,
    fit_at_samples,
    fit_score,
    start_stream,
)
from numpyro_kscore.estimators._fit.guide_estimator import AtSamples, GuideEstimator
from numpyro_kscore.estimators._fit.input_checks import check_context, check_settings
from numpyro_kscore.estimators._fit.score import Score
from numpyro_kscore.estimators._fit.settings import AutoBandwidth, FitSettings, Median
from numpyro_kscore.estimators._operators.operator_options import Landmarks, RandomFeatures, Subset
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._matrix import CurlFree
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.regularizers._iterations import NuMethod
from numpyro_kscore.solvers._solvers import Krylov
from numpyro_kscore.solvers._spectrum import Solver

NUMBER_OR_RULE = "a positive finite number, or a rule such as Median(0.5)"
# Samples below which the jackknife does not split.
FEWEST_TO_SPLIT = 8


@pytree
class ScoreEstimator(GuideEstimator):
    """Nonparametric estimator of the score ``∇ log q`` from samples of q.

    ``ŝ = s0 - g(L̂) ζ'`` with ``ζ' = ζ + L̂ s0`` (Zhou, Shi and Zhu 2020, eq. 9, extended by the
    base score s0): the kernel determines the space of functions, the regularizer g how far the
    estimate may leave the base score, the solver how g is applied.

    Args:
        kernel: :class:`CurlFree` (has a log density) or :class:`Diagonal`.
        regularizer: the filter g, on eigenvalues of K/n. A strength ``"auto"`` is selected from
            the samples by held-out score matching (docs/theory).
        solver: how it is applied; :class:`Krylov` serves all continuous filters.
        bandwidth: ``"median"``, a :class:`Median` rule, ``"auto"`` (the best of four multiples
            of the median by held-out loss), an :class:`AutoBandwidth` rule, or a number in
            standardized units. None is ``"auto"`` with an automatic strength of a kernel and
            ``"median"`` otherwise. Not differentiated when it comes from the samples.
        standardize: ``"full"`` whitens the samples; ``"local"`` then makes neighbors, not all
            samples, lie in all directions alike, which suits modes, ridges and curves
            (docs/theory); ``"diagonal"`` scales each coordinate, ``"none"`` leaves them (always
            centered, which a radial kernel does not notice).
        base: what the estimate is shrunk to. ``"auto"`` looks for up to four separate groups of
            samples, whose weights score matching does not see (docs/theory): where there are
            several, each has its own base ``"student"``, coordinates and share of the density;
            otherwise it is ``"student"``, as it is for streams. (With standardize ``"diagonal"``
            or ``"none"`` only the base is that of groups.) ``"student"`` is the score of a Student
            t distribution where tails are heavier than a Gaussian's, and of a Gaussian where not;
            ``"gaussian"`` that of a Gaussian fitted to the samples and shrunk by held-out score
            matching; None is zero (the paper), a callable (m, d) -> (m, d) in JAX a score
            function, a NumPyro distribution with event shape (d,) its score. Under ``vmap``
            ``"auto"`` costs several times as much as ``"student"``: it computes as for four groups.
        normalize: divide the kernel by tr K(x, x), so that λ and step counts mean the same at
            every dimension and bandwidth. False is the paper's scale.
        landmarks: :class:`Landmarks`, samples in whose span the estimate is (Nyström), at
            O(n m d) a solver step and O(m d) an evaluated point; None is all samples.
        subset: :class:`Subset`, samples that the Gram operator is averaged over: for very many
            samples, at O(n b d) once, O(b² d) a solver step and O(n d) an evaluated point.
        features: :class:`RandomFeatures` in place of a curl-free kernel: for the most samples and
            for streams, at O(n m d) and O(m²) for each sample of the operator once, O(m²) a solver
            step and O(m d) an evaluated point. At most one of landmarks, subset and features.
        sharding: how samples are divided over devices, ``NamedSharding(mesh, P("samples"))``:
            each works on the pairs of its own samples with all (docs/scaling). None keeps the
            layout that the samples have.
        precision: of products of a Krylov space with the Gram operator, where the hardware has
            coarser ones than ``"float32"``: ``"tensorfloat32"`` (errors below 2 % of the
            statistical one, docs/performance) or ``"bfloat16"``. Everything else is in float32.

    Example::

        score = ScoreEstimator().fit(samples)
        score.at_samples  # (200, 2)
        score.info.selection.strength  # steps of the ν-method that held-out samples support
    """

    kernel: Kernel = CurlFree()
    regularizer: Regularizer = NuMethod("auto")
    solver: Solver = Krylov()
    bandwidth: Any = None
    standardize: str = static(default="local")
    base: Any = static(default="auto")
    normalize: bool = static(default=True)
    landmarks: Landmarks | None = None
    subset: Subset | None = None
    features: RandomFeatures | None = None
    sharding: NamedSharding | None = static(default=None, kw_only=True)
    precision: str = static(default="tensorfloat32", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharding", check_sharding(self.sharding))
        if isinstance(self.bandwidth, str):
            check_choice("bandwidth", self.bandwidth, ("median", "auto"), NUMBER_OR_RULE)
            rule = Median() if self.bandwidth == "median" else AutoBandwidth()
            object.__setattr__(self, "bandwidth", rule)
        if self.bandwidth is not None:
            check_positive("bandwidth", self.bandwidth)
        check_choice("standardize", self.standardize, STANDARDIZE_CHOICES)
        check_choice("precision", self.precision, PRECISIONS)

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
            TypeError: for integer samples or a regularizer the solver cannot apply.

        Cost: O(n² d) a solver step, O(n²) memory up to about 2900 samples and O(n d) beyond.
        """
        return fit_score(*self._checked(samples, base_scores))

    def at_samples(
        self,
        samples: Any,
        base_scores: Any = None,
        *,
        debias: str | None = None,
        context: Any = None,
    ) -> AtSamples:
        """The estimate at the samples only, optionally without its leading bias.

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
            debias: None or ``"jackknife"``, at 1.5 times the operations.
            context: values drawn jointly with the samples, (n, c).

        Raises:
            ValueError: as :meth:`fit`; for ``debias`` with a subset; for a context with landmarks,
                a subset, features, a base fitted to the samples, or too many samples to keep pairs.
            TypeError: as :meth:`fit`; for a context with an automatic strength or bandwidth.
        """
        check_choice("debias", debias, (None, "jackknife"))
        settings, samples, base = self._checked(samples, base_scores)
        splits = samples.shape[0] >= FEWEST_TO_SPLIT
        jackknife = self.resolve_debias(debias) == "jackknife" and splits
        if context is not None:
            context = check_context(context, samples.shape[0], settings, self.base)
            context = place(context, settings.sharding)
        return fit_at_samples(settings, samples, base, context, jackknife=jackknife)

    def init_stream(self, batch: Any) -> StreamState:
        """Start a fit to samples that come in batches and need not fit into memory.

        Coordinates, bandwidth, base score and frequencies are determined by this first batch, so
        let it be a few thousand draws in random order. All batches then count alike. A base
        ``"auto"`` is ``"student"`` here: later samples are not dealt into groups. The steps are
        shown at :class:`~numpyro_kscore.estimators.StreamState`.

        Args:
            batch: i.i.d. draws, shape (n, d), n ≥ 2, in any units.

        Raises:
            ValueError: without ``features``; otherwise as :meth:`fit`.
            TypeError: as :meth:`fit`.
        """
        self._features_of_stream()
        is_auto = isinstance(self.base, str) and self.base == "auto"
        alone = dataclasses.replace(self, base="student") if is_auto else self
        return start_stream(*alone._checked(batch, None))

    def partial_fit(self, state: StreamState, batch: Any) -> StreamState:
        """The state with one more batch in it; batches of one shape share a program.

        Args:
            state: as :meth:`init_stream` or this method returned it.
            batch: i.i.d. draws, shape (n, d), n ≥ 1.

        Raises:
            ValueError: for a batch of another dimension than the first, or that is not finite.
            TypeError: for a batch of another dtype than the first.

        Cost: O(n m d), and O(n m²) until the operator has its samples.
        """
        options, mean = self._features_of_stream(), state.coordinates.mean
        points = as_points("batch", batch, dim=mean.shape[0])
        if points.dtype != mean.dtype:
            raise TypeError(
                f"batch: expected {mean.dtype}, as the first batch has; got {points.dtype}. "
                f"Convert it with .astype('{mean.dtype}')"
            )
        return add_batch(state, points, operator_samples=options.operator_samples)

    def finish(self, state: StreamState) -> Score:
        """The estimate from all batches so far; more may follow.

        It is :meth:`fit` to all samples, up to rounding, in the coordinates of the first batch, if
        ``operator_samples`` are no fewer than the samples; otherwise the operator is averaged over
        the first of them. An automatic strength is chosen here, from all samples.

        Cost: O(m²) a solver step.
        """
        self._features_of_stream()
        return finish_stream(self._settings(None, 2), state)

    def _checked(self, samples: Any, base_scores: Any) -> tuple[FitSettings, jax.Array, Base]:
        """The input of a fit, checked."""
        sharding = self.sharding or sharding_of(samples)
        samples = place(as_points("samples", samples, minimum=2), sharding)
        settings = self._settings(sharding, samples.shape[0])
        if base_scores is not None:
            base_scores = place(as_points("base_scores", base_scores), sharding)
        return settings, samples, make_base(self.base, samples, base_scores)

    def _settings(self, sharding: NamedSharding | None, num_samples: int) -> FitSettings:
        """The settings that a fit to so many samples is compiled for."""
        bandwidth = self.bandwidth
        if bandwidth is None:
            # Anything but a regularizer is refused below.
            chosen = isinstance(self.regularizer, Regularizer) and self.regularizer.is_auto
            bandwidth = AutoBandwidth() if chosen and self.features is None else Median()
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(FitSettings)}
        settings = FitSettings(**fields | {"bandwidth": bandwidth, "sharding": sharding})
        return check_settings(settings, num_samples)

    def _features_of_stream(self) -> RandomFeatures:
        if self.features is None:
            raise ValueError(
                "features: expected RandomFeatures(num_features) for a stream, whose samples are "
                "not kept; got None"
            )
        return self.features

    # The contract with an objective: GuideEstimator.

    def resolve_debias(self, debias: str | None) -> str | None:
        if self.subset is None:
            return super().resolve_debias(debias)
        if debias == "jackknife":
            raise ValueError(
                f"debias: expected None with a subset, whose halves would be other operators; got "
                f"{debias!r}. Use debias=None"
            )
        return None

    def in_objective(self, base: str | None, sharding: NamedSharding | None) -> Self:
        own_base = "gaussian" if base == "gaussian" else None
        own_sharding = self.sharding if sharding is None else sharding
        return dataclasses.replace(self, base=own_base, sharding=own_sharding)

    def follow(
        self,
        state: None,
        key: jax.Array,
        samples: Any,
        base_scores: Any = None,
        *,
        debias: str | None = None,
        context: Any = None,
    ) -> tuple[AtSamples, None]:
        return self.at_samples(samples, base_scores, debias=debias, context=context), state
