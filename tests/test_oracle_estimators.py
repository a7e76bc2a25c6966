"""The estimators against the dense reference of ``oracle.py``, and that against itself."""

import dataclasses
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import oracle
import pytest
from compiling import quick_jit

from numpyro_kscore import (
    IMQ,
    ConjugateGradient,
    CurlFree,
    Dense,
    Diagonal,
    Gaussian,
    Krylov,
    Landweber,
    Matern,
    Mixture,
    NuMethod,
    Profile,
    RationalQuadratic,
    Recursion,
    ScoreEstimator,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
    kef,
    kef_cg,
    landweber,
    nu_method,
    pairwise,
    ssge,
)

# One set of shapes for nearly everything: n, d and m differ, so that a transposed axis cannot pass,
# and n >= 2 d leaves the covariance unshrunk.
N, D, M = 8, 3, 5


def make_data(n, d, m, seed=0):
    """Skewed, correlated samples off the origin, and new points among and around them."""
    rng = np.random.default_rng(seed)
    mixing = np.eye(d) + 0.4 * np.tril(rng.normal(size=(d, d)), -1)
    shift = np.linspace(1.0, -2.0, d)

    def draw(size):
        z = rng.normal(size=(size, d))
        return (z + 0.3 * z**2) @ mixing.T + shift

    return draw(n), draw(m)


SAMPLES, POINTS = make_data(N, D, M)


def base_function(x):
    """A score that is neither linear nor fitted; works on NumPy and JAX arrays."""
    xp = jnp if isinstance(x, jax.Array) else np
    return -xp.tanh(x - 0.3) - 0.2 * x


REFERENCE_PROFILES = {
    "imq": oracle.imq(0.5),
    "imq-1.5": oracle.imq(1.5),
    "gaussian": oracle.gaussian(),
    "rational-quadratic": oracle.rational_quadratic(0.7),
    "matern-2.5": oracle.matern(2.5),
    "matern-3.5": oracle.matern(3.5),
    "user-written": oracle.shifted_exponential(),
    "mixture": oracle.mixture(
        (oracle.imq(0.5), oracle.gaussian(), oracle.matern(3.5)), (1.0, 0.5, 2.0), (0.7, 1.0, 1.6)
    ),
}


# ------------------------------------------------------------------- the reference against itself


@pytest.mark.parametrize(
    ("name", "curl_free"),
    # Every profile's closed forms are tied to it by autodiff in test_profiles.
    [("imq", True), ("matern-2.5", True), ("mixture", True), ("imq", False)],
)
def test_reference_formulas_are_the_derivatives_of_the_kernel(name, curl_free, x64):
    """The explicit residual and divergence equal those that only use phi and autodiff."""
    kernel = oracle.Kernel(curl_free, REFERENCE_PROFILES[name], 1.3)
    whitener = oracle.whitener(SAMPLES, "full")
    fitted = oracle.estimate(
        kernel, SAMPLES, oracle.tikhonov(0.05), base_function(SAMPLES), whitener, normalize=True
    )

    @quick_jit
    def differentiate(points):
        def value(x):
            residual = fitted.residual_autodiff(x)
            return residual, residual

        jacobian, residual = jax.vmap(jax.jacfwd(value, has_aux=True))(points)
        return residual, jnp.trace(jacobian, axis1=1, axis2=2)

    residual, divergence = differentiate(jnp.asarray(POINTS))
    assert oracle.relative_error(fitted.residual(POINTS), residual) < 1e-11
    assert oracle.relative_error(fitted.residual_divergence(POINTS), divergence) < 1e-11


@pytest.mark.parametrize(
    "make_filter",
    [
        oracle.tikhonov(1e-2),
        oracle.truncated_tikhonov(1e-2),
        oracle.spectral_cutoff(0.02),
        oracle.landweber(40, 0.8),
        oracle.nu_method(30),
        oracle.nu_method(30, 2.0).rescaled(1.7),
    ],
    ids=["tikhonov", "truncated", "cutoff", "landweber", "nu", "nu-rescaled"],
)
def test_reference_out_of_sample_formula_passes_through_the_samples(make_filter):
    kernel = oracle.Kernel(True, oracle.imq(), 2.0)
    fitted = oracle.estimate(kernel, SAMPLES, make_filter, base_function(SAMPLES), normalize=True)
    assert oracle.relative_error(fitted.residual(SAMPLES), fitted.in_sample) < 1e-10
    assert fitted.spectrum.sum() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("nu", [0.5, 1.0, 2.0])
def test_reference_nu_recursion_is_the_nu_method(nu):
    """The recursion has the Jacobi residual polynomials that define the nu-method."""
    spectrum = np.concatenate([[0.0], np.logspace(-12, 0, 60)])
    for num_steps in (1, 2, 3, 10, 100):
        filt = oracle.nu_method(num_steps, nu)
        residual = oracle.nu_residual_jacobi(spectrum, num_steps, nu)
        np.testing.assert_allclose(1 - spectrum * filt.g(spectrum), residual, atol=2e-11)
        assert filt.g(np.zeros(1))[0] == pytest.approx(filt.g0, rel=1e-13)
        for sigma in (0.0, 1e-9, 1e-4, 0.03, 0.5, 1.0):
            g, r = oracle.nu_exact(Fraction(sigma), num_steps, Fraction(nu))
            scale = filt.g0 * num_steps**2
            assert filt.g(np.array([sigma]))[0] == pytest.approx(float(g), abs=1e-14 * filt.g0)
            assert filt.r(np.array([sigma]))[0] == pytest.approx(float(r), abs=1e-14 * scale)


