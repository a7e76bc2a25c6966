"""Posteriors by this library's defaults, NumPyro's guides, SteinVI and published estimators.

    python -m benchmarks.accuracy.posterior_accuracy --cache FOLDER --csv FILE [--data PATH] [--quick]
        [--targets banana ...] [--methods AutoImplicit ...] [--seeds 0 1 ...] [--figure FILE]

Every method takes 5 000 steps on every posterior, and nothing is tuned to any of them. Adam's step
size falls from 1e-2 to 0 along a cosine, for ``AutoImplicit`` with ``ImplicitELBO`` and for
NumPyro's guides with ``Trace_ELBO`` of 32 particles alike, and all start where NumPyro puts them;
SteinVI has its documented settings. Where a Gaussian guide is far off on a posterior that is nearly
Gaussian, it has not arrived: on stiff models 5 000 steps from there do not suffice.

Draws are compared with exact ones, or with NUTS where there are none, in unconstrained coordinates
(a neural network's in its predictions), each divided by the reference's standard deviation:

* W/floor: sliced Wasserstein-1 distance over that of two independent sets of reference draws;
* mean: the largest error of a mean, in standard deviations;
* sd: the smallest and the largest ratio of a standard deviation to the reference's.

Where no variance exists (student), or draws do not determine it (funnel), medians and
interquartile ranges take their places. Rows are in the CSV file as soon as they are known, and
references in the folder: interrupted, the script goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import Array, lax, random

from benchmarks.accuracy.guides import METHODS, NUM_STEPS
from benchmarks.accuracy.posteriors import POSTERIORS, Posterior, make_posterior
from benchmarks.accuracy.references import QUICK, Reference, Sizes, load_reference
from examples.common.tables import Row, fill
from numpyro_kscore.diagnostics import sliced_wasserstein

COLUMNS = ("dim", "finite", "distance", "mean_error", "sd_low", "sd_high", "seconds", "cpu_seconds")
FLOOR = "reference again"  # the column of independent reference draws
OURS = "AutoImplicit"
STYLES = {
    OURS: "ko", "AutoNormal": "C0v", "AutoMultivariateNormal": "C1s", "AutoIAFNormal": "C2^",
    "AutoBNAFNormal": "C3D", "SteinVI": "C4x", "AutoImplicit, Stein": "C5<",
    "AutoImplicit, SSGE": "C6>",
    "AutoImplicit, nu": "C8o", FLOOR: "C7|",
}  # fmt: skip
# What a good fit is: the largest error of a mean, and the range of ratios of spreads.
MEAN_LIMIT, SPREAD_LIMITS = 0.15, (0.9, 1.1)
MARGIN = 1.1  # distances are compared up to 10 %


def location_and_spread(draws: Array, heavy_tails: bool) -> tuple[Array, Array]:
    """Mean and sd of each coordinate; the median and the quartiles' distance under heavy tails."""
    if not heavy_tails:
        return draws.mean(0), draws.std(0)
    low, middle, high = jnp.quantile(draws, jnp.array([0.25, 0.5, 0.75]), axis=0)
    return middle, (high - low) / 1.349  # that of a Gaussian with unit variance


def mean_distance(x: Array, y: Array, num_pairs: int) -> float:
    """Sliced Wasserstein distance, mean over consecutive pairs of equal parts."""
    parts = tuple(jnp.split(draws, num_pairs) for draws in (x, y))
    stacked = tuple(jnp.stack(part) for part in parts)
    distances = lax.map(lambda pair: sliced_wasserstein(*pair, random.key(0)), stacked)
    return float(distances.mean())


def measure(draws: Array, reference: Reference, heavy_tails: bool, num_pairs: int) -> Row:
    """The figures of one set of draws, as many as ``reference.truth`` has.

    Returns:
        ``dim``, ``finite``, ``distance`` (over the floor), ``mean_error``, ``sd_low`` and
        ``sd_high``; NaN if a draw is not finite.
    """
    dim = reference.truth.shape[1]
    if not bool(jnp.all(jnp.isfinite(draws))):
        return {"dim": dim, "finite": 0} | dict.fromkeys(COLUMNS[2:6], np.nan)
    location, spread = location_and_spread(reference.truth, heavy_tails)
    standard = [(x - location) / spread for x in (draws, reference.truth, reference.other)]
    center, scale = location_and_spread(standard[0], heavy_tails)
    floor = mean_distance(standard[2], standard[1], num_pairs)
    return {
        "dim": dim,
        "finite": 1,
        "distance": mean_distance(standard[0], standard[1], num_pairs) / floor,
        "mean_error": float(jnp.abs(center).max()),
        "sd_low": float(scale.min()),
        "sd_high": float(scale.max()),
    }


