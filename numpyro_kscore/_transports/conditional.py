"""Gaussians whose mean and covariance change with some of their latents, the scales.

Given its scales, many a model is close to Gaussian in all else: time series, smooth curves, fields
(Rue, Martino and Chopin 2009). But every value of the scales has another Gaussian. Where effects
are written as standardized ones times a scale no prior says how it changes, and where there are
several scales no basis makes all of these Gaussians independent. So modes and Cholesky factors are
taken at some values of the scales (see ``_starts.scale_rounds``) and interpolated. The logarithm
of the volume is then known everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.arrow import Arrow
from numpyro_kscore._transports.features import features, through_features
from numpyro_kscore._transports.stretch import slopes_at, stretched
from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.pytree import pytree, static


@pytree
class Conditional:
    """A Gaussian whose mean and covariance change with k of its latents, the scales.

    Given the scales at points ``u`` of theirs, the r others are ``mean + base (m(u) + T(u) v)`` at
    points ``v``, with a vector m(u) and a triangle T(u). Every entry of m and of the logarithms of
    the diagonal of T is linear in p :func:`~numpyro_kscore._transports.features.features` of u, and
    the rest of T in q sums of these.

    Attributes:
        scales: the Gaussian of the scales, before each is stretched.
        slopes: how that is done, see :func:`~numpyro_kscore._transports.stretch.stretched`,
            (k, 10).
        mean: of the others where the scales have their mean, (r,).
        base: the factor of their covariance there.
        means: coefficients of m, (p, r).
        logs: coefficients of the logarithms of the diagonal of T, (p, r).
        sums: coefficients of the sums of features, (p, q).
        rests: coefficients of the rest of T, q triangles with zeros on their diagonals.
        order: places of the latents in the order of the other attributes, scales first, d numbers.
    """

    scales: Affine
    slopes: Any
    mean: Any
    base: Arrow
    means: Any
    logs: Any
    sums: Any
    rests: Arrow
    order: tuple[int, ...] = static()

    def push(self, x: Any) -> Any:
        xp = namespace(x)
        u, v = self._split(x)
        values = features(u)
        inner = values @ self.means + xp.exp(values @ self.logs) * v
        inner = sum((weight * rest.times(v) for weight, rest in self._rests(values)), inner)
        found = [self.scales.push(stretched(u, self.slopes)), self.mean + self.base.times(inner)]
        return xp.concatenate(found, axis=-1)[..., np.argsort(self.order)]

    def log_volume(self, x: Any) -> Any:
        xp = namespace(x)
        u, _ = self._split(x)
        values = features(u)
        fixed = self.scales.log_det + xp.sum(xp.log(self.base.diagonal))
        stretches = xp.log(slopes_at(u, self.slopes)[0])
        return fixed + (values @ self.logs).sum(-1) + stretches.sum(-1)

    def pull(self, x: Any, gradients: Any) -> Any:
        xp = namespace(x)
        u, v = self._split(x)
        of_scales, of_others = self._split(gradients[..., np.array(self.order)])
        inner = self.base.transposed(of_others)
        by_scales = self.scales.pull(u, of_scales) * slopes_at(u, self.slopes)[0]
        values = features(u)
        by_points = inner * xp.exp(values @ self.logs)
        by_points = sum((w * rest.transposed(inner) for w, rest in self._rests(values)), by_points)
        moved = by_scales + self._through_scales(u, v, inner)
        return xp.concatenate([moved, by_points], axis=-1)

    def push_score(self, x: Any, score: Any) -> Any:
        xp = namespace(x, score)
        u, v = self._split(x)
        of_scales, of_others = self._split(score)
        values = features(u)
        triangle = self.rests.combined(values @ self.sums)
        triangle = triangle.with_diagonal(xp.exp(values @ self.logs))
        # The derivative is a block triangle: what others move with the scales is subtracted when
        # their own scores are known.
        inner = triangle.solve_transposed(of_others)
        rest = of_scales + self._through_scales(u, v, -inner)
        rest = rest / slopes_at(u, self.slopes)[0]
        found = [self.scales.push_score(u, rest), self.base.solve_transposed(inner)]
        return xp.concatenate(found, axis=-1)[..., np.argsort(self.order)]

    def _through_scales(self, u: Any, v: Any, inner: Any) -> Any:
        """The gradient in u of an energy of the others, and of minus the log volume, (..., k).

        ``inner`` is the gradient of the energy in ``m(u) + T(u) v``, (..., r).
        """
        xp = namespace(u)
        values = features(u)
        scaled = inner * xp.exp(values @ self.logs)
        by_values = inner @ self.means.T + (scaled * v - 1) @ self.logs.T
        for k in range(self.sums.shape[1]):
            by_sum = xp.sum(inner * self.rests[k].times(v), axis=-1)
            by_values = by_values + by_sum[..., None] * self.sums[:, k]
        return through_features(u, by_values) - slopes_at(u, self.slopes)[1]

    def _rests(self, values: Any) -> Iterator[tuple[Any, Arrow]]:
        """Every triangle of the rest with its weights (..., 1) at values of the features."""
        weights = values @ self.sums
        return ((weights[..., k, None], self.rests[k]) for k in range(weights.shape[-1]))

    def _split(self, points: Any) -> tuple[Any, Any]:
        count = self.slopes.shape[0]
        return points[..., :count], points[..., count:]
