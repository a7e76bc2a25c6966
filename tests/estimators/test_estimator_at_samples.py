"""Estimates at the samples alone: the presets of the paper, and the jackknife."""

import jax.numpy as jnp
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import kef, kef_cg, landweber, nu_method, ssge
from numpyro_kscore.kernels import CurlFree
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import Dense, Krylov
from support import oracle
from support.compiling import quick_jit
from support.estimating import SAMPLES, SHARE, jackknife_reference
from support.samples import base_function, make_data


# Quick ones are in test_presets.
@pytest.mark.slow
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
            ssge(fraction=SHARE, bandwidth=bandwidth),
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


@pytest.mark.parametrize("size", [pytest.param(8, marks=pytest.mark.slow), 9])
def test_jackknife_equals_its_definition(size, x64):
    samples = make_data(size, 2, 1, seed=9)[0]
    base = base_function(samples)
    expected = jackknife_reference(True, oracle.nu_method(20), samples, base)
    estimator = ScoreEstimator(
        CurlFree(), NuMethod(20), Krylov(2 * size), standardize="full", base=None
    )

    @quick_jit
    def evaluate(samples, base):
        return estimator.at_samples(samples, base, debias="jackknife")

    estimate = evaluate(jnp.asarray(samples), jnp.asarray(base))
    assert oracle.relative_error(estimate.residual, expected) < 1e-9
    assert oracle.relative_error(estimate.scores, base + expected) < 1e-9
    assert bool(estimate.info.finite)


@pytest.mark.thorough
def test_estimates_at_the_samples_only(x64):
    estimator = ScoreEstimator(CurlFree(), Tikhonov(1e-2), Dense(), base=None)

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
