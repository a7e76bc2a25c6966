"""Accuracy of posteriors by the defaults, NumPyro's guides, SteinVI and published estimators.

    python -m benchmarks.accuracy.posterior_accuracy --cache FOLDER --csv FILE [--data PATH]
        [--suite harder] [--targets banana ...] [--methods AutoImplicit ...] [--seeds 0 1 ...]
        [--diagnose] [--figure FILE] [--quick]

Nothing is tuned to a posterior. ``AutoImplicit`` is fitted as the README says, by ``fit`` with
Adam at 1e-2 and at most 5 000 steps. All others take 5 000 steps: ``AutoImplicit, svi.run`` with
``ImplicitELBO`` and NumPyro's guides with ``Trace_ELBO`` of 32 particles use Adam, whose step size
falls from 1e-2 to 0 along a cosine, and NumPyro's initial values; SteinVI has its documented
settings. Multi-path Pathfinder stops by itself. NUTS and MAMS are single chains. A Gaussian guide
that is far off on a nearly Gaussian posterior has not converged: on stiff models 5 000 steps do not
suffice.

The defaults were tuned on the ``familiar`` posteriors. The ``harder`` ones came later.

Draws are compared with exact ones, or with NUTS where no exact sampler exists. Coordinates are
unconstrained (or a summary without the labels of hidden units and components) and divided by the
reference's standard deviation:

* W/floor: sliced Wasserstein-1 distance divided by that of two independent sets of reference draws;
* mean: the largest error of a mean, in standard deviations;
* sd: the smallest and the largest ratio of a standard deviation to the reference's;
* gradients: those of the model's density over all particles; NUTS's are of its warm-up too;
* ending: why ``fit`` stopped, and what it warned of;
* diagnosis, with ``--diagnose``: the verdict of ``diagnose`` on the fit. Such a table needs a CSV
  file of its own, because it has one column more.

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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from benchmarks.accuracy.fits import Fit
from benchmarks.accuracy.guides import METHODS, NUM_STEPS
from benchmarks.accuracy.moments import Moments
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.posteriors import POSTERIORS, SUITES, make_posterior
from benchmarks.accuracy.references import (
    QUICK,
    Reference,
    Sizes,
    load_reference,
)
from benchmarks.accuracy.report import FLOOR, over_seeds, plot, table, verdict
from examples.common.tables import Row, fill
from numpyro_kscore.diagnostics import sliced_wasserstein

FIGURES = ("distance", "mean_error", "sd_low", "sd_high")
COLUMNS = ("dim", "finite", *FIGURES, "seconds", "cpu_seconds", "steps", "gradients", "ending")
QUICK_TARGETS, QUICK_METHODS = ("banana", "eight_schools"), ("AutoImplicit", "AutoNormal")


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
        return {"dim": dim, "finite": 0} | dict.fromkeys(FIGURES, np.nan)
    moments = Moments.of(reference, heavy_tails)
    location, spread = jnp.array(moments.location), jnp.array(moments.spread)
    standard = [(x - location) / spread for x in (draws, reference.truth, reference.other)]
    floor = mean_distance(standard[2], standard[1], num_pairs)
    return {
        "dim": dim,
        "finite": 1,
        "distance": mean_distance(standard[0], standard[1], num_pairs) / floor,
        **moments.compare(draws, heavy_tails),
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

    @staticmethod
    def fit(posterior: Posterior, method: str, seed: int, num_steps: int, num_draws: int) -> Fit:
        """A fit; one without a finite number is a result too."""
        try:
            return METHODS[method](posterior, seed, num_steps, num_draws)
        except (FloatingPointError, RuntimeError) as error:
            print(f"{posterior.target.name}, {method}: {error}", flush=True)
            return Fit(jnp.full((1, 1), jnp.nan), np.nan, np.nan, 0, np.nan, "failed")

    @staticmethod
    def diagnose(fit: Fit) -> str:
        """The verdict of ``diagnose`` on a fit, empty where it does not apply."""
        try:
            return "" if fit.diagnose is None else fit.diagnose()
        except (FloatingPointError, RuntimeError, ValueError) as error:
            print(f"diagnose: {error}", flush=True)
            return "failed"

    def compute(self, target: str, method: str, seed: int, num_steps: int) -> Row:
        """One row: a fit and its figures."""
        posterior: Posterior = self.posterior(target)
        reference: Reference = self.reference(target)
        if method == FLOOR:
            found = Fit(reference.other, reference.seconds, np.nan, 0, reference.gradients)
        else:
            found = self.fit(posterior, method, seed, num_steps, len(reference.truth))
        figures = measure(found.draws, reference, posterior.heavy_tails, self.sizes.num_pairs)
        rounded = {name: float(f"{figures[name]:.5g}") for name in FIGURES}
        row = figures | rounded | {
            "seconds": round(found.seconds, 1), "cpu_seconds": round(found.cpu_seconds, 1),
            "steps": found.steps, "gradients": found.gradients, "ending": found.ending,
        }  # fmt: skip
        if self.options.diagnose:
            row["diagnosis"] = self.diagnose(found)
        if method == FLOOR:  # the last row of a target, whose programs are not used again
            jax.clear_caches()
        return row


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


def add_files(parser: argparse.ArgumentParser) -> None:
    """The files that are read and written."""
    parser.add_argument("--data", type=Path, help="waveform.mat, or the folder that holds it")
    parser.add_argument("--cache", type=Path, help="folder for reference draws")
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--figure", type=Path, help="picture to write")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table, print it with the verdict and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_files(parser)
    parser.add_argument("--suite", choices=SUITES, default="all", help="a group of posteriors")
    parser.add_argument(
        "--targets", nargs="+", choices=POSTERIORS, metavar="TARGET", help="in place of a suite"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--diagnose", action="store_true", help="run diagnose on every fit, slow")
    parser.add_argument(
        "--quick", action="store_true",
        help="few draws and steps, by default two targets and two methods: to see it run",
    )  # fmt: skip
    options = parser.parse_args(arguments)

    bench = Bench(options)
    num_steps = 20 if options.quick else NUM_STEPS
    suite = QUICK_TARGETS if options.quick else SUITES[options.suite]
    options.targets = options.targets or suite
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
    columns = (*COLUMNS, "diagnosis") if options.diagnose else COLUMNS
    rows = fill(cells, bench.compute, columns, options.csv)
    found = over_seeds(rows)
    print(*table(found, methods), "", *verdict(rows), sep="\n")
    if options.figure:
        plot(options.figure, found, methods)


if __name__ == "__main__":
    main()
