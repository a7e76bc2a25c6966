"""The dense reference of ``oracle`` against itself."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracle
from support.compiling import quick_jit
from support.estimating import POINTS, REFERENCE_PROFILES, SAMPLES, D
from support.samples import base_function


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
