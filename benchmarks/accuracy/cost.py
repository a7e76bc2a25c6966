"""Costs of a posterior: seconds of a first and of a later call, gradients, and distance.

    python -m benchmarks.accuracy.cost --cache FOLDER --csv FILE [--data PATH]
        [--targets banana ...] [--methods AutoImplicit ...] [--figure FILE] [--quick]

Every method runs twice on every posterior, with its usual settings, as ``posterior_accuracy`` has
them: first in a process that has compiled nothing for it, and once more with another key, as a user
who has changed something does. NUTS and MAMS are one chain each, of the model as it is written.

* seconds, CPU: of the first call, compilation included, and of the later one;
* gradients of the model's density, over all particles, the search for a start and warm-up included;
  on tall data, where guides are fitted to minibatches, a gradient is a pass over all rows;
* W/floor, mean, sd: of the first call, see ``posterior_accuracy``.

The lines at the end are medians over the familiar and over the tall posteriors, and on how many a
method is right: all means within .15 standard deviations, all standard deviations within 10 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from benchmarks.accuracy.fits import Fit
from benchmarks.accuracy.guides import METHODS, NUM_STEPS
from benchmarks.accuracy.posterior_accuracy import (
    FIGURES,
    Bench,
    add_files,
    measure,
    usable_targets,
)
from benchmarks.accuracy.posteriors import POSTERIORS, SUITES
from benchmarks.accuracy.report import STYLES, row_is_right
from examples.common.tables import Row, fill
from numpyro_kscore._util.compiling import forget_programs

COMPARED = (
    "AutoImplicit", "AutoIAFNormal", "AutoBNAFNormal", "AutoMultivariateNormal",
    "multi-Pathfinder", "NUTS", "MAMS",
)  # fmt: skip
CLOCKS = ("seconds", "cpu_seconds", "later_seconds", "later_cpu_seconds")
COLUMNS = ("dim", *FIGURES, *CLOCKS, "gradients", "steps")
QUICK_TARGETS, QUICK_METHODS = ("banana",), ("AutoImplicit", "NUTS")


class Costs(Bench):
    """Computes the rows of the table."""

    def cost(self, target: str, method: str, num_steps: int) -> Row:
        """One row: two calls, and the figures of the first."""
        posterior, reference = self.posterior(target), self.reference(target)
        # Without what other methods have compiled, single operations too.
        forget_programs()
        num_draws = len(reference.truth)
        first, later = (self.fit(posterior, method, seed, num_steps, num_draws) for seed in (0, 1))
        figures = measure(first.draws, reference, posterior.heavy_tails, self.sizes.num_pairs)
        return {
            "dim": figures["dim"],
            **{name: float(f"{figures[name]:.5g}") for name in FIGURES},
            **dict(zip(CLOCKS, _clocks(first) + _clocks(later), strict=True)),
            "gradients": first.gradients,
            "steps": first.steps,
        }


def _clocks(fit: Fit) -> tuple[float, float]:
    return round(fit.seconds, 2), round(fit.cpu_seconds, 2)


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines of medians, one for each method."""
    lines = [
        f"{'':24}{'right':>9}{'W/floor':>9}{'seconds':>9}{'CPU s':>8}{'later s':>9}{'CPU s':>8}"
        f"{'gradients':>11}{'CPU s, all':>12}"
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        middle = {
            name: float(np.nanmedian([float(row[name]) for row in own]))
            for name in ("distance", *CLOCKS, "gradients")
        }
        total = np.nansum([float(row["cpu_seconds"]) for row in own])
        lines.append(
            f"{method:24}{sum(map(row_is_right, own)):>3} of {len(own):2}{middle['distance']:9.2f}"
            f"{middle['seconds']:9.1f}{middle['cpu_seconds']:8.1f}{middle['later_seconds']:9.1f}"
            f"{middle['later_cpu_seconds']:8.1f}{middle['gradients']:11.2g}{total:12.0f}"
        )
    return lines


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Plot distances against gradients and CPU seconds, a point for each posterior."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    columns = {"gradients": "gradients of the model", "cpu_seconds": "CPU seconds, first call"}
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        distance = [float(row["distance"]) for row in own]
        for panel, name in zip(panels, columns, strict=True):
            values = [float(row[name]) for row in own]
            panel.plot(values, distance, STYLES[method], ms=5, alpha=0.7, label=method)
    for panel, label in zip(panels, columns.values(), strict=True):
        panel.set(xscale="log", yscale="log", xlabel=label)
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[1].xaxis.set_major_formatter(ScalarFormatter())
    panels[0].set_ylabel("sliced Wasserstein distance / sampling floor")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table, print it with medians and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_files(parser)
    parser.add_argument("--targets", nargs="+", choices=POSTERIORS, metavar="TARGET")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD")
    parser.add_argument("--quick", action="store_true", help="few draws and steps, to see it run")
    options = parser.parse_args(arguments)
    options.diagnose = False

    bench = Costs(options)
    suites = (*SUITES["familiar"], *SUITES["tall"])
    targets = options.targets or (QUICK_TARGETS if options.quick else suites)
    methods = options.methods or (QUICK_METHODS if options.quick else COMPARED)
    num_steps = 20 if options.quick else NUM_STEPS
    cells = [
        {"target": target, "method": method, "num_steps": num_steps}
        for target in usable_targets(bench, targets)
        for method in methods
    ]
    rows = fill(cells, bench.cost, COLUMNS, options.csv)
    for row in rows:
        print(
            f"{row['target']:24}{row['method']:24}W {float(row['distance']):6.2f}  first "
            f"{float(row['seconds']):6.1f} s  later {float(row['later_seconds']):6.1f} s  "
            f"{float(row['gradients']):9.2g} gradients"
        )
    for name in ("familiar", "tall"):
        of_suite = [row for row in rows if row["target"] in SUITES[name]]
        if of_suite:
            print("", f"{name}, medians over the posteriors", *summary(of_suite), sep="\n")
    if options.figure:
        plot(options.figure, rows)


if __name__ == "__main__":
    main()
