"""Importance weights of fits by the defaults, what they repair, and what ``diagnose`` says.

    python -m benchmarks.accuracy.weights --csv FILE [--data PATH] [--cache FOLDER]
        [--suite harder] [--targets banana ...] [--seeds 0 1 ...] [--known] [--quick]
        [--guides AutoNormal ...]

Every posterior is fitted by ``fit`` with the defaults, and diagnosed. Draws of the guide and draws
by Pareto-smoothed weights are compared with moments of references as in ``posterior_accuracy``.
These stay in ``benchmarks/results/suite_references``, or in FOLDER. What is missing is drawn,
unless ``--known``. A fit or a set of draws is right if every mean is within 0.15 standard
deviations, and every ratio of standard deviations within 0.9 and 1.1. Other guides take 5000 steps
as there, and show what ``diagnose`` says of fits that are often wrong.

Printed are, for each guide, the shares that the weights are judged by: effective draws, k̂, verdicts
against the truth, seconds of ``diagnose`` over those of the fit, and how often weights put a wrong
fit right.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from benchmarks.accuracy.guides import NUM_STEPS, PEERS, fit_implicit
from benchmarks.accuracy.moments import KEPT, Moments, load_moments
from benchmarks.accuracy.posterior_accuracy import add_files
from benchmarks.accuracy.posteriors import POSTERIORS, SUITES, make_posterior
from benchmarks.accuracy.references import QUICK, Sizes
from benchmarks.accuracy.report import OURS, within_limits
from examples.common.tables import Row, fill
from numpyro_kscore import diagnose

GUIDES = {OURS: fit_implicit, **PEERS}

FIGURES = ("mean_error", "sd_low", "sd_high")
COLUMNS = (
    *("dim", "fit_cpu", "diagnose_cpu", "ending", "verdict", "codes"),
    *("khat", "effective", "divergence", "worst_shape", "log_evidence", "error"),
    *FIGURES,
    *(f"resampled_{name}" for name in FIGURES),
)


class Bench:
    """Computes the rows of the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.sizes = options, QUICK if options.quick else Sizes()
        self.posterior = cache(lambda name: make_posterior(name, options.data))
        self.reference = cache(self._reference)

    def _reference(self, name: str) -> Moments | None:
        folder = self.options.cache or (None if self.options.quick else KEPT)
        found = load_moments(self.posterior(name), self.sizes, folder, self.options.known)
        return found if found and (found.trusted or self.options.quick) else None

    def compute(self, target: str, guide: str, seed: int) -> Row:
        """One row: a fit, its weights and its verdict."""
        posterior = self.posterior(target)
        args, steps = posterior.fit_args, 80 if self.options.quick else NUM_STEPS
        try:
            fitted = GUIDES[guide](posterior, random.key(seed), steps)
            begin = time.process_time()
            found = diagnose(fitted.svi, fitted.result, *args, progress_bar=False)
        except (FloatingPointError, RuntimeError, ValueError) as error:
            print(f"{target}, {guide}: {error}", flush=True)
            return {"verdict": "failed"}
        svi, result, (_, fit_cpu), _ = fitted
        info = getattr(result, "info", None)
        ending = () if info is None else (info.cause, info.doubt)
        row: Row = {
            "dim": len(found.names),
            "fit_cpu": round(fit_cpu, 1),
            "diagnose_cpu": round(time.process_time() - begin, 1),
            "ending": ", ".join(filter(None, ending)),
            "verdict": found.verdict,
            "codes": "; ".join(found.codes),
        }
        if found.weights is not None:
            evidence = found.weights.evidence
            row |= {
                "khat": round(evidence.khat, 3), "effective": round(evidence.num_effective),
                "divergence": round(found.weights.divergence, 4),
                "worst_shape": round(float(np.max(found.weights.shapes)), 3),
                "log_evidence": round(evidence.value, 4), "error": round(evidence.error, 4),
            }  # fmt: skip
        reference = self.reference(target)
        if reference is not None:
            ways = [("", {}), ("resampled_", {"resample": True})]
            for prefix, how in ways if guide == OURS else ways[:1]:
                shape = (reference.num_draws,)
                draws = svi.guide.sample_posterior(
                    random.key(seed + 1), result.params, *args, sample_shape=shape, **how
                )
                compared = jnp.asarray(posterior.summarize(draws))
                figures = reference.compare(compared, posterior.heavy_tails)
                row |= {prefix + name: round(figures[name], 4) for name in FIGURES}
        jax.clear_caches()
        return row


