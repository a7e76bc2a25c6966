"""Products with the Gram operator, as ratios within one run.

    python -m benchmarks.gram [--csv FILE]

Each row compares this library's product ``K v / n`` of a curl-free IMQ kernel with the same product
written with an array of shape (n, n, d), and with the three bare matrix products it is made of. The
last rows are whole fits: one Krylov space against the published recursion of 100 steps.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_kscore import CurlFree, Krylov, NuMethod, Recursion, ScoreEstimator
from numpyro_kscore.gram import is_cached, make_gram
from numpyro_kscore.pairwise import squared_distances

SIZES = ((64, 8), (64, 128), (128, 128), (512, 16), (512, 128), (1024, 32), (2048, 16), (8192, 16))
SPAN_SIZES = ((64, 784), (64, 12288))
FIT_SIZES = ((64, 20), (512, 16), (512, 128))
# The (n, n, d) form beyond this many entries does not fit ordinary memory.
MOST_ENTRIES = 2**29


def minimum_seconds(functions: dict[str, Callable[[], Any]], budget: float = 2.0) -> dict:
    """Smallest time of each function, called in turns for about ``budget`` seconds each."""
    best: dict[str, float] = {}
    for function in functions.values():
        jax.block_until_ready(function())  # compilation
    for name, function in functions.items():
        start = time.perf_counter()
        jax.block_until_ready(function())
        best[name] = time.perf_counter() - start
    rounds = max(3, min(300, int(budget / max(best.values()))))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def plain_product(points: Array, v: Array) -> Array:
    """The same product with an array of all differences."""
    kernel = CurlFree()
    r = points[:, None, :] - points[None, :, :]
    s = jnp.sum(r * r, axis=-1)
    weights = kernel.field_weights(s, points.shape[1])
    inner = jnp.einsum("ijd,jd->ij", r, v)
    along = jnp.einsum("ij,ij,ijd->id", weights.outer, inner, r)
    return (along + weights.inner @ v) / points.shape[0]


def problem(n: int, dim: int) -> tuple[Array, Array]:
    """Points in units of their typical distance, and a vector."""
    x_key, v_key = random.split(random.key(n + dim))
    return random.normal(x_key, (n, dim)) / (2 * dim) ** 0.5, random.normal(v_key, (n, dim))


def product_row(n: int, dim: int) -> dict[str, Any]:
    """Times of one product."""
    points, v = problem(n, dim)
    s = squared_distances(points, points, jnp.asarray(False)) if is_cached(n) else None
    gram = jax.jit(lambda x, s: make_gram(CurlFree(), x, s, jnp.ones(()), x.shape[1], False))(
        points, s
    )
    ours = jax.jit(lambda gram, v: gram @ v)
    square = jnp.ones((n, n))
    # The products the operator consists of: x vᵀ, then two of (n, n) with (n, d).
    bare = jax.jit(lambda x, v, w: (x @ v.T, v.T @ w, x.T @ w))
    functions = {
        "ours": lambda: ours(gram, v.T),
        "bare": lambda: bare(points, v, square),
    }
    if n * n * dim <= MOST_ENTRIES:
        plain = jax.jit(plain_product)
        functions["plain"] = lambda: plain(points, v)
    times = minimum_seconds(functions)
    return {
        "what": "product",
        "n": n,
        "d": dim,
        "regime": "cached" if s is not None else "streamed",
        "microseconds": 1e6 * times["ours"],
        "times faster than (n,n,d)": times.get("plain", float("nan")) / times["ours"],
        "share of bare products": times["bare"] / times["ours"],
    }


def fit_row(n: int, dim: int, what: str) -> dict[str, Any]:
    """A whole fit by Krylov against the recursion of 100 steps; or, where d > n, against itself
    without the rotation into the span of the samples."""
    samples = random.normal(random.key(n), (n, dim))
    estimator = ScoreEstimator(
        regularizer=NuMethod(100), solver=Krylov(), standardize="diagonal", bandwidth=1.0
    )
    literal = ScoreEstimator(
        regularizer=NuMethod(100), solver=Recursion(), standardize="diagonal", bandwidth=1.0
    )
    times = minimum_seconds(
        {
            "ours": lambda: estimator.at_samples(samples).scores,
            "literal": lambda: literal.at_samples(samples).scores,
        }
    )
    return {
        "what": what,
        "n": n,
        "d": dim,
        "regime": "span" if dim > n else "cached",
        "microseconds": 1e6 * times["ours"],
        "times faster than (n,n,d)": float("nan"),
        "times faster than 100 steps": times["literal"] / times["ours"],
    }


def span_row(n: int, dim: int) -> dict[str, Any]:
    """100 steps of the ν-method where d > n, against the (n, n, d) form's 100 products."""
    points, v = problem(n, dim)
    estimator = ScoreEstimator(
        regularizer=NuMethod(100), solver=Recursion(), standardize="none", bandwidth=1.0
    )
    plain = jax.jit(plain_product)
    times = minimum_seconds(
        {
            "ours": lambda: estimator.at_samples(points).scores,
            "plain": lambda: plain(points, v),
        }
    )
    return {
        "what": "100 steps, d > n",
        "n": n,
        "d": dim,
        "regime": "span",
        "microseconds": 1e6 * times["ours"],
        "times faster than (n,n,d)": 100 * times["plain"] / times["ours"],
    }


def rows() -> Iterator[dict[str, Any]]:
    """All rows of the benchmark."""
    for n, dim in SIZES:
        yield product_row(n, dim)
    for n, dim in SPAN_SIZES:
        yield span_row(n, dim)
    for n, dim in FIT_SIZES:
        yield fit_row(n, dim, "fit, 100 ν-steps")


COLUMNS = (
    *("what", "n", "d", "regime", "microseconds"),
    *("times faster than (n,n,d)", "share of bare products", "times faster than 100 steps"),
)


def main() -> None:
    """Runs the benchmark, prints the rows as they come, and writes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, help="file to write the rows to")
    options = parser.parse_args()
    table = []
    print(" | ".join(COLUMNS))
    for row in rows():
        table.append(row)
        cells = [row.get(column, "") for column in COLUMNS]
        print(" | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells), flush=True)
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
