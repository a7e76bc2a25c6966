"""Landmarks, the estimators of the literature by name, and Stein's own extension.

What they are held against is their definition, by dense algebra in float64 NumPy.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.linalg
from compiling import quick_jit

from numpyro_kscore import (
    ConjugateGradient,
    CurlFree,
    Dense,
    Diagonal,
    Krylov,
    Landmarks,
    Landweber,
    Matern,
    NuMethod,
    Recursion,
    Score,
    ScoreEstimator,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
    kef,
    kef_cg,
    landweber,
    nkef,
    nu_method,
    pairwise,
    spectral_cutoff,
    ssge,
    stein,
    truncated_tikhonov,
)

N, D, M = 11, 2, 5
BANDWIDTH = 1.5
ROWS = np.array([7, 2, 10, 4])  # landmarks, in no order
KERNELS = pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])


def make_data(n, d, m, seed=0):
    """Skewed, correlated samples off the origin, and new points among and around them."""
    rng = np.random.default_rng(seed)
    mixing = np.eye(d) + 0.4 * np.tril(rng.normal(size=(d, d)), -1)

    def draw(size):
        z = rng.normal(size=(size, d))
        return (z + 0.3 * z**2) @ mixing.T + np.linspace(1.0, -2.0, d)

    return draw(n), draw(m)


SAMPLES, POINTS = make_data(N, D, M, seed=5)


def base_function(x):
    """A score that is neither linear nor fitted; works on NumPy and JAX arrays."""
    xp = jnp if isinstance(x, jax.Array) else np
    return -xp.tanh(x - 0.3) - 0.2 * x


def library_kernel(curl_free):
    return CurlFree() if curl_free else Diagonal()


# ------------------------------------------------------------------------- the definitions


def matrix(kernel, x, y):
    """K(x, y) as one matrix, points major."""
    d = x.shape[1]
    return kernel.matrix(x, y).transpose(0, 2, 1, 3).reshape(len(x) * d, len(y) * d)


class Combination(NamedTuple):
    """``Σ_l K(·, z_l) c_l`` and, where they apply, its potential and divergence."""

    kernel: oracle.Kernel
    nodes: np.ndarray
    weights: np.ndarray

    def residual(self, x):
        return self.kernel.apply(x, self.nodes, self.weights)

    def residual_potential(self, x):
        return self.kernel.apply_potential(x, self.nodes, self.weights)

    def residual_divergence(self, x):
        return np.trace(self.kernel.apply_jacobian(x, self.nodes, self.weights), axis1=1, axis2=2)


def nystrom(kernel, samples, rows, filt, base=None, part=slice(None)):
    """``-g(P L P) P zeta'`` on the span of landmarks, by a generalised eigenproblem.

    With ``B = K_ZX K_XZ / n``, the eigenfunctions of P L P are ``K(., Z) u`` with
    ``B u = s K_ZZ u`` and ``u^T K_ZZ u = 1``, and a function f has the coordinates ``u^T f(Z)`` in
    them. ``part`` are the samples that L averages over.
    """
    z, x = samples[rows], samples[part]
    cross = matrix(kernel, z, x)
    h = kernel.zeta(z, x).ravel()
    if base is not None:
        h = h + cross @ base[part].ravel() / len(x)
    spectrum, u = scipy.linalg.eigh(cross @ cross.T / len(x), matrix(kernel, z, z))
    weights = -u @ (filt.g(np.maximum(spectrum, 0)) * (u.T @ h))
    return Combination(kernel, z, weights.reshape(z.shape))


class Refit(NamedTuple):
    """The score at a point as that of a fit to the samples and the point."""

    kernel: oracle.Kernel
    samples: np.ndarray
    lam: float
    base: Any = None
    whitener: Any = None

    def residual(self, x):
        def at(point):
            samples = np.concatenate([self.samples, point[None]])
            base = None if self.base is None else self.base(samples)
            filt = oracle.tikhonov(self.lam)
            fitted = oracle.estimate(self.kernel, samples, filt, base, self.whitener)
            return fitted.in_sample[-1]

        return np.stack([at(point) for point in x])

    def residual_divergence(self, x, step=1e-4):
        """Fourth-order differences: an error of about 1e-11 here."""
        total = 0.0
        for axis in np.eye(x.shape[1]) * step:
            near, far = (
                (self.residual(x + k * axis) - self.residual(x - k * axis)) @ axis / step
                for k in (1, 2)
            )
            total = total + (8 * near - far) / (12 * step)
        return total


# -------------------------------------------------------------------------------- landmarks

TIKHONOV = oracle.tikhonov(1e-2)
# Every way to apply a filter to the compressed operator: the base score goes round.
NYSTROM = {
    "nkef-dense": (TruncatedTikhonov(1e-2), Dense(), TIKHONOV, None),
    "nkef-krylov": (TruncatedTikhonov(1e-2), Krylov(2 * N), TIKHONOV, base_function),
    "nkef-cg": (TruncatedTikhonov(1e-2), ConjugateGradient(200, 1e-13), TIKHONOV, None),
    "tikhonov-dense": (Tikhonov(1e-2), Dense(), TIKHONOV, base_function),
    "cutoff-dense": (SpectralCutoff(lam=0.03), Dense(), oracle.spectral_cutoff(0.03), None),
    "landweber-recursion": (Landweber(40, 0.9), Recursion(), oracle.landweber(40, 0.9), None),
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
        fitted = nystrom(kernel, SAMPLES, rows, filt, values)
        whole = fitted.residual(SAMPLES)
        size = (N + 1) // 2
        halves = [slice(0, size), slice(N - size, N)]
        first, second = (
            nystrom(kernel, SAMPLES, rows, filt, values, half).residual(SAMPLES[half])
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


@KERNELS
def test_landmarks_equal_the_projected_estimator(curl_free, x64):
    errors = nystrom_errors(curl_free, ROWS, NYSTROM)
    assert not {key: error for key, error in errors.items() if error > 1e-9}


@KERNELS
def test_landmarks_without_stored_pairs(curl_free, x64, monkeypatch):
    """Samples in tiles of a size that does not divide their number."""
    monkeypatch.setattr(pairwise, "CACHED_PAIRS", 25)
    monkeypatch.setattr(pairwise, "TILE_ROWS", 4)
    monkeypatch.setattr(pairwise, "TILE_COLUMNS", 3)
    names = ["tikhonov-dense"]
    # Three landmarks: a shape of their own, so that no program for stored pairs serves.
    errors = nystrom_errors(curl_free, ROWS[:3], names)
    assert not {key: error for key, error in errors.items() if error > 1e-9}


def test_landmarks_in_float32():
    errors = nystrom_errors(True, ROWS, ["nkef-krylov"], float_type=np.float32)
    assert not {key: error for key, error in errors.items() if error > 1e-4}


@KERNELS
@pytest.mark.parametrize("with_base", [False, True], ids=["no-base", "base"])
def test_all_points_as_landmarks_are_truncated_tikhonov(curl_free, with_base, x64):
    """NKEF as published, once corrected, is the range-space solution when Z = X."""
    base = base_function(SAMPLES) if with_base else None
    kernel = oracle.Kernel(curl_free, oracle.imq(), BANDWIDTH)
    # The Gram matrix is regular, so that nothing is truncated but directions outside its range.
    expected = oracle.estimate(kernel, SAMPLES, oracle.truncated_tikhonov(1e-2), base)
    estimator = ScoreEstimator(
        library_kernel(curl_free),
        TruncatedTikhonov(1e-2),
        Dense(),
        BANDWIDTH,
        "none",
        None,
        normalize=False,
        landmarks=Landmarks(share=1.0),
    )
    score = quick_jit(estimator.fit)(SAMPLES, base)
    residual = score.at_samples if base is None else score.at_samples - base
    assert oracle.relative_error(residual, expected.in_sample) < 1e-8
    residual = quick_jit(Score.residual)(score, POINTS)
    assert oracle.relative_error(residual, expected.residual(POINTS)) < 1e-8
    assert score.expansion.zeta_weight is None

    # The same by the printed system with 1/n and the sign put in.
    cross = matrix(kernel, SAMPLES, SAMPLES)
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
    fitted = nystrom(kernel, samples, rows, TIKHONOV)
    value = quick_jit(lambda x, y: estimator.fit(x)(y))(samples, points)
    assert oracle.relative_error(value, fitted.residual(points)) < 1e-9


def test_error_of_landmarks_shrinks_with_samples_and_landmarks():
    """On Gaussian draws, whose score is known, in float32."""
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
    samples = np.repeat(np.asarray(SAMPLES, np.float32), 2, axis=0)

    @quick_jit
    def evaluate(samples, points):
        estimator = ScoreEstimator(CurlFree(), NuMethod(20), Krylov(2 * N))
        choices = (Landmarks(share=1.0), Landmarks(indices=np.arange(0, 2 * N, 2)))
        estimators = (dataclasses.replace(estimator, landmarks=choice) for choice in choices)
        return [estimator.fit(samples)(points) for estimator in estimators]

    everything, once = evaluate(samples, np.asarray(POINTS, np.float32))
    assert np.all(np.isfinite(everything))
    assert oracle.relative_error(everything, once) < 1e-3


# -------------------------------------------------------------------- which landmarks


def test_landmarks_are_selected_as_told():
    every = Landmarks(3).select(12)
    np.testing.assert_array_equal(every, [2, 6, 10])
    np.testing.assert_array_equal(Landmarks(share=1.0).select(7), np.arange(7))
    assert [Landmarks(share=s).check(n) for s, n in ((0.1, 10), (0.7, 10), (0.21, 10))] == [1, 7, 3]
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
    batched = jax.vmap(lambda key: fit(nkef(landmarks=Landmarks(2, key=key)), samples).scores)
    scores = batched(jax.random.split(jax.random.key(1), 3))
    assert np.all(np.isfinite(scores))
    leaves, structure = jax.tree.flatten(Landmarks(2, key=jax.random.key(0)))
    assert len(leaves) == 1
    assert jax.tree.unflatten(structure, leaves).count == 2


# -------------------------------------------------------------------------------- Stein


@pytest.mark.parametrize(
    ("base", "standardize", "bandwidth"),
    [(None, "none", BANDWIDTH), (base_function, "full", "median")],
    ids=["literal", "base-and-whitening"],
)
def test_stein_extension_equals_refitting(base, standardize, bandwidth, x64):
    """With the whitening and the median of the fit."""
    lam = 3e-3
    estimator = dataclasses.replace(
        stein(lam, extension="refit", bandwidth=bandwidth),
        base=base,
        standardize=standardize,
        normalize=standardize == "full",
    )
    whitener = oracle.whitener(SAMPLES, standardize)
    if bandwidth == "median":
        bandwidth = oracle.median_distance(SAMPLES @ whitener.T)
    kernel = oracle.Kernel(False, oracle.imq(), bandwidth)
    kernel = kernel.normalized(D) if estimator.normalize else kernel
    reference = Refit(kernel, SAMPLES, lam, base, whitener)

    @quick_jit
    def evaluate(samples, points):
        score = estimator.fit(samples)
        return score.residual(points), score.residual_divergence(points)

    # The last is a sample, which then counts twice: no singular case.
    points = np.concatenate([POINTS, SAMPLES[:1]])
    residual, divergence = evaluate(SAMPLES, points)
    assert oracle.relative_error(residual, reference.residual(points)) < 1e-8
    expected = reference.residual_divergence(POINTS)
    assert oracle.relative_error(divergence[:M], expected) < 1e-7


def test_stein_extensions_agree_at_the_samples_and_differ_elsewhere(x64):
    """Li and Turner's estimator is ``-(K + η)⁻¹ H`` at the samples, whatever comes after."""
    lam = 1e-2
    kernel = oracle.Kernel(False, oracle.imq(), BANDWIDTH)
    gram = kernel.matrix(SAMPLES, SAMPLES)[..., 0, 0]
    sums = N * kernel.zeta(SAMPLES, SAMPLES)
    expected = -np.linalg.solve(gram + N * lam * np.eye(N), sums)

    @quick_jit
    def evaluate(samples, points):
        results = {}
        for extension in ("framework", "refit"):
            score = stein(lam, extension=extension, bandwidth=BANDWIDTH).fit(samples)
            results[extension] = score.at_samples, score(points)
        return results

    results = evaluate(SAMPLES, POINTS)
    for at_samples, _ in results.values():
        assert oracle.relative_error(at_samples, expected) < 1e-9
    # ZSZ's continuation is the combination of kernels with these values at the samples.
    cross = kernel.matrix(POINTS, SAMPLES)[..., 0, 0]
    continued = cross @ np.linalg.solve(gram, expected)
    assert oracle.relative_error(results["framework"][1], continued) < 1e-8
    assert oracle.relative_error(results["refit"][1], continued) > 1e-2


