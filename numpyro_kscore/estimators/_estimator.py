"""Score estimation: ``ScoreEstimator.fit(samples) -> Score``.

An estimator is a configuration (kernel, regularizer, solver, coordinates, base score) and
changes nothing when it fits. The fitted :class:`~numpyro_kscore.Score` is a pytree of
arrays, which can be returned from ``jit`` and mapped over by ``vmap``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from numpyro_kscore._util.checks import as_points, check_choice, check_positive, with_jax_leaves
from numpyro_kscore._util.precision import PRECISIONS
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore._util.sharding import check_sharding, divides, num_shards, place, sharding_of
from numpyro_kscore.estimators._base import Base
from numpyro_kscore.estimators._checks import make_base
from numpyro_kscore.estimators._coordinates import STANDARDIZE_CHOICES
from numpyro_kscore.estimators._fitting import AtSamples, fit_at_samples, fit_score
from numpyro_kscore.estimators._landmarks import Landmarks
from numpyro_kscore.estimators._score import Score
from numpyro_kscore.estimators._selection import AutoBandwidth, Median
from numpyro_kscore.estimators._subset import Subset
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._gram import is_cached
from numpyro_kscore.kernels._matrix import CurlFree
from numpyro_kscore.kernels._profiles import RadialProfile
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.regularizers._iterations import NuMethod
from numpyro_kscore.solvers._solvers import Krylov
from numpyro_kscore.solvers._spectrum import Solver

__all__ = ["ScoreEstimator"]

PARTS = (
    ("kernel", Kernel, "kernel: expected a kernel such as CurlFree(IMQ()) or Diagonal(Gaussian())"),
    ("regularizer", Regularizer, "regularizer: expected a filter such as NuMethod('auto')"),
    ("solver", Solver, "solver: expected a solver such as Krylov() or Dense()"),
)


@pytree
class ScoreEstimator:
    """Nonparametric estimator of the score ``∇ log q`` from samples of q.

    ``ŝ = s0 - g(L̂) ζ'`` with ``ζ' = ζ + L̂ s0`` (Zhou, Shi and Zhu 2020, eq. 9, extended by the
    base score s0): the kernel says what functions are considered, the regularizer g how far the
    estimate may leave the base score, the solver how g is applied.

    Args:
        kernel: :class:`CurlFree` (has a log density) or :class:`Diagonal`.
        regularizer: the filter g, on eigenvalues of K/n. A strength ``"auto"`` is chosen from the
            samples by held-out score matching (docs/theory).
        solver: how it is applied; :class:`Krylov` serves all continuous filters.
        bandwidth: ``"median"``, a :class:`Median` rule, ``"auto"`` (the best of three multiples
            of the median by held-out loss), an :class:`AutoBandwidth` rule, or a number in
            standardized units. Not differentiated when it comes from the samples.
        standardize: ``"full"`` whitens the samples, ``"diagonal"`` scales each coordinate,
            ``"none"`` leaves them (always centered, which a radial kernel does not notice).
        base: what the estimate is shrunk to: ``"gaussian"`` is the score of a Gaussian fitted to
            the samples and shrunk by held-out score matching (docs/theory), None is zero
            (the paper), a callable (m, d) -> (m, d) a score function, a NumPyro distribution with
            event shape (d,) its score.
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
            debias: None or ``"jackknife"``, at 1.5 times the operations.
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
        return fit_at_samples(estimator, samples, base, context, jackknife)

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

    def _check_parts(self) -> None:
        """Raise for a part of another kind, a class JAX does not know, and arrays for numbers."""
        for leaf in jax.tree.leaves(self):
            if isinstance(leaf, Kernel | RadialProfile | Regularizer | Solver):
                raise TypeError(
                    f"{type(leaf).__name__}: expected a pytree; got a class JAX does not know. "
                    "Decorate it with @numpyro_kscore.pytree"
                )
        for name, kind, expected in PARTS:
            if not isinstance(part := getattr(self, name), kind):
                raise TypeError(f"{expected}; got {part!r}")
        if self.bandwidth is None:
            raise ValueError("bandwidth: expected 'median', 'auto', a rule or a number; got None")
        numbers = {"bandwidth": getattr(self.bandwidth, "factor", self.bandwidth)}
        if not self.regularizer.is_auto:
            numbers["regularizer"] = self.regularizer.strength()
        for name, number in numbers.items():
            if not isinstance(number, AutoBandwidth) and jnp.ndim(number):
                raise ValueError(
                    f"{name}: expected one number; got shape {jnp.shape(number)}. Several fits are "
                    "one jax.vmap; the best of several bandwidths is AutoBandwidth(factors)"
                )

    def _checked(self, samples: Any, base_scores: Any) -> tuple[ScoreEstimator, jax.Array, Base]:
        """The input of a fit, checked, and the configuration that is left to compile."""
        sharding = self.sharding or sharding_of(samples)
        samples = place(as_points("samples", samples, minimum=2), sharding)
        self._check_parts()
        self.kernel.check()
        regularizer = self.regularizer
        if self.landmarks is not None:
            if not isinstance(self.landmarks, Landmarks):
                raise TypeError(
                    "landmarks: expected None or Landmarks(count), Landmarks(fraction=…) or "
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
                    "subset: expected None or Subset(count), Subset(fraction=…) or "
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
