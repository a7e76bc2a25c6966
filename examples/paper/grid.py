"""Scores of a mixture in up to 128 dimensions: the first figure of the paper, and the default.

The *grid* distribution in d dimensions is a mixture of d Gaussians with unit covariance at random
corners of the unit cube. Zhou, Shi and Zhu (2020), figure 1, compare score estimators on it by
E|ŝ - s|²/d at 1024 fresh points, over the dimension and over the number of samples M. This script
repeats that with the estimators exactly as published (inverse multiquadric kernel, median
bandwidth, no base score) and the published range of settings. It adds ``ScoreEstimator()``, which
chooses its setting from the samples:

    python -m examples.paper.grid [--panels "M = 128" ...] [--repeats 32] [--csv grid.csv]
                                  [--figure grid.png] [--quick]

A published estimator gets the setting with the smallest mean error over the repeats, which needs
the true score. An interrupted script resumes from ``--csv``.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import Array, lax, random

from examples.common.tables import Row, fill, make_parser
from numpyro_kscore import ScoreEstimator, pytree
from numpyro_kscore.estimators import (
    Landmarks,
    kef_cg,
    nkef,
    nu_method,
    spectral_cutoff,
    ssge,
    stein,
)
from numpyro_kscore.regularizers import Filter, NuMethod, Regularizer

LAMBDAS = tuple(10.0**-k for k in range(9))
FRACTIONS = (0.99, 0.97, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
STEPS = tuple(range(20, 101, 10))
DIMS = (16, 32, 48, 64, 80, 96, 112, 128)
SAMPLES = (64, 128, 256, 512)
# Largest order of a factorized matrix: with a curl-free kernel it has M d or m d rows.
LARGEST = 2048
LANDMARK_FRACTION = 0.4
DEFAULT = "ScoreEstimator()"
COLUMNS = ("setting", "error", "standard_error", "seconds")


# Compiler options for programs that run once: little time is spent on optimizing.
HASTY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Method(NamedTuple):
    """An estimator with the settings that are searched.

    Attributes:
        make: setting, which may be traced -> estimator.
        settings: the settings to try.
        blocks: fraction of the samples whose d by d blocks are factorized; 0 if none are.
        style: line style in the figure.
    """

    make: Callable[[Any], ScoreEstimator]
    settings: tuple[Any, ...]
    blocks: float
    style: str


@pytree
class NuSteps(Regularizer):
    """``NuMethod`` with a traced number of steps, at most 100: one program for all numbers."""

    num_steps: Any

    @property
    def spectral_bound(self) -> float:
        return 1.0

    def evaluate(self, sigma: Array) -> Filter:
        zero = jnp.zeros_like(sigma)

        def step(carry: Any, inputs: Any) -> tuple[Any, None]:
            (g, g0, r), old = carry
            t, u, w = inputs
            forced = Filter(w * (1 - sigma * g), w, -w * g)
            new = jax.tree.map(lambda a, b, c: a + u * (a - b) + c, Filter(g, g0, r), old, forced)
            # After the last step nothing changes.
            return jax.tree.map(
                lambda a, b: jnp.where(t < self.num_steps, a, b), (new, Filter(g, g0, r)), carry
            ), None

        coefficients = (jnp.asarray(x, sigma.dtype) for x in NuMethod(STEPS[-1]).coefficients())
        start = Filter(zero, jnp.zeros((), sigma.dtype), zero)
        (last, _), _ = lax.scan(step, (start, start), (jnp.arange(STEPS[-1]), *coefficients))
        return last


def nu_steps(num_steps: Any) -> ScoreEstimator:
    """``nu_method(num_steps)`` for a number that may be traced."""
    return dataclasses.replace(nu_method(), regularizer=NuSteps(num_steps))


METHODS = {
    "Stein": Method(stein, LAMBDAS, 0.0, "C1--"),
    "SSGE": Method(ssge, FRACTIONS, 0.0, "C3--"),
    "spectral cut-off": Method(spectral_cutoff, FRACTIONS, 1.0, "C4-"),
    "NKEF": Method(
        partial(nkef, landmarks=Landmarks(fraction=LANDMARK_FRACTION)),
        LAMBDAS,
        LANDMARK_FRACTION,
        "C5-",
    ),
    "KEF-CG": Method(kef_cg, LAMBDAS, 0.0, "C2-"),
    "ν-method": Method(nu_steps, STEPS, 0.0, "C0-"),
    DEFAULT: Method(lambda _: ScoreEstimator(), (0,), 0.0, "k-"),
}


def log_density(vertices: Array, x: Array) -> Array:
    """Log density of the mixture at one point, (d,), up to a constant."""
    return jax.nn.logsumexp(-0.5 * jnp.sum((x - vertices) ** 2, axis=1))


def draw(key: Array, vertices: Array, count: int) -> Array:
    """Draws of the mixture, (count, d)."""
    corner_key, noise_key = random.split(key)
    corners = random.randint(corner_key, (count,), 0, len(vertices))
    return vertices[corners] + random.normal(noise_key, (count, vertices.shape[1]))


def errors(method: Method, num_samples: int, dim: int, num_points: int, keys: Array) -> Array:
    """E|ŝ - s|²/d, (repeats, settings); each repeat draws its own corners and samples."""

    def repeat(key: Array) -> Array:
        corner_key, sample_key, point_key = random.split(key, 3)
        vertices = random.bernoulli(corner_key, 0.5, (dim, dim)).astype(jnp.float32)
        samples = draw(sample_key, vertices, num_samples)
        points = draw(point_key, vertices, num_points)
        truth = jax.vmap(jax.grad(log_density, 1), (None, 0))(vertices, points)

        def error(setting: Any) -> Array:
            estimate = method.make(setting).fit(samples)(points)
            return jnp.mean((estimate - truth) ** 2)

        # Everything that does not depend on the setting, such as factorizations, is done once.
        return jax.vmap(error)(jnp.array(method.settings))

    return lax.map(repeat, keys)


def compute(
    estimator: str, num_samples: int, dim: int, repeats: int, seed: int, points: int
) -> Row:
    """One cell of the table: the best setting, its error, and seconds with compilation."""
    method = METHODS[estimator]
    start = time.perf_counter()
    keys = random.split(random.key(seed), repeats)
    program = jax.jit(
        partial(errors, method, num_samples, dim, points),
        compiler_options=HASTY if num_samples * dim * repeats < 1_000 else None,
    )
    table = np.asarray(program(keys), np.float64)
    means = table.mean(0)
    # A setting whose estimate overflowed in any repeat is excluded.
    best = int(np.argmin(np.where(np.isfinite(means), means, np.inf)))
    return {
        "setting": method.settings[best],
        "error": float(means[best]),
        "standard_error": float(table[:, best].std() / max(1, repeats - 1) ** 0.5),
        "seconds": round(time.perf_counter() - start, 2),
    }


def is_affordable(estimator: str, num_samples: int, dim: int) -> bool:
    """True if the matrix that the estimator factorizes is small enough."""
    return METHODS[estimator].blocks * num_samples * dim <= LARGEST


def make_panels(options: argparse.Namespace) -> dict[str, list[tuple[int, int]]]:
    """Pairs of M and d, by the title of their panel."""
    if options.quick:
        return {"M = 32": [(32, 4)]}
    panels = {f"M = {m}": [(m, dim) for dim in DIMS] for m in (128, 512)}
    panels |= {f"d = {dim}": [(m, dim) for m in SAMPLES] for dim in (16, 128)}
    return {title: panels[title] for title in panels if title in options.panels}


def table(rows: dict[tuple, Row], sizes: Sequence[tuple[int, int]]) -> list[str]:
    """Lines of the printed table: errors, with the best settings below."""
    lines = [f"{'M':>4}{'d':>5}" + "".join(f"{name:>18}" for name in METHODS)]
    for m, dim in sizes:
        found = [rows.get((name, m, dim)) for name in METHODS]
        values = [
            f"{row['error']:.4f} ±{row['standard_error']:.4f}" if row else "—" for row in found
        ]
        chosen = [
            f"{row['setting']:g}" if row and row["estimator"] != DEFAULT else "" for row in found
        ]
        lines.append(f"{m:4}{dim:5}" + "".join(f"{value:>18}" for value in values))
        lines.append(" " * 9 + "".join(f"{value:>18}" for value in chosen))
    return lines


def verdict(rows: dict[tuple, Row], sizes: Sequence[tuple[int, int]]) -> list[str]:
    """The number of cells in which each claim holds."""

    def least(names: Sequence[str], size: tuple[int, int]) -> float:
        return min(rows[name, *size]["error"] for name in names if (name, *size) in rows)

    diagonal, published = ("Stein", "SSGE"), [name for name in METHODS if name != DEFAULT]
    lines = []
    for name in ("ν-method", "KEF-CG"):
        better = [size for size in sizes if rows[name, *size]["error"] < least(diagonal, size)]
        lines.append(f"{name} better than Stein and SSGE: {len(better)} of {len(sizes)} cells")
    worse = [size for size in sizes if rows[DEFAULT, *size]["error"] >= least(published, size)]
    count = f"{len(sizes) - len(worse)} of {len(sizes)} cells"
    exceptions = "".join(f"; not at M = {m}, d = {dim}" for m, dim in worse)
    lines.append(f"{DEFAULT} better than every published one: {count}{exceptions}")
    return lines


def plot(panel: plt.Axes, title: str, sizes: Sequence[tuple[int, int]], rows: dict) -> None:
    """Plot errors over M or d, whichever varies."""
    axis = 1 if title.startswith("M") else 0
    for name, method in METHODS.items():
        found = [size for size in sizes if (name, *size) in rows]
        values = [rows[name, *size] for size in found]
        panel.errorbar(
            [size[axis] for size in found],
            [row["error"] for row in values],
            [2 * row["standard_error"] for row in values],
            fmt=method.style + "o", ms=3, lw=1.2, capsize=2, label=name,
        )  # fmt: skip
    panel.set(title=title, xlabel="d" if axis else "M", yscale="log")
    panel.set_xticks([size[axis] for size in sizes])
    panel.grid(alpha=0.3, which="both")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table, print it and draw the figure."""
    parser = make_parser(
        "score estimators on the grid distribution", quick="one small size, to see it run"
    )
    parser.add_argument(
        "--panels", nargs="+", default=["M = 128", "M = 512", "d = 16", "d = 128"],
        help="which of 'M = 128', 'M = 512', 'd = 16' and 'd = 128'",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument(
        "--points", type=int, default=1024, help="points that errors are measured at"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.points = 2, 128

    panels = make_panels(options)
    sizes = sorted({size for panel in panels.values() for size in panel})
    common = {"repeats": options.repeats, "seed": options.seed, "points": options.points}
    cells = [
        {"estimator": name, "num_samples": m, "dim": dim} | common
        for m, dim in sizes
        for name in METHODS
        if is_affordable(name, m, dim)
    ]
    found = fill(cells, compute, COLUMNS, options.csv)
    rows = {(row["estimator"], row["num_samples"], row["dim"]): row for row in found}
    print(*table(rows, sizes), "", *verdict(rows, sizes), sep="\n")
    print(
        f"\nE|ŝ - s|²/d at {options.points} fresh points, mean ± standard error of "
        f"{options.repeats} repeats. Below it the setting with\nthe smallest mean, out of 9: λ of "
        "Stein, NKEF and KEF-CG, the fraction of the eigenvalues of SSGE and the\nspectral cut-off "
        "(curl-free kernel), steps of the ν-method. A dash: a matrix of more than "
        f"{LARGEST} rows\nwould have to be factorized. NKEF has {LANDMARK_FRACTION:g} M landmarks."
    )
    if options.figure:
        figure, axes = plt.subplots(
            1, len(panels), figsize=(1 + 4 * len(panels), 4), squeeze=False, layout="constrained"
        )
        for panel, (title, members) in zip(axes[0], panels.items(), strict=True):
            plot(panel, title, members, rows)
        axes[0, 0].set_ylabel("E|ŝ - s|²/d")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
        figure.savefig(options.figure, dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
