"""A basis of latents in which sizes vary with scales.

The elements of a smooth curve, or of effects of neighboring areas, have a prior that is not
independent. Given its scale τ, and the data, their precision is a sum of matrices, of which one is
proportional to τ⁻². In a basis in which both are diagonal, the generalized eigenvectors of the
precision and of its derivative in log τ, every coordinate has a size of its own that varies with τ.
The derivative comes from differences of the model's scores, however the model is written.
"""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.candidates import Latents
from numpyro_kscore._transports.affine import Affine, antithetic
from numpyro_kscore._transports.transport import Evaluate

__all__ = ["fit_basis"]

# Scales that are looked at, of which a latent may have four: more are those of single effects.
MOST_SCALES, MOST_OF_LATENT = 6, 4
# Points at which scores are compared, for each dimension and at least.
POINTS_PER_DIM, FEWEST_POINTS = 4, 64
# How far a scale is moved for that, in standard deviations, to both sides.
STEP = 0.5
# Sum of squares of the changes of log sizes, by a standard deviation of the scale, that counts.
LEAST_STRENGTH = 0.05


def fit_basis(
    evaluate: Evaluate, gaussian: Affine, latents: Latents, rng: np.random.Generator
) -> np.ndarray | None:
    """A basis for the elements of every latent; None if none varies with a scale.

    Args:
        evaluate: energies and their gradients at points (m, d).
        gaussian: the Gaussian near the posterior.
        latents: what is known of the latents.
        rng: for points.

    Returns:
        A matrix of determinant 1 or -1, (d, d), that takes coordinates to latents.

    Raises:
        LinAlgError: if rounding leaves a matrix singular.

    Cost: 8 gradients of the model for each dimension and scale; O(d³).
    """
    dim = len(gaussian.mean)
    ends = np.cumsum(latents.sizes)
    blocks = [np.arange(end - size, end) for end, size in zip(ends, latents.sizes, strict=True)]
    positive = [block for block in blocks if len(block) <= MOST_OF_LATENT]
    scales = [j for block in positive for j in block if latents.is_scale[j]]
    count = max(FEWEST_POINTS, POINTS_PER_DIM * dim)
    points = gaussian.push(antithetic(rng, count, dim))
    spreads = np.linalg.norm(gaussian.factor, axis=1)
    changes = []
    for j in scales[:MOST_SCALES]:
        change = _change(evaluate, gaussian, points, j, STEP * spreads[j])
        if change is not None:
            changes.append(spreads[j] * change)
    whitening = np.linalg.inv(gaussian.factor)
    basis = np.eye(dim)
    for block in blocks:
        inside = np.ix_(block, block)
        if len(block) == 1 or not changes:
            continue
        # Root of the precision given all other latents, without squares of its numbers.
        root = np.linalg.inv(np.linalg.qr(whitening[:, block], mode="r")).T
        found = [np.linalg.eigh(root @ change[inside] @ root.T) for change in changes]
        # The logarithm of a size changes by half as much as that of a precision.
        values, vectors = max(found, key=lambda one: float(np.sum(one[0] ** 2)))
        if np.sum(np.square(values / 2)) > LEAST_STRENGTH:
            turned = root.T @ vectors
            basis[inside] = turned * np.exp(-np.linalg.slogdet(turned)[1] / len(block))
    return None if np.array_equal(basis, np.eye(dim)) else basis


def _change(
    evaluate: Evaluate, gaussian: Affine, points: np.ndarray, scale: int, step: float
) -> np.ndarray | None:
    """The derivative of the precision in a coordinate, (d, d); None if scores are not finite."""
    move = np.where(np.arange(len(gaussian.mean)) == scale, step, 0.0)
    (_, above), (_, below) = evaluate(points + move), evaluate(points - move)
    differences = (above - below) / (2 * step)
    finite = np.all(np.isfinite(differences), axis=1)
    if np.sum(finite) < len(points) // 2:
        return None
    features = np.concatenate([np.ones((len(points), 1)), points - gaussian.mean], axis=1)[finite]
    slopes = np.linalg.lstsq(features, differences[finite], rcond=None)[0][1:]
    return 0.5 * (slopes + slopes.T)
