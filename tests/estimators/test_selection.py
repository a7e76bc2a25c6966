"""The automatic selection against its definition: held-out score matching by ``eigh``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy import selection as benchmark
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import AutoBandwidth, Landmarks
from numpyro_kscore.estimators._fit import selection
from numpyro_kscore.estimators._fit.settings import FitSettings
from numpyro_kscore.estimators._operators.features import Rows
from numpyro_kscore.kernels import CurlFree, Diagonal
from numpyro_kscore.regularizers import LandweberIteration, NuMethod, Tikhonov
from numpyro_kscore.solvers import Krylov
from support import oracle
from support.compiling import quick_jit
from support.estimating import jackknife_reference
from support.samples import base_function, make_scaled

N, D = 13, 2  # odd: the last sample is in neither half
FULL = (N // 2) * D  # a Krylov space of this size is the whole space of a half
FACTORS = (1.0, 2.5, 0.4)
SAMPLES = make_scaled(N, D)


# --------------------------------------------------------------------- the loss and the selection


def left_out_factors(samples):
    """Factors by Sherman and Morrison's formula, in the Gaussian's own parameters."""
    n, d = samples.shape
    scale, rho, _ = oracle.held_out_parameters(samples)
    x = (samples - samples.mean(axis=0)) / scale
    larger = n / (n - 1)
    matrix = (1 - rho) * larger * (x.T @ x / n) + rho * np.eye(d)
    leverage = (1 - rho) * larger / (n - 1) * np.sum(x @ np.linalg.inv(matrix) * x, axis=1)
    return larger / ((1 - rho) * larger + rho) / (1 - leverage)


def reference_losses(curl_free, filters, base, normalize, samples=SAMPLES):
    """Held-out loss less that of the base, per bandwidth, member and sample, by definition."""
    whitener = oracle.whitener(samples, "full")
    scores = np.zeros_like(samples)
    if base == "gaussian":
        whitener = oracle.held_out_gaussian(samples)
        scores = oracle.gaussian_score(samples, samples)
    elif base is not None:
        scores = base_function(samples)
    z = (samples - samples.mean(axis=0)) @ whitener.T
    s0 = scores @ np.linalg.inv(whitener)
    left_out = s0 * left_out_factors(samples)[:, None] if base == "gaussian" else s0
    median = oracle.median_distance(z)
    size = 2 * (len(samples) // 2)
    losses = []
    for factor in FACTORS:
        kernel = oracle.Kernel(curl_free, oracle.imq(), factor * median)
        path = []
        for make_filter in filters:
            values = []
            for fitted, judged in ((slice(0, size, 2), slice(1, size, 2)),) * 2:
                if values:
                    fitted, judged = judged, fitted
                fit = oracle.estimate(kernel, z[fitted], make_filter, s0[fitted], None, normalize)
                f = fit.residual(z[judged])
                products = np.sum(0.5 * f**2 + f * left_out[judged], axis=1)
                values.append(products + fit.residual_divergence(z[judged]))
            path.append(np.concatenate(values))
        losses.append(path)
    return np.array(losses), median * np.array(FACTORS)


def reference_choice(losses, is_auto=True, normalize=True):
    """Strongest member within a standard error of the best, the base's own loss being 0.

    On a normalized path the next one, because losses are those of fits to half of the samples.

    A bandwidth below the first must be better by two standard errors.
    """
    losses = np.concatenate([np.zeros_like(losses[:, :1]), losses], axis=1)
    mean = losses.mean(axis=2)
    first = 0 if is_auto else 1
    bests = first + np.argmin(mean[:, first:], axis=1)
    least = {row: losses[row, bests[row]] for row in range(len(FACTORS))}
    wide = min((r for r in least if FACTORS[r] >= 1), key=lambda r: least[r].mean())
    for row in [r for r in least if FACTORS[r] < 1]:
        gain = least[wide] - least[row]
        if gain.mean() <= 2 * np.std(gain) / len(gain) ** 0.5:
            del least[row]
    row = min(least, key=lambda r: least[r].mean())
    best = bests[row]
    error = np.std(losses[row] - losses[row, best], axis=1) / losses.shape[2] ** 0.5
    for column in range(first, losses.shape[1]):
        if mean[row, column] <= mean[row, best] + error[column]:
            further = is_auto and normalize and column > 0
            return row, min(column + further, losses.shape[1] - 1), error
    raise AssertionError


# Normalized paths: λ = 1/(d degree²), degrees from 1/4 in half octaves, six of them above 45.
DEGREES = 2.0 ** np.arange(-2, 9, 0.5)
STEPS = sorted({max(1, round(degree * D**0.5)) for degree in DEGREES})
DESCENTS = sorted({max(1, round(degree**2 * D)) for degree in DEGREES})
CASES = {
    "nu": (CurlFree(), NuMethod("auto"), "gaussian", True, STEPS, oracle.nu_method),
    "tikhonov": (
        CurlFree(),
        Tikhonov("auto"),
        base_function,
        True,
        1 / (D * DEGREES**2),
        oracle.tikhonov,
    ),
    "landweber": (CurlFree(), LandweberIteration("auto"), None, True, DESCENTS, oracle.landweber),
    "diagonal-tikhonov": (
        Diagonal(),
        Tikhonov("auto"),
        "gaussian",
        False,
        10.0 ** -np.arange(0, 7.5, 0.5),
        oracle.tikhonov,
    ),
    "diagonal-nu": (Diagonal(), NuMethod("auto"), base_function, True, STEPS, oracle.nu_method),
    "fixed": (CurlFree(), Tikhonov(0.02), None, False, [0.02], oracle.tikhonov),
}
# Other filters by the same code; all paths are compared with their members in test_filters.
SLOW = {"tikhonov", "landweber", "diagonal-nu"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES]
)
@pytest.mark.thorough
def test_the_choice_equals_its_definition(case, x64):
    kernel, regularizer, base, normalize, strengths, make_filter = CASES[case]
    estimator = ScoreEstimator(
        kernel,
        regularizer,
        Krylov(FULL),
        AutoBandwidth(FACTORS),
        standardize="full",
        base=base,
        normalize=normalize,
    )
    info = quick_jit(lambda x: estimator.fit(x).info)(jnp.asarray(SAMPLES))
    selected, bandwidth = info.selection, info.bandwidth
    filters = [make_filter(strength) for strength in strengths]
    losses, bandwidths = reference_losses(isinstance(kernel, CurlFree), filters, base, normalize)
    row, column, error = reference_choice(losses, case != "fixed", normalize)
    nothing = np.inf if isinstance(regularizer, Tikhonov) else 0.0
    np.testing.assert_allclose(selected.strengths, [nothing, *strengths], rtol=1e-13)
    np.testing.assert_allclose(selected.bandwidths, bandwidths, rtol=1e-13)
    assert np.all(selected.loss[:, 0] == 0)
    for value, reference in zip(selected.loss[:, 1:], losses.mean(axis=2), strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-8, atol=1e-8 * abs(reference[0]))
    np.testing.assert_allclose(selected.standard_error[row], error, rtol=1e-8, atol=1e-9)
    assert (int(selected.row), int(selected.column)) == (row, column)
    assert float(selected.strength) == float(selected.strengths[column])
    assert float(selected.bandwidth) == float(bandwidth) == float(selected.bandwidths[row])


@pytest.mark.thorough
def test_reduced_problems_have_the_same_loss(x64):
    """A problem whose samples span less than the space is rotated into their span."""
    samples = make_scaled(5, 12, seed=9)
    scores = base_function(samples)
    estimator = ScoreEstimator(standardize="none", bandwidth=4.0)

    @quick_jit
    def selected(x, s):
        return estimator.fit(x, s).info.selection

    reduced = selected(jnp.asarray(samples), jnp.asarray(scores))
    kernel = oracle.Kernel(True, oracle.imq(), 4.0)
    # By definition, in all 12 dimensions.
    steps = np.asarray(reduced.strengths[1:])
    for column, t in list(enumerate(steps, 1))[::5]:
        values = []
        for fitted, judged in ((slice(0, 4, 2), slice(1, 4, 2)), (slice(1, 4, 2), slice(0, 4, 2))):
            fit = oracle.estimate(
                kernel, samples[fitted], oracle.nu_method(int(t)), scores[fitted], normalize=True
            )
            f = fit.residual(samples[judged])
            products = np.sum(0.5 * f**2 + f * scores[judged], axis=1)
            values.append(products + fit.residual_divergence(samples[judged]))
        assert float(reduced.loss[0, column]) == pytest.approx(np.mean(values), rel=1e-8)


@pytest.mark.thorough
def test_choices_for_many_samples(monkeypatch, x64):
    """Some of the samples are used, and vectors are taken one after another."""
    z = jnp.asarray(make_scaled(31, D, seed=6))
    z = z - jnp.mean(z, axis=0)

    def chosen(rows):
        how = CurlFree(), NuMethod("auto"), Krylov(), None, None, None, None
        settings = FitSettings(*how, "full", True, None, "float32")
        return selection.choose(settings, rows, D, jnp.asarray([1.0, 2.0]), num_samples=200)[0]

    @functools.partial(quick_jit, static_argnames="patched")
    def choose(z, patched):
        return chosen(Rows(z, -z, jnp.linspace(1.0, 1.1, z.shape[0])))

    monkeypatch.setattr(selection, "SELECTION_POINTS", 16)
    few = choose(z, "few")
    factors = jnp.linspace(1.0, 1.1, 31)[::2]
    monkeypatch.setattr(selection, "VECTOR_PAIRS", 0)

    @quick_jit
    def one_by_one(z):
        return chosen(Rows(z, -z, factors))

    expected = one_by_one(z[::2])
    assert np.ptp(few.loss) > 0
    np.testing.assert_allclose(few.loss, expected.loss, rtol=1e-9, atol=1e-9)
    # The choice is for the fit to all of the samples, however many of them it uses itself.
    assert int(few.column) == int(expected.column)


# ---------------------------------------------------------------------- fits that a selection gives


WHITENER = oracle.whitener(SAMPLES, "full")


def whitened_kernel():
    bandwidth = oracle.median_distance(SAMPLES @ WHITENER.T)
    return oracle.Kernel(True, oracle.imq(), bandwidth)


@pytest.mark.thorough
def test_a_chosen_fit_is_the_fit_with_that_number(x64):
    """The halves of the jackknife take the number of the whole."""
    estimator = ScoreEstimator(
        CurlFree(),
        NuMethod("auto"),
        Krylov(N * D),
        bandwidth="median",
        standardize="full",
        base=None,
    )
    evaluate = quick_jit(lambda x, s: estimator.at_samples(x, s, debias="jackknife"))
    base = base_function(SAMPLES)
    estimate = evaluate(SAMPLES, base)
    assert int(estimate.info.selection.column) > 0
    filt = oracle.nu_method(int(estimate.info.selection.strength))
    expected = jackknife_reference(True, filt, SAMPLES, base)
    assert oracle.relative_error(estimate.residual, expected) < 1e-9


@pytest.mark.thorough
def test_a_chosen_fit_on_landmarks_is_the_fit_with_that_number(x64):
    """Both fits agree at the samples and elsewhere."""
    rows = np.array([0, 2, 5, 8])
    points = SAMPLES[:3] + 0.2
    estimator = ScoreEstimator(
        CurlFree(),
        Tikhonov("auto"),
        Krylov(12),
        bandwidth="median",
        standardize="full",
        base=None,
        landmarks=Landmarks(indices=rows),
    )

    @quick_jit
    def evaluate(samples, points):
        score = estimator.fit(samples)
        return score.at_samples, score(points), score.info.selection

    *values, selected = evaluate(SAMPLES, points)
    assert int(selected.column) > 0
    z = SAMPLES @ WHITENER.T
    kernel = whitened_kernel().normalized(D)
    fitted = oracle.nystrom(kernel, z, rows, oracle.tikhonov(float(selected.strength)))
    for value, where in zip(values, (SAMPLES, points), strict=True):
        expected = fitted.residual(where @ WHITENER.T) @ WHITENER
        assert oracle.relative_error(value, expected) < 1e-9


@pytest.mark.thorough
def test_a_choice_is_not_differentiated(x64):
    """Derivatives are those of the fit with the selected number, in samples and bandwidth."""
    estimator = ScoreEstimator(
        CurlFree(), Tikhonov("auto"), Krylov(N * D), standardize="none", base=None
    )
    direction = np.sin(SAMPLES)

    @quick_jit
    def derivative(samples, bandwidth):
        def fit(samples, bandwidth):
            estimate = dataclasses.replace(estimator, bandwidth=bandwidth).at_samples(samples)
            return estimate.scores, estimate.info.selection

        tangents = (jnp.asarray(direction), jnp.ones(()))
        return jax.jvp(fit, (samples, bandwidth), tangents, has_aux=True)[1:]

    value, selected = derivative(SAMPLES, 1.3)
    assert int(selected.column) > 0
    filt = oracle.tikhonov(float(selected.strength))

    def along(t):
        kernel = oracle.Kernel(True, oracle.imq(), 1.3 + t)
        return oracle.estimate(kernel, SAMPLES + t * direction, filt, normalize=True).in_sample

    # The five-point formula, of error step⁴ and eps/step.
    step = 1e-4
    expected = 8 * (along(step) - along(-step)) - (along(2 * step) - along(-2 * step))
    expected = expected / (12 * step)
    assert np.linalg.norm(expected) > 0.1
    assert oracle.relative_error(value, expected) < 1e-8

    # No operation of the default is without a reverse mode.
    def total(x):
        return jnp.sum(ScoreEstimator(bandwidth="auto").fit(x).at_samples)

    assert jax.eval_shape(jax.grad(total), SAMPLES).shape == (N, D)


@pytest.mark.slow
def test_a_base_that_cannot_be_improved_is_left_alone():
    """Normal draws: the Gaussian base is the whole score."""
    samples = np.random.default_rng(0).normal(size=(64, 3))
    estimate = quick_jit(lambda x: ScoreEstimator().at_samples(x))(np.float32(samples))
    selected = estimate.info.selection
    assert int(selected.column) == 0
    assert float(selected.strength) == 0.0
    assert np.all(estimate.residual == 0)
    expected = oracle.gaussian_score(samples, samples)
    assert oracle.relative_error(estimate.scores, expected) < 1e-4


@pytest.mark.slow
def test_a_choice_is_about_as_good_as_hindsight():
    """Error over that of the best fixed strength; benchmarks/results has all of them.

    In two dimensions, where there is something to choose: on normal draws the base alone, on the
    others a fit that is better than it. The mean over these three is 1.10 at 128 samples, 1.09 at
    256 and 1.12 at 512.
    """
    cells = benchmark.errors_of(("normal", "banana", "funnel"), 2, 256, seeds=4)
    means = {
        name: (cell[0].mean(axis=0), benchmark.errors_near(*cell, 0).mean())
        for name, cell in cells.items()
    }
    assert np.mean([auto / fixed.min() for fixed, auto in means.values()]) < 1.15
    for name, share in (("banana", 0.5), ("funnel", 0.85)):
        fixed, auto = means[name]
        assert auto < share * fixed[0]
