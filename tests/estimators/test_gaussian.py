"""The shrunk Gaussian, and the one that each sample sees without itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore.estimators._base.fitted_base import make_base
from numpyro_kscore.estimators._base.gaussian import fit_gaussian
from support import oracle
from support.compiling import quick_jit
from support.samples import make_scaled


@pytest.mark.thorough
def test_a_left_out_gaussian_by_leaving_out(x64):
    """The factors are exact without shrinkage and right to O(1/n) with it."""
    rng = np.random.default_rng(3)
    stiff = rng.normal(size=(60, 2)) @ np.array([[1.0, 1.0], [0.0, 1e-3]])
    round_ = rng.normal(size=(12, 6))
    shares = []
    # Covariances of condition 4e6 leave nine digits of sixteen.
    for samples, tolerance in ((stiff, 1e-8), (round_, 0.5 / 12)):
        fitted = fit_gaussian(jnp.asarray(samples))
        scale, rho, _ = oracle.held_out_parameters(samples)
        shares.append(rho)
        assert float(fitted.shrinkage) == pytest.approx(rho)
        whole = oracle.gaussian_score(samples, samples)
        expected = oracle.left_out_gaussian_scores(samples)
        assert oracle.relative_error(np.asarray(fitted.held_out)[:, None] * whole, expected) < (
            tolerance
        )
        # The purpose of the factor: the score at a sample is larger without that sample.
        assert np.linalg.norm(whole) < np.linalg.norm(expected)
    assert shares[0] == 0.0
    assert 0.0 < shares[1] <= 1.0


@pytest.mark.thorough
def test_gaussian_of_more_coordinates_than_samples(x64):
    """The eigenvalues of the small matrix give the same Gaussian."""
    samples = make_scaled(7, 10, seed=4)
    samples[:, 3] = 5.0
    fitted = quick_jit(fit_gaussian)(jnp.asarray(samples))
    varying = np.delete(samples, 3, axis=1)
    z = (samples - samples.mean(axis=0)) / np.asarray(fitted.coordinates.scale)
    assert float(fitted.coordinates.scale[3]) == 1.0
    # A coordinate that does not vary changes nothing for the others.
    alone = quick_jit(fit_gaussian)(jnp.asarray(varying))
    np.testing.assert_allclose(alone.held_out, fitted.held_out, rtol=1e-9)
    _, rho, sharpness = oracle.held_out_parameters(varying)
    assert float(fitted.shrinkage) == pytest.approx(rho)
    root = np.delete(np.asarray(fitted.coordinates.whitening.factor), 3, axis=0)
    np.testing.assert_allclose(
        oracle.relative_error(
            np.delete(z, 3, axis=1)
            @ np.linalg.inv(root @ root.T).T
            / np.delete(np.asarray(fitted.coordinates.scale), 3),
            -oracle.gaussian_score(varying, varying),
        ),
        0.0,
        atol=1e-9,
    )
    assert sharpness > 0


@pytest.mark.thorough
def test_far_points_have_finite_scores_and_one_divergence():
    """The points are in single precision, where squares of the last two overflow."""
    samples = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    points = np.outer([1e10, 1e20, 1e30], [1.0, -1.0, 2.0]).astype(np.float32)

    @quick_jit
    def evaluate(samples, points):
        base = make_base("gaussian", samples, None)
        return base.score(points), base.divergence(points)

    score, divergence = evaluate(samples, points)
    assert np.all(np.isfinite(score))
    np.testing.assert_allclose(score[1:] / score[:1], [[1e10] * 3, [1e20] * 3], rtol=1e-5)
    # It is constant: minus the trace of the precision.
    np.testing.assert_allclose(divergence, divergence[0], rtol=1e-6)
