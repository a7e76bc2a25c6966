"""The figures of docs/errata.md: how far off each published formula is, in float64 NumPy."""

import pathlib
import re

import numpy as np
import pytest

from support import oracle

N, D, LAM, STEPS, STEP_SIZE = 11, 2, 1e-2, 30, 1.0
SAMPLES = np.random.default_rng(5).normal(size=(N, D)) @ np.array([[1.0, 0.4], [0.0, 1.0]])
BANDWIDTH = oracle.median_distance(SAMPLES)
KERNEL = oracle.Kernel(True, oracle.imq(), BANDWIDTH)
LANDMARKS = np.array([0, 3, 7, 8])


def matrix(x, y):
    return KERNEL.matrix(x, y).transpose(0, 2, 1, 3).reshape(len(x) * D, len(y) * D)


def landweber(sign):
    """The recursion for the coefficients; at the samples, where zeta is h."""
    gram, h = matrix(SAMPLES, SAMPLES), KERNEL.zeta(SAMPLES, SAMPLES).ravel()
    c = np.zeros(N * D)
    for t in range(STEPS):
        c = c - STEP_SIZE * gram @ c / N + sign * t * STEP_SIZE**2 * h / N
    return (-STEPS * STEP_SIZE * h + gram @ c).reshape(N, D)


def nystrom(sign=-1.0, fraction=1.0 / N):
    z = SAMPLES[LANDMARKS]
    cross = matrix(z, SAMPLES)
    h = KERNEL.zeta(z, SAMPLES).ravel()
    c = sign * np.linalg.solve(fraction * cross @ cross.T + LAM * matrix(z, z), h)
    return (cross.T @ c).reshape(N, D)


def test_the_corrected_formulas_are_the_definition():
    fitted = oracle.estimate(KERNEL, SAMPLES, oracle.landweber(STEPS, STEP_SIZE))
    assert fitted.spectrum[-1] * STEP_SIZE < 1
    assert oracle.relative_error(landweber(1.0), fitted.in_sample) < 1e-10
    # The projection of the definition, in the basis of a Cholesky factor.
    z = SAMPLES[LANDMARKS]
    lower = np.linalg.cholesky(matrix(z, z))
    half = np.linalg.solve(lower, matrix(z, SAMPLES))
    h = np.linalg.solve(lower, KERNEL.zeta(z, SAMPLES).ravel())
    shifted = half @ half.T / N + LAM * np.eye(len(h))
    projected = -(half.T @ np.linalg.solve(shifted, h)).reshape(N, D)
    assert oracle.relative_error(nystrom(), projected) < 1e-10


def figures():
    """Relative errors, keyed by row of the table."""
    estimate = oracle.estimate(KERNEL, SAMPLES, oracle.tikhonov(LAM)).in_sample
    distances = np.linalg.norm(SAMPLES[:, None] - SAMPLES, axis=-1)
    return {
        "Landweber recursion": oracle.relative_error(landweber(-1.0), landweber(1.0)),
        "Nyström form, without 1/n": oracle.relative_error(nystrom(fraction=1.0), nystrom()),
        "Nyström form, sign": oracle.relative_error(nystrom(1.0), nystrom()),
        # The estimate is linear in h, and so in ζ.
        "SSGE remark": oracle.relative_error(N * estimate, estimate),
        "curl-free": oracle.relative_error(-estimate, estimate),
        "median": abs(np.median(distances) / BANDWIDTH - 1),
    }


@pytest.mark.parametrize(("row", "value"), figures().items())
def test_the_page_shows_the_figures(row, value):
    page = pathlib.Path(__file__).parents[2] / "docs" / "errata.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("|") and row in line]
    assert len(lines) == 1, row
    shown = float(re.fullmatch(r".*\| ([0-9.e]+) \|", lines[0])[1])
    assert shown == float(f"{value:.2g}")
