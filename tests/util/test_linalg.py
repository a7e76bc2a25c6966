"""Factorizations: the same numbers under vmap, and LAPACK calls of safe kinds and sizes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, ScoreEstimator
from numpyro_kscore._util.linalg import (
    BLOCK,
    cholesky,
    eigh,
    invert_lower,
    log_abs_det,
    qr,
    slogdet_and_inverse,
)
from support.compiling import default_jit
from support.platforms import elsewhere_than_on_a_cpu

LOWER = np.float32([[2.0, 0.0, 0.0], [0.5, 1.5, 0.0], [-0.3, 0.2, 1.0]])
SYMMETRIC = LOWER @ LOWER.T
CASES = {
    "eigh": (eigh, jnp.linalg.eigh, (SYMMETRIC,)),
    "cholesky": (cholesky, jnp.linalg.cholesky, (SYMMETRIC,)),
    "qr": (qr, jnp.linalg.qr, (SYMMETRIC[:, :2],)),
    "invert_lower": (invert_lower, lambda a: jnp.linalg.inv(jnp.tril(a)), (LOWER,)),
    "log_abs_det": (log_abs_det, lambda a: jnp.linalg.slogdet(a)[1], (LOWER + 1,)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough
def test_equals_the_plain_function_batched_and_differentiated(name):
    looped, plain, arguments = CASES[name]

    def total(fn):
        return lambda *a: sum(jnp.sum(jnp.sin(part)) for part in jax.tree.leaves(fn(*a)))

    batches = [np.stack([a, np.float32(1.1) * a]) for a in arguments]

    @jax.jit
    def evaluate(*batches):
        return [
            [jax.vmap(transform(total(fn)))(*batches) for fn in (looped, plain)]
            for transform in (lambda f: f, jax.grad, lambda f: jax.jacfwd(f))
        ]

    for mine, reference in evaluate(*batches):
        np.testing.assert_allclose(mine, reference, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_batches_are_loops_on_a_cpu_and_single_calls_on_a_gpu(name, monkeypatch):
    """The program is lowered for one or the other, on a machine that has both."""
    function, _, arguments = CASES[name]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    batches = [np.stack([a, np.float32(1.1) * a]) for a in arguments]
    traced = jax.jit(jax.vmap(function)).trace(*batches)
    on_cpu, on_gpu = (traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda"))
    assert "stablehlo.while" in on_cpu
    assert "stablehlo.while" not in on_gpu


@pytest.mark.parametrize("dim", [1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 150])
@pytest.mark.thorough
def test_a_triangle_is_inverted_by_blocks_as_exactly_as_its_condition_allows(dim):
    """Against float64; coordinates correlated by .999 have a factor of condition 30 √d."""
    factor = np.linalg.cholesky(0.999 * np.ones((dim, dim)) + 0.001 * np.eye(dim))
    found = default_jit(invert_lower)(jnp.asarray(factor, jnp.float32))
    assert found.dtype == jnp.float32
    exact = np.linalg.inv(np.asarray(jnp.asarray(factor, jnp.float32), np.float64))
    assert np.all(np.triu(np.asarray(found), 1) == 0.0)
    # Higham (2002), section 14.2: |X - L⁻¹| ≤ c d u |L⁻¹| |L| |L⁻¹|; c is 2 by blocks. Errors
    # have both signs: .007 of the bound was measured at 31, .002 at 150.
    bound = 2 * dim * np.finfo(np.float32).eps * np.abs(exact) @ np.abs(factor) @ np.abs(exact)
    assert np.all(np.abs(found - exact) <= 0.03 * bound + np.finfo(np.float32).eps * np.abs(exact))


@pytest.mark.parametrize(
    "dim", [*(pytest.param(d, marks=pytest.mark.slow) for d in (1, 10)), 40, 100]
)
@pytest.mark.thorough
def test_lapack_calls_of_a_step_are_of_sizes_for_one_thread(dim):
    """Threads of OpenBLAS spin after a call that used them: on two cores steps took twice as long.

    Where it divides: triangular solves for 1024 numbers, eigenproblems beyond 25, which it splits,
    Cholesky factors between 200 and 256, and LU factors between 250 and 300.
    """

    def model():
        numpyro.sample("x", dist.Normal(jnp.zeros(dim), 1.0).to_event(1))

    svi = SVI(model, AutoImplicit(model, warm_start=False), optax.sgd(0.1), ImplicitELBO())
    text = jax.jit(svi.update).lower(jax.eval_shape(svi.init, random.key(0))).as_text()
    sizes = {"potrf": 0, "trsm": 0, "syevd": 0, "getrf": 0}
    for line in text.splitlines():
        if call := re.search(r"@(?:lapack|blas)_s(\w+?)_ffi", line):
            shapes = [
                [int(size) for size in shape.split("x")[:-1]]
                for shape in re.findall(r"tensor<([\dx]+xf32)>", line.rsplit(": (", 1)[1])
            ]
            last = max(shapes, key=len)
            size = last[-2] * last[-1] if call[1] == "trsm" else last[-1]
            sizes[call[1]] = max(sizes[call[1]], size)
    assert sizes["syevd"] > 0, "expected LAPACK calls; the check below would be empty"
    assert sizes["syevd"] <= 25
    assert sizes["potrf"] <= 200
    assert sizes["getrf"] < 200
    assert sizes["trsm"] < 1024


@pytest.mark.parametrize(
    ("dim", "is_cpu"),
    [(1, True), (2, True), (7, True), (30, True), (40, True), (1, False), (7, False)],
)
@pytest.mark.thorough
def test_log_abs_det_and_its_gradient(dim, is_cpu, monkeypatch):
    """Against NumPy in float64; the first pivot of the second matrix is zero."""
    if not is_cpu:
        elsewhere_than_on_a_cpu(monkeypatch)
    generator = np.random.default_rng(dim)
    matrices = generator.standard_normal((2, dim, dim))
    if dim > 1:
        matrices[1, 0, 0] = 0.0
    with jax.enable_x64(True):
        values, gradients = jax.jit(jax.vmap(jax.value_and_grad(log_abs_det)))(matrices)
    np.testing.assert_allclose(values, np.linalg.slogdet(matrices)[1], rtol=1e-12, atol=1e-12)
    inverses = np.swapaxes(np.linalg.inv(matrices), 1, 2)
    np.testing.assert_allclose(gradients, inverses, rtol=1e-8, atol=1e-10)
    single = np.asarray(jax.jit(jax.vmap(log_abs_det))(matrices.astype(np.float32)))
    np.testing.assert_allclose(single, values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("dim", [1, 2, 7, BLOCK + 1, 70])
def test_sign_and_inverse(dim, is_cpu, monkeypatch):
    """Against NumPy in float64, with many orders of pivots; on a CPU by calls of one matrix."""
    if not is_cpu:
        elsewhere_than_on_a_cpu(monkeypatch)
    matrices = np.random.default_rng(dim).standard_normal((40, dim, dim))
    expected = np.linalg.slogdet(matrices)
    assert set(expected[0]) == {-1.0, 1.0}
    with jax.enable_x64(True):
        sign, value, inverse = jax.jit(jax.vmap(slogdet_and_inverse))(matrices)
    np.testing.assert_array_equal(sign, expected[0])
    np.testing.assert_allclose(value, expected[1], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(inverse, np.linalg.inv(matrices), rtol=1e-8, atol=1e-9)
    if is_cpu:
        program = jax.jit(jax.vmap(slogdet_and_inverse)).lower(matrices.astype(np.float32))
        calls = re.findall(r".*@\w*(?:lapack|blas)_.*", program.as_text())
        assert calls
        assert not [call for call in calls if f"tensor<40x{dim}x{dim}x" in call]


@pytest.mark.thorough
def test_a_mapped_fit_has_no_batched_lapack_call():
    """Two batched LAPACK calls at once wait for each other forever on a two-core machine."""

    def fit(x):
        return ScoreEstimator(base="gaussian").at_samples(x, debias="jackknife").residual

    samples = random.normal(random.key(0), (3, 16, 2))
    text = jax.jit(jax.vmap(fit)).lower(samples).as_text()
    calls = [line for line in text.splitlines() if re.search(r"@\w*(lapack|blas)_", line)]
    assert calls, "expected LAPACK calls in the program; the check below would be empty"
    # tensor<3x...: three dimensions or more mean a batch.
    batched = [line for line in calls if re.search(r"tensor<\d+x\d+x\d+x[a-z]", line)]
    assert not batched
