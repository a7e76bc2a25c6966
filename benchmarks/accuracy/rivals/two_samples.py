"""A test of whether two sets of draws are from one distribution, and how often it says no."""

from __future__ import annotations

import numpy as np

__all__ = ["p_value", "rejection_rate"]

NUM_DRAWS, NUM_TESTS, NUM_PERMUTATIONS, LEVEL = 500, 50, 199, 0.05


def p_value(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> float:
    """The share of permutations with as large a discrepancy, for sets of as many draws.

    The statistic is the maximum mean discrepancy with a Gaussian kernel at the median distance of
    all draws (Gretton et al. 2012). Its diagonal is the same for all permutations.
    """
    pooled = np.concatenate([x, y]).astype(float)
    pooled = pooled - pooled.mean(0)
    squares = (pooled**2).sum(1)
    distances = np.maximum(squares[:, None] + squares - 2 * pooled @ pooled.T, 0)
    middle = np.median(distances[np.triu_indices(len(pooled), 1)])
    kernel = np.exp(-distances / (2 * (middle or 1.0)))
    sides = np.repeat([1.0, -1.0], len(x))
    every = np.stack([sides, *(rng.permutation(sides) for _ in range(NUM_PERMUTATIONS))], axis=1)
    found = (every * (kernel @ every)).sum(0)
    # Rounding must not tell a permutation that changes nothing from the sides as they are.
    return float(np.mean(found >= found[0] * (1 - 1e-12)))


def rejection_rate(x: np.ndarray, y: np.ndarray, num_tests: int = NUM_TESTS) -> float:
    """The share of tests of few draws that reject at the level .05; .05 for equal distributions."""
    rng = np.random.default_rng(0)
    count = min(NUM_DRAWS, len(x), len(y))
    found = [
        p_value(*(z[rng.choice(len(z), count, replace=False)] for z in (x, y)), rng)
        for _ in range(num_tests)
    ]
    return float(np.mean(np.array(found) <= LEVEL))