# --------------------------------------------------------------------------------- SSGE


def test_ssge_equals_its_eigenfunction_form(x64):
    """Shi, Sun and Zhu (2018): Nyström eigenfunctions and the coefficients of their Stein identity.

    ``psi_j(x) = sqrt(n)/l_j Σ_m u_jm k(x, x_m)``, ``β_j = -(1/n) Σ_m ∇psi_j(x_m)`` and
    ``ŝ = Σ_j≤J β_j psi_j``, with (l_j, u_j) the eigenpairs of the n by n Gram matrix.
    """
    share = 0.95

    def gram(x):
        return 1 / np.sqrt(1 + np.sum((x[:, None] - SAMPLES) ** 2, -1) / BANDWIDTH**2)

    def gram_gradient(x):
        """d k(x_i, x_m) / d x_i, (i, m, d)."""
        r = x[:, None] - SAMPLES
        return -r / BANDWIDTH**2 * gram(x)[..., None] ** 3

    values, vectors = np.linalg.eigh(gram(SAMPLES))
    values, vectors = values[::-1], vectors[:, ::-1]
    kept = 1 + np.searchsorted(np.cumsum(values) / values.sum(), share)
    assert 1 < kept < N
    scales = np.sqrt(N) / values[:kept]
    gradients = np.einsum("j,mj,imd->ijd", scales, vectors[:, :kept], gram_gradient(SAMPLES))
    beta = -gradients.mean(axis=0)

    def estimate(x):
        return (gram(x) @ vectors[:, :kept] * scales) @ beta

    @quick_jit
    def evaluate(estimators, samples, points):
        scores = [estimator.fit(samples) for estimator in estimators]
        return [(score.at_samples, score(points)) for score in scores]

    threshold = np.sqrt(values[kept - 1] * values[kept]) / N
    estimators = ssge(share, bandwidth=BANDWIDTH), ssge(lam=threshold, bandwidth=BANDWIDTH)
    for at_samples, at_points in evaluate(estimators, SAMPLES, POINTS):
        assert oracle.relative_error(at_samples, estimate(SAMPLES)) < 1e-8
        assert oracle.relative_error(at_points, estimate(POINTS)) < 1e-8