def test_reference_landweber_sums():
    spectrum = np.logspace(-3, 0, 20, dtype=np.longdouble)
    filt = oracle.landweber(50, 0.9)
    g = (1 - (1 - np.longdouble(0.9) * spectrum) ** 50) / spectrum
    np.testing.assert_allclose(filt.g(spectrum), np.float64(g), rtol=1e-12)
    np.testing.assert_allclose(filt.r(spectrum), np.float64((g - 45) / spectrum), rtol=1e-11)


def test_reference_filter_of_the_matrix_equals_literal_steps():
    kernel = oracle.Kernel(True, oracle.imq(), 2.0)
    base = base_function(SAMPLES)
    fitted = oracle.estimate(kernel, SAMPLES, oracle.nu_method(100), base, normalize=True)
    literal = oracle.literal_nu_steps(kernel.normalized(D), fitted.nodes, 100, base=base)
    assert oracle.relative_error(literal, fitted.in_sample) < 1e-12


def test_reference_estimates_the_score_of_a_gaussian():
    """The only check of the overall sign: -x for standard normal samples."""
    samples = np.random.default_rng(1).normal(size=(150, 1))
    for curl_free in (True, False):
        kernel = oracle.Kernel(curl_free, oracle.imq(), oracle.median_distance(samples))
        fitted = oracle.estimate(kernel, samples, oracle.tikhonov(1e-2), normalize=True)
        # s = -x (1 + O(shrinkage)): the slope of the estimate on x is near -1.
        slope = np.sum(fitted.in_sample * samples) / np.sum(samples**2)
        assert -1.2 < slope < -0.8


# ---------------------------------------------------------------------- the library against it


def user_written(s):
    return jnp.exp(1 - jnp.sqrt(1 + s))


PROFILES = {
    "imq": IMQ(),
    "imq-1.5": IMQ(1.5),
    "gaussian": Gaussian(),
    "rational-quadratic": RationalQuadratic(0.7),
    "matern-2.5": Matern(2.5),
    "matern-3.5": Matern(3.5),
    "user-written": Profile(user_written),
    "mixture": Mixture((IMQ(), Gaussian(), Matern(3.5)), (1.0, 0.5, 2.0), (0.7, 1.0, 1.6)),
}
TOLERANCE = {True: 1e-9, False: 1e-4}  # relative, in norm; by whether 64-bit mode is on
SHARE = 0.9
FULL = N * D  # a Krylov space of this size is the whole space


class Case(NamedTuple):
    """One way to configure an estimator, and the filter it stands for."""

    regularizer: Any  # or a function of the cut-off
    solver: Any
    filter: Any  # or a function of the spectrum and the cut-off
    base: str | None = None
    standardize: str = "none"
    normalize: bool = True
    bandwidth: Any = 2.0


