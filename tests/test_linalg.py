"""Factorisations under vmap: the same numbers, and never a batched LAPACK call."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_kscore import ScoreEstimator
from numpyro_kscore._linalg import cholesky, eigh, qr, solve_lower, solve_lower_transposed

LOWER = jnp.asarray([[2.0, 0.0, 0.0], [0.5, 1.5, 0.0], [-0.3, 0.2, 1.0]])
SYMMETRIC = LOWER @ LOWER.T
B = jnp.arange(6.0).reshape(3, 2)
CASES = {
    "eigh": (eigh, jnp.linalg.eigh, (SYMMETRIC,)),
    "cholesky": (cholesky, jnp.linalg.cholesky, (SYMMETRIC,)),
    "qr": (qr, jnp.linalg.qr, (SYMMETRIC[:, :2],)),
    "solve_lower": (solve_lower, lambda a, b: jnp.linalg.solve(jnp.tril(a), b), (LOWER, B)),
    "solve_lower_transposed": (
        solve_lower_transposed,
        lambda a, b: jnp.linalg.solve(jnp.tril(a).T, b),
        (LOWER, B),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_plain_function_batched_and_differentiated(name):
    looped, plain, arguments = CASES[name]

    def total(fn):
        return lambda *a: sum(jnp.sum(jnp.sin(part)) for part in jax.tree.leaves(fn(*a)))

    batches = [jnp.stack([a, 1.1 * a]) for a in arguments]
    for transform in (lambda f: f, jax.grad, lambda f: jax.jacfwd(f)):
        mine = jax.vmap(transform(total(looped)))(*batches)
        reference = jax.vmap(transform(total(plain)))(*batches)
        np.testing.assert_allclose(mine, reference, rtol=2e-4, atol=2e-4)


def test_a_mapped_fit_has_no_batched_lapack_call():
    """Two batched LAPACK calls at once wait for each other for ever on a two-core machine."""

    def fit(x):
        return ScoreEstimator(base="gaussian").at_samples(x, debias="jackknife").residual

    samples = random.normal(random.key(0), (3, 16, 2))
    text = jax.jit(jax.vmap(fit)).lower(samples).as_text()
    calls = [line for line in text.splitlines() if re.search(r"@\w*(lapack|blas)_", line)]
    assert calls, "expected LAPACK calls in the program; the check below would be empty"
    # tensor<3x...: three dimensions or more mean a batch.
    batched = [line for line in calls if re.search(r"tensor<\d+x\d+x\d+x[a-z]", line)]
    assert not batched
