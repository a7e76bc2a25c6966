"""Verdicts of ``diagnose`` on fits known to be right or wrong.

    python -m benchmarks.calibration.verdicts [--cache FOLDER] [--csv FILE] [--posteriors NAME ...]
        [--quick]

A fit is right if every mean of its unconstrained coordinates is within 0.15 standard deviations of
the reference, and every ratio of standard deviations within 0.9 and 1.1. The fits are those of
``fits``, reference draws as they are and changed, and the last ``AutoImplicit`` changed in the same
ways. Fits and references are kept in the folder: they take hours, verdicts minutes. The settings
were chosen on the posteriors in ``CHOSEN_ON``; the others are held out.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import random

from benchmarks.accuracy.posteriors import make_posterior
from benchmarks.accuracy.references import QUICK as QUICK_SIZES
from benchmarks.accuracy.references import Sizes, load_reference
from benchmarks.calibration.fits import (
    NAMES,
    QUICK,
    FitSizes,
    flat_model,
    load_fits,
    perturbed,
)
from numpyro_kscore._model.tall_density import ModelDensity
from numpyro_kscore.diagnostics._examine import examine

MEAN_LIMIT, SD_LIMIT = 0.15, 0.1
CHOSEN_ON = (
    *("banana", "multimodal", "x_shape", "ring", "gaussian30", "eight_schools", "unequal_modes"),
    *("eight_schools_centered", "varying_slopes", "poisson_mixed", "negative_binomial", "linear"),
)
VERDICTS = ("good", "bad", "cannot tell")
COLUMNS = (
    *("posterior", "fit", "dim", "right", "verdict", "codes", "true shift", "least true ratio"),
    *("greatest true ratio", "shift", "least ratio", "greatest ratio", "transitions", "missed"),
    "seconds",
)


def cases(
    name: str, truth: np.ndarray, sizes: FitSizes, folder: Path | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Fits of one posterior."""
    for change, draws in perturbed(truth[: len(truth) // 2], random.key(3)).items():
        yield f"reference, {change}", draws
    fits = load_fits(name, sizes, folder)
    yield from fits.items()
    last = f"AutoImplicit, {sizes.num_steps} steps"
    for change, draws in perturbed(fits[last], random.key(4)).items():
        if change != "as is":
            yield f"{last}, {change}", draws


def rows_of(name: str, folder: Path | None, is_quick: bool) -> Iterator[dict[str, Any]]:
    """Truth and verdict of every fit of one posterior."""
    posterior = make_posterior(name)
    sizes, fit_sizes = (QUICK_SIZES, QUICK) if is_quick else (Sizes(), FitSizes())
    reference = load_reference(posterior, sizes, folder)
    if not (reference.trusted or is_quick):
        print(f"{name}: left out, its reference has R-hat {reference.rhat:.3f}", flush=True)
        return
    truth = np.concatenate([reference.truth, reference.other])
    density, sites = flat_model(posterior.target)
    model = ModelDensity(density)
    rng = np.random.default_rng(0)
    for number, (fit, draws) in enumerate(cases(name, truth, fit_sizes, folder)):
        finite = rng.permutation(draws[np.isfinite(draws).all(1)])
        if 2 * len(finite) < len(draws):
            print(f"{name}, {fit}: left out, {len(finite)} of {len(draws)} draws are finite")
            continue
        sd = truth.std(0)
        shift = float(np.max(np.abs(finite.mean(0) - truth.mean(0)) / sd))
        ratio = finite.std(0) / sd
        is_right = shift < MEAN_LIMIT and np.all(np.abs(ratio - 1) < SD_LIMIT)
        start = time.perf_counter()
        found = examine(finite, model, sites, random.key(number), len(draws) - len(finite))
        move = found.movement
        values = (
            *(name, fit, finite.shape[1], bool(is_right), found.verdict, "; ".join(found.codes)),
            *(shift, float(ratio.min()), float(ratio.max())),
            *(float(np.max(np.abs(move.shift))), float(move.ratio.min()), float(move.ratio.max())),
            *(move.num_transitions, found.modes.num_missed, time.perf_counter() - start),
        )
        row = dict(zip(COLUMNS, values, strict=True))
        yield {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}


def kind(row: dict[str, Any]) -> str:
    """Kind of the guide of a row, and whether its draws were changed."""
    name, *rest = str(row["fit"]).split(", ")
    return f"{name}, changed" if len(rest) > 1 else name


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The confusion table, for all and for each kind of guide, and wrong fits called good."""
    yield f"{'':48}" + "".join(f"{verdict:>13}" for verdict in VERDICTS)
    parts = {
        "settings chosen on these": [r for r in rows if r["posterior"] in CHOSEN_ON],
        "held out": [r for r in rows if r["posterior"] not in CHOSEN_ON],
    }
    held_out = parts["held out"]
    parts |= {
        f"held out: {k}": [r for r in held_out if kind(r) == k] for k in sorted(map(kind, held_out))
    }
    for title, part in parts.items():
        for right, word in ((True, "right"), (False, "wrong")):
            found = Counter(row["verdict"] for row in part if row["right"] is right)
            total = max(sum(found.values()), 1)
            cells = "".join(f"{found[v]:6} {found[v] / total:6.1%}" for v in VERDICTS)
            yield f"{title:40}{word:8}{cells}"
    yield "wrong fits called good:"
    for row in rows:
        if row["verdict"] == "good" and not row["right"]:
            yield f"  {line_of(row)}"


def line_of(row: dict[str, Any]) -> str:
    """One row in words."""
    return (
        f"{row['posterior']}, {row['fit']}: {'right' if row['right'] else 'wrong'}, "
        f"{row['verdict']} ({row['codes']}); mean off by {row['true shift']:.2f}, reported "
        f"{row['shift']:.2f}; sd {row['least true ratio']:.2f} to {row['greatest true ratio']:.2f},"
        f" reported {row['least ratio']:.2f} to {row['greatest ratio']:.2f}; "
        f"{row['transitions']} transitions, {row['seconds']:.1f} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cache", type=Path, help="folder of references and of draws of fits")
    parser.add_argument("--posteriors", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="one posterior, few steps and draws")
    parser.add_argument("--csv", type=Path, help="file to write all rows to")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    folder = None if options.quick else options.cache
    for name in options.posteriors or (["banana"] if options.quick else NAMES):
        for row in rows_of(name, folder, options.quick):
            rows.append(row)
            print(line_of(row), flush=True)
        # Compiled programs of some dozen posteriors take gigabytes.
        jax.clear_caches()
        if options.csv:
            with options.csv.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
    print("", *report(rows), sep="\n")


if __name__ == "__main__":
    main()
