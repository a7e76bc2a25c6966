"""Functional Bayesian neural networks: the prior is a distribution of functions, not of weights.

    python -m examples.functions.bnn                             # scikit-learn's diabetes data
    python -m examples.functions.bnn --toys --figure toys.png
    python -m examples.functions.bnn --data yacht.txt concrete.txt --seeds 10 --csv uci.csv

A network with random weights is a random function. The density of its values at a finite set of
inputs cannot be evaluated, but their score can be estimated, so a Gaussian process or a simulator
can be their prior. The script compares this with networks with a posterior over weights, the exact
Gaussian process, a deep ensemble and MC dropout. Rows in the CSV file are not computed again.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from examples.common.output import output_file
from examples.common.tables import Row, fill
from examples.functions import simulated, tasks, toys
from examples.functions.data import load, split
from examples.functions.fit import Settings
from examples.functions.methods import DEFAULT_METHODS, METHODS, Process, fit, hyperparameters
from examples.functions.metrics import COLUMNS, measure_fit

TOYS = (*toys.PROCESSES, *tasks.TOYS)


def make_parser() -> ArgumentParser:
    """The options of the command."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--toys", nargs="*", choices=TOYS, metavar="TOY",
                        help="functions of one variable instead: all, or some of "
                        + ", ".join(TOYS))  # fmt: skip
    parser.add_argument("--priors", nargs="+", choices=simulated.METHODS, default=("program",),
                        help="for toys whose prior is a simulator: the program, a prior learned "
                        "from its draws, the Gaussian of their moments")  # fmt: skip
    parser.add_argument("--data", nargs="+", default=["diabetes"], help="files of numbers with "
                        "the target last, openml:ID, or diabetes")  # fmt: skip
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT_METHODS)
    parser.add_argument("--seeds", type=int, default=1, help="number of splits, or of data "
                        "sets of a simulator")  # fmt: skip
    parser.add_argument("--steps", type=int, help="default: 2000 to 12 000 for toys, 3000 for "
                        "diabetes, 20 000 otherwise")  # fmt: skip
    parser.add_argument("--step-size", type=float, default=3e-3, help="first step size of Adam")
    parser.add_argument("--batch", type=int, default=20, help="rows per step")
    parser.add_argument("--points", type=int, default=5, help="other inputs per step")
    parser.add_argument("--particles", type=int, default=100, help="functions per step")
    parser.add_argument("--csv", type=output_file, help="table to write, and to resume from")
    parser.add_argument("--figure", type=output_file, default=Path("functional_bnn.png"))
    parser.add_argument("--quick", action="store_true", help="20 steps, to see it run")
    return parser


def regress(options: Namespace) -> list[Row]:
    """One row for every data set, split and method."""
    paths = {Path(name).stem if name != "diabetes" else name: name for name in options.data}
    tables = {short: load(name)[1:] for short, name in paths.items()}
    cells = [
        {"data": name, "seed": seed, "method": method,
         "steps": options.steps or (3000 if name == "diabetes" else 20_000),
         "step_size": options.step_size, "batch": options.batch, "points": options.points,
         "particles": options.particles}
        for seed in range(options.seeds) for name in tables for method in options.methods
    ]  # fmt: skip

    def compute(data: str, seed: int, method: str, steps: int, **rest: Any) -> dict[str, Any]:
        parts = split(*tables[data], seed)
        sizes = {f"num_{name}": rest[name] for name in ("points", "particles")}
        settings = Settings(steps, rest["step_size"], rest["batch"], **sizes)
        process = partial(hyperparameters_of, data, seed)
        return measure_fit(fit(method, parts, settings, seed, process), parts)

    # Splits come one after another, and the methods of one split use the same Gaussian process.
    @lru_cache(maxsize=1)
    def hyperparameters_of(data: str, seed: int) -> Process:
        return hyperparameters(split(*tables[data], seed))

    return fill(cells, compute, COLUMNS, options.csv)


