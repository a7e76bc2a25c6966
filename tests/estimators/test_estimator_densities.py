"""Potentials, log densities and divergences of estimates, with every kind of base score."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels import CurlFree, Diagonal, Gaussian, Matern, Mixture
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import Dense, Krylov
from support import oracle
from support.compiling import quick_jit
from support.estimating import (
    FULL,
    POINTS,
    PROFILES,
    REFERENCE_PROFILES,
    SAMPLES,
    base_values,
    bases_with_density,
    reference_fit,
)
from support.samples import base_function


@pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
@pytest.mark.thorough
def test_residual_potentials_and_divergences_equal_the_reference(curl_free, x64):
    kernel_class = CurlFree if curl_free else Diagonal
    # The default, and one whose third derivative is singular where a pair coincides.
    names = ("imq", "matern-2.5")

    @quick_jit
    def evaluate(weights, samples, points, base_scores):
        def fit(weights):
            kernel = kernel_class(Mixture(tuple(PROFILES[n] for n in names), tuple(weights)))
            estimator = ScoreEstimator(
                kernel, Tikhonov(1e-2), Krylov(FULL), standardize="full", base=None
            )
            score = estimator.fit(samples, base_scores)
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


# The Gaussian's density is test_kernel_exponential_family's; none has the residual of any.
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("none", "gaussian")), "student-t"]
)
@pytest.mark.thorough
def test_scores_differentiate_their_log_density(name, x64):
    points = jnp.asarray(POINTS)
    base = bases_with_density()[name]

    @quick_jit
    def evaluate(samples, points):
        kernel = CurlFree(Matern(3.5))
        estimator = ScoreEstimator(
            kernel, NuMethod(20), Krylov(FULL), standardize="full", base=base
        )
        score = estimator.fit(samples)
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
        estimator = ScoreEstimator(
            Diagonal(Gaussian()), Tikhonov(0.1), Dense(), standardize="diagonal", base=base_function
        )
        score = estimator.fit(samples)
        jacobian = jax.vmap(jax.jacfwd(lambda x: score(x[None])[0]))(points)
        return score.divergence(points), jnp.trace(jacobian, axis1=1, axis2=2)

    divergence, expected = evaluate(jnp.asarray(SAMPLES), jnp.asarray(POINTS))
    assert oracle.relative_error(divergence, expected) < 1e-9


class Around:
    """A score function whose equality is an array, as that of dataclasses with arrays."""

    def __init__(self, center):
        self.center = np.full(SAMPLES.shape[1], center)

    def __eq__(self, other):
        return self.center == getattr(other, "center", 0.0)

    def __call__(self, x):
        return self.center - x


@pytest.mark.thorough
def test_a_base_is_told_from_others_without_comparing_arrays():
    """The same kinds of bases with other numbers: scores, which are pytrees, and others."""
    samples, points = np.float32(SAMPLES), np.float32(POINTS)
    estimator = ScoreEstimator(
        CurlFree(), Tikhonov(0.1), Dense(), bandwidth=2.0, standardize="none", base=None
    )
    evaluate = quick_jit(lambda score, x: (score(x), score.residual(x)))
    scores = [estimator.fit(samples), estimator.fit(2 * samples + 1)]
    for base in (*scores, Around(0.0), Around(1.0)):
        score = dataclasses.replace(estimator, base=base).fit(samples)
        of_base = base(points) if isinstance(base, Around) else evaluate(base, points)[0]
        value, residual = evaluate(score, points)
        np.testing.assert_allclose(value, of_base + residual, rtol=1e-4, atol=1e-4)


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
