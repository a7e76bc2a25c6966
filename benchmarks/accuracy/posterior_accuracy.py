"""Accuracy of posteriors by the defaults, NumPyro's guides, SteinVI and published estimators.

    python -m benchmarks.accuracy.posterior_accuracy --cache FOLDER --csv FILE [--data PATH]
        [--targets banana ...] [--methods AutoImplicit ...] [--seeds 0 1 ...] [--figure FILE]
        [--quick]

Every method takes 5 000 steps on every posterior, without tuning. ``AutoImplicit`` with
``ImplicitELBO`` and NumPyro's guides with ``Trace_ELBO`` of 32 particles use Adam, whose step size
falls from 1e-2 to 0 along a cosine, and NumPyro's initial values; SteinVI has its documented
settings. A Gaussian guide that is far off on a nearly Gaussian posterior has not converged: on
stiff models 5 000 steps do not suffice.

Draws are compared with exact ones, or with NUTS where no exact sampler exists. Coordinates are
unconstrained (for the neural network they are its predictions) and divided by the reference's
standard deviation:

* W/floor: sliced Wasserstein-1 distance divided by that of two independent sets of reference draws;
* mean: the largest error of a mean, in standard deviations;
* sd: the smallest and the largest ratio of a standard deviation to the reference's.

Medians and interquartile ranges are used where the variance is infinite (student) or poorly
determined by draws (funnel). Every row is written to the CSV file as soon as it is computed, and
references are kept in the folder, so an interrupted script continues where it stopped.
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
FLOOR = "reference again"  # the row of independent reference draws
OURS = "AutoImplicit"
STYLES = {
    OURS: "ko", "AutoNormal": "C0v", "AutoMultivariateNormal": "C1s", "AutoIAFNormal": "C2^",
    "AutoBNAFNormal": "C3D", "SteinVI": "C4x", "AutoImplicit, Stein": "C5<",
    "AutoImplicit, SSGE": "C6>",
    "AutoImplicit, nu": "C8o", FLOOR: "C7|",
}  # fmt: skip
# A good fit: at most this error of a mean, and ratios of spreads in this range.
MEAN_LIMIT, SPREAD_LIMITS = 0.15, (0.9, 1.1)
MARGIN = 1.1  # distances that differ by at most 10 % count as equal
QUICK_TARGETS, QUICK_METHODS = ("banana", "eight_schools"), (OURS, "AutoNormal")


def location_and_spread(draws: Array, heavy_tails: bool) -> tuple[Array, Array]:
    """Mean and sd of each coordinate; under heavy tails median and scaled interquartile range."""
    if not heavy_tails:
        return draws.mean(0), draws.std(0)
    low, middle, high = jnp.quantile(draws, jnp.array([0.25, 0.5, 0.75]), axis=0)
    return middle, (high - low) / 1.349  # that of a Gaussian with unit variance


def mean_distance(x: Array, y: Array, num_pairs: int) -> float:
    """Sliced Wasserstein distance, averaged over consecutive pairs of equal parts."""
    parts = tuple(jnp.split(draws, num_pairs) for draws in (x, y))
    stacked = tuple(jnp.stack(part) for part in parts)
    distances = lax.map(lambda pair: sliced_wasserstein(*pair, random.key(0)), stacked)
    return float(distances.mean())


def measure(draws: Array, reference: Reference, heavy_tails: bool, num_pairs: int) -> Row:
    """Figures of one set of draws, of the size of ``reference.truth``.

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
    """Computes the rows of the table; posteriors and references are made once."""

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
        if method == FLOOR:  # the last row of a target, whose programs are not used again
            jax.clear_caches()
        rounded = {name: float(f"{value:.5g}") for name, value in figures.items()}
        times = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
        return rounded | {"dim": figures["dim"], "finite": figures["finite"]} | times


class Figures(NamedTuple):
    """A method on a posterior over the seeds: mean distance and time, worst errors."""

    distance: float
    mean_error: float
    sd_low: float
    sd_high: float
    seconds: float
    cpu_seconds: float

    @property
    def good(self) -> bool:
        """Whether mean and spread are within the limits; false for NaN."""
        low, high = SPREAD_LIMITS
        return self.mean_error <= MEAN_LIMIT and self.sd_low >= low and self.sd_high <= high


def over_seeds(rows: Sequence[Row]) -> dict[tuple[str, str], Figures]:
    """Figures of every posterior and method."""
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
    """On how many posteriors the claims hold, of those whose methods were run."""
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
    """Plot distances and extreme ratios of spreads, one line for each posterior."""
    targets = list(dict.fromkeys(target for target, _ in found))[::-1]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.5 + 0.28 * len(targets)), sharey=True, layout="constrained"
    )
    for method in methods:
        has = [(i, found[t, method]) for i, t in enumerate(targets) if (t, method) in found]
        style = {"ms": 7 if method == OURS else 5, "zorder": 3 if method == OURS else 2}
        height = [i for i, _ in has]
        left.plot([f.distance for _, f in has], height, STYLES[method], label=method, **style)
        # The ratio further from 1 on a logarithmic scale.
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
    """Targets with data and a trusted reference; prints why others are left out."""
    usable = []
    for name in names:
        try:
            bench.posterior(name)
        except ValueError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        reference = bench.reference(name)
        evidence = f"R-hat {reference.rhat:.4f}, effective draws {reference.ess:.0f}"
        # A quick run only shows that the script runs.
        if reference.trusted or bench.options.quick:
            usable.append(name)
        else:
            print(f"{name} is left out: NUTS did not converge ({evidence})", flush=True)
    return usable


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table, print it with the verdict and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="waveform.mat, or the folder that holds it")
    parser.add_argument("--cache", type=Path, help="folder for reference draws")
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--figure", type=Path, help="picture to write")
    parser.add_argument("--targets", nargs="+", choices=POSTERIORS, metavar="TARGET")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--quick", action="store_true",
        help="few draws and steps, by default two targets and two methods: to see it run",
    )  # fmt: skip
    options = parser.parse_args(arguments)

    bench = Bench(options)
    num_steps = 20 if options.quick else NUM_STEPS
    options.targets = options.targets or (QUICK_TARGETS if options.quick else POSTERIORS)
    options.methods = options.methods or (QUICK_METHODS if options.quick else METHODS)
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
