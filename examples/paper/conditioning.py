"""Why conjugate gradients are cheap in high dimension: the second figure of the paper.

KEF-CG solves ``(K/n + λ) u = h`` with a curl-free kernel. Its cost is the number of steps, which
depends on the spread of the eigenvalues of K/n. Zhou, Shi and Zhu (2020), section 3.5, observe that
both shrink as the dimension grows. This script measures that with the inverse multiquadric kernel
at the median distance, for draws of a standard normal and of the grid distribution of ``grid.py``:

    python -m examples.paper.conditioning [--num-samples 128] [--lam 1e-5] [--csv conditioning.csv]
                                    [--figure conditioning.png] [--quick]
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import Array, random

from examples.common.tables import Row, fill, make_parser
from examples.paper.grid import draw
from numpyro_kscore.estimators import kef_cg
from numpyro_kscore.kernels._gram import Gram, make_gram
from numpyro_kscore.kernels._pairwise import squared_distances
from numpyro_kscore.solvers import Krylov

DIMS = (2, 4, 8, 16, 32, 64, 128)
DISTRIBUTIONS = ("normal", "grid")
# Largest order of a matrix whose eigenvalues are computed densely.
LARGEST = 2048
KRYLOV_STEPS = 300
COLUMNS = ("largest", "smallest", "largest_share", "steps", "steps_error", "residual")


def make_samples(distribution: str, key: Array, num_samples: int, dim: int) -> Array:
    """Draws, (n, d)."""
    if distribution == "normal":
        return random.normal(key, (num_samples, dim), jnp.float64)
    corner_key, sample_key = random.split(key)
    vertices = random.bernoulli(corner_key, 0.5, (dim, dim)).astype(jnp.float64)
    return draw(sample_key, vertices, num_samples)


@jax.jit
def make_operator(samples: Array, bandwidth: Array) -> Gram:
    """The operator ``K/n`` of :func:`kef_cg`."""
    points = (samples - samples.mean(0)) / bandwidth
    s = squared_distances(points, points, jnp.asarray(False))
    return make_gram(kef_cg().kernel, points, s, bandwidth**-2, samples.shape[1], False)


@partial(jax.jit, static_argnames="num_steps")
def ritz_values(gram: Gram, key: Array, num_steps: int) -> Array:
    """Ritz values of ``K/n`` in a Krylov space of a random vector: exact at the ends."""
    vector = random.normal(key, gram.points.T.shape, gram.points.dtype)
    return Krylov().decompose(gram, vector, num_steps).sigma


def compute(
    distribution: str, num_samples: int, dim: int, lam: float, tol: float, repeats: int, seed: int
) -> Row:
    """Means over the repeats; the eigenvalues are those of the first repeat."""
    estimator = kef_cg(lam, max_steps=2_000, tol=tol)
    keys = random.split(random.fold_in(random.key(seed), dim), repeats)
    steps, residuals = [], []
    for key in keys:
        samples = make_samples(distribution, key, num_samples, dim)
        info = estimator.fit(samples).info
        steps.append(int(info.steps))
        residuals.append(float(info.residual))
        if len(steps) == 1:
            gram = make_operator(samples, info.bandwidth)
    if num_samples * dim <= LARGEST:
        sigma = np.linalg.eigvalsh(np.asarray(gram.dense()))
    else:
        sigma = np.asarray(ritz_values(gram, random.key(seed), KRYLOV_STEPS))
    return {
        "largest": float(sigma.max()),
        "smallest": float(sigma.min()),
        "largest_share": float(sigma.max()) / float(trace_of(gram)),
        "steps": float(np.mean(steps)),
        "steps_error": float(np.std(steps) / max(1, repeats - 1) ** 0.5),
        "residual": max(residuals),
    }


def trace_of(gram: Gram) -> Array:
    """tr K/n, the sum of the eigenvalues."""
    return gram.scale * gram.kernel.trace(gram.dim)


def ratio(row: Row, num_samples: int) -> float:
    """Largest over smallest eigenvalue, which is at least the rounding error of the largest."""
    rounding = num_samples * row["dim"] * np.finfo(np.float64).eps * row["largest"]
    return row["largest"] / max(row["smallest"], rounding)


def plot(path: Path, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Plot steps, eigenvalue ratio and fraction of the trace over the dimension."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for distribution, color in zip(DISTRIBUTIONS, ("C0", "C1"), strict=True):
        found = [row for row in rows if row["distribution"] == distribution]
        dims = [row["dim"] for row in found]
        steps, errors = ([row[name] for row in found] for name in ("steps", "steps_error"))
        panels[0].errorbar(
            dims, steps, errors, fmt=color + "o-", ms=4, capsize=2, label=distribution
        )
        panels[1].plot(dims, [ratio(row, options.num_samples) for row in found], color + "o-")
        panels[2].plot(dims, [row["largest_share"] for row in found], color + "o-")
    panels[0].set_title(f"CG steps to {options.tol:g} (λ = {options.lam:g})")
    panels[1].set_title("largest / smallest eigenvalue")
    panels[2].set_title("largest eigenvalue / trace")
    for panel in panels:
        panel.set(xscale="log", yscale="log", xlabel="d")
        panel.set_xticks(sorted({row["dim"] for row in rows}), minor=False)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set(yscale="linear", ylim=(0, None))
    panels[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table, print it and draw the figure."""
    parser = make_parser("conditioning of curl-free kernels")
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--lam", type=float, default=1e-5, help="regularization parameter")
    parser.add_argument("--tol", type=float, default=1e-4, help="relative residual of the solve")
    parser.add_argument("--repeats", type=int, default=8, help="sets of draws")
    options = parser.parse_args(arguments)
    dims = DIMS
    if options.quick:
        options.num_samples, options.repeats, dims = 32, 2, (2, 16)

    common = {name: getattr(options, name) for name in ("lam", "tol", "repeats", "seed")}
    cells = [
        {"distribution": distribution, "num_samples": options.num_samples, "dim": dim} | common
        for dim in dims
        for distribution in DISTRIBUTIONS
    ]
    # The smallest eigenvalues are far below single precision.
    with jax.enable_x64(True):
        rows = fill(cells, compute, COLUMNS, options.csv)
    print(f"{'':8}{'d':>5}{'CG steps':>16}{'λ₁/λₙ':>12}{'λ₁/trace':>11}{'times n d':>11}")
    for row in sorted(rows, key=lambda row: DISTRIBUTIONS.index(row["distribution"])):
        print(
            f"{row['distribution']:8}{row['dim']:5}{row['steps']:10.1f} ±{row['steps_error']:4.1f}"
            f"{ratio(row, options.num_samples):12.3g}{row['largest_share']:11.4f}"
            f"{row['largest_share'] * options.num_samples * row['dim']:11.1f}"
        )
    print(
        f"\nn = {options.num_samples}; steps to a relative residual of {options.tol:g} at "
        f"λ = {options.lam:g}, mean ± standard error of {options.repeats} repeats.\nEigenvalues of "
        f"K/n are those of one repeat; above n d = {LARGEST} they are the extreme Ritz values of "
        f"{KRYLOV_STEPS} steps,\nwhich make the ratio a lower bound. The last column is the "
        "largest eigenvalue over the mean one."
    )
    if options.figure:
        plot(options.figure, rows, options)


if __name__ == "__main__":
    main()
