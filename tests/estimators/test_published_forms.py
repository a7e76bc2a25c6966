"""Estimators of the literature as they were published: Stein's and SSGE."""

import numpy as np

from numpyro_kscore.estimators import ssge, stein
from support import oracle
from support.compiling import quick_jit
from support.samples import make_data

N, D, M = 11, 2, 5
BANDWIDTH = 1.5
SAMPLES, POINTS = make_data(N, D, M, seed=5)


def test_stein_equals_its_published_form(x64):
    """``-(K + η)⁻¹ H`` at the samples (Li and Turner), continued in the kernel's space (ZSZ)."""
    lam = 1e-2
    kernel = oracle.Kernel(False, oracle.imq(), BANDWIDTH)
    gram = kernel.matrix(SAMPLES, SAMPLES)[..., 0, 0]
    sums = N * kernel.zeta(SAMPLES, SAMPLES)
    expected = -np.linalg.solve(gram + N * lam * np.eye(N), sums)

    @quick_jit
    def evaluate(samples, points):
        score = stein(lam, bandwidth=BANDWIDTH).fit(samples)
        return score.at_samples, score(points)

    at_samples, at_points = evaluate(SAMPLES, POINTS)
    assert oracle.relative_error(at_samples, expected) < 1e-9
    cross = kernel.matrix(POINTS, SAMPLES)[..., 0, 0]
    continued = cross @ np.linalg.solve(gram, expected)
    assert oracle.relative_error(at_points, continued) < 1e-8


def test_ssge_equals_its_eigenfunction_form(x64):
    """Shi, Sun and Zhu (2018): Nyström eigenfunctions and the coefficients of their Stein identity.

    ``psi_j(x) = sqrt(n)/l_j Σ_m u_jm k(x, x_m)``, ``β_j = -(1/n) Σ_m ∇psi_j(x_m)`` and
    ``ŝ = Σ_j≤J β_j psi_j``, with (l_j, u_j) the eigenpairs of the n by n Gram matrix.
    """
    fraction = 0.95

    def gram(x):
        return 1 / np.sqrt(1 + np.sum((x[:, None] - SAMPLES) ** 2, -1) / BANDWIDTH**2)

    def gram_gradient(x):
        """d k(x_i, x_m) / d x_i, (i, m, d)."""
        r = x[:, None] - SAMPLES
        return -r / BANDWIDTH**2 * gram(x)[..., None] ** 3

    values, vectors = np.linalg.eigh(gram(SAMPLES))
    values, vectors = values[::-1], vectors[:, ::-1]
    kept = 1 + np.searchsorted(np.cumsum(values) / values.sum(), fraction)
    assert 1 < kept < N
    scales = np.sqrt(N) / values[:kept]
    gradients = np.einsum("j,mj,imd->ijd", scales, vectors[:, :kept], gram_gradient(SAMPLES))
    beta = -gradients.mean(axis=0)

    def estimate(x):
        return (gram(x) @ vectors[:, :kept] * scales) @ beta

    @quick_jit
    def evaluate(estimators, samples, points):
        scores = [estimator.fit(samples) for estimator in estimators]
        return [(score.at_samples, score(points)) for score in scores]

    threshold = np.sqrt(values[kept - 1] * values[kept]) / N
    estimators = ssge(fraction, bandwidth=BANDWIDTH), ssge(lam=threshold, bandwidth=BANDWIDTH)
    for at_samples, at_points in evaluate(estimators, SAMPLES, POINTS):
        assert oracle.relative_error(at_samples, estimate(SAMPLES)) < 1e-8
        assert oracle.relative_error(at_points, estimate(POINTS)) < 1e-8
