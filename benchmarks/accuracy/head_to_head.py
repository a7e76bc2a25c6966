"""Implicit guides of this library beside their published rivals, in one table.

    python -m benchmarks.accuracy.head_to_head --csv FILE [--targets banana ...]
        [--methods fit sivi ...] [--seeds 0 1 2] [--data FOLDER] [--cache FOLDER] [--share .1]
        [--quick]

``fit`` fits a network of noise by the defaults, ``auto`` an ``AutoImplicit``. Rivals are written
from their papers (``rivals/``, which says where, and with which settings), and take their authors'
number of steps, or the share of it that ``--share`` says. Ours never take fewer.

Targets are three toys with exact draws, a logistic regression of waveforms and a conditioned
diffusion of 100 steps with draws by NUTS, and Bayesian networks on three UCI regressions. FOLDER of
``--data`` has, at any depth, waveform.mat and NAME.txt of the regressions; targets whose files it
has not are left out.

``sliced`` is the sliced Wasserstein distance from exact draws in the mean over five sets, ``W`` the
same over that between exact sets, ``error`` its standard error from one set to another. ``reject``
is the rate at which a test of 500 draws tells them from exact ones at level .05. ``mean`` is the
largest error of a mean in standard deviations, ``low`` and ``high`` are ratios of these. Networks
have the ``rmse`` and the ``nll`` of test rows in standard units. ``gradients`` counts evaluations
of the model's gradient, ``cpu`` seconds of fitting with compilation. What goes wrong in a row is in
its ``said``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax import Array, random

from benchmarks.accuracy.posteriordb import sliced_wasserstein
from benchmarks.accuracy.posteriors import make_posterior
from benchmarks.accuracy.references import QUICK, Sizes, load_reference
from benchmarks.accuracy.rivals import (
    aisivi,
    kernels,
    ksivi,
    networks,
    ours,
    pvi,
    realnvp,
    sivi,
    svgd,
    uivi,
)
from benchmarks.accuracy.rivals.problem import Outcome, Problem, make_problem
from benchmarks.accuracy.rivals.two_samples import rejection_rate
from benchmarks.accuracy.targets import TARGETS as KNOWN
from benchmarks.accuracy.targets import reference
from examples.common.output import output_file
from examples.common.tables import Row, fill, read
from examples.functions.data import Split

METHODS: dict[str, Callable[[Problem, Array, float], Outcome]] = {
    "fit": ours.fit_network,
    "auto": ours.fit_auto,
    "ssge": kernels.fit_ssge,
    "stein": kernels.fit_stein,
    "sivi": sivi.fit,
    "uivi": uivi.fit,
    "ksivi": ksivi.fit,
    "pvi": pvi.fit,
    "aisivi": aisivi.fit,
    "svgd": svgd.fit,
    "realnvp": realnvp.fit,
}
OURS = ("fit", "auto")
FILES = {"waveform": "waveform.mat"} | {name: f"{name}.txt" for name in networks.NETWORKS}
TARGETS = ("banana", "multimodal", "x_shape", "waveform", "diffusion", *networks.NETWORKS)
NUM_SETS, NUM_DRAWS, QUICK_SHARE = 5, 10_000, 0.002
FIGURES = ("sliced", "W", "error", "reject", "mean", "low", "high")
COLUMNS = (*FIGURES, "rmse", "nll", "gradients", "cpu", "steps", "said")


class Case(NamedTuple):
    """A target as it is measured.

    Attributes:
        problem: the posterior.
        sets: sets of exact draws, (n, dim) each; none for networks.
        floor: the mean sliced Wasserstein distance of two of them.
        parts: rows of a network, with those for tests.
        said: what is wrong with the exact draws.
    """

    problem: Problem
    sets: tuple[np.ndarray, ...] = ()
    floor: float = math.nan
    parts: Split | None = None
    said: str = ""


def file_of(target: str, folder: Path | None) -> Path | None:
    """The file of a target's data; None if there is none, or the target needs none."""
    if folder is None or target not in FILES:
        return None
    return next(iter(sorted(folder.rglob(FILES[target]))), None)


@cache
def make_case(target: str, seed: int, data: Path | None, folder: Path | None, quick: bool) -> Case:
    """A target with its exact draws, which are the same for all methods and seeds."""
    path = file_of(target, data)
    if target in networks.NETWORKS:
        if path is None:
            raise ValueError(f"expected {FILES[target]} in the folder of --data; got none")
        posterior, parts = networks.make_network(path, seed)
        return Case(make_problem(posterior), parts=parts)
    posterior, said = make_posterior(target, path), ""
    if target in KNOWN:
        draws = reference(posterior.target, random.key(0), NUM_SETS * NUM_DRAWS)
    else:
        found = load_reference(posterior, QUICK if quick else Sizes(), folder)
        draws, said = found.truth, "" if found.trusted or quick else "exact draws not trusted"
    sets = np.split(np.asarray(draws, float), NUM_SETS)
    floor = np.mean([sliced_wasserstein(a, b) for a, b in combinations(sets, 2)])
    return Case(make_problem(posterior), tuple(sets), float(floor), said=said)


