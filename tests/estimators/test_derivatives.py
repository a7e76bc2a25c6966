"""Derivatives of fits against differences of the definition, where plain autodiff has none.

Duplicated samples give the operator eigenvalues that coincide and end every Krylov space early;
the estimate itself is smooth there.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore._util.divided_differences import divided_differences, with_slopes
from numpyro_kscore._util.linalg import inverse_root
from numpyro_kscore.estimators import Landmarks
from numpyro_kscore.kernels import CurlFree, Diagonal, Matern
from numpyro_kscore.regularizers import LandweberIteration, NuMethod, Tikhonov
from numpyro_kscore.solvers import Dense, Krylov, Recursion
from support import oracle
from support.compiling import quick_jit

N, D, BANDWIDTH = 8, 2, 1.3
RNG = np.random.default_rng(3)
HALF = RNG.normal(size=(N // 2, D))
DUPLICATED = np.concatenate([HALF, HALF])
COLLAPSED = np.tile(HALF[:1], (N, 1))
# The first point is a sample.
POINTS = np.concatenate([HALF[:1], RNG.normal(size=(2, D))])
DIRECTION, WEIGHTS = RNG.normal(size=(2, N, D))
POINT_WEIGHTS, BASE = RNG.normal(size=(3, D)), RNG.normal(size=(N, D))


def weighted(weights, values):
    # A copy: JAX keeps the dtype of a NumPy array that another program uses in another precision.
    return jnp.sum(jnp.asarray(weights.copy()) * values)


def literal(kernel, regularizer, solver, **options):
    options = {"bandwidth": BANDWIDTH, "standardize": "none", "base": None} | options
    return ScoreEstimator(kernel, regularizer, solver, **options)


def differences(f, step=1e-4):
    """The derivative at 0 by the five-point formula."""
    return (8 * (f(step) - f(-step)) - (f(2 * step) - f(-2 * step))) / (12 * step)


NU = literal(CurlFree(), NuMethod(5), Krylov(16), normalize=False)
# Estimator, oracle's filter, samples, base scores at the samples. The first three share a program.
CASES = {
    "ν-method with a base": (NU, oracle.nu_method(5), DUPLICATED, BASE),
    # The target is zero: ζ of samples that are all equal is.
    "zero vector": (NU, oracle.nu_method(5), COLLAPSED, np.zeros_like(BASE)),
    "rescaled spectrum": (
        dataclasses.replace(NU, bandwidth=0.3),
        lambda spectrum: oracle.nu_method(5).rescaled(1.01 * np.max(spectrum)),
        DUPLICATED,
        BASE,
    ),
    "diagonal kernel": (
        literal(Diagonal(), Tikhonov(0.01), Krylov(16)),
        oracle.tikhonov(0.01),
        DUPLICATED,
        None,
    ),
    "dense": (
        literal(CurlFree(), Tikhonov(0.01), Dense()),
        oracle.tikhonov(0.01),
        COLLAPSED,
        BASE,
    ),
    "recursion": (
        literal(CurlFree(), LandweberIteration(20), Recursion()),
        oracle.landweber(20),
        DUPLICATED,
        None,
    ),
    "landmarks": (
        literal(CurlFree(), Tikhonov(0.01), Dense(), landmarks=Landmarks(indices=(0, 1, 2))),
        oracle.tikhonov(0.01),
        DUPLICATED,
        None,
    ),
}


def reference(estimator, filt, samples, base):
    kernel = oracle.Kernel(estimator.kernel.has_potential, oracle.imq(), float(estimator.bandwidth))
    if estimator.landmarks is not None:
        centered = samples - np.mean(samples, axis=0)
        fitted = oracle.nystrom(kernel.normalized(D), centered, [0, 1, 2], filt)
        return fitted.residual(centered), fitted.residual(POINTS - np.mean(samples, axis=0))
    fitted = oracle.estimate(kernel, samples, filt, base, normalize=estimator.normalize)
    return fitted.in_sample, fitted.residual(POINTS)


@quick_jit
def derivatives(estimator, samples, base):
    """Derivatives of weighted values at the samples and elsewhere: along DIRECTION, and reverse."""

    def total(x):
        score = estimator.fit(x, base)
        at_points = weighted(POINT_WEIGHTS, score.residual(POINTS))
        return weighted(WEIGHTS, score.at_samples) + at_points

    # One linearization serves both modes: most of the time is compilation.
    forward = jax.linearize(total, samples)[1]
    (reverse,) = jax.linear_transpose(forward, samples)(jnp.ones(()))
    return forward(jnp.asarray(DIRECTION.copy())), weighted(DIRECTION, reverse)


# Plain autodiff of a loop, without a rule of its own; and fewer of the terms of the ν-method.
SLOW = {"recursion", "diagonal kernel"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
@pytest.mark.thorough
def test_derivatives_in_the_samples(name, x64):
    estimator, filt, samples, base = CASES[name]

    def along(t):
        at_samples, at_points = reference(estimator, filt, samples + t * DIRECTION, base)
        return np.sum(WEIGHTS * at_samples) + np.sum(POINT_WEIGHTS * at_points)

    expected = differences(along)
    assert abs(expected) > 1e-2
    for value in derivatives(estimator, samples, base):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_second_derivatives_of_a_density_at_a_sample(x64):
    """The Hessian of log_density at a sample is the Jacobian of the definition's score."""
    estimator = literal(CurlFree(), Tikhonov(0.01), Dense())
    kernel = oracle.Kernel(True, oracle.imq(), BANDWIDTH)
    fitted = oracle.estimate(kernel, DUPLICATED, oracle.tikhonov(0.01), normalize=True)
    score = quick_jit(estimator.fit)(jnp.asarray(DUPLICATED))

    def log_density(x):
        return score.log_density(x[None])[0]

    hessian = quick_jit(jax.hessian(log_density))(jnp.asarray(POINTS[0]))
    jacobian = differences(
        lambda t: np.concatenate([fitted.residual(POINTS[:1] + t * e) for e in np.eye(D)])
    )
    np.testing.assert_allclose(hessian, jacobian, rtol=1e-6)


