"""Output of the benchmark of posteriors, printed and plotted from the rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from examples.common.tables import Row

__all__ = [
    "FLOOR",
    "OURS",
    "STYLES",
    "Figures",
    "is_silent",
    "over_seeds",
    "plot",
    "table",
    "verdict",
    "within_limits",
    "row_is_right",
]

FLOOR = "reference again"  # the row of independent reference draws
OURS = "AutoImplicit"
STYLES = {
    OURS: "ko", "AutoImplicit, svi.run": "k+", "AutoImplicit, far start": "k*",
    "AutoNormal": "C0v", "AutoMultivariateNormal": "C1s", "AutoIAFNormal": "C2^",
    "AutoBNAFNormal": "C3D", "SteinVI": "C4x", "multi-Pathfinder": "C9p",
    "NUTS": "m*", "MAMS": "C5X",
    "AutoImplicit, Stein": "C5<", "AutoImplicit, SSGE": "C6>", "AutoImplicit, nu": "C8o",
    FLOOR: "C7|",
}  # fmt: skip
# A good fit: at most this error of a mean, and ratios of spreads in this range.
MEAN_LIMIT, SPREAD_LIMITS = 0.15, (0.9, 1.1)
# A fit is reported if it says that it did not converge, or diagnose says that it is bad. No mean
# of one that is not may be off by more than this.
SILENT_LIMIT = 0.5
MARGIN = 1.1  # distances that differ by at most 10 % count as equal


class Figures(NamedTuple):
    """A method on a posterior over the seeds: means of distance and costs, worst errors."""

    distance: float
    mean_error: float
    sd_low: float
    sd_high: float
    seconds: float
    cpu_seconds: float
    gradients: float

    @property
    def good(self) -> bool:
        """True if mean and spread are within the limits; false for NaN."""
        return within_limits(self.mean_error, self.sd_low, self.sd_high)


def within_limits(mean_error: float, sd_low: float, sd_high: float) -> bool:
    """True if a fit is right; false for NaN."""
    low, high = SPREAD_LIMITS
    return mean_error <= MEAN_LIMIT and sd_low >= low and sd_high <= high


def over_seeds(rows: Sequence[Row]) -> dict[tuple[str, str], Figures]:
    """Figures of every posterior and method."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["method"]), []).append(row)
    worst = {"mean_error": np.max, "sd_low": np.min, "sd_high": np.max}
    out = {}
    for name, group in groups.items():
        values = {
            column: worst.get(column, np.mean)([float(row[column]) for row in group])
            for column in Figures._fields
        }
        out[name] = Figures(**{column: float(value) for column, value in values.items()})
    return out


def table(found: dict[tuple[str, str], Figures], methods: Sequence[str]) -> list[str]:
    """Lines of the printed table, one for each posterior and method."""
    lines = [
        f"{'':53}{'W/floor':>9}{'mean':>8}{'sd from':>9}{'to':>7}{'seconds':>9}{'CPU s':>8}"
        f"{'gradients':>11}"
    ]
    for target in dict.fromkeys(name for name, _ in found):
        for i, method in enumerate(name for name in methods if (target, name) in found):
            f = found[target, method]
            lines.append(
                f"{target if i == 0 else '':29}{method:24}{f.distance:9.2f}{f.mean_error:8.3f}"
                f"{f.sd_low:9.3f}{f.sd_high:7.3f}{f.seconds:9.1f}{f.cpu_seconds:8.1f}"
                f"{f.gradients:11.2g}"
            )
    return lines


def is_silent(row: Row) -> bool:
    """True if a fit is far off and neither ``fit`` nor ``diagnose``, if it was run, says so."""
    reported = row["ending"] not in ("plateau", "tol") or row.get("diagnosis") == "bad"
    return not (float(row["mean_error"]) <= SILENT_LIMIT or reported)


def verdict(rows: Sequence[Row]) -> list[str]:
    """The number of posteriors on which the claims hold, of those whose methods were run."""
    found = over_seeds(rows)
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
        others = [f.distance for (t, method), f in found.items() if t == target and method != FLOOR]
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
    own = [row for row in rows if row["method"] == OURS]
    names = [f"{row['target']} ({row['seed']})" for row in own if not row_is_right(row)]
    lines.append(line("right, of all seeds", names, len(own)))
    names = [f"{row['target']} ({row['seed']})" for row in own if is_silent(row)]
    claim = f"every mean within {SILENT_LIMIT:g} sd, or the fit is reported"
    return [*lines, line(claim, names, len(own))]


def row_is_right(row: Row) -> bool:
    """True if one fit is within the limits."""
    return within_limits(*(float(row[name]) for name in ("mean_error", "sd_low", "sd_high")))


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
