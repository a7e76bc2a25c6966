"""Random features against their definition, dense algebra in float64, and against the kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ImplicitELBO, KernelExponentialFamily, ScoreEstimator
from numpyro_kscore.estimators import AutoBandwidth, Landmarks, RandomFeatures, Subset
from numpyro_kscore.estimators._operators import features as feature_module
from numpyro_kscore.kernels import (
    IMQ,
    CurlFree,
    Diagonal,
    Gaussian,
    Matern,
    Profile,
    RationalQuadratic,
    multi_bandwidth,
)
from numpyro_kscore.kernels._spectral import draw_frequencies
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
from support.samples import base_function, make_data, make_scaled

N, D, M, BANDWIDTH = 21, 2, 5, 1.5
SAMPLES, POINTS = make_data(N, D, M, seed=5)
FEATURES = RandomFeatures(14, key=jax.random.key(3))

# Every regularizer, by every solver.
FILTERS = {
    "tikhonov": (Tikhonov(1e-2), Krylov(), oracle.tikhonov(1e-2)),
    "tikhonov-cg": (Tikhonov(1e-2), ConjugateGradient(200, 1e-13), oracle.tikhonov(1e-2)),
    # A matrix of 14 features is regular on 42 equations, and its eigenvalues are above rounding.
    "truncated": (TruncatedTikhonov(1e-2), Dense(), oracle.truncated_tikhonov(1e-2, 1e-15)),
    "cutoff": (SpectralCutoff(lam=0.03), Dense(), oracle.spectral_cutoff(0.03)),
    "landweber": (LandweberIteration(40, 0.9), Recursion(), oracle.landweber(40, 0.9)),
    "nu": (NuMethod(20), Krylov(), oracle.nu_method(20)),
}


def fields_of(score):
    """The features of a fit as the oracle has them, in units of the bandwidth."""
    features = score.expansion.features
    omega = np.asarray(features.lengths)[:, None] * np.asarray(features.directions)
    return oracle.FeatureFields(omega, float(features.amplitude))


@pytest.mark.slow
def test_features_equal_their_definition(x64, monkeypatch):
    """Rows in tiles of a size that does not divide their number; base scores alternate."""
    monkeypatch.setattr(feature_module, "TILE_ROWS", 4)

    @quick_jit
    def evaluate(samples, points):
        results = {}
        for k, (name, (regularizer, solver, _)) in enumerate(FILTERS.items()):
            base = base_function if k % 2 else None
            estimator = ScoreEstimator(
                CurlFree(), regularizer, solver, BANDWIDTH, "none", base, features=FEATURES
            )
            score = estimator.fit(samples)
            results[name] = (
                score,
                {
                    "samples": score.at_samples,
                    "points": score.residual(points),
                    "potential": score.residual_potential(points),
                    "divergence": score.residual_divergence(points),
                },
            )
        jackknife = estimator.at_samples(samples, debias="jackknife").residual
        return results, jackknife

    results, jackknife = jax.device_get(evaluate(SAMPLES, POINTS))
    center = SAMPLES.mean(axis=0)
    x, y = (SAMPLES - center) / BANDWIDTH, (POINTS - center) / BANDWIDTH
    for k, (name, (_, _, filt)) in enumerate(FILTERS.items()):
        score, found = results[name]
        own = fields_of(score)
        base = base_function(SAMPLES) if k % 2 else np.zeros_like(SAMPLES)
        w = own.coefficients(x, filt, base * BANDWIDTH)
        field = np.einsum("nmd,m->nd", own.fields(y), w)
        # The potential is known up to a constant.
        potential = own.potentials(y) @ w
        expected = {
            "samples": base + np.einsum("nmd,m->nd", own.fields(x), w) / BANDWIDTH,
            "points": field / BANDWIDTH,
            "potential": potential - potential[0],
            "divergence": np.einsum("nmdd,m->n", own.jacobians(y), w) / BANDWIDTH**2,
        }
        found["potential"] = found["potential"] - found["potential"][0]
        for what, value in expected.items():
            assert oracle.relative_error(found[what], value) < 1e-9, (name, what)
    size = (N + 1) // 2

    def half(rows):
        w = own.coefficients(x[rows], filt, base[rows] * BANDWIDTH)
        return np.einsum("nmd,m->nd", own.fields(x[rows]), w) / BANDWIDTH

    parts = np.concatenate([half(slice(0, size)), half(slice(N - size, N))[2 * size - N :]])
    whole = found["samples"] - base
    expected = whole + size / (N - size) * (whole - parts)
    assert oracle.relative_error(jackknife, expected) < 1e-9


def reference_selection(fields, filters, x, base, left_out):
    """Held-out losses less that of the base, per member and sample, by definition: (p, n)."""
    values = np.zeros((len(filters), len(x)))
    for own, other in (
        (slice(0, None, 2), slice(1, None, 2)),
        (slice(1, None, 2), slice(0, None, 2)),
    ):
        matrix, target = fields.moments(x[own], base[own])
        for p, filt in enumerate(filters):
            w = np.zeros_like(target) if filt is None else oracle.filtered(matrix, target, filt)
            field = np.einsum("nmd,m->nd", fields.fields(x[other]), w)
            divergence = np.einsum("nmdd,m->n", fields.jacobians(x[other]), w)
            values[p, other] = 0.5 * np.sum(field**2, 1) + np.sum(field * left_out[other], 1)
            values[p, other] += divergence
    return values


@pytest.mark.thorough
def test_the_choice_is_by_held_out_loss(x64):
    """Whitened, with the Gaussian base and two bandwidths; all samples are among "a few"."""
    n = 60
    samples = make_scaled(n, D, seed=4)
    rule = AutoBandwidth((1.0, 2.5))
    estimator = ScoreEstimator(
        regularizer=Tikhonov("auto"),
        bandwidth=rule,
        solver=Krylov(14),
        standardize="full",
        base="gaussian",
        features=FEATURES,
    )
    score = jax.device_get(quick_jit(estimator.fit)(samples))
    found = score.info.selection
    whitener = oracle.held_out_gaussian(samples)
    z = (samples - samples.mean(axis=0)) @ whitener.T
    factors = np.asarray(score.base.held_out)[:, None]
    bandwidths = np.array([1.0, 2.5]) * oracle.median_distance(z)
    np.testing.assert_allclose(found.bandwidths, bandwidths, rtol=1e-9)
    filters = [None, *(oracle.tikhonov(lam) for lam in np.asarray(found.strengths)[1:])]
    # λ from 16/d down by factors of two, six steps further than for other estimators.
    np.testing.assert_allclose(found.strengths[1:], 16 / D / 2.0 ** np.arange(22), rtol=1e-12)
    losses, errors = [], []
    for h in bandwidths:
        values = (
            reference_selection(fields_of(score), filters, z / h, -z * h, factors * (-z * h)) / h**2
        )
        loss = values.mean(axis=1)
        losses.append(loss)
        errors.append((values - values[loss.argmin()]).std(axis=1) / n**0.5)
    assert oracle.relative_error(found.loss, losses) < 1e-9
    assert oracle.relative_error(found.standard_error, errors) < 1e-7
    row = int(np.min(losses, axis=1).argmin())
    within = losses[row] - losses[row].min() <= errors[row]
    assert (found.row, found.column) == (row, within.argmax() + 1)


PROFILES = {
    "imq": (IMQ(), oracle.imq()),
    "imq-1.3": (IMQ(1.3), oracle.imq(1.3)),
    "gaussian": (Gaussian(), oracle.gaussian()),
    "rational": (RationalQuadratic(0.8), oracle.rational_quadratic(0.8)),
    "matern-2.5": (Matern(2.5), oracle.matern(2.5)),
    "matern-3.5": (Matern(3.5), oracle.matern(3.5)),
    "mixture": (
        multi_bandwidth(IMQ(), (0.5, 2.0)) + 0.7 * Gaussian(),
        oracle.mixture(
            (oracle.imq(), oracle.imq(), oracle.gaussian()), (0.5, 0.5, 0.7), (0.5, 2.0, 1.0)
        ),
    ),
}


@pytest.mark.thorough
def test_frequencies_have_the_spectral_measure_of_the_profile():
    """``mean u uᵀ cos(ω·r)`` is the kernel over its trace, and exact at r = 0.

    Entries are means of k numbers of at most 1 in size, whose standard deviation in three
    dimensions is below 0.5: five errors are 2.5/√k.
    """
    k = 3 * 4000
    differences = (
        np.random.default_rng(0).normal(size=(6, 3)) * np.array([0, 0.3, 1, 1, 2, 3])[:, None]
    )

    @quick_jit
    def draw(key):
        return {
            name: draw_frequencies(profile, key, k, 3, jnp.dtype("float32"))
            for name, (profile, _) in PROFILES.items()
        }

    found = draw(jax.random.key(1))
    for name, (_, reference) in PROFILES.items():
        u, lengths = (np.asarray(a, float) for a in found[name])
        cosines = np.cos(differences @ (lengths[:, None] * u).T)
        values = np.einsum("rk,ka,kb->rab", cosines, u, u) / k
        exact = oracle.Kernel(True, reference, 1.0).normalized(3)
        expected = np.stack([exact.matrix(r[None], 0 * r[None])[0, 0] for r in differences])
        assert np.abs(values - expected).max() < 2.5 / k**0.5, name
        np.testing.assert_allclose(values[0], np.eye(3) / 3, atol=1e-5)


@pytest.mark.slow
def test_the_error_against_the_kernel_falls_with_the_root_of_the_number_of_features(x64):
    """The Monte-Carlo error of the kernel is that of a mean: 16 times the features, a quarter.

    Root mean squares over eight keys, each with a relative error of 1/√16 at most, so the ratio is
    within 1/4 · (1 ± 0.7) with two errors of each.
    """
    x, y = make_data(60, 2, 20, seed=1)
    plain = ScoreEstimator(CurlFree(), Tikhonov(0.05), Krylov(60), 2.0, "none", None)
    exact = quick_jit(lambda x, y: plain.fit(x)(y))(x, y)

    def rms(m):
        @quick_jit
        def squares(key):
            features = RandomFeatures(m, key=key)
            return jnp.sum((dataclasses.replace(plain, features=features).fit(x)(y) - exact) ** 2)

        keys = jax.random.split(jax.random.key(2), 8)
        return float(np.mean([squares(key) for key in keys]) ** 0.5 / jnp.linalg.norm(exact))

    few, many = rms(128), rms(2048)
    assert few / 4 * 0.3 < many < few / 4 * 1.7
    assert many < 0.05


@pytest.mark.thorough
def test_the_operator_of_some_samples():
    """Evenly spaced samples, as many even as odd ones; the divergence term is that of all."""
    few = dataclasses.replace(FEATURES, operator_samples=8)
    fixed = ScoreEstimator(CurlFree(), NuMethod(5), Krylov(), BANDWIDTH, "none", None)

    @quick_jit
    def coefficients(samples):
        score = dataclasses.replace(fixed, features=few).fit(samples)
        return score.expansion.coefficients, score

    samples = np.asarray(SAMPLES, np.float32)
    found, score = coefficients(samples)
    x = (SAMPLES - SAMPLES.mean(axis=0)) / BANDWIDTH
    own = fields_of(score)
    halves = [own.moments(x[rows])[0] for rows in (slice(0, None, 6), slice(3, None, 6))]
    weights = np.array([4, 3]) / 7
    matrix = weights[0] * halves[0] + weights[1] * halves[1]
    np.testing.assert_allclose(matrix, own.moments(x[::3])[0], atol=1e-12)
    expected = oracle.filtered(matrix, own.moments(x)[1], oracle.nu_method(5))
    # The oracle's first fields are of phase 0: minus the sines.
    signs = np.repeat([-1.0, 1.0], len(expected) // 2)
    assert oracle.relative_error(found.ravel() * signs, expected) < 1e-4


@pytest.mark.slow
def test_features_serve_objectives_and_densities():
    """A guide's estimator, a density made of draws, and gradients in λ: one program each."""
    estimator = ScoreEstimator(regularizer=NuMethod(5), features=FEATURES)
    samples = np.asarray(SAMPLES, np.float32)
    score = estimator.fit(samples)
    density = KernelExponentialFamily(samples, score)
    gradient = jax.grad(lambda x: density.log_prob(x))(samples[0])
    np.testing.assert_allclose(gradient, score(samples[:1])[0], rtol=1e-4)
    assert bool(score.info.converged)
    ImplicitELBO(16, estimator=estimator)

    def length(lam):
        own = dataclasses.replace(estimator, regularizer=Tikhonov(lam), solver=Dense())
        return jnp.sum(own.fit(samples).at_samples ** 2)

    slope = jax.jit(jax.grad(length))(1e-2)
    step = 1e-3
    numeric = (length(1e-2 + step) - length(1e-2 - step)) / (2 * step)
    np.testing.assert_allclose(slope, numeric, rtol=0.05)


