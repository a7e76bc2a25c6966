"""Growth of a fit's time, memory and compilation with the number and dimension of samples.

    python -m benchmarks.speed.growth [--csv FILE] [--figure FILE] [--quick]

A fit is everything ``ScoreEstimator`` does with 50 ν-steps: whitening, bandwidth, base score,
solve, values at the samples. Memory is that of the compiled program without its input and output;
it is dominated by the matrix of pairs up to about 2900 samples and by tiles above. Exponents, also
shown in the figure, are slopes of a least-squares line through the logarithms of the last four
sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from jax import random

from benchmarks.speed.measuring import (
    Row,
    compile_seconds,
    make_parser,
    minimum_seconds,
    temporary_megabytes,
    write_table,
)
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import Subset
from numpyro_kscore.regularizers import NuMethod

SAMPLES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DIMENSIONS = (2, 4, 8, 16, 32, 64, 128, 256)
FIXED_DIM, FIXED_SAMPLES = 16, 512
FITTED = 4
# More samples than the subset has, up to sizes where a full fit takes many seconds.
SUBSET = 2048
SUBSET_SAMPLES = (4096, 16384, 65536, 262144)
# Sizes of a quick run: the smallest of each series.
QUICK = {"samples": 3, "dimension": 3, "subset": 2}


def fit_row(what: str, n: int, dim: int, estimator: ScoreEstimator, budget: float) -> Row:
    """Time, memory and compilation of one fit."""
    x = random.normal(random.key(n + dim), (n, dim))

    def fit(x: object) -> object:
        return estimator.fit(x).expansion

    times = minimum_seconds({"fit": lambda: fit(x)}, budget, fewest=1)
    return {
        "what": what,
        "n": n,
        "d": dim,
        "ms": 1e3 * times["fit"],
        "MB": temporary_megabytes(fit, x),
        "compile, s": compile_seconds(fit, x),
    }


def rows(quick: bool = False) -> Iterator[Row]:
    """All rows of the benchmark."""
    budget = 0.1 if quick else 1.0
    count = QUICK if quick else dict.fromkeys(QUICK)
    full = ScoreEstimator(regularizer=NuMethod(50))
    some = ScoreEstimator(regularizer=NuMethod(50), subset=Subset(SUBSET))
    for n in SAMPLES[: count["samples"]]:
        yield fit_row("samples", n, FIXED_DIM, full, budget)
    for dim in DIMENSIONS[: count["dimension"]]:
        yield fit_row("dimension", FIXED_SAMPLES, dim, full, budget)
    for n in SUBSET_SAMPLES[: count["subset"]]:
        yield fit_row(f"samples, subset of {SUBSET}", n, FIXED_DIM, some, budget)


def exponents(table: Sequence[Row]) -> dict[str, float]:
    """Exponent of time in every series, from its last four sizes."""
    found = {}
    for what in dict.fromkeys(row["what"] for row in table):
        series = [row for row in table if row["what"] == what][-FITTED:]
        size = np.log([row["d" if what == "dimension" else "n"] for row in series])
        values = np.log([row["ms"] for row in series])
        found[what] = float(np.polyfit(size, values, 1)[0])
    return found


def plot(table: Sequence[Row], path: Path) -> None:
    """Plot time and memory against samples and dimension, on logarithmic axes."""
    slopes = exponents(table)
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.5), sharey="row", layout="constrained")
    labels = {"ms": "ms a fit", "MB": "MB without input and output"}
    for what in dict.fromkeys(row["what"] for row in table):
        series = [row for row in table if row["what"] == what]
        axis = int(what == "dimension")
        size = [row["d" if axis else "n"] for row in series]
        for line, column in enumerate(("ms", "MB")):
            panel = panels[line][axis]
            name = what.removeprefix("samples, ") if "," in what else "all samples"
            panel.loglog(
                size,
                [row[column] for row in series],
                "o-",
                label=f"{name}: exponent {slopes[what]:.2f}" if column == "ms" else name,
            )
            panel.set_ylabel(labels[column] if axis == 0 else "")
            panel.set_xlabel(
                f"dimension d, n = {FIXED_SAMPLES}" if axis else f"samples n, d = {FIXED_DIM}"
            )
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--figure", type=Path, help="picture to write")
    options = parser.parse_args(arguments)
    table = list(rows(options.quick))
    write_table(options.csv, table)
    for what, slope in exponents(table).items():
        print(f"exponent of time in {what}: {slope:.2f}")
    if options.figure:
        plot(table, options.figure)


if __name__ == "__main__":
    main()
