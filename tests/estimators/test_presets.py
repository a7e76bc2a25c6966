"""One protocol for every preset: values, divergences, potentials and derivatives."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore.estimators import (
    Landmarks,
    Score,
    kef,
    kef_cg,
    landweber,
    nkef,
    nu_method,
    spectral_cutoff,
    ssge,
    stein,
    truncated_tikhonov,
)
from numpyro_kscore.solvers import ConjugateGradient
from support import oracle
from support.compiling import quick_jit
from support.samples import make_data

D, BANDWIDTH = 2, 1.5
ROWS = np.array([7, 2, 10, 4])  # landmarks, in no order
SAMPLES, POINTS = make_data(11, D, 5, seed=5)
SHARE = 0.9
TIKHONOV = oracle.tikhonov(1e-2)


class Case(NamedTuple):
    make: Any  # from a bandwidth
    curl_free: bool
    filter: Any
    tolerance: float = 1e-8  # float64; float32 is 1e-3


PRESETS = {
    "nu_method": Case(lambda h: nu_method(20, 1.5, bandwidth=h), True, oracle.nu_method(20, 1.5)),
    "landweber": Case(lambda h: landweber(30, 0.5, bandwidth=h), True, oracle.landweber(30, 0.5)),
    "kef": Case(lambda h: kef(1e-2, bandwidth=h), True, oracle.tikhonov(1e-2)),
    # At its published tolerance of 1e-4 on the residual.
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
}
BANDWIDTHS = (BANDWIDTH, 2.0)


def preset_reference(name, bandwidth):
    """Values at the samples, and a reference that evaluates elsewhere."""
    _, curl_free, filt, _ = PRESETS[name]
    kernel = oracle.Kernel(curl_free, oracle.imq(), bandwidth)
    if name == "nkef":
        fitted = oracle.nystrom(kernel, SAMPLES, ROWS, filt)
        return fitted.residual(SAMPLES), fitted
    fitted = oracle.estimate(kernel, SAMPLES, filt)
    return fitted.in_sample, fitted


@functools.cache
def preset_results(enabled, names):
    """Presets at two bandwidths: one jitted program, mapped over the bandwidth."""

    @quick_jit
    def evaluate(samples, points, bandwidths):
        def fit(bandwidth):
            results = {}
            for name in names:
                case = PRESETS[name]
                estimator = dataclasses.replace(case.make(bandwidth), precision="float32")
                score = estimator.fit(samples)
                results[name] = {
                    "fit": score.at_samples,
                    "points": score(points),
                    "info": score.info,
                }
                # In single precision the same code sums the same kind of combination.
                if name in ("kef", "ssge") or enabled:
                    results[name]["divergence"] = score.divergence(points)
                if enabled and name in AT_SAMPLES:
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


# One of each solver, and the landmarks.
QUICK = ("nu_method", "kef", "kef_cg", "nkef", "ssge")
# Without the fit: the same problem and solution. All of them are a long test.
AT_SAMPLES = ("nu_method", "nkef", "ssge")


def slow_beyond(quick):
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS
    ]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.thorough
def test_presets_keep_the_protocol(name):
    check_protocol(name, True, tuple(PRESETS))


@pytest.mark.parametrize("name", slow_beyond(QUICK))
@pytest.mark.thorough
def test_presets_keep_the_protocol_in_float32(name):
    check_protocol(name, False, QUICK if name in QUICK else tuple(PRESETS))


def check_protocol(name, enabled, names):
    result, case = dict(preset_results(enabled, names)[name]), PRESETS[name]
    info = result.pop("info")
    assert np.all(info.finite)
    # The scale at which the paper's own recursion runs, so nothing may be rescaled.
    assert np.all(info.spectral_scale == 1.0)
    errors = {}
    for i, bandwidth in enumerate(BANDWIDTHS):
        in_sample, fitted = preset_reference(name, bandwidth)
        expected = {"fit": in_sample, "points": fitted.residual(POINTS)}
        if "at_samples" in result:
            expected["at_samples"] = in_sample
        if "divergence" in result:
            expected["divergence"] = fitted.residual_divergence(POINTS)
        if "potential" in result:
            potential = fitted.residual_potential(POINTS)
            expected["potential"] = potential[1:] - potential[:1]
        for what, value in expected.items():
            assert result[what].dtype == (np.float64 if enabled else np.float32)
            errors[what, bandwidth] = oracle.relative_error(result[what][i], value)
    assert set(expected) == set(result)
    assert not enabled or len(expected) == 3 + case.curl_free + (name in AT_SAMPLES)
    tolerance = case.tolerance if enabled else 1e-3
    assert not {key: error for key, error in errors.items() if error > tolerance}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_literal(name):
    estimator = PRESETS[name].make(BANDWIDTH)
    assert (estimator.standardize, estimator.base, estimator.normalize) == ("none", None, False)


# The Krylov space has test_derivatives, and the other filters the same rule.
@pytest.mark.parametrize("name", slow_beyond(("kef", "kef_cg", "nkef", "ssge")))
def test_presets_are_differentiable(name, x64):
    """Derivatives in the bandwidth and in the point against differences of the definition."""
    case, step = PRESETS[name], 1e-4
    estimator = case.make(BANDWIDTH)
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
