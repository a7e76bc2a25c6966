"""The Gram operator of a subset against its definition, a dense ``eigh`` in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ImplicitELBO, ScoreEstimator
from numpyro_kscore.estimators import Landmarks, Score, Subset
from numpyro_kscore.kernels import CurlFree, Diagonal
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import Dense, Krylov, Recursion
from support import oracle
from support.compiling import quick_jit

N, D, M, BANDWIDTH = 15, 3, 6, 1.7
ROWS = np.array([3, 11, 0, 7, 8])
RNG = np.random.default_rng(7)
SAMPLES = RNG.normal(size=(N, D)) + 0.5 * RNG.normal(size=(N, 1)) ** 2
POINTS = RNG.normal(size=(M, D))
BASE = -np.tanh(SAMPLES - 0.2)
SOLVERS = {
    "krylov": (NuMethod(20), Krylov(3 * N), oracle.nu_method(20)),
    "recursion": (NuMethod(20), Recursion(), oracle.nu_method(20)),
    "dense": (Tikhonov(1e-2), Dense(), oracle.tikhonov(1e-2)),
}


class Reference:
    """``-g(L_S) ζ'`` at any points, with ``L_S`` averaged over the subset and ζ' over all."""

    def __init__(self, kernel, rows, filt, base):
        self.kernel, self.filt, self.base, self.subset = kernel, filt, base, SAMPLES[rows]
        h = self.target(self.subset)
        spectrum, vectors = np.linalg.eigh(kernel.gram(self.subset) / len(rows))
        projected = filt.r(np.maximum(spectrum, 0)) * (vectors.T @ h.ravel())
        self.weights = -(vectors @ projected).reshape(h.shape) / len(rows)

    def target(self, x):
        total = self.kernel.zeta(x, SAMPLES)
        return total if self.base is None else total + self.kernel.apply(x, SAMPLES, self.base / N)

    def residual(self, x):
        return -self.filt.g0 * self.target(x) + self.kernel.apply(x, self.subset, self.weights)


@pytest.mark.parametrize(
    ("curl_free", "with_base"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
    ids=["curl-free-base", "diagonal-no-base", "curl-free-no-base", "diagonal-base"],
)
@pytest.mark.thorough
def test_subset_equals_its_definition(curl_free, with_base, x64):
    kernel = oracle.Kernel(curl_free, oracle.imq(), BANDWIDTH).normalized(D)
    base = BASE if with_base else None

    @quick_jit
    def evaluate(samples, points, base):
        results = {}
        for name, (regularizer, solver, _) in SOLVERS.items():
            estimator = ScoreEstimator(
                CurlFree() if curl_free else Diagonal(),
                regularizer,
                solver,
                BANDWIDTH,
                "none",
                None,
                subset=Subset(indices=ROWS),
            )
            score = estimator.fit(samples, base)
            results[name] = (
                score.residual(points),
                score.at_samples,
                estimator.at_samples(samples, base).scores,
            )
        return results

    results = evaluate(SAMPLES, POINTS, base)
    for name, (_, _, filt) in SOLVERS.items():
        reference = Reference(kernel, ROWS, filt, base)
        at_points, *at_samples = results[name]
        assert oracle.relative_error(at_points, reference.residual(POINTS)) < 1e-9
        expected = reference.residual(SAMPLES) + (0 if base is None else base)
        for values in at_samples:
            assert oracle.relative_error(values, expected) < 1e-9


@pytest.mark.slow
def test_all_samples_as_subset_are_the_full_estimate(x64):
    """Whitened, with the Gaussian base, and with the automatic strength."""
    whole = ScoreEstimator(solver=Krylov(3 * N))
    some = dataclasses.replace(whole, subset=Subset(fraction=1.0))

    @quick_jit
    def evaluate(samples, points):
        scores = [estimator.fit(samples) for estimator in (whole, some)]
        return [(score(points), score.at_samples, score.log_density(points)) for score in scores]

    for a, b in zip(*evaluate(SAMPLES, POINTS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_noise_is_that_of_all_samples():
    """Gaussian draws and base: the estimate is noise only. 4096 draws, 256 in the operator.

    Means over four keys, each with a standard error of a tenth: .0196 with all samples, .0209
    with the subset's operator, .335 from the subset alone. The bounds are eight errors away.
    """

    @jax.jit
    def errors(key):
        x = jax.random.normal(key, (4096, 4))
        y = jax.random.normal(jax.random.fold_in(key, 1), (100, 4))
        whole = ScoreEstimator(regularizer=NuMethod(30))
        some = dataclasses.replace(whole, subset=Subset(256))
        scores = (whole.fit(x), some.fit(x), whole.fit(x[::16]))
        return [jnp.mean((score(y) + y) ** 2) for score in scores]

    keys = jax.random.split(jax.random.key(0), 4)
    whole, some, alone = np.mean([errors(key) for key in keys], axis=0)
    assert some < 2 * whole
    assert alone > 5 * some


def test_values_at_the_samples_are_made_when_asked_for():
    """A fit to 1e5 samples touches n b pairs and keeps nothing of that size."""
    n, b, d = 100_000, 1024, 5
    estimator = ScoreEstimator(
        CurlFree(), NuMethod(20), Krylov(8), 1.0, "none", None, subset=Subset(b)
    )
    fit = quick_jit(lambda x: estimator.fit(x))
    compiled = fit.lower(jax.ShapeDtypeStruct((n, d), jnp.float32)).compile()
    # One array of the pairs would be 4 n b bytes.
    assert compiled.memory_analysis().temp_size_in_bytes < n * b
    assert jax.eval_shape(fit, jax.ShapeDtypeStruct((n, d), jnp.float32)).stored is None
    assert jax.eval_shape(
        lambda x: Score.at_samples.fget(estimator.fit(x)),  # type: ignore[attr-defined]
        jax.ShapeDtypeStruct((n, d), jnp.float32),
    ).shape == (n, d)


def test_rows_that_do_not_exist_are_reported():
    estimator = ScoreEstimator(CurlFree(), NuMethod(5), Krylov(4), 1.0, "none", None)

    @quick_jit
    def fit(samples, rows):
        return dataclasses.replace(estimator, subset=Subset(indices=rows)).fit(samples).info.finite

    assert bool(fit(np.asarray(SAMPLES, np.float32), ROWS))
    assert not bool(fit(np.asarray(SAMPLES, np.float32), ROWS + N))


def test_bad_subsets_are_refused():
    samples = np.asarray(SAMPLES, np.float32)
    fixed = ScoreEstimator(regularizer=NuMethod(5), base=None)

    def fit(subset, **options):
        return dataclasses.replace(fixed, subset=subset, **options).fit(samples)

    with pytest.raises(TypeError, match=r"subset: expected None or Subset\(count\).*got 5"):
        fit(5)
    with pytest.raises(ValueError, match="expected one of count, fraction and indices; got none"):
        Subset()
    with pytest.raises(ValueError, match="at most as many as there are samples, 15; got 16"):
        fit(Subset(16))
    with pytest.raises(ValueError, match="subset: expected None with landmarks"):
        fit(Subset(5), landmarks=Landmarks(5))
    some = dataclasses.replace(fixed, subset=Subset(5))
    with pytest.raises(ValueError, match="debias: expected None with a subset.*got 'jackknife'"):
        some.at_samples(samples, debias="jackknife")
    with pytest.raises(ValueError, match="context: expected None with subset="):
        dataclasses.replace(some, bandwidth=1.0, base=None).at_samples(samples, context=samples)
    with pytest.raises(ValueError, match="debias: expected None with a subset"):
        ImplicitELBO(16, estimator=some, debias="jackknife")
    assert ImplicitELBO(16, estimator=some).settings.debias is None
