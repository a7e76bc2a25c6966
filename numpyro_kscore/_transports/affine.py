"""Affine maps, whose images of a standard normal are Gaussians, and mixtures of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from numpyro_kscore._util.linalg import invert_lower
from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.pytree import pytree, static


@pytree
class Affine:
    """``x -> mean + factor x``: the Gaussian N(mean, factor factorᵀ) of standard normal points.

    Attributes:
        mean: shape (d,).
        factor: lower triangle, (d, d), with a positive diagonal.
    """

    mean: Any
    factor: Any

    @property
    def log_det(self) -> Any:
        """Logarithm of the determinant of the factor."""
        xp = namespace(self.factor)
        return xp.sum(xp.log(xp.diagonal(self.factor)))

    def push(self, x: Any) -> Any:
        return self.mean + x @ self.factor.T

    def log_volume(self, x: Any) -> Any:
        return namespace(x).broadcast_to(self.log_det, x.shape[:-1])

    def pull(self, x: Any, gradients: Any) -> Any:
        del x
        return gradients @ self.factor

    def push_score(self, x: Any, score: Any) -> Any:
        del x
        if namespace(self.factor, score) is np:
            return np.linalg.solve(self.factor.T, score.T).T
        return score @ invert_lower(self.factor)


@pytree
class OfFirst:
    """A map of the first k coordinates; the others stay.

    Attributes:
        transport: the map, in k dimensions.
        count: k.
    """

    transport: Any
    count: int = static()

    def push(self, x: Any) -> Any:
        return self._joined(self.transport.push(x[..., : self.count]), x)

    def log_volume(self, x: Any) -> Any:
        return self.transport.log_volume(x[..., : self.count])

    def pull(self, x: Any, gradients: Any) -> Any:
        first = self.transport.pull(x[..., : self.count], gradients[..., : self.count])
        return self._joined(first, gradients)

    def push_score(self, x: Any, score: Any) -> Any:
        first = self.transport.push_score(x[..., : self.count], score[..., : self.count])
        return self._joined(first, score)

    def _joined(self, first: Any, whole: Any) -> Any:
        xp = namespace(first, whole)
        return xp.concatenate([first, whole[..., self.count :]], axis=-1)


@pytree
class Diagonal:
    """``x -> loc + scale * x``.

    Attributes:
        loc: shape (d,).
        scale: positive, (d,).
    """

    loc: Any
    scale: Any

    def push(self, x: Any) -> Any:
        return self.loc + self.scale * x

    def log_volume(self, x: Any) -> Any:
        xp = namespace(x)
        return xp.broadcast_to(xp.sum(xp.log(self.scale)), x.shape[:-1])

    def pull(self, x: Any, gradients: Any) -> Any:
        del x
        return gradients * self.scale

    def push_score(self, x: Any, score: Any) -> Any:
        del x
        return score / self.scale


@pytree
class GaussianMixture:
    """A mixture of Gaussians, of which a draw is given its component.

    Attributes:
        weights: shape (k,).
        means: shape (k, d).
        factors: shape (k, d, d).
    """

    weights: Any
    means: Any
    factors: Any

    def component(self, k: jax.Array) -> Affine:
        """The map to the draws of component ``k``."""
        return Affine(self.means[k], self.factors[k])


def standard(dim: int) -> Affine:
    """The identity: a standard normal."""
    return Affine(np.zeros(dim), np.eye(dim))


def factor(covariance: np.ndarray) -> np.ndarray:
    """Lower Cholesky factor of a covariance (d, d)."""
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        # Rounding: its diagonal is positive all the same.
        return np.diag(np.sqrt(np.maximum(np.diag(covariance), np.finfo(float).tiny)))


def fitted(draws: np.ndarray) -> Affine:
    """The Gaussian with the moments of draws (m, d), correlations shrunk."""
    count, dim = draws.shape
    covariance = np.cov(draws.T).reshape(dim, dim)
    kept = count / (count + dim)
    covariance = kept * covariance + (1 - kept) * np.diag(np.diag(covariance))
    return Affine(draws.mean(0), factor(covariance))


def antithetic(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Standard normal noise (count, dim) in pairs of opposite sign: means have no error."""
    half = rng.standard_normal((count // 2, dim))
    return np.concatenate([half, -half])


def with_moments(parts: Sequence[Affine], weights: np.ndarray) -> Affine:
    """The Gaussian with the moments of a mixture."""
    means = np.stack([part.mean for part in parts])
    mean = weights @ means
    covariance = sum(
        w * (part.factor @ part.factor.T + np.outer(part.mean - mean, part.mean - mean))
        for w, part in zip(weights, parts, strict=True)
    )
    return Affine(mean, factor(np.asarray(covariance)))
