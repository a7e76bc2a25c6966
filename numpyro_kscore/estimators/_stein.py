"""Stein's own extension to new points: the estimate with the point added to the samples.

Li and Turner (2018) define their estimator at the samples only, and evaluate it at a new point y
by adding y to them and solving again. With ``M = K + (n+1) λ`` and ``H`` the sums that make up
``(n+1) h'``, the system of n+1 points is bordered by b = k(X, y), and its last row is

    ŝ(y) - s0(y) = -(H_y - bᵀ M⁻¹ H_X) / (k(y, y) + (n+1) λ - bᵀ M⁻¹ b).

M does not depend on y and is factorized once. H_X does, through the new point's own terms, which
are again weights times differences: no point needs more than O(n² + n d).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_kscore._util.checks import as_points
from numpyro_kscore._util.linalg import inverse_root
from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.estimators._estimator import ScoreEstimator
from numpyro_kscore.estimators._score import Score
from numpyro_kscore.kernels import _pairwise as pairwise
from numpyro_kscore.kernels._gram import is_cached
from numpyro_kscore.kernels._pairwise import Expansion
from numpyro_kscore.regularizers._filters import Tikhonov

__all__ = ["RefitEstimator", "RefitScore"]


@pytree
class RefitScore(Score):
    """An estimate that is made anew, with the point among the samples, wherever it is evaluated.

    Coordinates and bandwidth stay those of the fit. At a sample it is the estimate with that
    sample counted twice, which is not ``at_samples``. Such a function is no gradient
    and no combination of kernels: there is no log density, and ``expansion`` holds points only.

    Attributes:
        base_values: s0 at the samples in the kernel's coordinates, (n, d), or None.
        solved: ``M⁻¹ H`` without the new point's terms, (n, d).
        root: R with ``RᵀR = M⁻¹``, (n, n).
        scale: factor on the kernel.
        shift: ``(n+1) λ``.
    """

    base_values: jax.Array | None
    solved: jax.Array
    root: jax.Array
    scale: jax.Array
    shift: jax.Array

    def residual(self, x: Any) -> jax.Array:
        """The estimate less its base, ``ŝ - s0``, at ``x``: (m, d) -> (m, d).

        Cost: O(m n (n + d)) time, O(m n) memory.
        """
        x = self._points(x)
        y, points = self.coordinates.to_kernel(x), self.expansion.points
        s = pairwise.squared_distances(y, points, pairwise.cancels(points) | pairwise.cancels(y))
        weights = jax.tree.map(lambda w: self.scale * w, self._weights(s))
        border = weights.inner
        half = border @ self.root.T
        solved_border = half @ self.root
        explained = jnp.sum(half * half, axis=1, keepdims=True)
        at_origin = self.scale * self._weights(jnp.zeros((), s.dtype)).inner

        # H_y - bᵀ M⁻¹ H_X, whose new terms are (x_j - y) zeta_j and, with a base, b_j s0(y).
        along = weights.zeta * (1.0 + solved_border)
        value = pairwise.along_differences(along, y, points) - border @ self.solved
        if self.base_values is not None:
            here = self.coordinates.scores_to_kernel(self.base.score(x))
            value = value + border @ self.base_values + (at_origin - explained) * here
        value = -value / (at_origin + self.shift - explained)
        return self.coordinates.scores_from_kernel(value)

    def residual_divergence(self, x: Any) -> jax.Array:
        """``div (ŝ - s0)`` at ``x``: (m, d) -> (m,), by d forward derivatives."""

        def trace(point: jax.Array) -> jax.Array:
            return jnp.trace(jax.jacfwd(lambda p: self.residual(p[None])[0])(point))

        return jax.vmap(trace)(self._points(x))

    def _weights(self, s: jax.Array) -> Any:
        return self.kernel.field_weights(s, self.expansion.points.shape[1])


@pytree
class RefitEstimator(ScoreEstimator):
    """Tikhonov with a scalar kernel, evaluated at new points as Li and Turner (2018) do.

    ``score(y)`` is the last row of ``at_samples`` of a fit to the samples and y, at the same λ,
    bandwidth and coordinates. Their η is ``(n+1) λ``. :func:`numpyro_kscore.estimators.stein` makes
    one.

    Args:
        kernel: a :class:`~numpyro_kscore.kernels.Diagonal` kernel.
        regularizer: :class:`~numpyro_kscore.regularizers.Tikhonov`.
        solver: for the estimate at the samples.
        bandwidth: as for :class:`~numpyro_kscore.ScoreEstimator`, and so are the others.
        standardize: as there.
        base: as there; values at the samples alone do not suffice to evaluate the score.
        normalize: as there.
        landmarks: None.
    """

    def fit(self, samples: Any, base_scores: Any = None) -> RefitScore:
        """Estimate the score of the distribution the samples come from.

        Args:
            samples: i.i.d. draws, shape (n, d), n ≥ 2, in any units.
            base_scores: values of the base score at the samples, (n, d).

        Raises:
            ValueError: as :meth:`numpyro_kscore.ScoreEstimator.fit`, for landmarks, and for more
                samples than a dense matrix allows.
            TypeError: as there, and for a kernel that is not scalar or another regularizer.

        Cost: O(n³) time, O(n²) memory.
        """
        if not self.kernel.is_scalar:
            raise TypeError(
                f"kernel: expected Diagonal(…) to refit at new points; got "
                f"{type(self.kernel).__name__}. Use ScoreEstimator(…)"
            )
        if not isinstance(self.regularizer, Tikhonov):
            raise TypeError(
                "regularizer: expected Tikhonov(lam) to refit at new points; got "
                f"{type(self.regularizer).__name__}"
            )
        if self.is_auto:
            raise ValueError(
                "lam: expected a number to refit at new points; got a choice left to the samples. "
                "Fit ScoreEstimator(…) first and take score.info.choice"
            )
        if self.landmarks is not None:
            raise ValueError("landmarks: expected None to refit at new points; got some")
        samples = as_points("samples", samples, minimum=2)
        if not is_cached(samples.shape[0]):
            raise ValueError(
                f"samples: expected at most {int(pairwise.CACHED_PAIRS**0.5)} to refit at new "
                f"points; got {samples.shape[0]}. Use stein(extension='framework')"
            )
        score = super().fit(samples, base_scores)
        return _refit(score, self.regularizer, self.normalize)


@partial(jax.jit, static_argnames="normalize")
def _refit(score: Score, regularizer: Tikhonov, normalize: bool) -> RefitScore:
    points, kernel = score.expansion.points, score.kernel
    n, dim = points.shape
    if normalize:
        scale = 1.0 / kernel.trace(dim).astype(points.dtype)
    else:
        scale = score.coordinates.bandwidth ** -kernel.scale_exponent()
    s = pairwise.squared_distances(points, points, pairwise.cancels(points))
    weights = jax.tree.map(lambda w: scale * w, kernel.field_weights(s, dim))
    sums = pairwise.along_differences(weights.zeta, points, points)
    base_values = score.base.at_samples
    if base_values is not None:
        base_values = score.coordinates.scores_to_kernel(base_values)
        sums = sums + weights.inner @ base_values
    shift = (n + 1) * jnp.asarray(regularizer.lam, points.dtype)
    # A Cholesky factor would be NaN where (n+1) λ is below the rounding of K.
    root = inverse_root(weights.inner, shift, jnp.zeros((), points.dtype)).T
    return RefitScore(
        kernel,
        score.coordinates,
        Expansion(points, None, None),
        score.base,
        score.at_samples,
        score.info,
        base_values,
        root.T @ (root @ sums),
        root,
        scale,
        shift,
    )