# ------------------------------------------------------- one protocol for every preset

SHARE = 0.9


class Case(NamedTuple):
    make: Any  # from a bandwidth
    curl_free: bool
    filter: Any
    tolerance: float = 1e-8  # float64; float32 is 1e-3


PRESETS = {
    "nu_method": Case(lambda h: nu_method(20, 1.5, bandwidth=h), True, oracle.nu_method(20, 1.5)),
    "landweber": Case(lambda h: landweber(30, 0.5, bandwidth=h), True, oracle.landweber(30, 0.5)),
    "kef": Case(lambda h: kef(1e-2, bandwidth=h), True, oracle.tikhonov(1e-2)),
    # To its published tolerance of 1e-4 on the residual.
    "kef_cg": Case(lambda h: kef_cg(5e-2, bandwidth=h), True, oracle.tikhonov(5e-2), 1e-3),
    "truncated_tikhonov": Case(
        lambda h: truncated_tikhonov(1e-2, bandwidth=h), True, oracle.truncated_tikhonov(1e-2)
    ),
    "nkef": Case(
        lambda h: nkef(1e-2, landmarks=Landmarks(indices=ROWS), bandwidth=h), True, TIKHONOV
    ),
    "spectral_cutoff": Case(
        lambda h: spectral_cutoff(SHARE, bandwidth=h),
        True,
        lambda spectrum: oracle.spectral_cutoff(oracle.cutoff_for_share(spectrum, SHARE)),
    ),
    "ssge": Case(
        lambda h: ssge(SHARE, bandwidth=h),
        False,
        lambda spectrum: oracle.spectral_cutoff(oracle.cutoff_for_share(spectrum, SHARE)),
    ),
    "stein": Case(lambda h: stein(1e-2, bandwidth=h), False, oracle.truncated_tikhonov(1e-2)),
    "stein-refit": Case(
        lambda h: stein(1e-2, extension="refit", bandwidth=h), False, oracle.tikhonov(1e-2)
    ),
}
BANDWIDTHS = (BANDWIDTH, 2.0)


