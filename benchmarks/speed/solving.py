"""Speed of whole solves: one Krylov space against iterations and dense factorizations.

    python -m benchmarks.speed.solving [--csv FILE] [--quick]

* 100 steps of the ν-method: a Krylov space against the recursion. Both use this library's product
  with the Gram operator.
* KEF: conjugate gradients and a Krylov space against a Cholesky factorization of the (n d, n d)
  matrix, formed from its blocks or by automatic differentiation of the kernel (a Hessian for each
  pair).
* A path of nine λ from one Krylov space, against one λ.

Both sides of a comparison solve the same problem. The table has the largest difference between
their estimates, relative to the largest entry of the slow one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

from benchmarks.speed.measuring import (
    Row,
    counted_compilations,
    minimum_seconds,
    run_table,
)
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels import IMQ, CurlFree
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import ConjugateGradient, Krylov, Recursion

NU_SIZES = ((64, 20), (512, 16), (512, 128))
KEF_SIZES = ((512, 16), (64, 128))
QUICK_KEF_SIZES = ((64, 16),)
PATH_SIZES = ((128, 16), (512, 16), (512, 128))
LAM = 1e-3
# Nine values over eight decades around it.
PATH = LAM * 10.0 ** jnp.arange(-4, 5)


def draws(n: int, dim: int) -> Array:
    """Standard normal draws, (n, d): for small n d they are no easier than others."""
    return random.normal(random.key(n + dim), (n, dim))


def typical(dim: int) -> float:
    """Approximate median distance between draws."""
    return float((2 * dim) ** 0.5)


def plain(regularizer: Any, solver: Any, dim: int) -> ScoreEstimator:
    """An estimator that only solves: no whitening, no base score, a fixed bandwidth."""
    return ScoreEstimator(
        regularizer=regularizer,
        solver=solver,
        standardize="none",
        base=None,
        bandwidth=typical(dim),
    )


def difference(fast: Array, slow: Array) -> float:
    """Largest difference, relative to the largest entry."""
    return float(jnp.max(jnp.abs(fast - slow)) / jnp.max(jnp.abs(slow)))


def compare(functions: dict[str, Callable[[], Array]], budget: float) -> Row:
    """Times of a fast and a slow way to compute one estimate, in this order."""
    times = minimum_seconds(functions, budget, fewest=2)
    fast, slow = functions
    return {
        "ms": 1e3 * times[fast],
        "slow, ms": 1e3 * times[slow],
        "times faster": times[slow] / times[fast],
        "relative difference": difference(functions[fast](), functions[slow]()),
    }


def nu_row(n: int, dim: int, budget: float) -> Row:
    """One Krylov space against 100 steps of the recursion."""
    x = draws(n, dim)
    krylov, recursion = (plain(NuMethod(100), solver, dim) for solver in (Krylov(), Recursion()))
    functions = {
        "krylov": lambda: krylov.at_samples(x).scores,
        "recursion": lambda: recursion.at_samples(x).scores,
    }
    return {"what": "100 ν-steps: Krylov, recursion", "n": n, "d": dim} | compare(functions, budget)


def zeta(x: Array, dim: int) -> Array:
    """The divergence term at unit bandwidth, from an array of all differences."""
    r = x[:, None, :] - x[None, :, :]
    weights = CurlFree().field_weights(jnp.sum(r * r, axis=-1), dim)
    return jnp.mean(weights.zeta[..., None] * r, axis=1)


def blocks(x: Array) -> Array:
    """Blocks K(x_i, x_j), (n, n, d, d), from their formula."""
    return jax.vmap(lambda a: jax.vmap(lambda b: CurlFree()(a, b))(x))(x)


def hessians(x: Array) -> Array:
    """The same blocks by automatic differentiation of the radial profile."""

    def potential(a: Array, b: Array) -> Array:
        return IMQ()(jnp.sum((a - b) ** 2))

    block = jax.hessian(potential)
    return -jax.vmap(lambda a: jax.vmap(lambda b: block(a, b))(x))(x)


@partial(jax.jit, static_argnums=(0, 1))
def dense_kef(form: Callable[[Array], Array], lam: float, x: Array) -> Array:
    """``-(K/n + λ)⁻¹ ζ`` at the samples by Cholesky; K is divided by its trace at a point."""
    n, dim = x.shape
    x = (x - jnp.mean(x, axis=0)) / typical(dim)
    trace = CurlFree().trace(dim)
    matrix = form(x).transpose(0, 2, 1, 3).reshape(n * dim, n * dim) / trace
    factor = jnp.linalg.cholesky(matrix / n + lam * jnp.eye(n * dim))
    solution = jax.scipy.linalg.cho_solve((factor, True), (zeta(x, dim) / trace).ravel())
    return -solution.reshape(n, dim) / typical(dim)


def kef_rows(n: int, dim: int, budget: float) -> Iterator[Row]:
    """Conjugate gradients against two dense factorizations."""
    x = draws(n, dim)
    estimator = plain(Tikhonov(LAM), ConjugateGradient(200, 1e-5), dim)
    for name, form in (("blocks", blocks), ("autodiff", hessians)):
        functions = {
            "cg": lambda: estimator.at_samples(x).scores,
            "dense": lambda form=form: dense_kef(form, LAM, x),
        }
        row = compare(functions, budget)
        yield {"what": f"KEF: conjugate gradients, Cholesky ({name})", "n": n, "d": dim} | row


def path_row(n: int, dim: int, budget: float) -> Row:
    """Nine λ in one call against one λ, and the compilations that nine other λ need."""
    x = draws(n, dim)
    estimator = plain(Tikhonov(LAM), Krylov(32), dim)

    @jax.jit
    def scores(lam: Array) -> Array:
        return dataclasses.replace(estimator, regularizer=Tikhonov(lam)).at_samples(x).scores

    path = jax.jit(jax.vmap(scores))
    one_by_one = jnp.stack([scores(lam) for lam in PATH])
    with counted_compilations() as again:
        jax.block_until_ready([scores(lam) for lam in 2 * PATH])
    times = minimum_seconds({"path": lambda: path(PATH), "one": lambda: scores(PATH[4])}, budget)
    return {
        "what": "nine λ: Krylov, one λ",
        "n": n,
        "d": dim,
        "ms": 1e3 * times["path"],
        "slow, ms": 1e3 * times["one"],
        "times faster": times["one"] / times["path"],
        "relative difference": difference(path(PATH), one_by_one),
        "compilations for nine more λ": len(again),
    }


def rows(quick: bool) -> Iterator[Row]:
    """All rows of the benchmark."""
    budget = 0.3 if quick else 2.0
    for size in NU_SIZES[:2] if quick else NU_SIZES:
        yield nu_row(*size, budget)
    for size in QUICK_KEF_SIZES if quick else KEF_SIZES:
        yield from kef_rows(*size, budget)
    for size in PATH_SIZES[:1] if quick else PATH_SIZES:
        yield path_row(*size, budget)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    run_table(__doc__, rows, arguments)


if __name__ == "__main__":
    main()
