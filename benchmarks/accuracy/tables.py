"""The tables of the documentation, from the rows that ``posterior_accuracy`` wrote.

python -m benchmarks.accuracy.tables benchmarks/results/posterior_accuracy.csv
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy.posteriors import SUITES
from benchmarks.accuracy.report import FLOOR, MARGIN, OURS, over_seeds, within_limits
from examples.common.tables import Row

__all__ = ["posterior_table", "summary_table"]

# Methods of the table of posteriors, whose distances alone are shown, and the names of columns.
PEERS = {
    "AutoImplicit, svi.run": "`svi.run`", "AutoBNAFNormal": "BNAF", "AutoIAFNormal": "IAF",
    "AutoMultivariateNormal": "full rank", "AutoNormal": "mean field",
    "multi-Pathfinder": "Pathfinder", "SteinVI": "SteinVI",
}  # fmt: skip


def posterior_table(rows: Sequence[Row], targets: Sequence[str]) -> list[str]:
    """One line for each posterior: ours over all seeds, distances of the others, and NUTS's cost.

    Distances are means over the seeds, errors the worst of them; bold figures miss the limits.
    """
    found = over_seeds(rows)
    dims = {row["target"]: row["dim"] for row in rows}
    peers = {m: name for m, name in PEERS.items() if any((t, m) in found for t in targets)}
    head = ["posterior", "d", "W", "mean", "sd", "CPU s", "gradients", *peers.values()]
    head.append("NUTS, gradients")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for target in targets:
        if (target, OURS) not in found:
            continue
        own, floor = found[target, OURS], found.get((target, FLOOR))
        mean, sd = f"{own.mean_error:.2f}", f"{own.sd_low:.2f}–{own.sd_high:.2f}"
        cells = [
            target,
            str(dims[target]),
            f"{own.distance:.2f}",
            mean if within_limits(own.mean_error, 1, 1) else f"**{mean}**",
            sd if within_limits(0, own.sd_low, own.sd_high) else f"**{sd}**",
            f"{own.cpu_seconds:.0f}",
            f"{own.gradients / 1e3:.0f} k",
        ]
        for method in peers:
            one = found.get((target, method))
            cells.append("" if one is None else _short(one.distance))
        nuts = floor.gradients if floor is not None else np.nan
        cells.append(f"{nuts / 1e3:.0f} k" if nuts > 0 else "")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def summary_table(rows: Sequence[Row], targets: Sequence[str]) -> list[str]:
    """One line for each method: on how many posteriors it is right and near the best, and costs.

    Only the first seed of each method counts, as methods were run for different numbers of them.
    """
    first = [row for row in rows if str(row["seed"]) == "0" and row["target"] in targets]
    found = over_seeds(first)
    methods = dict.fromkeys(row["method"] for row in first)
    best = {
        target: np.nanmin([f.distance for (t, m), f in found.items() if t == target and m != FLOOR])
        for target in targets
    }
    lines = ["| | right | near the best | W, median | CPU s |", "|---|---|---|---|---|"]
    for method in methods:
        if method == FLOOR:
            continue
        own = {t: found[t, method] for t in targets if (t, method) in found}
        near = sum(f.distance <= MARGIN * best[t] for t, f in own.items())
        distances = np.nan_to_num([f.distance for f in own.values()], nan=np.inf)
        lines.append(
            f"| {method} | {sum(f.good for f in own.values())} of {len(own)} | {near} "
            f"| {_short(float(np.median(distances)))} "
            f"| {np.nansum([f.cpu_seconds for f in own.values()]):.0f} |"
        )
    return lines


def _short(distance: float) -> str:
    """A distance with three digits that count."""
    if not np.isfinite(distance):
        return "failed"
    return f"{distance:.2f}" if distance < 10 else f"{distance:.3g}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    options = parser.parse_args(argv)
    with options.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for suite in ("familiar", "harder"):
        present = [t for t in SUITES[suite] if any(r["target"] == t for r in rows)]
        if present:
            body = [*posterior_table(rows, present), "", *summary_table(rows, present)]
            print("\n".join([f"## {suite}", "", *body, ""]))


if __name__ == "__main__":
    main()