class Bench:
    """Posteriors and references, each made once, and the rows of the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.sizes = QUICK if options.quick else Sizes()
        self.options = options
        self.posterior = cache(lambda name: make_posterior(name, options.data))
        self.reference = cache(
            lambda name: load_reference(self.posterior(name), self.sizes, options.cache)
        )

    def compute(self, target: str, method: str, seed: int, num_steps: int) -> Row:
        """One row: a fit and its figures."""
        posterior: Posterior = self.posterior(target)
        reference: Reference = self.reference(target)
        if method == FLOOR:
            draws, seconds, cpu_seconds = reference.other, reference.seconds, np.nan
        else:
            num_draws = len(reference.truth)
            draws, seconds, cpu_seconds = METHODS[method](posterior, seed, num_steps, num_draws)
        figures = measure(draws, reference, posterior.heavy_tails, self.sizes.num_pairs)
        if method == FLOOR:  # the last of a target: none of its programs is used again
            jax.clear_caches()
        rounded = {name: float(f"{value:.5g}") for name, value in figures.items()}
        times = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
        return rounded | {"dim": figures["dim"], "finite": figures["finite"]} | times


class Figures(NamedTuple):
    """A method on a posterior, over the seeds: mean distance and time, worst errors."""

    distance: float
    mean_error: float
    sd_low: float
    sd_high: float
    seconds: float
    cpu_seconds: float

    @property
    def good(self) -> bool:
        """Whether mean and spread are right; NaN is not."""
        low, high = SPREAD_LIMITS
        return self.mean_error <= MEAN_LIMIT and self.sd_low >= low and self.sd_high <= high


def over_seeds(rows: Sequence[Row]) -> dict[tuple[str, str], Figures]:
    """The figures of every posterior and method."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["method"]), []).append(row)
    means, worst = ("distance", "seconds", "cpu_seconds"), {"sd_low": np.min}
    out = {}
    for name, group in groups.items():
        values = {
            column: (np.mean if column in means else worst.get(column, np.max))(
                [float(row[column]) for row in group]
            )
            for column in Figures._fields
        }
        out[name] = Figures(**{column: float(value) for column, value in values.items()})
    return out


def table(found: dict[tuple[str, str], Figures], methods: Sequence[str]) -> list[str]:
    """Lines of the printed table, one for each posterior and method."""
    lines = [f"{'':46}{'W/floor':>9}{'mean':>8}{'sd from':>9}{'to':>7}{'seconds':>9}{'CPU s':>8}"]
    for target in dict.fromkeys(name for name, _ in found):
        for i, method in enumerate(name for name in methods if (target, name) in found):
            f = found[target, method]
            lines.append(
                f"{target if i == 0 else '':23}{method:23}{f.distance:9.2f}{f.mean_error:8.3f}"
                f"{f.sd_low:9.3f}{f.sd_high:7.3f}{f.seconds:9.1f}{f.cpu_seconds:8.1f}"
            )
    return lines


