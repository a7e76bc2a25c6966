"""Weights of a few rows with which the scores at draws are those of all rows.

A choice of rows at random is right on average, and off by its noise. The rows of a likelihood are
much alike, so that others can take over what is missed: their weights are fitted to the scores of
all rows, near those of the choice (Campbell and Broderick 2019).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import Array, lax

from numpyro_kscore._tracing.coreset import RowWeights

__all__ = ["fit_weights", "score_remainders"]

# Inverse variances of the relative changes of weights, of which held-out draws choose.
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# What is left of the mean square that was missed, at most, for weights to be changed.
WORTH = 0.5


def score_remainders(
    rows_at: Callable[[Array], Array], point: Array, draws: Array, root: Array, is_curved: bool
) -> Array:
    """What an expansion at a point leaves of the score of every row, (draws, rows, d).

    Args:
        rows_at: log likelihoods of the rows, (rows,), at coordinates (d,).
        point: where the expansion is made, (d,).
        draws: (draws, d).
        root: of the covariance of the draws, (d, d): scores are those of whitened coordinates.
        is_curved: whether the expansion is of second order; of first otherwise.

    Cost: a pass over the rows and a derivative of it, both forward, for each draw and dimension.
    """
    scores = jax.jacfwd(rows_at)
    here, bend = jax.linearize(scores, point)

    def at(x: Array) -> Array:
        left = scores(x) - here
        return (left - bend(x - point) if is_curved else left) @ root

    return lax.map(at, draws)


def fit_weights(chosen: RowWeights, of_rows: np.ndarray, missed: np.ndarray) -> RowWeights:
    """The choice with weights that are fitted to the score of all rows.

    Args:
        chosen: some rows, with weights that are right on average.
        of_rows: see :func:`score_remainders`, (draws, rows, d).
        missed: by how much the score with these weights is off at the draws, whitened, (draws, d).

    Cost: O(draws d rows²).
    """
    weights = np.asarray(chosen.weights, np.float64)
    effects = np.asarray(of_rows, np.float64).transpose(0, 2, 1) * weights
    missed = np.asarray(missed, np.float64)
    is_finite = np.isfinite(effects).all(axis=(1, 2)) & np.isfinite(missed).all(axis=1)
    effects, missed = effects[is_finite], missed[is_finite]
    if len(missed) < 2 or not missed.any():
        return chosen
    # Unknown are the relative changes; those of even draws are chosen by the odd ones.
    scale = np.mean(missed**2)
    best, least = np.zeros(len(weights)), WORTH * np.mean(missed[1::2] ** 2)
    products = _products(effects[0::2], missed[0::2])
    for penalty in PENALTIES:
        changes = _ridge(*products, penalty * scale * missed[0::2].size)
        loss = np.mean((missed[1::2] + effects[1::2] @ changes) ** 2)
        if loss < least:
            best, least = changes, loss
    return chosen._replace(weights=weights * (1 + best))


def _products(effects: np.ndarray, missed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = effects.reshape(-1, effects.shape[-1])
    return flat.T @ flat, -flat.T @ missed.ravel()


def _ridge(gram: np.ndarray, target: np.ndarray, penalty: float) -> np.ndarray:
    changes = np.linalg.solve(gram + penalty * np.eye(len(gram)), target)
    return np.maximum(changes, -1.0)
