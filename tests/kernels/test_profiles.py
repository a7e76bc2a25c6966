"""Radial profiles and kernels against closed forms and automatic differentiation."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore.kernels import (
    IMQ,
    CurlFree,
    Diagonal,
    Gaussian,
    Matern,
    Mixture,
    Profile,
    RationalQuadratic,
    multi_bandwidth,
)
from support import oracle


def user_written(s):
    return jnp.exp(1 - jnp.sqrt(1 + s))


PROFILES = {
    "imq": (IMQ(), oracle.imq(0.5)),
    "imq-1.5": (IMQ(1.5), oracle.imq(1.5)),
    "gaussian": (Gaussian(), oracle.gaussian()),
    "rational-quadratic": (RationalQuadratic(0.7), oracle.rational_quadratic(0.7)),
    "matern-1.5": (Matern(1.5), oracle.matern(1.5)),
    "matern-2.5": (Matern(2.5), oracle.matern(2.5)),
    "matern-3.5": (Matern(3.5), oracle.matern(3.5)),
    "user-written": (Profile(user_written), oracle.shifted_exponential()),
    "mixture": (
        Mixture((IMQ(), Gaussian(), Matern(3.5)), (1.0, 0.5, 2.0), (0.7, 1.0, 1.6)),
        oracle.mixture(
            (oracle.imq(0.5), oracle.gaussian(), oracle.matern(3.5)),
            (1.0, 0.5, 2.0),
            (0.7, 1.0, 1.6),
        ),
    ),
}
# The highest derivative in s that is finite at s = 0; the others in PROFILES are analytic there.
FINITE_AT_ZERO = {"matern-1.5": 1, "matern-2.5": 2, "matern-3.5": 3, "mixture": 3}


GRID = np.concatenate([np.logspace(-6, 2, 33), [0.5, 1.0]])
NEAR_ZERO = np.array([0.0, 1e-30, 1e-16])
SOME = np.array([0.2, 1.0, 3.7])


@functools.cache
def derivatives(enabled):
    """φ and its derivatives in s up to the fourth, (5, number of points), of every profile.

    At GRID, NEAR_ZERO and SOME: one program, since compiling takes most of the time.
    """

    @jax.jit
    def evaluate(s):
        return {
            name: (profile(s), profile.derivatives(s, 4)) for name, (profile, _) in PROFILES.items()
        }

    with jax.enable_x64(enabled):
        s = np.concatenate([GRID, NEAR_ZERO, SOME]).astype(float if enabled else np.float32)
        results = jax.device_get(evaluate(s))
    for phi, values in results.values():
        assert len(values) == 5
        assert {phi.dtype, *(v.dtype for v in values)} == {s.dtype}
    return {name: (phi, np.stack(values)) for name, (phi, values) in results.items()}


def at(points, enabled=True):
    """Derivatives by profile at one of the sets of points."""
    start = {id(GRID): 0, id(NEAR_ZERO): len(GRID), id(SOME): len(GRID) + len(NEAR_ZERO)}
    own = slice(start[id(points)], start[id(points)] + len(points))
    return {name: values[:, own] for name, (_, values) in derivatives(enabled).items()}


@functools.cache
def towers():
    """The same by automatic differentiation of φ alone, at SOME."""

    @jax.jit
    def differentiate(s):
        results = {}
        for name, (_, reference) in PROFILES.items():
            function, tower = reference.traced, []
            for _ in range(5):
                tower.append(jax.vmap(function)(s))
                function = jax.grad(function)
            results[name] = tower
        return results

    with jax.enable_x64(True):
        return jax.device_get(differentiate(SOME))


@pytest.mark.parametrize("name", PROFILES)
def test_derivatives_equal_closed_forms(name):
    _, reference = PROFILES[name]
    for enabled, tolerance in ((True, 1e-12), (False, 3e-6)):
        values = at(GRID, enabled)[name]
        for order, value in enumerate(values):
            expected = reference.derivative(GRID, order)
            # exp(-z) in float32 loses z ulps by rounding its argument; below 1e-6 nothing of
            # it reaches a Gram sum.
            error = np.abs(value.astype(np.float64) - expected)
            floor = 1e-6 * np.max(np.abs(expected[GRID > 0.1]))
            assert np.max(error / (np.abs(expected) + floor)) < tolerance, order
        phi = derivatives(enabled)[name][0][: len(GRID)]
        np.testing.assert_allclose(phi, values[0], rtol=1e-13 if enabled else 1e-6, atol=1e-37)


@pytest.mark.parametrize("name", PROFILES)
def test_derivatives_equal_autodiff_of_the_profile(name):
    """This ties the closed forms, of library and reference, to φ."""
    _, reference = PROFILES[name]
    values = at(SOME)[name]
    for order, expected in enumerate(towers()[name]):
        np.testing.assert_allclose(values[order], expected, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(values[order], reference.derivative(SOME, order), rtol=1e-10)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", PROFILES)
def test_derivatives_at_zero_are_finite(name, enabled):
    """Coincident points have s = 0: limits where they exist, finite values where not."""
    profile, reference = PROFILES[name]
    values = at(NEAR_ZERO, enabled)[name][:, 0]
    assert np.all(np.isfinite(values))
    for order in range(FINITE_AT_ZERO.get(name, 4) + 1):
        expected = reference.derivative(np.zeros(()), order)
        np.testing.assert_allclose(values[order], expected, rtol=1e-12 if enabled else 1e-5)
    for order in (0, 1, 2, 3):
        few = jax.eval_shape(lambda s, order=order: profile.derivatives(s, order), np.zeros(()))
        assert len(few) == order + 1


@pytest.mark.parametrize("name", PROFILES)
def test_terms_of_the_estimator_vanish_at_zero(name):
    """s phi''', s^2 phi'''' and similar terms tend to 0 at coincident points, not to 0 * inf."""
    first_open = FINITE_AT_ZERO.get(name, 4) + 1
    for order in range(first_open, 5):
        terms = at(NEAR_ZERO)[name][order] * NEAR_ZERO ** (order - first_open + 1)
        assert np.all(np.abs(terms) < 1e-5)


