"""Estimators under JAX: first steps when compiled, settings as leaves, pytrees, dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels import IMQ, CurlFree, Diagonal, Gaussian, Matern, Mixture
from numpyro_kscore.regularizers import (
    LandweberIteration,
    NuMethod,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
)
from numpyro_kscore.solvers import ConjugateGradient, Dense, Krylov, Recursion
from support import oracle
from support.compiling import default_jit, quick_jit
from support.estimating import (
    FULL,
    LANDWEBER,
    NU,
    POINTS,
    SAMPLES,
    TIKHONOV,
    TOLERANCE,
    bases_with_density,
    reference_fit,
)
from support.samples import base_function


# Two steps have the first in them, and the first product.
@pytest.mark.parametrize(
    "num_steps",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
@pytest.mark.thorough
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
        (LandweberIteration(num_steps), oracle.landweber(num_steps), Recursion()),
    ):
        estimator = ScoreEstimator(CurlFree(), regularizer, solver, 2.0, "none", base=None)

        @default_jit
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
@pytest.mark.thorough
def test_lam_is_a_leaf(solver, x64):
    """vmap and gradients over lam, and one trace for many values of it."""
    estimator = ScoreEstimator(CurlFree(), Tikhonov(1e-2), solver, standardize="full", base=None)
    lams = np.array([1e-3, 1e-2, 0.3])
    traces = []

    def with_lam(lam):
        return dataclasses.replace(estimator, regularizer=Tikhonov(lam))

    @jax.jit
    def shapes(estimator):
        traces.append(None)
        return estimator.fit(SAMPLES).at_samples

    for lam in lams:
        jax.eval_shape(shapes, with_lam(lam))
    assert len(traces) == 1

    # An early-stopped loop has a forward derivative only.
    derivative = jax.jacfwd if isinstance(solver, ConjugateGradient) else jax.grad

    @quick_jit
    @jax.vmap
    def evaluate(lam):
        def loss(lam):
            values = with_lam(lam).fit(jnp.asarray(SAMPLES))(jnp.asarray(POINTS))
            return jnp.sum(values**2), values

        return derivative(loss, has_aux=True)(lam)

    def reference(lam):
        return reference_fit(True, oracle.imq(), oracle.tikhonov(lam)).residual(POINTS)

    slopes, values = evaluate(lams)
    assert oracle.relative_error(values, np.stack([reference(lam) for lam in lams])) < 1e-9
    slope = np.sum(reference(1e-2 + 1e-6) ** 2) - np.sum(reference(1e-2 - 1e-6) ** 2)
    assert float(slopes[1]) == pytest.approx(slope / 2e-6, rel=1e-5)


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
            CurlFree(),
            LandweberIteration(10, step_size),
            bandwidth=bandwidth,
            standardize="none",
            base=None,
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
        (SpectralCutoff(fraction=0.5), Dense()),
        (LandweberIteration(5), Recursion()),
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
    estimator = dataclasses.replace(estimator, solver=Dense(), standardize="none", bandwidth=2.0)
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
        (Diagonal(), SpectralCutoff(fraction=0.9), Dense()),
        (CurlFree(Matern(2.5)), Tikhonov(0.1), ConjugateGradient(8)),
        (CurlFree(Mixture((IMQ(), Gaussian()))), LandweberIteration(5), Recursion()),
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