def test_what_features_do_not_suit_is_refused():
    samples = np.asarray(SAMPLES, np.float32)
    fixed = ScoreEstimator(regularizer=NuMethod(5), features=FEATURES)

    def fit(**options):
        return dataclasses.replace(fixed, **options).fit(samples)

    with pytest.raises(ValueError, match="num_features: expected an even number"):
        RandomFeatures(7)
    with pytest.raises(TypeError, match="num_features: expected an integer"):
        RandomFeatures(8.0)
    with pytest.raises(ValueError, match="operator_samples: expected an integer of at least 2"):
        RandomFeatures(8, operator_samples=1)
    with pytest.raises(TypeError, match="features: expected None or RandomFeatures.*got 8"):
        fit(features=8)
    with pytest.raises(ValueError, match="features: expected None with landmarks; got both"):
        fit(landmarks=Landmarks(5))
    with pytest.raises(ValueError, match="features: expected None with subset; got both"):
        fit(subset=Subset(5))
    with pytest.raises(TypeError, match=r"kernel: expected CurlFree\(profile\) with features"):
        fit(kernel=Diagonal())
    with pytest.raises(TypeError, match="profile: expected one whose spectral measure is known"):
        fit(kernel=CurlFree(IMQ() + Profile(lambda s: jnp.exp(-s))))
    with pytest.raises(TypeError, match="regularizer: expected a filter that is continuous"):
        fit(regularizer=SpectralCutoff(lam=0.1))
    plain = dataclasses.replace(fixed, bandwidth=1.0, base=None)
    with pytest.raises(ValueError, match="context: expected None with features="):
        plain.at_samples(samples, context=samples)
