"""Speed of products with the Gram operator, against three other ways to compute them.

    python -m benchmarks.speed.gram [--csv FILE] [--quick]

Each row times this library's product ``K v / n`` of a curl-free IMQ kernel, repeated in one
compiled loop as a solver repeats it. It is compared with the three bare matrix products it consists
of, with the same product written with an array of shape (n, n, d), and, if pykeops is installed,
with KeOps's tiled reduction. For d > n a row compares 100 steps of the ν-method, as a fit takes
them, with 100 products of the (n, n, d) form; the fit has no base score, because a Gaussian base
costs O(d³). Ratios within one run are more reliable than the times.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from benchmarks.speed.measuring import (
    Row,
    iterated,
    minimum_seconds,
    run_table,
    temporary_megabytes,
)
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels import CurlFree
from numpyro_kscore.kernels._gram import is_cached, make_gram
from numpyro_kscore.kernels._pairwise import squared_distances
from numpyro_kscore.regularizers import NuMethod
from numpyro_kscore.solvers import Recursion

SIZES = (
    *((64, 8), (64, 128), (128, 128), (512, 16), (512, 128)),
    *((1024, 16), (1024, 32), (2048, 16), (8192, 16), (8192, 64)),
)
SPAN_SIZES = ((64, 784), (64, 12288))
QUICK_SIZES = ((64, 8), (512, 16), (4096, 4))  # the last one streams tiles
# Above this number of entries, the (n, n, d) form does not fit into ordinary memory.
MOST_ENTRIES = 2**28
# Operations in one timed loop: enough that the time of the call itself is negligible.
LOOP_OPERATIONS = 1e9


def plain_product(points: Array, v: Array) -> Array:
    """The same product computed from an array of all differences."""
    kernel = CurlFree()
    r = points[:, None, :] - points[None, :, :]
    s = jnp.sum(r * r, axis=-1)
    weights = kernel.field_weights(s, points.shape[1])
    inner = jnp.einsum("ijd,jd->ij", r, v)
    along = jnp.einsum("ij,ij,ijd->id", weights.outer, inner, r)
    return (along + weights.inner @ v) / points.shape[0]


def bare_products(operands: tuple[Array, Array], v: Array) -> Array:
    """Only the three matrix products, with the same shapes: (d, n) -> (d, n)."""
    x, square = operands
    return v @ square + x @ (v.T @ x)


def keops_product(points: Array, v: Array) -> Callable[[], Any] | None:
    """A function that computes the same product with KeOps on the CPU; None without pykeops."""
    if importlib.util.find_spec("pykeops") is None:
        return None
    from pykeops.numpy import LazyTensor

    x, c = np.asarray(points), np.asarray(v)

    def run() -> Any:
        r = LazyTensor(x[:, None, :]) - LazyTensor(x[None, :, :])
        c_j = LazyTensor(c[None, :, :])
        root = (1 + (r * r).sum(-1)).rsqrt()
        cube = root * root * root
        return ((-3.0 * cube * root * root * (r * c_j).sum(-1)) * r + cube * c_j).sum(1)

    return run


def problem(n: int, dim: int) -> tuple[Array, Array]:
    """Points in units of their typical distance and a vector, both (n, d)."""
    x_key, v_key = random.split(random.key(n + dim))
    return random.normal(x_key, (n, dim)) / (2 * dim) ** 0.5, random.normal(v_key, (n, dim))


def product_row(n: int, dim: int, budget: float) -> Row:
    """Times of one product and its alternatives."""
    points, v = problem(n, dim)
    s = squared_distances(points, points, jnp.asarray(False)) if is_cached(n) else None
    gram = jax.jit(lambda x, s: make_gram(CurlFree(), x, s, jnp.ones(()), x.shape[1], False))(
        points, s
    )
    count = int(np.clip(LOOP_OPERATIONS / (6 * n * n * dim), 1, 500))
    ours = iterated(lambda gram, v: gram @ v, count)
    bare = iterated(bare_products, count)
    times = minimum_seconds(
        {
            "ours": partial(ours, gram, v.T),
            "bare": partial(bare, (points.T, jnp.ones((n, n))), v.T),
        },
        budget,
    )
    row = {
        "n": n,
        "d": dim,
        "regime": "streamed" if s is None else "cached",
        "µs": 1e6 * times["ours"] / count,
        "share of bare products": times["bare"] / times["ours"],
        "MB": temporary_megabytes(lambda gram, v: gram @ v, gram, v.T),
    }
    others: dict[str, Callable[[], Any]] = {"ours": partial(jax.jit(lambda g, v: g @ v), gram, v.T)}
    if n * n * dim <= MOST_ENTRIES:
        others["plain"] = partial(jax.jit(plain_product), points, v)
    if n >= 512 and (keops := keops_product(points, v)) is not None:
        others["KeOps"] = keops
    times = minimum_seconds(others, budget)
    for name, label in (("plain", "times the (n,n,d) form"), ("KeOps", "times KeOps")):
        row[label] = times.get(name, float("nan")) / times["ours"]
    return row


def span_row(n: int, dim: int, budget: float) -> Row:
    """100 steps of the ν-method for d > n, against 100 products of the (n, n, d) form."""
    points, v = problem(n, dim)
    estimator = ScoreEstimator(
        regularizer=NuMethod(100),
        solver=Recursion(),
        standardize="none",
        bandwidth=1.0,
        base=None,
    )
    plain = jax.jit(plain_product)
    times = minimum_seconds(
        {
            "ours": lambda: estimator.at_samples(points).scores,
            "plain": lambda: plain(points, v),
        },
        budget,
    )
    return {
        "n": n,
        "d": dim,
        "regime": "100 steps in the span",
        "µs": 1e6 * times["ours"],
        "times the (n,n,d) form": 100 * times["plain"] / times["ours"],
    }


def rows(quick: bool) -> Iterator[Row]:
    """All rows of the benchmark."""
    budget = 0.3 if quick else 2.0
    for n, dim in QUICK_SIZES if quick else SIZES:
        yield product_row(n, dim, budget)
    for n, dim in SPAN_SIZES[:1] if quick else SPAN_SIZES:
        yield span_row(n, dim, budget)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    run_table(__doc__, rows, arguments)


if __name__ == "__main__":
    main()