def preset_reference(name, bandwidth):
    """Values at the samples, and what gives values, divergences and potentials elsewhere."""
    _, curl_free, filt, _ = PRESETS[name]
    kernel = oracle.Kernel(curl_free, oracle.imq(), bandwidth)
    if name == "nkef":
        fitted = nystrom(kernel, SAMPLES, ROWS, filt)
        return fitted.residual(SAMPLES), fitted
    fitted = oracle.estimate(kernel, SAMPLES, filt)
    return fitted.in_sample, Refit(kernel, SAMPLES, 1e-2) if name == "stein-refit" else fitted


@functools.cache
def preset_results(enabled):
    """Every preset at two bandwidths: one jitted program, mapped over the bandwidth."""

    @quick_jit
    def evaluate(samples, points, bandwidths):
        def fit(bandwidth):
            results = {}
            for name, case in PRESETS.items():
                estimator = case.make(bandwidth)
                score = estimator.fit(samples)
                results[name] = {
                    "fit": score.at_samples,
                    "points": score(points),
                    "finite": score.info.finite,
                }
                # In single precision the same code sums the same kind of combination.
                if name in ("kef", "ssge") or enabled:
                    results[name]["divergence"] = score.divergence(points)
                if enabled:
                    results[name]["at_samples"] = estimator.at_samples(samples).scores
                if case.curl_free and (name in ("kef", "nkef") or enabled):
                    # The potential is defined up to a constant, which differences leave out.
                    potential = score.log_density(points)
                    results[name]["potential"] = potential[1:] - potential[:1]
            return results

        return jax.vmap(fit)(bandwidths)

    with jax.enable_x64(enabled):
        arrays = (jnp.asarray(a, float) for a in (SAMPLES, POINTS, BANDWIDTHS))
        return jax.device_get(evaluate(*arrays))