def is_right(row: Row, prefix: str = "") -> bool | None:
    """Whether draws are right; None without a reference."""
    values = [row.get(prefix + name, "") for name in FIGURES]
    if "" in values or None in values:
        return None
    return within_limits(*map(float, values))


def report(rows: Sequence[Row]) -> Iterator[str]:
    """The shares that weights of one guide are judged by."""
    failed = [row for row in rows if row["verdict"] == "failed"]
    rows = [row for row in rows if row not in failed]
    yield f"{len(rows)} fits, {len(failed)} more that failed"
    if not rows:
        return
    weighed = [row for row in rows if row.get("khat", "") not in ("", None)]
    if weighed:
        effective = np.median([float(row["effective"]) for row in weighed])
        good = np.mean([float(row["khat"]) < 0.7 for row in weighed])
        yield f"{len(weighed)} with weights: {effective:.0f} effective, median; k̂ < 0.7 {good:.0%}"
    shares = [float(row["diagnose_cpu"]) / float(row["fit_cpu"]) for row in rows]
    yield f"diagnose over fit: median {np.median(shares):.2f}, largest {max(shares):.2f}"
    told = [(is_right(row), str(row["verdict"]), row) for row in rows]
    counts = Counter((right, verdict) for right, verdict, _ in told)
    for right, word in ((True, "right"), (False, "wrong"), (None, "unknown")):
        cells = (f"{counts[right, v]} {v}" for v in ("good", "bad", "cannot tell"))
        yield f"{word}: {', '.join(cells)}"
    for right, verdict, row in told:
        if right is not None and (right, verdict) not in ((True, "good"), (False, "bad")):
            yield (
                f"  {row['target']}, seed {row['seed']}: {'right' if right else 'wrong'}, {verdict}"
                f" ({row['codes']}); mean {row['mean_error']}, sd {row['sd_low']}-{row['sd_high']}"
            )
    wrong = [row for right, _, row in told if right is False]
    fair = [row for row in wrong if float(row.get("khat") or np.inf) < 0.7]
    repaired = sum(bool(is_right(row, "resampled_")) for row in fair)
    yield f"wrong with k̂ < 0.7: {len(fair)}, of which right by weights: {repaired}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table and print its shares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_files(parser)
    parser.add_argument("--suite", choices=SUITES, default="all", help="a group of posteriors")
    parser.add_argument("--targets", nargs="+", choices=POSTERIORS, metavar="TARGET")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--guides", nargs="+", choices=GUIDES, default=[OURS])
    parser.add_argument("--known", action="store_true", help="draw no references")
    parser.add_argument("--quick", action="store_true", help="one posterior, few steps")
    options = parser.parse_args(arguments)
    bench = Bench(options)
    targets = options.targets or (["eight_schools"] if options.quick else SUITES[options.suite])
    usable = []
    for name in targets:
        try:
            bench.posterior(name)
            usable.append(name)
        except ValueError as error:
            print(f"{name} is left out: {error}", flush=True)
    cells = [
        {"target": name, "guide": guide, "seed": seed}
        for name in usable
        for guide in options.guides
        for seed in options.seeds
    ]
    with warnings.catch_warnings():
        # Their reasons are in the table.
        warnings.simplefilter("ignore", UserWarning)
        rows = fill(cells, bench.compute, COLUMNS, options.csv)
    for guide in options.guides:
        print(guide, *report([row for row in rows if row["guide"] == guide]), sep="\n")


if __name__ == "__main__":
    main()