def verdict(found: dict[tuple[str, str], Figures]) -> list[str]:
    """In how many posteriors the claims hold; one that lacks a method counts for what it has."""
    targets = [target for target, method in found if method == OURS]
    if not targets:
        return []

    def line(claim: str, fails: Sequence[str], number: int) -> str:
        misses = f"; not {', '.join(fails)}" if fails else ""
        return f"{claim}: {number - len(fails)} of {number}{misses}"

    low, high = SPREAD_LIMITS
    claim = f"{OURS}: mean within {MEAN_LIMIT:g} sd, sd ratios {low:g} to {high:g}"
    lines = [line(claim, [t for t in targets if not found[t, OURS].good], len(targets))]
    fails = []
    for target in targets:
        others = [found[target, name].distance for name in METHODS if (target, name) in found]
        if not found[target, OURS].distance <= MARGIN * np.nanmin(others):
            fails.append(target)
    lines.append(line("best, or within 10 % of the best distance", fails, len(targets)))
    rival = "AutoMultivariateNormal"
    both = [t for t in targets if (t, rival) in found]
    fails = [t for t in both if not found[t, OURS].distance <= MARGIN * found[t, rival].distance]
    lines.append(line(f"at most 10 % behind {rival}", fails, len(both)))
    both = [t for t in targets if (t, "AutoBNAFNormal") in found]
    sums = [
        sum(getattr(found[t, method], clock) for t in both)
        for clock in ("seconds", "cpu_seconds")
        for method in (OURS, "AutoBNAFNormal")
    ]
    lines.append(
        f"time on {len(both)} posteriors: {sums[0]:.0f} s, AutoBNAFNormal {sums[1]:.0f} s; "
        f"on the CPU {sums[2]:.0f} s and {sums[3]:.0f} s"
    )
    return lines


def plot(path: Path, found: dict[tuple[str, str], Figures], methods: Sequence[str]) -> None:
    """Distances and extreme ratios of spreads, a line for each posterior."""
    targets = list(dict.fromkeys(target for target, _ in found))[::-1]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.5 + 0.28 * len(targets)), sharey=True, layout="constrained"
    )
    for method in methods:
        has = [(i, found[t, method]) for i, t in enumerate(targets) if (t, method) in found]
        style = {"ms": 7 if method == OURS else 5, "zorder": 3 if method == OURS else 2}
        height = [i for i, _ in has]
        left.plot([f.distance for _, f in has], height, STYLES[method], label=method, **style)
        # The ratio that is further from 1, on a logarithmic scale.
        extreme = [max(f.sd_low, f.sd_high, key=lambda x: abs(np.log(x))) for _, f in has]
        right.plot(extreme, height, STYLES[method], **style)
    left.set(xscale="log", xlabel="sliced Wasserstein distance / sampling floor")
    right.set(xscale="log", xlabel="most extreme ratio of standard deviations")
    right.axvspan(*SPREAD_LIMITS, color="0.9", zorder=0)
    left.set_yticks(range(len(targets)), targets)
    for panel in (left, right):
        panel.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def usable_targets(bench: Bench, names: Sequence[str]) -> list[str]:
    """The targets whose data are there and whose reference can be trusted; says why others not."""
    usable = []
    for name in names:
        try:
            bench.posterior(name)
        except ValueError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        reference = bench.reference(name)
        evidence = f"R-hat {reference.rhat:.4f}, effective draws {reference.ess:.0f}"
        # A quick run is there to see that it runs.
        if reference.trusted or bench.options.quick:
            usable.append(name)
        else:
            print(f"{name} is left out: NUTS is not to be trusted ({evidence})", flush=True)
    return usable


def main(arguments: Sequence[str] | None = None) -> None:
    """Fills the table, prints it with the verdict, and draws the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="waveform.mat, or the folder that holds it")
    parser.add_argument("--cache", type=Path, help="folder for reference draws")
    parser.add_argument("--csv", type=Path, help="table to write, and to go on from")
    parser.add_argument("--figure", type=Path, help="picture to write")
    parser.add_argument(
        "--targets", nargs="+", choices=POSTERIORS, default=POSTERIORS, metavar="TARGET"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=tuple(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--quick", action="store_true", help="few draws and steps, to see it run")
    options = parser.parse_args(arguments)

    bench = Bench(options)
    num_steps = 20 if options.quick else NUM_STEPS
    methods = [*options.methods, FLOOR]
    cells = [
        {"target": target, "method": method, "seed": seed, "num_steps": num_steps}
        for target in usable_targets(bench, options.targets)
        for method in methods
        for seed in (options.seeds if method != FLOOR else [0])
    ]
    if not cells:
        sys.exit("no target is left")
    found = over_seeds(fill(cells, bench.compute, COLUMNS, options.csv))
    print(*table(found, methods), "", *verdict(found), sep="\n")
    if options.figure:
        plot(options.figure, found, methods)


if __name__ == "__main__":
    main()