@pytest.mark.parametrize("enabled", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_the_protocol(name, enabled):
    result, case = preset_results(enabled)[name], PRESETS[name]
    assert np.all(result["finite"])
    errors = {}
    for i, bandwidth in enumerate(BANDWIDTHS):
        in_sample, fitted = preset_reference(name, bandwidth)
        expected = {"fit": in_sample, "points": fitted.residual(POINTS)}
        if enabled:
            expected["at_samples"] = in_sample
        if "divergence" in result:
            expected["divergence"] = fitted.residual_divergence(POINTS)
        if "potential" in result:
            potential = fitted.residual_potential(POINTS)
            expected["potential"] = potential[1:] - potential[:1]
        for what, value in expected.items():
            assert result[what].dtype == (np.float64 if enabled else np.float32)
            errors[what, bandwidth] = oracle.relative_error(result[what][i], value)
    assert set(expected) == set(result) - {"finite"}
    assert not enabled or len(expected) == 4 + case.curl_free
    tolerance = case.tolerance if enabled else 1e-3
    assert not {key: error for key, error in errors.items() if error > tolerance}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_differentiable_and_literal(name, x64):
    """Derivatives in the bandwidth and in the point against differences of the definition."""
    case, step = PRESETS[name], 1e-4
    estimator = case.make(BANDWIDTH)
    assert (estimator.standardize, estimator.base, estimator.normalize) == ("none", None, False)
    if name == "kef_cg":  # The early stop is what it says, but no smooth function.
        estimator = dataclasses.replace(estimator, solver=ConjugateGradient(200, 1e-13))
    samples, points = jnp.asarray(SAMPLES), jnp.asarray(POINTS)

    @quick_jit
    def evaluate(bandwidth):
        def at(h):
            score = dataclasses.replace(estimator, bandwidth=h).fit(samples)
            assert isinstance(score, Score)
            return score.at_samples, score

        _, in_bandwidth, score = jax.jvp(at, (bandwidth,), (jnp.ones(()),), has_aux=True)
        in_point = jax.grad(lambda x: jnp.sum(score(x) ** 2))(points)
        return in_bandwidth, in_point

    in_bandwidth, in_point = evaluate(jnp.asarray(BANDWIDTH))

    def differences(f):
        return (8 * (f(step) - f(-step)) - (f(2 * step) - f(-2 * step))) / (12 * step)

    expected = differences(lambda t: preset_reference(name, BANDWIDTH + t)[0])
    assert oracle.relative_error(in_bandwidth, expected) < 1e-5
    fitted = preset_reference(name, BANDWIDTH)[1]
    expected = np.stack(
        [
            differences(lambda t, e=e: np.sum(fitted.residual(POINTS + t * e) ** 2, axis=1))
            for e in np.eye(D)
        ],
        axis=1,
    )
    assert oracle.relative_error(in_point, expected) < 1e-5


# ------------------------------------------------------------------------------ bad input

GOOD = np.asarray(SAMPLES, np.float32)


def trace(function):
    """Where only shapes and concrete settings are known."""
    return jax.eval_shape(function, jax.ShapeDtypeStruct(GOOD.shape, jnp.float32))


def fit(estimator):
    return trace(estimator.fit)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "lam: expected a positive finite number; got 0", lambda: stein(0.0)),
        (ValueError, "lam: expected a positive finite number; got -1", lambda: nkef(-1.0)),
        (ValueError, "lam: .*; got nan", lambda: kef(float("nan"))),
        (ValueError, "lam: .*; got 0", lambda: kef_cg(0)),
        (ValueError, "lam: .*; got -0.1", lambda: truncated_tikhonov(-0.1)),
        (ValueError, "lam: expected a non-negative number; got -1", lambda: ssge(lam=-1.0)),
        (ValueError, r"share: .*\(0, 1\]; got 1.5", lambda: spectral_cutoff(1.5)),
        (ValueError, "share: .*positive.*; got 0", lambda: ssge(0.0)),
        (ValueError, "num_steps: .*at least 1; got 0", lambda: nu_method(0)),
        (ValueError, "num_steps: .*at least 1; got -3", lambda: landweber(-3)),
        (TypeError, "num_steps: expected an integer; got 2.5", lambda: nu_method(2.5)),
        (ValueError, "nu: expected a positive finite number; got 0", lambda: nu_method(9, 0.0)),
        (ValueError, "nu: .*; got -1", lambda: nu_method(9, -1.0)),
        (ValueError, "step_size: .*; got -1", lambda: landweber(9, -1.0)),
        (ValueError, "max_steps: .*at least 1; got 0", lambda: kef_cg(max_steps=0)),
        (ValueError, "tol: .*; got 0", lambda: kef_cg(tol=0.0)),
        (ValueError, "extension: .*'framework', 'refit'; got 'li'", lambda: stein(extension="li")),
        (ValueError, "bandwidth: expected .*; got 'scott'", lambda: kef(bandwidth="scott")),
        *(
            (
                ValueError,
                "profile: expected at least 4 continuous derivatives for CurlFree; got .*with 2",
                lambda preset=preset: fit(preset(profile=Matern(1.5))),
            )
            for preset in (kef, kef_cg, nkef, nu_method, landweber, spectral_cutoff)
        ),
        (ValueError, "count: .*at least 1; got 0", lambda: Landmarks(0)),
        (TypeError, "count: expected an integer; got 2.0", lambda: Landmarks(2.0)),
        (ValueError, r"share: .*\(0, 1\]; got 1.01", lambda: Landmarks(share=1.01)),
        (ValueError, "share: .*positive.*; got 0", lambda: Landmarks(share=0.0)),
        (
            ValueError,
            "landmarks: expected at most as many as there are samples, 11; got 12",
            lambda: fit(nkef(landmarks=Landmarks(12))),
        ),
        (
            ValueError,
            "at most as many as there are samples, 11; got 12",
            lambda: jax.eval_shape(
                lambda rows: nkef(landmarks=Landmarks(indices=rows)).fit(GOOD),
                jax.ShapeDtypeStruct((12,), jnp.int32),
            ),
        ),
        (ValueError, "landmarks: .*; got none", lambda: fit(nkef(landmarks=Landmarks()))),
        (
            ValueError,
            "landmarks: expected one of count, share and indices; got count and share",
            lambda: fit(nkef(landmarks=Landmarks(2, 0.5))),
        ),
        (
            ValueError,
            r"indices: expected values in \[0, 11\); got values from 1 to 11",
            lambda: fit(nkef(landmarks=Landmarks(indices=[1, 11]))),
        ),
        (
            ValueError,
            "indices: .*got values from -1 to 3",
            lambda: fit(nkef(landmarks=Landmarks(indices=[3, -1]))),
        ),
        (
            ValueError,
            "indices: expected distinct values; got 2 repeated",
            lambda: fit(nkef(landmarks=Landmarks(indices=[3, 1, 3, 3]))),
        ),
        (
            TypeError,
            "indices: expected integers; got dtype float",
            lambda: fit(nkef(landmarks=Landmarks(indices=np.ones(2)))),
        ),
        (
            ValueError,
            r"indices: expected shape \(m,\).*; got \(1, 2\)",
            lambda: fit(nkef(landmarks=Landmarks(indices=[[1, 2]]))),
        ),
        (
            ValueError,
            "key: expected None beside indices",
            lambda: fit(nkef(landmarks=Landmarks(indices=[1], key=jax.random.key(0)))),
        ),
        (
            TypeError,
            "landmarks: expected None or Landmarks.*; got 5",
            lambda: fit(nkef(landmarks=5)),
        ),
        (
            TypeError,
            "regularizer: expected a filter that is continuous.*got SpectralCutoff",
            lambda: fit(
                ScoreEstimator(
                    regularizer=SpectralCutoff(0.1), landmarks=Landmarks(3), solver=Krylov()
                )
            ),
        ),
        *(
            (
                TypeError,
                "log_density: expected a curl-free kernel; got Diagonal",
                lambda estimator=estimator: trace(lambda x: estimator.fit(x).log_density(x)),
            )
            for estimator in (ssge(), stein(), stein(extension="refit"))
        ),
        (
            TypeError,
            "kernel: expected Diagonal.*; got CurlFree",
            lambda: fit(dataclasses.replace(stein(extension="refit"), kernel=CurlFree())),
        ),
        (
            TypeError,
            r"regularizer: expected Tikhonov\(lam\).*; got NuMethod",
            lambda: fit(dataclasses.replace(stein(extension="refit"), regularizer=NuMethod(3))),
        ),
        (
            ValueError,
            "lam: expected a number to refit at new points; got",
            lambda: fit(stein("auto", extension="refit")),
        ),
        (
            ValueError,
            "landmarks: expected None to refit",
            lambda: fit(dataclasses.replace(stein(extension="refit"), landmarks=Landmarks(3))),
        ),
        (
            ValueError,
            "samples: expected at most .* to refit at new points; got 5000.*framework",
            lambda: jax.eval_shape(
                stein(extension="refit").fit, jax.ShapeDtypeStruct((5000, 2), jnp.float32)
            ),
        ),
        (
            ValueError,
            "landmarks: expected at most .*factorised; got 5000",
            lambda: jax.eval_shape(
                nkef(landmarks=Landmarks(5000)).fit, jax.ShapeDtypeStruct((9000, 2), jnp.float32)
            ),
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(error, message, call):
    with pytest.raises(error, match=f"(?s){message}"):
        call()


def test_a_base_known_at_the_samples_alone_cannot_be_refitted():
    estimator = stein(extension="refit")
    with pytest.raises(ValueError, match=r"(?s)expected a base score that is known away.*got"):
        trace(lambda x: estimator.fit(x, base_function(x)).residual(x))
