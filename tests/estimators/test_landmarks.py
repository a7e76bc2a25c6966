"""Estimates on the span of landmarks, and which samples are landmarks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import Landmarks, Score, nkef
from numpyro_kscore.kernels import CurlFree, Diagonal
from numpyro_kscore.kernels import _pairwise as pairwise
from numpyro_kscore.regularizers import (
    LandweberIteration,
    NuMethod,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
)
from numpyro_kscore.solvers import ConjugateGradient, Dense, Krylov, Recursion
from support import oracle
from support.compiling import quick_jit
from support.samples import base_function, make_data

N, D, M = 11, 2, 5
BANDWIDTH = 1.5
ROWS = np.array([7, 2, 10, 4])  # landmarks, in no order
KERNELS = pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
SAMPLES, POINTS = make_data(N, D, M, seed=5)


def library_kernel(curl_free):
    return CurlFree() if curl_free else Diagonal()


# -------------------------------------------------------------------------------------- estimates

TIKHONOV = oracle.tikhonov(1e-2)
# Every way to apply a filter to the compressed operator; base scores alternate.
NYSTROM = {
    "nkef-dense": (TruncatedTikhonov(1e-2), Dense(), TIKHONOV, None),
    "nkef-krylov": (TruncatedTikhonov(1e-2), Krylov(2 * N), TIKHONOV, base_function),
    "nkef-cg": (TruncatedTikhonov(1e-2), ConjugateGradient(200, 1e-13), TIKHONOV, None),
    "tikhonov-dense": (Tikhonov(1e-2), Dense(), TIKHONOV, base_function),
    "cutoff-dense": (SpectralCutoff(lam=0.03), Dense(), oracle.spectral_cutoff(0.03), None),
    "landweber-recursion": (
        LandweberIteration(40, 0.9),
        Recursion(),
        oracle.landweber(40, 0.9),
        None,
    ),
    "nu-krylov": (NuMethod(20, 2.0), Krylov(2 * N), oracle.nu_method(20, 2.0), base_function),
}


def nystrom_errors(curl_free, rows, names, *, float_type=np.float64):
    """Errors of values at samples and points, divergence, potential and jackknife."""
    kernel = oracle.Kernel(curl_free, oracle.imq(), BANDWIDTH).normalized(D)

    @quick_jit
    def evaluate(samples, points, rows):
        results = {}
        for name in names:
            regularizer, solver, _, base = NYSTROM[name]
            estimator = ScoreEstimator(
                library_kernel(curl_free),
                regularizer,
                solver,
                BANDWIDTH,
                "none",
                base,
                landmarks=Landmarks(indices=rows),
            )
            score = estimator.fit(samples)
            results[name] = {
                "samples": score.at_samples,
                "points": score.residual(points),
            }
            if base is not None:
                jackknife = estimator.at_samples(samples, debias="jackknife")
                results[name]["jackknife"] = jackknife.residual
            if isinstance(solver, Krylov):
                results[name]["divergence"] = score.residual_divergence(points)
                if curl_free:
                    results[name]["potential"] = score.residual_potential(points)
        return results

    arrays = (jnp.asarray(a, float_type) for a in (SAMPLES, POINTS))
    results = jax.device_get(evaluate(*arrays, jnp.asarray(rows)))
    errors = {}
    for name in names:
        _, solver, filt, base = NYSTROM[name]
        values = None if base is None else base(SAMPLES)
        fitted = oracle.nystrom(kernel, SAMPLES, rows, filt, values)
        whole = fitted.residual(SAMPLES)
        size = (N + 1) // 2
        halves = [slice(0, size), slice(N - size, N)]
        first, second = (
            oracle.nystrom(kernel, SAMPLES, rows, filt, values, half).residual(SAMPLES[half])
            for half in halves
        )
        parts = np.concatenate([first, second[2 * size - N :]])
        expected = {
            "samples": whole if values is None else values + whole,
            "points": fitted.residual(POINTS),
        }
        if base is not None:
            expected["jackknife"] = whole + size / (N - size) * (whole - parts)
        if isinstance(solver, Krylov):
            expected["divergence"] = fitted.residual_divergence(POINTS)
            if curl_free:
                expected["potential"] = fitted.residual_potential(POINTS)
        assert set(results[name]) == set(expected)
        for what, value in expected.items():
            assert results[name][what].dtype == float_type
            errors[name, what] = oracle.relative_error(results[name][what], value)
    return errors


@pytest.mark.thorough
def test_landmarks_equal_the_projected_estimator(x64):
    """Solvers that iterate: the dense one has tests below, of tiles and of all points."""
    errors = nystrom_errors(True, ROWS, ("nkef-krylov", "nkef-cg", "landweber-recursion"))
    assert not {key: error for key, error in errors.items() if error > 1e-9}


@pytest.mark.slow
@KERNELS
def test_all_filters_and_solvers_equal_the_projected_estimator(curl_free, x64):
    errors = nystrom_errors(curl_free, ROWS, NYSTROM)
    assert not {key: error for key, error in errors.items() if error > 1e-9}


@KERNELS
@pytest.mark.thorough
def test_landmarks_without_stored_pairs(curl_free, x64, monkeypatch):
    """Samples in tiles of a size that does not divide their number."""
    monkeypatch.setattr(pairwise, "CACHED_PAIRS", 25)
    monkeypatch.setattr(pairwise, "TILE_ROWS", 4)
    monkeypatch.setattr(pairwise, "TILE_COLUMNS", 3)
    names = ["tikhonov-dense"]
    # Three landmarks: a shape of their own, so that no program for stored pairs is used.
    errors = nystrom_errors(curl_free, ROWS[:3], names)
    assert not {key: error for key, error in errors.items() if error > 1e-9}


# A quick one is test_presets, which has nkef in single precision.
@pytest.mark.slow
def test_landmarks_in_float32():
    errors = nystrom_errors(True, ROWS, ["nkef-krylov"], float_type=np.float32)
    assert not {key: error for key, error in errors.items() if error > 1e-4}


@pytest.mark.parametrize(
    ("curl_free", "with_base"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
    ids=["curl-free-base", "diagonal-no-base", "curl-free-no-base", "diagonal-base"],
)
def test_all_points_as_landmarks_are_truncated_tikhonov(curl_free, with_base, x64):
    """NKEF as published, once corrected, is the range-space solution when Z = X."""
    base = base_function(SAMPLES) if with_base else None
    kernel = oracle.Kernel(curl_free, oracle.imq(), BANDWIDTH)
    # The Gram matrix is regular: only directions outside its range are truncated.
    expected = oracle.estimate(kernel, SAMPLES, oracle.truncated_tikhonov(1e-2), base)
    estimator = ScoreEstimator(
        library_kernel(curl_free),
        TruncatedTikhonov(1e-2),
        Dense(),
        BANDWIDTH,
        "none",
        None,
        normalize=False,
        landmarks=Landmarks(fraction=1.0),
    )

    @quick_jit
    def evaluate(samples, base, points):
        score = estimator.fit(samples, base)
        return score, score.residual(points)

    score, residual = evaluate(SAMPLES, base, POINTS)
    in_sample = score.at_samples if base is None else score.at_samples - base
    assert oracle.relative_error(in_sample, expected.in_sample) < 1e-8
    assert oracle.relative_error(residual, expected.residual(POINTS)) < 1e-8
    assert score.expansion.zeta_weight is None

    # The same by the printed system with 1/n and the sign put in.
    cross = kernel.gram(SAMPLES)
    h = kernel.zeta(SAMPLES, SAMPLES).ravel()
    if base is not None:
        h = h + cross @ base.ravel() / N
    direct = -np.linalg.solve(cross @ cross / N + 1e-2 * cross, h).reshape(N, D)
    assert oracle.relative_error(residual, kernel.apply(POINTS, SAMPLES, direct)) < 1e-8


def test_landmarks_with_more_dimensions_than_samples(x64):
    """The problem is rotated into the span of its vectors first, which must be exact."""
    samples, points = make_data(5, 9, 4, seed=2)
    rows = np.array([3, 0])
    kernel = oracle.Kernel(True, oracle.imq(), 3.0)
    estimator = ScoreEstimator(
        CurlFree(),
        Tikhonov(1e-2),
        Krylov(20),
        3.0,
        "none",
        None,
        normalize=False,
        landmarks=Landmarks(indices=rows),
    )
    fitted = oracle.nystrom(kernel, samples, rows, TIKHONOV)
    value = quick_jit(lambda x, y: estimator.fit(x)(y))(samples, points)
    assert oracle.relative_error(value, fitted.residual(points)) < 1e-9


@pytest.mark.slow
def test_error_of_landmarks_shrinks_with_samples_and_landmarks():
    """The draws are Gaussian, so that the score is known, and in float32."""
    samples = np.random.default_rng(3).normal(size=(1600, 2)).astype(np.float32)
    points = np.random.default_rng(4).normal(size=(200, 2)).astype(np.float32)
    errors = {}
    for n, m in ((100, 32), (1600, 32), (1600, 8)):
        estimator = nkef(1e-3, landmarks=Landmarks(m), solver=Krylov(), bandwidth=2.0)
        score = quick_jit(estimator.fit)(samples[:n])
        assert bool(score.info.converged)
        assert score.expansion.points.shape == (m, 2)
        errors[n, m] = oracle.relative_error(quick_jit(Score.__call__)(score, points), -points)
    # Over five sets of draws the ratios were .25 to .41 and .62 to .80, the error .28 to .37.
    assert errors[1600, 32] < 0.5 * errors[100, 32]
    assert errors[1600, 32] < 0.85 * errors[1600, 8]
    assert errors[1600, 32] < 0.45


def test_many_samples_stay_in_tiles():
    """1e5 samples, 200 landmarks: memory is a few tiles, far below one (n, m) array."""
    n, m, d = 100_000, 200, 5
    estimator = nkef(landmarks=Landmarks(m), solver=Krylov(8))
    fit = quick_jit(lambda x: estimator.fit(x).expansion.coefficients)
    compiled = fit.lower(jax.ShapeDtypeStruct((n, d), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * n * m


def test_degenerate_landmarks_are_finite():
    """Repeated samples as landmarks make K_ZZ singular, which changes nothing."""
    estimator = ScoreEstimator(
        CurlFree(),
        NuMethod(20),
        Krylov(2 * N),
        BANDWIDTH,
        "none",
        None,
        landmarks=Landmarks(fraction=1.0),
    )
    evaluate = quick_jit(lambda samples, points: estimator.fit(samples)(points))
    found = evaluate(np.float32(np.repeat(SAMPLES, 2, axis=0)), np.float32(POINTS))
    # Once is as good as twice.
    kernel = oracle.Kernel(True, oracle.imq(), BANDWIDTH).normalized(D)
    expected = oracle.nystrom(kernel, SAMPLES, np.arange(N), oracle.nu_method(20))
    assert np.all(np.isfinite(found))
    assert oracle.relative_error(found, expected.residual(POINTS)) < 1e-3


# -------------------------------------------------------------------------------- which landmarks


def test_landmarks_are_selected_as_told():
    every = Landmarks(3).select(12)
    np.testing.assert_array_equal(every, [2, 6, 10])
    np.testing.assert_array_equal(Landmarks(fraction=1.0).select(7), np.arange(7))
    assert [Landmarks(fraction=s).check(n) for s, n in ((0.1, 10), (0.7, 10), (0.21, 10))] == [
        1,
        7,
        3,
    ]
    np.testing.assert_array_equal(Landmarks(indices=[3, 1]).select(4), [3, 1])
    keys = jax.random.split(jax.random.key(0), 20)
    drawn = np.asarray(jax.vmap(lambda key: Landmarks(5, key=key).select(8))(keys))
    assert all(len(set(row)) == 5 for row in drawn.tolist())
    assert set(drawn.ravel().tolist()) == set(range(8))
    assert len({tuple(row) for row in drawn.tolist()}) > 15


def test_landmarks_are_leaves():
    """One trace serves other indices, keys and λ; a bad index under jit is reported as data."""
    traces = []

    @quick_jit
    def fit(estimator, samples):
        traces.append(estimator)
        return estimator.at_samples(samples)

    samples = jnp.asarray(SAMPLES, jnp.float32)
    first = fit(nkef(landmarks=Landmarks(indices=np.array([0, 3]))), samples)
    second = fit(nkef(0.1, landmarks=Landmarks(indices=np.array([5, 1]))), samples)
    assert not np.allclose(first.scores, second.scores)
    bad = fit(nkef(landmarks=Landmarks(indices=np.array([0, N]))), samples)
    assert bool(first.info.finite)
    assert not bool(bad.info.finite)
    assert len(traces) == 1
    batched = jax.vmap(lambda key: nkef(landmarks=Landmarks(2, key=key)).fit(samples).at_samples)
    assert jax.eval_shape(batched, jax.random.split(jax.random.key(1), 3)).shape == (3, N, D)
    leaves, structure = jax.tree.flatten(Landmarks(2, key=jax.random.key(0)))
    assert len(leaves) == 1
    assert jax.tree.unflatten(structure, leaves).count == 2
