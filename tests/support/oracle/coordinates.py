"""Bandwidth, whitening, and the Gaussian that predicts left-out samples best."""

from __future__ import annotations

import math

import numpy as np

from .profiles import Array


def median_distance(points: Array) -> float:
    """Median of the n (n - 1) / 2 distances between different points."""
    rows, columns = np.triu_indices(len(points), 1)
    return float(np.median(np.linalg.norm(points[rows] - points[columns], axis=-1)))


def whitener(samples: Array, mode: str, ddof: int = 0) -> Array:
    """W with ``W^T W`` the inverse covariance ("full") or the inverse variances ("diagonal").

    Which root is taken does not matter: radial kernels commute with rotations.
    """
    samples = np.asarray(samples, np.float64)
    d = samples.shape[1]
    if mode == "none":
        return np.eye(d)
    if mode == "diagonal":
        return np.diag(1 / samples.std(axis=0, ddof=ddof))
    return np.linalg.inv(np.linalg.cholesky(np.cov(samples.T, ddof=ddof).reshape(d, d)))


def local_shape(z: Array, rounds: int = 5) -> Array:
    """Shape S of determinant 1 in which neighbors of whitened samples lie in all directions alike.

    Without a root: ``C = sum e eᵀ / (eᵀ S⁻¹ e)`` over the differences e of each sample and its
    eight nearest by the distance ``eᵀ S⁻¹ e``, then S becomes ``C S⁻¹ C`` of unit trace, with a
    fraction of it replaced by that of the identity.
    """
    z = np.asarray(z, np.float64)
    n, d = z.shape
    shape, rho = np.eye(d), min(1.0, d / (2 * n))
    for _ in range(rounds):
        precision = np.linalg.inv(shape)
        total = np.zeros((d, d))
        for i in range(n):
            e = np.delete(z, i, axis=0) - z[i]
            squared = np.einsum("ka,ab,kb->k", e, precision, e)
            nearest = np.argsort(squared)[: min(8, n // 4)]
            total += np.einsum("ka,kb,k->ab", e[nearest], e[nearest], 1 / squared[nearest])
        shape = total @ precision @ total
        shape = (1 - rho) * shape / np.trace(shape) + rho * np.eye(d) / d
        shape /= np.linalg.det(shape) ** (1 / d)
    return shape


SHRINKAGES = (0, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.06, 0.1, 0.16, 0.25, 0.4, 0.6, 0.8, 1)


def held_out_parameters(samples: Array) -> tuple[Array, float, float]:
    """Scales, shrinkage and sharpness that predict left-out samples best, by leaving them out."""
    samples = np.asarray(samples, np.float64)
    n, d = samples.shape

    def left_out(points):
        for i in range(n):
            others = np.delete(points, i, axis=0)
            yield others, points[i] - others.mean(axis=0)

    def sharpest(pairs, most=math.inf):
        """Least mean of γ² a/2 - γ b, and the γ that attains it."""
        a, b = np.mean(list(pairs), axis=0)
        gamma = min(b / a, most)
        return gamma**2 * a / 2 - gamma * b, gamma

    sd = samples.std(axis=0)
    evened = {}
    for tau in (0.0, 0.25, 0.5, 0.75, 1.0):
        pairs = []
        for others, deviation in left_out(samples / sd):
            log_variance = np.log(others.var(axis=0) * sd**2)
            inverse = sd**2 / np.exp(log_variance + tau * (log_variance.mean() - log_variance))
            pairs.append((np.sum((inverse * deviation) ** 2), inverse.sum()))
        evened[tau] = sharpest(pairs)[0]
    tau = min(evened, key=evened.get)
    scale = np.exp(np.log(sd) + tau * (np.log(sd).mean() - np.log(sd)))

    # Errors are measured between the samples' own spread, if there are many, and fixed units.
    unknown = 4 * d**2 / n
    whole = np.cov((samples / scale).T, ddof=0).reshape(d, d)
    metric = (whole + unknown * np.eye(d)) / (1 + unknown)
    shrunk = {}
    for rho in SHRINKAGES if d > 1 else (1,):
        pairs = []
        for others, deviation in left_out(samples / scale):
            covariance = np.cov(others.T, ddof=0).reshape(d, d)
            covariance = (1 - rho) * covariance + rho * np.eye(d)
            # With fewer samples than dimensions there is no Gaussian without shrinkage; whether
            # rounding hides that differs by machine.
            if np.linalg.matrix_rank(covariance) < d:
                break
            precision = np.linalg.inv(covariance)
            score = precision @ deviation
            pairs.append((score @ metric @ score, np.trace(metric @ precision)))
        else:
            shrunk[rho] = sharpest(pairs, most=4.0)
    rho = min(shrunk, key=lambda key: shrunk[key][0])
    return scale, rho, shrunk[rho][1]


def held_out_gaussian(samples: Array) -> Array:
    """W with ``W^T W`` the precision of the Gaussian with these parameters."""
    samples = np.asarray(samples, np.float64)
    scale, rho, sharpness = held_out_parameters(samples)
    d = samples.shape[1]
    covariance = np.cov((samples / scale).T, ddof=0).reshape(d, d)
    covariance = ((1 - rho) * covariance + rho * np.eye(d)) / sharpness
    return np.linalg.inv(np.linalg.cholesky(covariance)) @ np.diag(1 / scale)


def left_out_gaussian_scores(samples: Array) -> Array:
    """Score at each sample of the Gaussian fitted to the others, its parameters held fixed."""
    samples = np.asarray(samples, np.float64)
    scale, rho, sharpness = held_out_parameters(samples)
    x, d = samples / scale, samples.shape[1]
    scores = []
    for i in range(len(x)):
        others = np.delete(x, i, axis=0)
        covariance = (1 - rho) * np.cov(others.T, ddof=0).reshape(d, d) + rho * np.eye(d)
        scores.append(-sharpness * np.linalg.solve(covariance, x[i] - others.mean(axis=0)))
    return np.array(scores) / scale


def gaussian_score(x: Array, samples: Array) -> Array:
    """Score of that Gaussian."""
    root = held_out_gaussian(samples)
    return -(np.asarray(x, np.float64) - samples.mean(axis=0)) @ root.T @ root