TIKHONOV = Tikhonov(1e-2), oracle.tikhonov(1e-2)
LANDWEBER = Landweber(40, 0.9), oracle.landweber(40, 0.9)
NU = NuMethod(20), oracle.nu_method(20)
# Every regulariser with every solver that takes it; bases, coordinates and scales go round.
CASES = {
    "tikhonov-dense": Case(TIKHONOV[0], Dense(), TIKHONOV[1], None, "none", False),
    "tikhonov-krylov": Case(
        TIKHONOV[0], Krylov(FULL), TIKHONOV[1], "function", "full", True, "median"
    ),
    "tikhonov-cg": Case(
        TIKHONOV[0], ConjugateGradient(200, 1e-13), TIKHONOV[1], "values", "diagonal", True
    ),
    "truncated-dense": Case(
        TruncatedTikhonov(1e-2),
        Dense(),
        oracle.truncated_tikhonov(1e-2, 1e-15),
        "gaussian",
        "full",
    ),
    "cutoff-dense": Case(
        SpectralCutoff, Dense(), lambda s, cut: oracle.spectral_cutoff(cut), None, "full"
    ),
    "share-dense": Case(
        SpectralCutoff(share=SHARE),
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
    "landweber-krylov": Case(LANDWEBER[0], Krylov(FULL), LANDWEBER[1]),
    "landweber-recursion": Case(LANDWEBER[0], Recursion(), LANDWEBER[1], "gaussian", "none", False),
    "nu-dense": Case(NU[0], Dense(), NU[1], "gaussian", "diagonal", True, "median"),
    "nu-krylov": Case(NuMethod(20, 2.0), Krylov(FULL), oracle.nu_method(20, 2.0), "values", "full"),
    "nu-recursion": Case(NU[0], Recursion(), NU[1], "function", "none", False, 0.7),
}
BASES = {None: None, "values": None, "function": base_function, "gaussian": "gaussian"}


SINGLE_PROFILES = [
    "imq",
    "gaussian",
    "rational-quadratic",
    "matern-2.5",
    "matern-3.5",
    "user-written",
]


def base_values(base, x, samples=SAMPLES):
    """A base score at x, whether the estimator evaluates it or is given its values."""
    if base is None:
        return np.zeros_like(x)
    return oracle.gaussian_score(x, samples) if base == "gaussian" else base_function(x)


def reference_fit(
    curl_free,
    profile,
    make_filter,
    base=None,
    standardize="full",
    normalize=True,
    bandwidth="median",
    samples=SAMPLES,
    **kwargs,
):
    """The oracle's estimate with the library's conventions: covariances with 1/n, median rule."""
    whitener = oracle.whitener(samples, standardize)
    if base == "gaussian" and standardize == "full":
        whitener = oracle.held_out_gaussian(samples)
    if bandwidth == "median":
        bandwidth = oracle.median_distance(samples @ whitener.T)
    kernel = oracle.Kernel(curl_free, profile, bandwidth)
    scores = base_values(base, samples, samples)
    return oracle.estimate(kernel, samples, make_filter, scores, whitener, normalize, **kwargs)


@pytest.mark.parametrize("enabled", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
def test_every_estimator_equals_the_reference(curl_free, enabled):
    """Every regulariser with every solver that takes it, for every profile.

    All cases are one program, mapped over the profiles by a mixture with all weight on one, or, for
    the last, on several: what is compared is cheap, what is compiled is not.
    """
    kernel_class = CurlFree if curl_free else Diagonal
    # How float32 rounds is a matter of the solvers; the profiles' own rounding is tested alone.
    names = SINGLE_PROFILES if enabled else SINGLE_PROFILES[:1]
    profiles = tuple(PROFILES[name] for name in names)
    references = {name: REFERENCE_PROFILES[name] for name in names}
    weights, lengthscales = np.eye(len(names)), np.ones((len(names), len(names)))
    if enabled:
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
            for name, case in CASES.items():
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

        return jax.vmap(fit)(weights, lengthscales, cuts)

    with jax.enable_x64(enabled):
        arguments = weights, lengthscales, cuts, SAMPLES, POINTS, base_function(SAMPLES)
        results = jax.device_get(fit_all(*(jnp.asarray(a, float) for a in arguments)))

    errors = {}
    for name, case in CASES.items():
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
            bounded = isinstance(case.regularizer, NuMethod | Landweber)
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
    assert not {key: error for key, error in errors.items() if error > TOLERANCE[enabled]}


@pytest.mark.parametrize(("dim", "num_steps"), [(2, 24), (8, 24), (20, 16)])
def test_few_krylov_steps_equal_a_hundred_nu_steps(dim, num_steps):
    samples, _ = make_data(64, dim, 1, seed=3)
    whitener = oracle.whitener(samples, "full")
    nodes = (samples - samples.mean(0)) @ whitener.T
    kernel = oracle.Kernel(True, oracle.imq(), oracle.median_distance(nodes)).normalized(dim)
    base = base_function(samples)
    literal = oracle.literal_nu_steps(kernel, nodes, 100, base=base @ np.linalg.inv(whitener))
    expected = base + literal @ whitener
    for solver in (Krylov(num_steps), Recursion())[: 2 if dim == 8 else 1]:
        estimator = ScoreEstimator(CurlFree(), NuMethod(100), solver, base=None)
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


@pytest.mark.parametrize("standardize", ["none", "full"])
def test_more_dimensions_than_samples(standardize, x64):
    """n < d: whatever the library does to save work is exact."""
    samples, points = make_data(5, 9, 4, seed=2)
    base = base_function(samples)
    estimator = ScoreEstimator(
        CurlFree(), Tikhonov(1e-2), Krylov(45), standardize=standardize, normalize=False, base=None
    )

    @quick_jit
    def evaluate(samples, base, points):
        score = estimator.fit(samples, base)
        return score, score.residual(points), score.residual_divergence(points)

    arguments = (jnp.asarray(a) for a in (samples, base, points))
    score, at_points, divergence = evaluate(*arguments)
    # The covariance is shrunk here, so the whitener is the library's own: scores transform by it.
    whitener = np.eye(9)
    if standardize == "full":
        coordinates = score.coordinates
        origin = coordinates.to_kernel(jnp.zeros((1, 9)))
        unit = coordinates.to_kernel(jnp.eye(9)) - origin
        whitener = np.asarray(unit).T * float(score.info.bandwidth)
    kernel = oracle.Kernel(True, oracle.imq(), float(score.info.bandwidth))
    fitted = oracle.estimate(kernel, samples, oracle.tikhonov(1e-2), base, whitener)
    assert oracle.relative_error(score.at_samples, base + fitted.in_sample) < 1e-9
    assert (
        oracle.relative_error(score.residual(jnp.asarray(points)), fitted.residual(points)) < 1e-9
    )
    assert oracle.relative_error(divergence, fitted.residual_divergence(points)) < 1e-9


def jackknife_reference(curl_free, make_filter, samples, base):
    """f_n + m/(n-m) (f_n - f_m) with f_m from two halves, in the coordinates of the whole."""
    whitener = oracle.whitener(samples, "full")
    bandwidth = oracle.median_distance(samples @ whitener.T)
    kernel = oracle.Kernel(curl_free, oracle.imq(), bandwidth)

    def residual(rows):
        return oracle.estimate(
            kernel, samples[rows], make_filter, base[rows], whitener, normalize=True
        ).in_sample

    # Halves of equal size: of an odd number they share the middle one.
    size = len(samples)
    half = (size + 1) // 2
    first, second = residual(slice(0, half)), residual(slice(size - half, size))
    parts = np.concatenate([first, second[2 * half - size :]])
    whole = residual(slice(None))
    return whole + half / (size - half) * (whole - parts)


@pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
def test_without_stored_pairs(curl_free, x64, monkeypatch):
    """Above a size the pairs are recomputed tile by tile; here above zero, in many small tiles."""
    monkeypatch.setattr(pairwise, "CACHED_PAIRS", 0)
    monkeypatch.setattr(pairwise, "TILE_ROWS", 4)
    monkeypatch.setattr(pairwise, "TILE_COLUMNS", 3)
    # A shape of its own: programs traced for stored pairs must neither serve nor be replaced.
    samples, points = make_data(11, 2, M, seed=8)
    kernel = CurlFree() if curl_free else Diagonal()
    for solver, base in ((Krylov(22), "function"), (Recursion(), None))[: 2 if curl_free else 1]:
        estimator = ScoreEstimator(kernel, NuMethod(20), solver, base=BASES[base])

        @quick_jit
        def evaluate(samples, points, estimator=estimator):
            score = estimator.fit(samples)
            is_krylov = isinstance(estimator.solver, Krylov)
            debias = "jackknife" if is_krylov else None
            jackknife = estimator.at_samples(samples, debias=debias).residual
            residual = score.residual(points), score.residual_divergence(points)
            return score.at_samples, jackknife, *residual

        at_samples, jackknife, at_points, divergence = evaluate(
            jnp.asarray(samples), jnp.asarray(points)
        )
        filt, values = oracle.nu_method(20), base_values(base, samples)
        fitted = reference_fit(curl_free, oracle.imq(), filt, base, samples=samples)
        assert oracle.relative_error(at_samples, values + fitted.in_sample) < 1e-9
        assert oracle.relative_error(at_points, fitted.residual(points)) < 1e-9
        assert oracle.relative_error(divergence, fitted.residual_divergence(points)) < 1e-9
        if isinstance(solver, Krylov):
            expected = jackknife_reference(curl_free, filt, samples, values)
        else:
            expected = fitted.in_sample
        assert oracle.relative_error(jackknife, expected) < 1e-9


def test_float32_survives_offsets_and_distant_clusters():
    """Centring and expanded squares lose what the distances within a cluster need."""
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


# ------------------------------------------------------------------- potentials and divergences


@pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
def test_residual_potentials_and_divergences_equal_the_reference(curl_free, x64):
    kernel_class = CurlFree if curl_free else Diagonal
    # The default, and one whose third derivative is singular where a pair coincides.
    names = ("imq", "matern-2.5")

    @quick_jit
    def evaluate(weights, samples, points, base_scores):
        def fit(weights):
            kernel = kernel_class(Mixture(tuple(PROFILES[n] for n in names), tuple(weights)))
            score = ScoreEstimator(kernel, Tikhonov(1e-2), Krylov(FULL), base=None).fit(
                samples, base_scores
            )
            # At the samples too, where a pair coincides.
            where = jnp.concatenate([points, samples])
            potential = score.residual_potential(where) if curl_free else None
            return potential, score.residual_divergence(where)

        return jax.vmap(fit)(weights)

    base = base_function(SAMPLES)
    where = np.concatenate([POINTS, SAMPLES])
    arguments = (np.eye(len(names)), SAMPLES, POINTS, base)
    potentials, divergences = evaluate(*(jnp.asarray(a) for a in arguments))
    errors = {}
    for i, name in enumerate(names):
        fitted = reference_fit(curl_free, REFERENCE_PROFILES[name], oracle.tikhonov(1e-2), "values")
        errors[name, "divergence"] = oracle.relative_error(
            divergences[i], fitted.residual_divergence(where)
        )
        if curl_free:
            errors[name, "potential"] = oracle.relative_error(
                potentials[i], fitted.residual_potential(where)
            )
    assert not {case: error for case, error in errors.items() if error > 1e-9}


def bases_with_density():
    return {
        "none": None,
        "gaussian": "gaussian",
        "student-t": dist.StudentT(4.0, jnp.zeros(D), 2.0).to_event(1),
    }


@pytest.mark.parametrize("name", bases_with_density())
def test_scores_differentiate_their_log_density(name, x64):
    points = jnp.asarray(POINTS)
    base = bases_with_density()[name]

    @quick_jit
    def evaluate(samples, points):
        kernel = CurlFree(Matern(3.5))
        score = ScoreEstimator(kernel, NuMethod(20), Krylov(FULL), base=base).fit(samples)
        gradient = jax.grad(lambda x: jnp.sum(score.log_density(x)))(points)
        jacobian = jax.vmap(jax.jacfwd(lambda x: score(x[None])[0]))(points)
        return score(points), gradient, score.divergence(points), jacobian

    value, gradient, divergence, jacobian = evaluate(jnp.asarray(SAMPLES), points)
    assert oracle.relative_error(gradient, value) < 1e-9
    assert oracle.relative_error(divergence, np.trace(jacobian, axis1=1, axis2=2)) < 1e-9
    assert oracle.relative_error(jacobian, np.swapaxes(jacobian, 1, 2)) < 1e-9
    if name in ("none", "gaussian"):
        base = None if name == "none" else name
        fitted = reference_fit(True, oracle.matern(3.5), oracle.nu_method(20), base)
        expected = base_values(base, POINTS) + fitted.residual(POINTS)
        assert oracle.relative_error(value, expected) < 1e-9


def test_divergence_with_a_callable_base(x64):
    @quick_jit
    def evaluate(samples, points):
        score = ScoreEstimator(Diagonal(Gaussian()), NuMethod(20), base=base_function).fit(samples)
        jacobian = jax.vmap(jax.jacfwd(lambda x: score(x[None])[0]))(points)
        return score.divergence(points), jnp.trace(jacobian, axis1=1, axis2=2)

    divergence, expected = evaluate(jnp.asarray(SAMPLES), jnp.asarray(POINTS))
    assert oracle.relative_error(divergence, expected) < 1e-9


def test_given_base_scores_leave_only_the_residual():
    for method, alternative in (
        ("__call__", "residual"),
        ("log_density", "residual_potential"),
        ("divergence", "residual_divergence"),
    ):
        with pytest.raises(ValueError, match=rf"(?s)expected.*got.*{alternative}"):
            jax.eval_shape(
                lambda x, name=method: getattr(
                    ScoreEstimator(base=None, regularizer=NuMethod(50)).fit(x, -x), name
                )(x),
                jnp.asarray(SAMPLES),
            )


# ------------------------------------------------------------------------------ transformations


@pytest.mark.parametrize("base", [None, "gaussian"])
def test_full_standardization_is_affine_equivariant(base, x64):
    rng = np.random.default_rng(5)
    matrix, shift = rng.normal(size=(D, D)) + 2 * np.eye(D), rng.normal(size=D) * 10
    if base == "gaussian":
        # Shrinkage knows which coordinates are the user's, but neither their order nor their unit.
        matrix = 3.0 * np.eye(D)[rng.permutation(D)]

    @quick_jit
    def evaluate(samples, points):
        score = ScoreEstimator(CurlFree(), Tikhonov(1e-2), Krylov(FULL), base=base).fit(samples)
        log_density = score.log_density(points)
        return score.at_samples, score(points), log_density, score.divergence(points)

    at_samples, at_points, density, divergence = evaluate(jnp.asarray(SAMPLES), jnp.asarray(POINTS))
    moved = evaluate(*(jnp.asarray(x @ matrix.T + shift) for x in (SAMPLES, POINTS)))
    # s_y(A x + b) = A^-T s_x(x), row by row.
    assert oracle.relative_error(moved[0] @ matrix, at_samples) < 1e-8
    assert oracle.relative_error(moved[1] @ matrix, at_points) < 1e-8
    assert oracle.relative_error(moved[2] - moved[2][0], density - density[0]) < 1e-8
    # The divergence is no invariant; it follows the jacobian A^-T J A^-1 and is checked above.
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
    """Strong correlation is what whitening is for: no floor may act where it is resolved."""
    rng = np.random.default_rng(7)
    z = rng.normal(size=(32, 4))
    mixing = np.linalg.cholesky(0.999 * np.ones((4, 4)) + 0.001 * np.eye(4))
    samples = np.asarray(z @ mixing.T, np.float32)
    score = ScoreEstimator(CurlFree(), Tikhonov(1e-2), Krylov(32), base=None).fit(
        jnp.asarray(samples)
    )
    fitted = reference_fit(True, oracle.imq(), oracle.tikhonov(1e-2), samples=samples.astype(float))
    # Condition number of the correlations: 4e3; the map itself is its square root.
    assert oracle.relative_error(score.at_samples, fitted.in_sample) < 1e-4


@pytest.mark.parametrize("enabled", [True, False], ids=["float64", "float32"])
def test_spectrum_beyond_the_polynomial_methods_is_rescaled(enabled):
    """Curl-free K grows as 1 / bandwidth^2: small data leave [0, 1] and the iteration diverges."""
    samples, points = 0.1 * SAMPLES, 0.1 * POINTS

    @(quick_jit if enabled else jax.jit)
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
        "landweber": (Landweber(20, 0.5), oracle.landweber(20, 0.5)),
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


# ------------------------------------------------------------------------------- JAX behaviour


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_compiled_first_steps_equal_the_reference(num_steps):
    """The compiler may fuse a product with a zero start into garbage; the first steps show it.

    The reference is NumPy, so it is never compiled: the same steps in the same Krylov space.
    """
    base = base_function(SAMPLES)
    spectral = {1: TIKHONOV, 2: LANDWEBER, 3: NU}
    for regularizer, filt, solver in (
        # One iteration serves all filters, so each step count takes another.
        (*spectral[num_steps], Krylov(num_steps)),
        (*TIKHONOV, ConjugateGradient(num_steps, 1e-12)),
        (NuMethod(num_steps), oracle.nu_method(num_steps), Recursion()),
        (Landweber(num_steps), oracle.landweber(num_steps), Recursion()),
    ):
        estimator = ScoreEstimator(CurlFree(), regularizer, solver, 2.0, "none", base=None)

        @jax.jit
        def fit(samples, base, estimator=estimator):
            score = estimator.fit(samples, base)
            return score.at_samples, score.info.steps

        at_samples, steps = fit(jnp.asarray(SAMPLES), jnp.asarray(base))
        # A Krylov space of t steps holds every polynomial of degree t - 1.
        fitted = reference_fit(
            True, oracle.imq(), filt, "values", "none", True, 2.0, krylov_steps=num_steps
        )
        assert oracle.relative_error(at_samples - base, fitted.in_sample) < TOLERANCE[False]
        assert steps == num_steps


@pytest.mark.parametrize(
    "solver", [Krylov(FULL), Dense(), ConjugateGradient(200, 1e-13)], ids=lambda s: type(s).__name__
)
def test_lam_is_a_leaf(solver, x64):
    """vmap and gradients over lam, and one trace for many values of it."""
    samples, points = jnp.asarray(SAMPLES), jnp.asarray(POINTS)
    estimator = ScoreEstimator(CurlFree(), Tikhonov(1e-2), solver, base=None)
    lams = (1e-3, 1e-2, 0.3)
    traces = []

    @quick_jit
    def fit(estimator):
        traces.append(None)
        return estimator.fit(samples)(points)

    def with_lam(lam):
        return dataclasses.replace(estimator, regularizer=Tikhonov(lam))

    def loss(lam):
        return jnp.sum(with_lam(lam).fit(samples)(points) ** 2)

    one_by_one = jnp.stack([fit(with_lam(lam)) for lam in lams])
    assert len(traces) == 1
    mapped = quick_jit(jax.vmap(lambda lam: with_lam(lam).fit(samples)(points)))(jnp.asarray(lams))
    # A stopping rule may act at another step when mapped; both are within its tolerance.
    assert oracle.relative_error(mapped, one_by_one) < 1e-9
    expected = [
        reference_fit(True, oracle.imq(), oracle.tikhonov(lam)).residual(POINTS) for lam in lams
    ]
    assert oracle.relative_error(one_by_one, np.stack(expected)) < 1e-9

    def reference_loss(lam):
        fitted = reference_fit(True, oracle.imq(), oracle.tikhonov(lam))
        return np.sum(fitted.residual(POINTS) ** 2)

    # An early-stopped loop has a forward derivative only.
    derivative = jax.jacfwd if isinstance(solver, ConjugateGradient) else jax.grad
    slope = (reference_loss(1e-2 + 1e-6) - reference_loss(1e-2 - 1e-6)) / 2e-6
    assert float(quick_jit(derivative(loss))(1e-2)) == pytest.approx(slope, rel=1e-5)


def test_bandwidth_and_step_size_are_leaves():
    samples = jnp.asarray(SAMPLES)
    traces = []

    @jax.jit
    def fit(estimator):
        traces.append(None)
        score = estimator.fit(samples)
        return score.at_samples, score.info.bandwidth

    for bandwidth, step_size in ((1.0, 0.5), (2.0, 0.7)):
        estimator = ScoreEstimator(
            CurlFree(), Landweber(10, step_size), bandwidth=bandwidth, standardize="none", base=None
        )
        at_samples, used = fit(estimator)
        assert float(used) == bandwidth
        kernel = oracle.Kernel(True, oracle.imq(), bandwidth)
        fitted = oracle.estimate(kernel, SAMPLES, oracle.landweber(10, step_size), normalize=True)
        assert oracle.relative_error(at_samples, fitted.in_sample) < 1e-4
    assert len(traces) == 1


def test_pytree_round_trips():
    samples, points = jnp.asarray(SAMPLES), jnp.asarray(POINTS)
    for regularizer, solver in (
        (Tikhonov(1e-2), Krylov(8)),
        (TruncatedTikhonov(1e-2), Dense()),
        (SpectralCutoff(lam=0.1), Dense()),
        (SpectralCutoff(share=0.5), Dense()),
        (Landweber(5), Recursion()),
        (NuMethod(5, 2.0), Krylov(8)),
        (Tikhonov(1e-2), ConjugateGradient(5)),
    ):
        estimator = ScoreEstimator(
            CurlFree(Mixture((IMQ(), Matern(2.5)))), regularizer, solver, base=None
        )
        leaves, structure = jax.tree.flatten(estimator)
        again = jax.tree.unflatten(structure, leaves)
        assert again == estimator
        assert jax.tree.structure(again) == structure
        assert hash(structure) == hash(jax.tree.structure(again))
        # Transformations rebuild objects with placeholders in place of numbers.
        jax.tree.unflatten(structure, [object()] * len(leaves))
    for base in (None, "gaussian", base_function, bases_with_density()["student-t"]):
        estimator = ScoreEstimator(CurlFree(), NuMethod(5), Krylov(8), base=base)
        shapes = jax.eval_shape(estimator.fit, samples)
        leaves, structure = jax.tree.flatten(shapes)
        assert jax.tree.unflatten(structure, leaves).at_samples.shape == samples.shape
        jax.tree.unflatten(structure, [object()] * len(leaves))
    fitted = estimator.fit(samples)
    evaluate = jax.jit(lambda score: (score, score(points)))
    passed, value = evaluate(fitted)
    assert jax.tree.structure(passed) == jax.tree.structure(fitted)
    np.testing.assert_array_equal(passed.at_samples, fitted.at_samples)
    np.testing.assert_array_equal(evaluate(passed)[1], value)


def test_dtypes_follow_the_samples(x64):
    """float32 samples stay float32 where 64-bit mode is on."""
    samples, points = jnp.asarray(SAMPLES, jnp.float32), jnp.asarray(POINTS, jnp.float32)
    for kernel, regularizer, solver in (
        (CurlFree(), NuMethod(5), Krylov(8)),
        (Diagonal(), SpectralCutoff(share=0.9), Dense()),
        (CurlFree(Matern(2.5)), Tikhonov(0.1), ConjugateGradient(8)),
        (CurlFree(Mixture((IMQ(), Gaussian()))), Landweber(5), Recursion()),
    ):
        estimator = ScoreEstimator(kernel, regularizer, solver, base="gaussian")

        def evaluate(samples, points, estimator=estimator):
            score = estimator.fit(samples)
            values = [score.at_samples, score(points), score.divergence(points)]
            if isinstance(estimator.kernel, CurlFree):
                values.append(score.log_density(points))
            return *values, score.info.bandwidth, score.info.spectral_scale, score.info.residual

        for value in jax.eval_shape(evaluate, samples, points):
            assert value.dtype == jnp.float32


# --------------------------------------------------------------------------- degenerate samples


def degenerate_sets():
    duplicated = np.concatenate([SAMPLES[: N // 2]] * 2)
    collapsed = np.tile(SAMPLES[:1], (N, 1))
    constant = SAMPLES.copy()
    constant[:, 1] = 4.0
    collinear = SAMPLES.copy()
    collinear[:, 2] = 2.0 * collinear[:, 0]
    far = SAMPLES.copy()
    far[0] = 1e6
    return {
        "duplicated": duplicated,
        "collapsed": collapsed,
        "all but one collapsed": np.concatenate([collapsed[1:], SAMPLES[1:2]]),
        "at the origin": np.zeros((N, D)),
        "constant coordinate": constant,
        "collinear": collinear,
        "outlier": far,
        "tiny": 1e-15 * SAMPLES,
        "huge": 1e15 * SAMPLES,
        "far from the origin": SAMPLES + 1e4,
    }


@pytest.mark.parametrize(
    ("kernel", "regularizer", "solver", "standardize", "normalize", "base"),
    [
        (CurlFree(), NuMethod(50), Krylov(16), "full", True, "gaussian"),
        (CurlFree(Matern(2.5)), Tikhonov(1e-3), ConjugateGradient(), "diagonal", True, None),
        (CurlFree(), TruncatedTikhonov(1e-3), Dense(), "none", True, None),
        (Diagonal(Gaussian()), SpectralCutoff(share=0.95), Dense(), "none", False, None),
        (Diagonal(), Landweber(50), Recursion(), "full", True, "gaussian"),
        (CurlFree(), NuMethod(50), Recursion(), "full", True, None),
    ],
    ids=["nu-krylov", "cg", "truncated", "ssge", "landweber", "nu-recursion"],
)
def test_degenerate_samples_are_finite(kernel, regularizer, solver, standardize, normalize, base):
    estimator = ScoreEstimator(
        kernel, regularizer, solver, standardize=standardize, normalize=normalize, base=base
    )

    @jax.jit
    def fit(samples, points):
        score = estimator.fit(samples)
        return score.at_samples, score(points), score.info.finite

    bad = []
    for name, samples in degenerate_sets().items():
        at_samples, at_points, finite = fit(jnp.asarray(samples), jnp.asarray(samples[:M] * 1.01))
        if not (bool(finite) and np.isfinite(at_samples).all() and np.isfinite(at_points).all()):
            bad.append(name)
        if name == "duplicated":
            assert oracle.relative_error(at_samples[N // 2 :], at_samples[: N // 2]) < 1e-4
        if name in ("collapsed", "at the origin") and base is None:
            # ζ vanishes where nothing differs: no direction is preferred.
            np.testing.assert_allclose(at_samples, 0.0, atol=1e-6)
    assert not bad


# ----------------------------------------------------------------------------------- bad input


def fit_default(samples, base_scores=None, **kwargs):
    options = {"base": None, "regularizer": NuMethod(50)} | kwargs
    return ScoreEstimator(**options).fit(samples, base_scores)


def trace(function):
    return jax.eval_shape(function, jnp.asarray(GOOD))


def with_entry(value):
    samples = SAMPLES.astype(np.float32)
    samples[1, 2] = value
    return jnp.asarray(samples)


GOOD = np.asarray(SAMPLES, np.float32)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ValueError, lambda: fit_default(with_entry(np.nan))),
        (ValueError, lambda: fit_default(with_entry(np.inf))),
        (ValueError, lambda: fit_default(GOOD[:1])),
        (ValueError, lambda: fit_default(GOOD[:, 0])),
        (ValueError, lambda: fit_default(GOOD[None])),
        (ValueError, lambda: fit_default(GOOD[:, :0])),
        (TypeError, lambda: fit_default(np.arange(6).reshape(3, 2))),
        (TypeError, lambda: fit_default(GOOD.astype(complex))),
        (ValueError, lambda: fit_default(GOOD, GOOD[:-1])),
        (ValueError, lambda: fit_default(GOOD, GOOD[:, :-1])),
        (ValueError, lambda: fit_default(GOOD, with_entry(np.nan))),
        (ValueError, lambda: fit_default(GOOD, base=dist.Normal(0.0, 1.0))),
        ((TypeError, ValueError), lambda: fit_default(GOOD, base="student")),
        ((TypeError, ValueError), lambda: fit_default(GOOD, base=3.0)),
        (ValueError, lambda: fit_default(GOOD, base=lambda x: x[:, :1])),
        (ValueError, lambda: fit_default(GOOD, kernel=CurlFree(Matern(1.5)))),
        (ValueError, lambda: fit_default(GOOD, bandwidth=-1.0)),
        (ValueError, lambda: fit_default(GOOD, bandwidth="scott")),
        (ValueError, lambda: fit_default(GOOD, standardize="whiten")),
        (TypeError, lambda: trace(lambda x: fit_default(x, kernel=Diagonal()).log_density(x))),
        (ValueError, lambda: trace(lambda x: fit_default(x)(x[:, :2]))),
        (ValueError, lambda: trace(lambda x: fit_default(x)(x[0]))),
        (ValueError, lambda: Krylov(0)),
        (ValueError, lambda: ConjugateGradient(0)),
        (ValueError, lambda: ConjugateGradient(10, 0.0)),
        *(
            (TypeError, lambda r=r, s=s: fit_default(GOOD, regularizer=r, solver=s))
            for r, s in (
                (TruncatedTikhonov(), Krylov()),
                (SpectralCutoff(share=0.9), Krylov()),
                (NuMethod(), ConjugateGradient()),
                (Landweber(), ConjugateGradient()),
                (TruncatedTikhonov(), ConjugateGradient()),
                (Tikhonov(), Recursion()),
                (SpectralCutoff(share=0.9), Recursion()),
            )
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(error, call):
    with pytest.raises(error, match=r"(?s)expected.*got"):
        call()


def test_capabilities_are_checked_while_tracing():
    with pytest.raises(TypeError, match=r"(?s)expected.*got"):
        jax.eval_shape(
            ScoreEstimator(regularizer=TruncatedTikhonov(), base=None).fit, jnp.asarray(GOOD)
        )
    with pytest.raises(ValueError, match=r"(?s)expected.*got"):
        jax.eval_shape(
            ScoreEstimator(base=None, regularizer=NuMethod(50)).fit, jnp.asarray(GOOD[:1])
        )


def test_values_that_go_bad_under_jit_are_reported_as_data():
    score = jax.jit(ScoreEstimator(base=None, regularizer=NuMethod(50)).fit)(with_entry(np.nan))
    assert not bool(score.info.finite)
    assert not bool(score.info.converged)
    with pytest.raises(FloatingPointError, match=r"(?s)expected.*got"):
        score.info.raise_if_failed()


# ------------------------------------------------------------------------------------- presets


def test_presets_are_the_paper_to_the_letter(x64):
    samples = jnp.asarray(SAMPLES)
    bandwidth = 2.5
    for preset, curl_free, make_filter in (
        (nu_method(30, bandwidth=bandwidth), True, oracle.nu_method(30)),
        (landweber(30, 0.5, bandwidth=bandwidth), True, oracle.landweber(30, 0.5)),
        (kef(1e-2, bandwidth=bandwidth), True, oracle.tikhonov(1e-2)),
        (
            kef_cg(1e-2, max_steps=200, tol=1e-13, bandwidth=bandwidth),
            True,
            oracle.tikhonov(1e-2),
        ),
        (
            ssge(share=SHARE, bandwidth=bandwidth),
            False,
            lambda spectrum: oracle.spectral_cutoff(oracle.cutoff_for_share(spectrum, SHARE)),
        ),
    ):
        estimate = quick_jit(lambda e, x: e.at_samples(x))(preset, samples)
        # The scale at which the paper's own recursion runs, so nothing may be rescaled.
        assert float(estimate.info.spectral_scale) == 1.0
        kernel = oracle.Kernel(curl_free, oracle.imq(), bandwidth)
        fitted = oracle.estimate(kernel, SAMPLES, make_filter)
        assert oracle.relative_error(estimate.scores, fitted.in_sample) < 1e-9


@pytest.mark.parametrize("size", [8, 9])
def test_jackknife_equals_its_definition(size, x64):
    samples = make_data(size, 2, 1, seed=9)[0]
    base = base_function(samples)
    expected = jackknife_reference(True, oracle.nu_method(20), samples, base)
    estimator = ScoreEstimator(CurlFree(), NuMethod(20), Krylov(2 * size), base=None)

    @quick_jit
    def evaluate(samples, base):
        return estimator.at_samples(samples, base, debias="jackknife")

    estimate = evaluate(jnp.asarray(samples), jnp.asarray(base))
    assert oracle.relative_error(estimate.residual, expected) < 1e-9
    assert oracle.relative_error(estimate.scores, base + expected) < 1e-9
    assert bool(estimate.info.finite)


def test_estimates_at_the_samples_only(x64):
    estimator = ScoreEstimator(CurlFree(), NuMethod(20), Krylov(8), base=None)

    @quick_jit
    def evaluate(samples, base):
        plain, fitted = estimator.at_samples(samples, base), estimator.fit(samples, base)
        few = estimator.at_samples(samples[:7], base[:7], debias="jackknife")
        return plain, fitted.at_samples, few, estimator.at_samples(samples[:7], base[:7])

    base = jnp.asarray(base_function(SAMPLES))
    plain, fitted, few, whole = evaluate(jnp.asarray(SAMPLES), base)
    assert oracle.relative_error(plain.scores, fitted) < 1e-12
    assert oracle.relative_error(plain.residual, fitted - base) < 1e-12
    # Seven are too few to split.
    assert oracle.relative_error(few.residual, whole.residual) < 1e-12
    with pytest.raises(ValueError, match=r"(?s)expected.*got"):
        estimator.at_samples(jnp.asarray(SAMPLES), debias="bootstrap")
