"""Estimates in other coordinates: units, offsets, correlations, and spectra far from one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels import CurlFree, Diagonal
from numpyro_kscore.regularizers import LandweberIteration, NuMethod, Tikhonov
from numpyro_kscore.solvers import Dense, Krylov, Recursion
from support import oracle
from support.compiling import quick_jit
from support.estimating import FULL, POINTS, SAMPLES, TOLERANCE, D, M, reference_fit


@pytest.mark.parametrize(
    ("base", "standardize"),
    [pytest.param(None, "full", marks=pytest.mark.slow), (None, "local"), ("gaussian", "full")],
)
def test_whitening_is_affine_equivariant(base, standardize, x64):
    rng = np.random.default_rng(5)
    matrix, shift = rng.normal(size=(D, D)) + 2 * np.eye(D), rng.normal(size=D) * 10
    if base == "gaussian":
        # Shrinkage depends on the axes, but not on the order and units of coordinates.
        matrix = 3.0 * np.eye(D)[rng.permutation(D)]

    @quick_jit
    def evaluate(samples, points):
        estimator = ScoreEstimator(
            CurlFree(), Tikhonov(1e-2), Krylov(FULL), standardize=standardize, base=base
        )
        score = estimator.fit(samples)
        log_density = score.log_density(points)
        return score.at_samples, score(points), log_density, score.divergence(points)

    at_samples, at_points, density, divergence = evaluate(jnp.asarray(SAMPLES), jnp.asarray(POINTS))
    moved = evaluate(*(jnp.asarray(x @ matrix.T + shift) for x in (SAMPLES, POINTS)))
    # s_y(A x + b) = A^-T s_x(x), row by row.
    assert oracle.relative_error(moved[0] @ matrix, at_samples) < 1e-8
    assert oracle.relative_error(moved[1] @ matrix, at_points) < 1e-8
    assert oracle.relative_error(moved[2] - moved[2][0], density - density[0]) < 1e-8
    # The divergence is no invariant: it follows the jacobian A^-T J A^-1, and is checked in
    # test_estimator_densities.
    assert divergence.shape == moved[3].shape == (M,)


def test_equivariance_of_the_lesser_standardizations(x64):
    rng = np.random.default_rng(6)
    rotation = np.linalg.qr(rng.normal(size=(D, D)))[0]
    for standardize, matrix in (
        ("none", rotation),
        ("none", 7.0 * rotation),
        ("diagonal", np.diag([0.1, 3.0, -20.0])),
    ):
        estimator = ScoreEstimator(CurlFree(), Tikhonov(1e-2), standardize=standardize, base=None)
        fit = jax.jit(lambda e, x: e.fit(x).at_samples)
        plain = fit(estimator, jnp.asarray(SAMPLES))
        moved = fit(estimator, jnp.asarray(SAMPLES @ matrix.T + 3.0))
        assert oracle.relative_error(moved @ matrix, plain) < 1e-8


def test_float32_whitening_is_as_accurate_as_its_input():
    """Whitening is for strong correlation: no floor may act where it is resolved."""
    rng = np.random.default_rng(7)
    z = rng.normal(size=(32, 4))
    mixing = np.linalg.cholesky(0.999 * np.ones((4, 4)) + 0.001 * np.eye(4))
    samples = np.asarray(z @ mixing.T, np.float32)
    estimator = ScoreEstimator(
        CurlFree(), Tikhonov(1e-2), Krylov(32), standardize="full", base=None, precision="float32"
    )
    score = estimator.fit(jnp.asarray(samples))
    fitted = reference_fit(True, oracle.imq(), oracle.tikhonov(1e-2), samples=samples.astype(float))
    # Condition number of the correlations: 4e3; the map itself is its square root.
    assert oracle.relative_error(score.at_samples, fitted.in_sample) < 1e-4


def test_float32_survives_offsets_and_distant_clusters():
    """Centering and expanded squares lose what the distances within a cluster need."""
    clusters = SAMPLES.copy()
    clusters[::2] += 100.0
    for samples in (SAMPLES + 1000.0, clusters):
        samples = np.asarray(samples, np.float32)
        for kernel in (CurlFree(), Diagonal()):
            estimator = ScoreEstimator(kernel, Tikhonov(1e-2), Krylov(FULL), 2.0, "none", base=None)
            value = estimator.at_samples(jnp.asarray(samples)).scores
            fitted = reference_fit(
                isinstance(kernel, CurlFree),
                oracle.imq(),
                oracle.tikhonov(1e-2),
                standardize="none",
                bandwidth=2.0,
                samples=samples.astype(float),
            )
            assert oracle.relative_error(value, fitted.in_sample) < TOLERANCE[False]


@pytest.mark.parametrize(
    "enabled",
    [pytest.param(True, id="float64", marks=pytest.mark.slow), pytest.param(False, id="float32")],
)
def test_spectrum_beyond_the_polynomial_methods_is_rescaled(enabled):
    """Curl-free K grows as 1 / bandwidth^2: small data leave [0, 1] and the iteration diverges."""
    samples, points = 0.1 * SAMPLES, 0.1 * POINTS

    @quick_jit
    def evaluate(samples, points):
        results = {}
        for name, (regularizer, _) in regularizers.items():
            for solver in (Krylov(FULL), Dense(), Recursion()):
                score = ScoreEstimator(
                    CurlFree(), regularizer, solver, standardize="none", normalize=False, base=None
                ).fit(samples)
                results[name, type(solver).__name__] = (
                    score.at_samples, score(points), score.info,
                )  # fmt: skip
        return results

    regularizers = {
        "nu": (NuMethod(20), oracle.nu_method(20)),
        "landweber": (LandweberIteration(20, 0.5), oracle.landweber(20, 0.5)),
    }
    with jax.enable_x64(enabled):
        results = evaluate(jnp.asarray(samples, float), jnp.asarray(points, float))
    for (name, _), (at_samples, at_points, info) in results.items():
        rho = float(info.spectral_scale)
        assert rho > 1
        fitted = reference_fit(
            True,
            oracle.imq(),
            regularizers[name][1].rescaled(rho),
            standardize="none",
            normalize=False,
            samples=samples,
        )
        assert oracle.relative_error(at_samples, fitted.in_sample) < TOLERANCE[enabled]
        assert oracle.relative_error(at_points, fitted.residual(points)) < TOLERANCE[enabled]
        assert bool(info.finite)