DEGENERATE = {
    "duplicated": DUPLICATED,
    "collapsed": COLLAPSED,
    "constant coordinate": DUPLICATED * np.array([1.0, 0.0]) + 4.0,
    "collinear": DUPLICATED[:, :1] * np.array([1.0, 2.0]),
    "at the origin": np.zeros((N, D)),
    "tiny": 1e-8 * DUPLICATED,
}


@pytest.mark.parametrize(
    "estimator",
    [
        # A profile with a kink where samples coincide, and the base that samples are whitened by.
        pytest.param(ScoreEstimator(CurlFree(Matern(2.5)), NuMethod(20)), id="matern"),
        # That choices have derivatives at all, test_selection traces.
        pytest.param(ScoreEstimator(), id="default", marks=pytest.mark.slow),
        pytest.param(
            ScoreEstimator(Diagonal(), NuMethod(20), Recursion(), base=None),
            id="diagonal",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.thorough
def test_derivatives_of_degenerate_fits_are_finite(estimator):
    @quick_jit
    def derivative(samples, points):
        def total(x, y):
            score = estimator.fit(x)
            return weighted(WEIGHTS, score.at_samples) + jnp.sum(jnp.sin(score(y)))

        return jax.grad(total, argnums=(0, 1))(samples, points)

    bad = []
    for name, samples in DEGENERATE.items():
        samples = jnp.asarray(samples, jnp.float32)
        if not all(np.isfinite(part).all() for part in derivative(samples, samples[:3])):
            bad.append(name)
    assert not bad


@pytest.mark.thorough
def test_derivatives_map_and_leave_the_choice_of_lam_alone(x64):
    """Batches of derivatives: in λ at fixed operator and vector, and in those alone."""

    def total(lam, scale):
        estimator = literal(CurlFree(), Tikhonov(lam), Krylov(16))
        samples = scale * jnp.asarray(DUPLICATED.copy())
        return weighted(WEIGHTS, estimator.fit(samples).at_samples)

    @quick_jit
    @jax.vmap
    def slopes(lam, scale):
        in_lam = jax.jvp(lambda t: total(t, scale), (lam,), (jnp.ones_like(lam),))[1]
        return in_lam, jax.grad(total, argnums=1)(lam, scale)

    lams, scales = np.array([0.01, 0.1]), np.array([1.0, 1.2])
    mapped = slopes(lams, scales)
    kernel = oracle.Kernel(True, oracle.imq(), BANDWIDTH)

    def expected(lam, scale):
        fitted = oracle.estimate(kernel, scale * DUPLICATED, oracle.tikhonov(lam), normalize=True)
        return np.sum(WEIGHTS * fitted.in_sample)

    for k, (lam, scale) in enumerate(zip(lams, scales, strict=True)):
        in_lam = differences(lambda t, a=lam, b=scale: expected(a + t, b), 1e-5)
        in_scale = differences(lambda t, a=lam, b=scale: expected(a, b + t))
        np.testing.assert_allclose([part[k] for part in mapped], [in_lam, in_scale], rtol=1e-6)


@pytest.mark.slow
def test_programs_of_both_precisions_live_side_by_side():
    """NumPy arrays in an estimator are compiled in one precision, then used in the other."""
    estimator = literal(
        CurlFree(),
        Tikhonov(np.array(0.01)),
        Krylov(4),
        base=dist.Normal(np.zeros(D), np.ones(D)).to_event(1),
        landmarks=Landmarks(indices=(0, 1, 2)),
    )
    base, kept = BASE.copy(), []
    for precision in (True, False, True):
        with jax.enable_x64(precision):
            samples = jnp.asarray(DUPLICATED.copy())
            for scores in (None, base):
                # Each estimator is kept, and with it JAX's conversions of its arrays.
                slope = jax.grad(lambda x, b=scores: jnp.sum(estimator.fit(x, b).at_samples))
                kept.append(jax.jit(slope).trace(samples))
                assert kept[-1].lower().out_info.dtype == samples.dtype


def test_inverse_root_has_a_derivative_where_eigenvalues_are_equal(x64):
    """Compared by ``W Wᵀ``, since W is defined up to a rotation."""
    change = RNG.normal(size=(3, 3))
    change = change + change.T

    def inverse(t):
        return np.linalg.inv(2.5 * np.eye(3) + t * change)

    @quick_jit
    def product(t):
        root = inverse_root(2.0 * jnp.eye(3) + t * change, jnp.asarray(0.5), jnp.asarray(0.0))
        return root @ root.T

    value, derivative = jax.jvp(product, (jnp.asarray(0.0),), (jnp.asarray(1.0),))
    np.testing.assert_allclose(value, inverse(0.0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(derivative, differences(inverse), rtol=1e-8)
    low_rank = inverse_root(jnp.diag(jnp.array([2.0, 0.0, 1e-20])), *jnp.array([0.0, 1e-12]))
    np.testing.assert_allclose(low_rank @ low_rank.T, np.diag([0.5, 0.0, 0.0]), atol=1e-15)
    bad = inverse_root(jnp.full((2, 2), jnp.nan), *jnp.zeros(2))
    assert np.isnan(bad).all()


def test_divided_differences_where_points_meet(x64):
    """1/(σ + λ), whose divided difference is -1/((σ + λ)(θ + λ)) at any distance."""
    lam = 1e-3
    theta = np.array([0.0, 1e-6, 1e-3, 0.5, 1.0])
    sigma = theta + np.array([0.0, 1e-12, 1e-8, 1e-5, -0.7])
    points = [jnp.asarray(a) for a in (sigma, theta)]
    sloped = [with_slopes(lambda x: (1.0 / (x + lam))[None], x) for x in points]
    value = divided_differences(points[0], sloped[0], points[1], sloped[1])[0]
    expected = -1.0 / ((sigma[:, None] + lam) * (theta[None, :] + lam))
    np.testing.assert_allclose(value, expected, rtol=1e-8)