@pytest.mark.parametrize(
    ("name", "curl_free"),
    [("imq", True), ("matern-2.5", True), ("mixture", True), ("imq", False), ("matern-1.5", False)],
)
def test_kernels_equal_the_hessian_of_the_profile(name, curl_free):
    profile, reference = PROFILES[name]
    kernel = CurlFree(profile) if curl_free else Diagonal(profile)
    expected = oracle.Kernel(curl_free, reference)
    with jax.enable_x64(True):
        x, y = jnp.asarray([0.3, -1.0, 0.4]), jnp.asarray([1.1, 0.2, -0.5])
        value = kernel(x, y)
        assert value.shape == (3, 3)
        hessian = jax.jit(expected.point_autodiff)(x, y)
        np.testing.assert_allclose(value, hessian, rtol=1e-11, atol=1e-13)
        explicit = expected.matrix(np.asarray(x)[None], np.asarray(y)[None])[0, 0]
        np.testing.assert_allclose(value, explicit, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(kernel(y, x), value.T, rtol=1e-13)
        same = expected.matrix(np.zeros((1, 3)), np.zeros((1, 3)))[0, 0]
        np.testing.assert_allclose(kernel(x, x), same, rtol=1e-12, atol=1e-14)
    assert bool(jnp.all(jnp.isfinite(kernel(jnp.ones(3), jnp.ones(3)))))


def test_profile_algebra():
    s = jnp.asarray([0.0, 0.3, 2.0])
    both = (IMQ() + 2.0 * Gaussian()).derivatives(s, 4)
    for order, (a, b) in enumerate(
        zip(IMQ().derivatives(s, 4), Gaussian().derivatives(s, 4), strict=True)
    ):
        np.testing.assert_allclose(both[order], a + 2.0 * b, rtol=1e-6)
    lengthscales = (0.5, 1.0, 2.0)
    several = multi_bandwidth(IMQ(), lengthscales)
    one = [IMQ()(s / ell**2) for ell in lengthscales]
    # Up to an overall factor, which cancels wherever the kernel is normalized.
    ratio = several(s) / sum(one)
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)
    assert float(ratio[0]) > 0
    # From either side, and of lists, arrays and plain numbers, integers included.
    scaled = Gaussian() * 0.5
    assert scaled == 0.5 * Gaussian()
    assert Mixture([Gaussian()], [0.5]) == Mixture((Gaussian(),), np.array([0.5])) == scaled
    narrow = Mixture((Gaussian(),), lengthscales=(0.5,))
    np.testing.assert_allclose([narrow(1.0), narrow(1)], math.exp(-2.0), rtol=1e-6)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Matern(2.0),
        lambda: IMQ(-0.5),
        lambda: RationalQuadratic(0.0),
        lambda: Mixture((IMQ(), Gaussian()), (1.0,), (1.0, 2.0)),
        lambda: Mixture((IMQ(),), (-1.0,), (1.0,)),
        lambda: Mixture((IMQ(),), (1.0,), (0.0,)),
        lambda: Mixture((IMQ(),), [-1.0]),
        lambda: Mixture((IMQ(),), np.array([-1.0])),
        lambda: Mixture((IMQ(), Gaussian()), [1.0]),
        lambda: Mixture((IMQ(),), 2.0),
        lambda: Mixture(IMQ()),
        lambda: Mixture(()),
        lambda: -1.0 * IMQ(),
        lambda: IMQ() * "half",
    ],
)
def test_impossible_profiles_are_refused(build):
    with pytest.raises((TypeError, ValueError), match=r"(?s)expected.*got"):
        build()


def test_differentiability():
    expected = {"matern-1.5": 2, "matern-2.5": 4, "matern-3.5": 6, "mixture": 6}
    for name, (profile, _) in PROFILES.items():
        assert profile.differentiability == expected.get(name, math.inf)
