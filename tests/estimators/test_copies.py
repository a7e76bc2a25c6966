"""Samples with copies: their errors are those of as many distinct samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore.estimators import KernelDensity, RandomFeatures, entropy
from numpyro_kscore.estimators._base.copies import (
    MOST_PAIRED,
    deal,
    distinct_share,
    effective_number,
    find_copies,
    is_discrete,
)

N = 400
POINTS = np.random.default_rng(9).normal(size=(300, 10))


def copied(kind: str, dim: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed + 100 * dim)
    x = rng.normal(size=(N, dim))
    if kind == "independent":
        return x
    if kind == "half":
        return np.concatenate([x[: N // 2]] * 2)
    if kind == "bootstrap":
        return x[rng.integers(N, size=N)]
    if kind == "resampled":  # about 50 effective ones
        return x[rng.choice(N, size=N, p=rng.dirichlet(np.full(N, 1 / 7)))]
    if kind.startswith("jitter"):
        x = x[rng.integers(N, size=N)]
        return x + float(kind.split()[1]) * rng.normal(size=x.shape)
    return np.round(x / float(kind.split()[1])) * float(kind.split()[1])


fit = quick_jit(lambda estimator, x, points: _values(estimator.fit(x), points))


def _values(score, points):
    return score(points), score.info


def error(samples: np.ndarray, estimator=None) -> float:
    """Squared error of the score over its square; zero as an estimate has 1."""
    points = jnp.asarray(POINTS[:, : samples.shape[1]], jnp.float32)
    found = fit(estimator or ScoreEstimator(), jnp.asarray(samples, jnp.float32), points)[0]
    return float(jnp.sum((found + points) ** 2) / jnp.sum(points**2))


# Errors of a Gaussian fitted to k distinct ones are about (d + 3)/(2k) to (d + 3)/k: at most .1 for
# the 200 of a bootstrap, .3 for 50. Before, all were above 1 and most above 100.
@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("bootstrap", 0.1),
        ("resampled", 0.3),
        ("jitter 0.001", 0.1),
        *(
            pytest.param(kind, 0.1, marks=pytest.mark.thorough)
            for kind in ("half", "jitter 0.01", "grid 0.1")
        ),
    ],
)
def test_errors_are_those_of_distinct_samples(kind, bound):
    assert error(copied(kind, 2), ScoreEstimator(base="student")) < bound


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2, 5, 10])
@pytest.mark.parametrize(
    "kind",
    ["half", "bootstrap", "resampled", "jitter 0.001", "jitter 0.01", "grid 0.5", "grid 0.1"],
)
def test_errors_in_all_dimensions(kind, dim):
    if kind == "jitter 0.01" and dim == 1:
        pytest.skip("noise as large as the distance of neighbors")
    bound = 0.3 if kind == "resampled" else 0.15
    assert all(error(copied(kind, dim, seed)) < bound for seed in range(3))


@pytest.mark.thorough
def test_copies_in_features_and_densities():
    samples = copied("bootstrap", 2)
    assert error(samples, ScoreEstimator(features=RandomFeatures(128))) < 0.1
    # Independent ones have .10, and the smallest bandwidth that is tried has 2.
    assert error(samples, KernelDensity("auto")) < 0.5


# The error of a mean of 50 values of variance 1 is .14, of 200 it is .07.
@pytest.mark.thorough
def test_the_error_of_an_entropy_counts_distinct_samples():
    found = entropy(jnp.asarray(copied("resampled", 2), jnp.float32))
    assert 0.08 < float(found.standard_error) < 0.4
    assert abs(float(found.value) - 2.8379) < 3 * float(found.standard_error)


numbers = quick_jit(lambda x: (effective_number(find_copies(x)), is_discrete(x)))


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_effective_numbers(dim):
    def number(samples):
        return float(numbers(jnp.asarray(samples, jnp.float32))[0])

    assert number(copied("independent", dim)) == N
    samples = copied("bootstrap", dim)
    counts = np.unique(samples, axis=0, return_counts=True)[1]
    assert number(samples) == pytest.approx(N**2 / np.sum(counts**2), rel=1e-3)
    near = samples + 1e-3 * np.random.default_rng(0).normal(size=samples.shape)
    # In one dimension neighbors are as near: 400 have 2.5 within .011, at most, of each.
    assert number(near) == pytest.approx(N**2 / np.sum(counts**2), rel=0.6 if dim == 1 else 0.1)
    # Tight clusters and chains are no copies.
    rng = np.random.default_rng(3)
    clusters = rng.integers(2, size=(N, 1)) + 1e-2 * rng.normal(size=(N, dim))
    assert number(clusters - clusters.mean(0)) > 0.95 * N
    walk = np.cumsum(rng.normal(size=(N, dim)), axis=0)
    assert number((walk - walk.mean(0)) / walk.std(0)) > 0.9 * N


def test_equal_ones_among_very_many():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(MOST_PAIRED, 3)).astype(np.float32)
    own = quick_jit(find_copies)(jnp.asarray(np.concatenate([x, x[:100]])))
    np.testing.assert_array_equal(own[MOST_PAIRED:], np.arange(100))
    # Projections of about two pairs of others agree within rounding.
    assert np.mean(np.asarray(own[:MOST_PAIRED]) == np.arange(MOST_PAIRED)) > 0.99


def test_no_group_is_in_two_halves():
    own = np.minimum.reduceat(np.arange(60), np.arange(0, 60, 4)).repeat(4)
    own = np.random.default_rng(0).permutation(own)
    first_of = {value: np.flatnonzero(own == value)[0] for value in set(own)}
    own = np.array([first_of[value] for value in own])
    first, second, counted = (np.asarray(a) for a in deal(jnp.asarray(own)))
    assert sorted(np.concatenate([first, second])) == list(range(60))
    shared = set(own[first][counted[0]]) & set(own[second])
    assert not shared
    assert not set(own[second][counted[1]]) & set(own[first])
    # At most one sample of four copies is in both.
    assert np.sum(~counted) in (0, 4)


def test_a_coordinate_of_few_values_is_reported():
    samples = copied("independent", 2)
    samples[:, 0] = samples[:, 0] > 0
    points = jnp.asarray(POINTS[:, :2], jnp.float32)
    scores, info = fit(ScoreEstimator(base="student"), jnp.asarray(samples, jnp.float32), points)
    assert bool(info.selection.discrete)
    assert not bool(info.converged)
    with pytest.raises(FloatingPointError, match="few values"):
        info.raise_if_failed()
    # The base alone: before, scores were 10 000 times as large as those of the other coordinate.
    assert float(jnp.max(jnp.abs(scores))) < 100


def test_copies_under_vmap():
    sets = jnp.asarray(np.stack([copied("bootstrap", 2), copied("independent", 2)]), jnp.float32)
    shares = quick_jit(jax.vmap(distinct_share))(sets)
    assert shares[1] == 1.0
    assert 0.4 < float(shares[0]) < 0.6