def print_table(rows: list[Row]) -> None:
    """Print means over seeds, with standard errors if there are several."""
    header = ("RMSE", "log likelihood", "CRPS", "calibration", "entropy rise", "seconds")
    for name in dict.fromkeys(row["data"] for row in rows):
        seeds = len({row["seed"] for row in rows if row["data"] == name})
        print(f"\n{name}, {seeds} split(s)")
        print(f"{'':24}" + "".join(f"{title:>17}" for title in header))
        for method in dict.fromkeys(row["method"] for row in rows):
            of_method = [row for row in rows if (row["data"], row["method"]) == (name, method)]
            line = ""
            for column in COLUMNS:
                values = np.array([row[column] for row in of_method])
                text = f"{values.mean():.3f}"
                if seeds > 1:
                    text += f" ± {values.std(ddof=1) / np.sqrt(seeds):.3f}"
                line += f"{text:>17}"
            print(f"{method:24}{line}")
    print(
        "\nCalibration: mean distance between the fraction of targets below a predicted quantile "
        "and its level.\nEntropy rise: that of predictions, in nats, at inputs three times as far "
        "from the center."
    )


def plot_table(rows: list[Row], path: Path) -> None:
    """Plot RMSE and log likelihood of every method, one column for each data set."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, panels = plt.subplots(
        2, len(names), figsize=(2 + 3 * len(names), 5.5), squeeze=False, layout="constrained"
    )
    for name, pair in zip(names, panels.T, strict=True):
        for panel, column in zip(pair, ("rmse", "log_likelihood"), strict=True):
            for place, method in enumerate(methods):
                values = [r[column] for r in rows if (r["data"], r["method"]) == (name, method)]
                panel.plot(np.full(len(values), place), values, "o", ms=4, alpha=0.7)
            panel.set(title=name, ylabel=column.replace("_", " "))
            panel.set_xticks(range(len(methods)), methods, rotation=40, ha="right", fontsize=7)
            panel.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def solve_toys(options: Namespace) -> list[Path]:
    """Fit the toys, print their differences from the exact posteriors and draw them."""
    chosen = options.toys or TOYS
    paths = []
    if processes := [name for name in toys.PROCESSES if name in chosen]:
        paths.append(options.figure)
        solve_processes(processes, options)
    if simulators := [name for name in tasks.TOYS if name in chosen]:
        path = options.figure
        paths.append(path.with_stem(f"{path.stem}_simulators") if paths else path)
        given = options.priors, options.seeds, options.steps, options.csv
        rows, panels = simulated.run(simulators, *given)
        simulated.print_rows(rows)
        simulated.plot(panels, paths[-1])
    return paths


def solve_processes(names: Sequence[str], options: Namespace) -> None:
    """Fit the toys whose prior is a Gaussian process."""
    solved = {}
    print(f"{'':20}{'mean, error in sd':>24}{'sd, ratio to the exact':>40}{'seconds':>10}")
    print(f"{'':20}{'inside':>12}{'outside':>12}{'inside':>20}{'outside':>20}")
    settings = with_steps(toys.TOY, options)
    for name, guide in product(names, toys.GUIDES):
        found = toys.solve(name, settings, guide=guide)
        # The figure shows the network, which has to find the posterior.
        solved.setdefault(name, found)
        values = toys.compare(found)
        ratios = "".join(
            f"{values[f'sd_{where}_least']:>12.2f} – {values[f'sd_{where}_most']:.2f} "
            for where in ("inside", "outside")
        )
        label = f"{name}, {guide}"
        print(f"{label:20}{values['mean_inside']:>12.2f}{values['mean_outside']:>12.2f}"
              f"{ratios}{found.seconds:>8.0f}")  # fmt: skip
    toys.plot(solved, options.figure)


def with_steps(settings: Settings, options: Namespace) -> Settings:
    return replace(settings, num_steps=options.steps or settings.num_steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, print tables and draw figures."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps = 20
    plt.switch_backend("agg")
    if options.toys is not None:
        paths = solve_toys(options)
    else:
        paths = [options.figure]
        try:
            rows = regress(options)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        print_table(rows)
        plot_table(rows, options.figure)
    print("\npicture in " + ", ".join(map(str, paths)))


if __name__ == "__main__":
    main()
