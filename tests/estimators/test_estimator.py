"""Every regularizer with every solver that takes it, against the dense reference."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels import CurlFree, Diagonal, Mixture
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
from support.estimating import (
    BASES,
    FULL,
    LANDWEBER,
    NU,
    POINTS,
    PROFILES,
    REFERENCE_PROFILES,
    SAMPLES,
    SHARE,
    TIKHONOV,
    TOLERANCE,
    M,
    base_values,
    jackknife_reference,
    reference_fit,
)
from support.samples import base_function, make_data


class Case(NamedTuple):
    """One way to configure an estimator, and the filter it stands for."""

    regularizer: Any  # or a function of the cut-off
    solver: Any
    filter: Any  # or a function of the spectrum and the cut-off
    base: str | None = None
    standardize: str = "none"
    normalize: bool = True
    bandwidth: Any = 2.0


# Every regularizer with every solver that takes it; bases, coordinates and scales alternate. Those
# that share a solver share coordinates where they can: the compiler then builds one operator.
CASES = {
    "tikhonov-dense": Case(TIKHONOV[0], Dense(), TIKHONOV[1], "gaussian", "full"),
    "truncated-dense": Case(
        TruncatedTikhonov(1e-2),
        Dense(),
        oracle.truncated_tikhonov(1e-2, 1e-15),
        "gaussian",
        "full",
    ),
    "cutoff-dense": Case(
        SpectralCutoff,
        Dense(),
        lambda s, cut: oracle.spectral_cutoff(cut),
        "values",
        "none",
        False,
        "median",
    ),
    "share-dense": Case(
        SpectralCutoff(fraction=SHARE),
        Dense(),
        lambda s, cut: oracle.spectral_cutoff(oracle.cutoff_for_share(s, SHARE)),
        "values",
        "none",
        False,
        "median",
    ),
    "landweber-dense": Case(
        LANDWEBER[0], Dense(), LANDWEBER[1], "function", "diagonal", False, 0.7
    ),
    "nu-dense": Case(NU[0], Dense(), NU[1], "function", "diagonal", False, 0.7),
    "tikhonov-krylov": Case(
        TIKHONOV[0], Krylov(FULL), TIKHONOV[1], "function", "full", True, "median"
    ),
    "landweber-krylov": Case(LANDWEBER[0], Krylov(FULL), LANDWEBER[1]),
    "nu-krylov": Case(NuMethod(20, 2.0), Krylov(FULL), oracle.nu_method(20, 2.0), "values", "full"),
    "tikhonov-cg": Case(
        TIKHONOV[0], ConjugateGradient(200, 1e-13), TIKHONOV[1], "values", "diagonal", True
    ),
    "landweber-recursion": Case(LANDWEBER[0], Recursion(), LANDWEBER[1], "gaussian", "none", False),
    "nu-recursion": Case(NU[0], Recursion(), NU[1], "function", "none", False, 0.7),
}
# Solvers reach a scalar kernel by the same products, but for its matrix, which is one coordinate's.
SCALAR_CASES = ("truncated-dense", "landweber-dense", "nu-krylov", "tikhonov-cg")
SINGLE_PROFILES = [
    "imq",
    "gaussian",
    "rational-quadratic",
    "matern-2.5",
    "matern-3.5",
    "user-written",
]


def relative_errors(cases, curl_free, enabled, names=("imq",), mixed=False):
    """Errors at samples and points of every case with every profile.

    All are one program, mapped over the profiles by a mixture with all weight on one, or, for the
    last, on several: what is compared is cheap, what is compiled is not.
    """
    kernel_class = CurlFree if curl_free else Diagonal
    profiles = tuple(PROFILES[name] for name in names)
    references = {name: REFERENCE_PROFILES[name] for name in names}
    weights, lengthscales = np.eye(len(names)), np.ones((len(names), len(names)))
    if mixed:
        weights = np.concatenate([weights, [[1.0, 0.5, 0.0, 0.0, 2.0, 0.0]]])
        lengthscales = np.concatenate([lengthscales, [[0.7, 1.0, 1.0, 1.0, 1.6, 1.0]]])
        references["mixture"] = oracle.mixture(
            tuple(references.values()), tuple(weights[-1]), tuple(lengthscales[-1])
        )
    cuts = []
    for reference in references.values():
        # In the widest gap of the spectrum's middle: how well an invariant subspace is determined
        # is the rounding error over the gap, whatever the eigensolver.
        spectrum = reference_fit(
            curl_free, reference, oracle.tikhonov(1.0), *CASES["cutoff-dense"][3:]
        ).spectrum
        middle = spectrum[FULL // 4 :]
        widest = np.argmax(middle[1:] - middle[:-1])
        cuts.append(0.5 * (middle[widest] + middle[widest + 1]))

    @quick_jit
    def fit_all(weights, lengthscales, cuts, samples, points, base_scores):
        def fit(weights, lengthscales, cut):
            kernel = kernel_class(Mixture(profiles, tuple(weights), tuple(lengthscales)))
            results = {}
            for name, case in cases.items():
                is_family = case.regularizer is SpectralCutoff
                estimator = ScoreEstimator(
                    kernel,
                    case.regularizer(cut) if is_family else case.regularizer,
                    case.solver,
                    case.bandwidth,
                    case.standardize,
                    BASES[case.base],
                    case.normalize,
                )
                given = case.base == "values"
                score = estimator.fit(samples, base_scores if given else None)
                at_points = score.residual(points) if given else score(points)
                results[name] = score.at_samples, at_points, score.info
            return results

        if len(cuts) > 1:
            return jax.vmap(fit)(weights, lengthscales, cuts)
        # The loops of a map would be more to compile than the one fit.
        return jax.tree.map(lambda a: a[None], fit(weights[0], lengthscales[0], cuts[0]))

    with jax.enable_x64(enabled):
        arguments = weights, lengthscales, cuts, SAMPLES, POINTS, base_function(SAMPLES)
        arguments = (np.asarray(a, float if enabled else np.float32) for a in arguments)
        results = jax.device_get(fit_all(*arguments))

    errors = {}
    for name, case in cases.items():
        at_samples, at_points, info = results[name]
        assert at_samples.dtype == at_points.dtype == (np.float64 if enabled else np.float32)
        assert np.all(info.finite)
        for i, (profile_name, reference) in enumerate(references.items()):
            rho = float(info.spectral_scale[i])

            def rescaled(spectrum, i=i, rho=rho, case=case):
                is_function = not isinstance(case.filter, oracle.Filter)
                filt = case.filter(spectrum, cuts[i]) if is_function else case.filter
                return filt.rescaled(rho)

            fitted = reference_fit(curl_free, reference, rescaled, *case[3:])
            bounded = isinstance(case.regularizer, NuMethod | LandweberIteration)
            largest = fitted.spectrum[-1] * getattr(case.regularizer, "step_size", 1.0)
            if bounded and largest > 1:
                assert largest * (1 - 1e-6) <= rho <= 1.02 * largest
            elif case.normalize or not bounded:
                assert rho == 1.0
            expected = base_values(case.base, SAMPLES) + fitted.in_sample
            errors[name, profile_name, "samples"] = oracle.relative_error(at_samples[i], expected)
            expected = fitted.residual(POINTS)
            if case.base != "values":
                expected = expected + base_values(case.base, POINTS)
            errors[name, profile_name, "points"] = oracle.relative_error(at_points[i], expected)
    return {key: error for key, error in errors.items() if error > TOLERANCE[enabled]}


@pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
def test_every_solver_equals_the_reference(curl_free):
    """Every regularizer with every solver that takes it, in double precision."""
    cases = CASES if curl_free else {name: CASES[name] for name in SCALAR_CASES}
    assert not relative_errors(cases, curl_free, True)


@pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
@pytest.mark.thorough
def test_every_profile_equals_the_reference(curl_free):
    """Each profile alone, and three of them mixed with lengthscales of their own."""
    cases = {"nu-krylov": CASES["nu-krylov"]}
    assert not relative_errors(cases, curl_free, True, SINGLE_PROFILES, mixed=True)


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
def test_every_profile_with_every_solver_equals_the_reference(curl_free, enabled):
    """All combinations; in single precision too, as test_presets does for some of them."""
    # float32 tests the rounding of solvers; that of the profiles has its own test.
    names = SINGLE_PROFILES if enabled else SINGLE_PROFILES[:1]
    assert not relative_errors(CASES, curl_free, enabled, names, mixed=enabled)


@pytest.mark.parametrize(
    ("dim", "num_steps"),
    [
        (2, 24),
        pytest.param(8, 24, marks=pytest.mark.slow),
        pytest.param(20, 16, marks=pytest.mark.slow),
    ],
)
def test_few_krylov_steps_equal_a_hundred_nu_steps(dim, num_steps):
    samples, _ = make_data(64, dim, 1, seed=3)
    whitener = oracle.whitener(samples, "full")
    nodes = (samples - samples.mean(0)) @ whitener.T
    kernel = oracle.Kernel(True, oracle.imq(), oracle.median_distance(nodes)).normalized(dim)
    base = base_function(samples)
    literal = oracle.literal_nu_steps(kernel, nodes, 100, base=base @ np.linalg.inv(whitener))
    expected = base + literal @ whitener
    for solver in (Krylov(num_steps), Recursion())[: 2 if dim == 8 else 1]:
        estimator = ScoreEstimator(
            CurlFree(), NuMethod(100), solver, standardize="full", base=None, precision="float32"
        )
        score = jax.jit(estimator.fit)(jnp.asarray(samples), jnp.asarray(base))
        assert score.at_samples.dtype == jnp.float32
        assert oracle.relative_error(score.at_samples, expected) < 1e-4
        assert score.info.steps == (100 if isinstance(solver, Recursion) else solver.num_steps)
        assert bool(score.info.converged)
        score.info.raise_if_failed()


def test_an_unconverged_krylov_space_is_reported():
    samples, _ = make_data(64, 2, 1, seed=3)
    score = ScoreEstimator(CurlFree(), NuMethod(100), Krylov(4), base=None).fit(
        jnp.asarray(samples)
    )
    assert not bool(score.info.converged)
    with pytest.raises(FloatingPointError, match=r"(?s)expected.*got"):
        score.info.raise_if_failed()


# Without standardization: test_landmarks, for some of the samples.
@pytest.mark.parametrize("standardize", [pytest.param("none", marks=pytest.mark.slow), "full"])
@pytest.mark.thorough
def test_more_dimensions_than_samples(standardize, x64):
    """n < d: the problem is reduced to fewer dimensions, which must be exact."""
    samples, points = make_data(5, 9, 4, seed=2)
    base = base_function(samples)
    estimator = ScoreEstimator(
        CurlFree(), Tikhonov(1e-2), Krylov(45), standardize=standardize, normalize=False, base=None
    )

    @quick_jit
    def evaluate(samples, base, points):
        score = estimator.fit(samples, base)
        return score, score.residual(points), score.residual_divergence(points)

    score, at_points, divergence = jax.device_get(evaluate(samples, base, points))
    # The covariance is shrunk here, so the whitener is the library's own: scores transform by it.
    whitener = np.eye(9)
    if standardize == "full":
        origin, *units = score.coordinates.to_kernel(np.concatenate([np.zeros((1, 9)), np.eye(9)]))
        whitener = (np.stack(units) - origin).T * float(score.info.bandwidth)
    kernel = oracle.Kernel(True, oracle.imq(), float(score.info.bandwidth))
    fitted = oracle.estimate(kernel, samples, oracle.tikhonov(1e-2), base, whitener)
    assert oracle.relative_error(score.at_samples, base + fitted.in_sample) < 1e-9
    assert oracle.relative_error(at_points, fitted.residual(points)) < 1e-9
    assert oracle.relative_error(divergence, fitted.residual_divergence(points)) < 1e-9


@pytest.mark.parametrize(
    ("kernel", "solver", "base"),
    [
        pytest.param(CurlFree(), Krylov(22), "function", id="curl-free"),
        pytest.param(Diagonal(), Krylov(22), "function", id="diagonal"),
        # By the same products.
        pytest.param(CurlFree(), Recursion(), None, id="recursion", marks=pytest.mark.slow),
    ],
)
@pytest.mark.thorough
def test_without_stored_pairs(kernel, solver, base, x64, monkeypatch):
    """Pairs are recomputed tile by tile above a size; here always, in many small tiles."""
    monkeypatch.setattr(pairwise, "CACHED_PAIRS", 0)
    monkeypatch.setattr(pairwise, "TILE_ROWS", 4)
    monkeypatch.setattr(pairwise, "TILE_COLUMNS", 3)
    # A shape of its own: programs traced for stored pairs must not be used, nor replaced.
    samples, points = make_data(11, 2, M, seed=8)
    curl_free = isinstance(kernel, CurlFree)
    # The jackknife does not know which kernel it is.
    split = curl_free and isinstance(solver, Krylov)
    estimator = ScoreEstimator(kernel, NuMethod(20), solver, standardize="full", base=BASES[base])

    @quick_jit
    def evaluate(samples, points):
        score = estimator.fit(samples)
        values = [score.at_samples, score.residual(points), score.residual_divergence(points)]
        if split:
            values.append(estimator.at_samples(samples, debias="jackknife").residual)
        return values

    at_samples, at_points, divergence, *jackknife = evaluate(samples, points)
    filt, values = oracle.nu_method(20), base_values(base, samples)
    fitted = reference_fit(curl_free, oracle.imq(), filt, base, samples=samples)
    assert oracle.relative_error(at_samples, values + fitted.in_sample) < 1e-9
    assert oracle.relative_error(at_points, fitted.residual(points)) < 1e-9
    assert oracle.relative_error(divergence, fitted.residual_divergence(points)) < 1e-9
    if split:
        expected = jackknife_reference(curl_free, filt, samples, values)
        assert oracle.relative_error(jackknife[0], expected) < 1e-9