def compare(case: Case, draws: np.ndarray) -> Row:
    """Figures of as many draws as there are exact ones."""
    if not np.isfinite(draws).all():
        return dict.fromkeys(FIGURES, math.nan) | {"said": "draws are not finite"}
    truth = np.concatenate(case.sets)
    pairs = zip(np.split(draws, NUM_SETS), case.sets, strict=True)
    distances = np.array([sliced_wasserstein(found, exact) for found, exact in pairs])
    ratios = draws.std(0) / truth.std(0)
    errors = np.abs(draws.mean(0) - truth.mean(0)) / truth.std(0)
    spread = distances.std(ddof=1) / NUM_SETS**0.5
    figures = (
        *(distances.mean(), distances.mean() / case.floor, spread / case.floor),
        *(rejection_rate(draws, truth), errors.max(), ratios.min(), ratios.max()),
    )
    return {n: float(f"{value:.4g}") for n, value in zip(FIGURES, figures, strict=True)}


def compute(options: argparse.Namespace, method: str, target: str, seed: int, share: float) -> Row:
    """One row of the table; a method that fails says why."""
    jax.clear_caches()
    row: Row = dict.fromkeys(COLUMNS, "")
    try:
        is_network = target in networks.NETWORKS
        given = (options.data, options.cache, options.quick)
        case = make_case(target, seed if is_network else 0, *given)
        key, draw_key = random.split(random.key(seed))
        begin = time.process_time()
        outcome = METHODS[method](case.problem, key, share)
        row["cpu"] = round(time.process_time() - begin, 1)
        row |= {"gradients": int(outcome.gradients), "steps": outcome.steps}
        row["said"] = " ".join(filter(None, (outcome.said, case.said)))
        if case.parts is not None:
            found = networks.predict(case.problem, outcome, draw_key, case.parts)
            row |= {name: float(f"{value:.4g}") for name, value in found.items()}
        else:
            count = sum(len(exact) for exact in case.sets)
            row |= compare(case, np.asarray(outcome.draw(draw_key, count), float))
    except Exception as error:
        row["said"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    return row


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Methods of every target, the best first, with medians over seeds; runs of a share apart.

    A star marks those whose main figure is within one standard error of the best one's: over seeds,
    or with one seed over the five sets.
    """
    for target in dict.fromkeys(row["target"] for row in rows):
        figure = "rmse" if target in networks.NETWORKS else "W"
        here = [row for row in rows if row["target"] == target]
        found: dict[str, list[Row]] = {}
        for row in here:
            part = "" if float(row["share"]) == 1 else f" {float(row['share']):.2g}"
            found.setdefault(row["method"] + part, []).append(row)
        middles = {method: median(part, figure) for method, part in found.items()}
        order = sorted(found, key=lambda method: (math.isnan(middles[method]), middles[method]))
        limit = middles[order[0]] + standard_error(found[order[0]], figure)
        yield f"\n{target}: {figure}, then the rest"
        for method in order:
            star = "*" if middles[method] <= limit else " "
            names = ("rmse", "nll") if figure == "rmse" else FIGURES
            rest = [f"{n} {median(found[method], n):.3g}" for n in (*names, "gradients", "cpu")]
            yield f"{star} {method:12} {', '.join(rest)}; {len(found[method])} seed(s)"


def values_of(rows: Sequence[Row], name: str) -> np.ndarray:
    """The numbers in a column, NaN where there is none."""
    return np.array([math.nan if row[name] == "" else float(row[name]) for row in rows])


def median(rows: Sequence[Row], name: str) -> float:
    """The median of a column; NaN if any number is missing."""
    return float(np.median(values_of(rows, name)))


def standard_error(rows: Sequence[Row], name: str) -> float:
    """The standard error of a column over seeds, or of the one seed over its sets."""
    if len(rows) > 1:
        return float(values_of(rows, name).std(ddof=1) / len(rows) ** 0.5)
    return float(values_of(rows, "error")[0]) if name == "W" else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table and print its summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--csv", type=output_file, help="table to write, and to resume from")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, metavar="TARGET")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=tuple(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--data", type=Path, help="folder of waveform.mat and of UCI files")
    parser.add_argument("--cache", type=Path, help="folder that keeps draws of the diffusion")
    parser.add_argument("--share", type=float, default=1.0, help="of the authors' steps")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    options = parser.parse_args(arguments)
    if not 0 < options.share:
        parser.error(f"--share: expected a positive number; got {options.share}")
    chosen = options.targets or (("banana",) if options.quick else TARGETS)
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    left_out = [t for t in chosen if t in FILES and file_of(t, options.data) is None]
    for target in left_out:
        print(f"{target} is left out: expected {FILES[target]} in the folder of --data")
    share = QUICK_SHARE if options.quick else options.share
    cells = [
        {
            "method": method,
            "target": target,
            "seed": seed,
            "share": 1.0 if method in OURS and not options.quick else share,
        }
        for target in chosen
        if target not in left_out
        for seed in seeds
        for method in options.methods
    ]
    if not cells:
        parser.error("--targets: expected one whose data are there; got none")
    rows = fill(cells, partial(compute, options), COLUMNS, options.csv)
    # Rows of other shares and methods that the file has belong to the comparison.
    every = read(options.csv, [*cells[0], *COLUMNS]) or rows
    print(*report([row for row in every if row["target"] in chosen]), sep="\n")


if __name__ == "__main__":
    main()
