"""Fits of models with hundreds to thousands of latents by the defaults, against long NUTS.

    python -m benchmarks.accuracy.large_models --csv FILE [--targets crossed_343 ...]
        [--seeds 0 1 ...] [--limit 600] [--memory 12] [--known] [--cache FOLDER] [--quick]
        [--linear-response]
    python -m benchmarks.accuracy.large_models --references [--targets ...] [--cache FOLDER]

The second command draws the references and stops: NUTS in double precision, in coordinates that are
nearly white (``large/whitening.py``), four chains that go on until every R̂ is below 1.01 and every
scale has 1000 effective draws. After all of them come the rivals: one short chain each of NUTS with
its defaults, on the model as it is written. Of both are printed the CPU seconds for 400 effective
draws of the worst scale: warm-up and compilation of one chain, and its share of the draws. Their
moments stay in ``benchmarks/results/large_references``, or in FOLDER. The first command draws those
that are missing, unless ``--known``.

Every fit runs in a process of its own, by ``fit`` with the defaults. After ``--limit`` seconds, or
with more than ``--memory`` gigabytes, its row says "no answer". 1000 draws are compared with the
reference in

* scales: the unconstrained coordinates of all scales, correlations, global means and slopes;
* effects: fifty random effects, chosen with a fixed seed.

Errors of means are in standard deviations of the reference. A fit is right if

* every scale has a mean within 0.15 and a ratio of standard deviations within 0.9 and 1.1, and
  besides two standard errors of the reference: 2/√e of the mean and 2/√(2e) of the ratio, for e
  effective draws of that scale;
* of the effects the median error of means is below 0.1, and nine in ten ratios are within 0.85 and
  1.15.

``--linear-response`` makes the same rows of deterministic ADVI with linear response, a rival whose
moments are compared as ours are.
"""

from __future__ import annotations

import argparse
import inspect
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax import random

from benchmarks.accuracy.large import LARGE, crossed
from benchmarks.accuracy.large.compared import LargePosterior
from benchmarks.accuracy.large.long_runs import (
    LONG,
    QUICK,
    Lengths,
    LongRun,
    draw_reference,
    draw_rival,
)
from benchmarks.accuracy.outcomes import fit_as_users_do, is_called_good
from benchmarks.accuracy.report import MEAN_LIMIT, SPREAD_LIMITS
from benchmarks.accuracy.rivals.linear_response import fit_linear_response
from benchmarks.speed.large_n import peak_megabytes
from examples.common.tables import Row, fill

SAID = ("steps", "fit_cpu", "converged", "cause", "doubt", "warned", "reason")
FIGURES = tuple(
    f"{kind}_{figure}"
    for kind in ("scale", "effect")
    for figure in ("mean", "mean_median", "sd_low", "sd_high", "sd_median")
)
COLUMNS = (
    *("dim", "seconds", "peak_mb", *SAID, *FIGURES, "effects_within", "worst_scale", "right"),
    *("rhat", "effective", "reference_cpu", "nuts_cpu", "error"),
)
EFFECT_MEAN_LIMIT, EFFECT_SPREAD_LIMITS, EFFECT_SHARE = 0.1, (0.85, 1.15), 0.9
NUM_DRAWS = 1_000
QUICK_TARGET = "crossed_43"
# Moments of references and rivals, drawn by the second command.
KEPT = Path(__file__).parents[1] / "results" / "large_references"
# Beside those of the suite a small one for tests, and one for time and memory alone.
POSTERIORS = LARGE | {
    QUICK_TARGET: partial(crossed.crossed, QUICK_TARGET, 30, 10, 300),
    "crossed_10000": partial(crossed.crossed, "crossed_10000", 9_000, 997, 200_000),
}


def measure(draws: np.ndarray, reference: LongRun) -> Row:
    """Figures of draws (n, k), scales first."""
    if not np.all(np.isfinite(draws)):
        return {"right": 0, "error": "draws that are not finite"}
    return compare(draws.mean(0), draws.std(0), reference)


def compare(means: np.ndarray, sds: np.ndarray, reference: LongRun) -> Row:
    """Figures of means and standard deviations (k,), scales first."""
    if not np.all(np.isfinite([means, sds])):
        return {"right": 0, "error": "moments that are not finite"}
    errors = np.abs(means - reference.mean) / reference.sd
    ratios = sds / reference.sd
    count = reference.num_scales
    row: Row = {}
    for kind, here in (("scale", slice(count)), ("effect", slice(count, None))):
        found = (
            errors[here].max(), np.median(errors[here]),
            ratios[here].min(), ratios[here].max(), np.median(ratios[here]),
        )  # fmt: skip
        names = [name for name in FIGURES if name.startswith(kind)]
        row |= {name: round(float(value), 4) for name, value in zip(names, found, strict=True)}
    in_sd = 2 / np.sqrt(reference.ess[:count])
    beyond_mean = errors[:count] - MEAN_LIMIT - in_sd
    # Ratios in logarithms, whose standard error is that of the reference's standard deviation.
    low, high = np.log(SPREAD_LIMITS)
    logs = np.log(np.maximum(ratios, 1e-30))
    beyond_sd = np.maximum(low - logs, logs - high)[:count] - in_sd / np.sqrt(2)
    low, high = EFFECT_SPREAD_LIMITS
    within = np.mean((ratios[count:] >= low) & (ratios[count:] <= high))
    right = max(beyond_mean.max(), beyond_sd.max()) <= 0
    right &= row["effect_mean_median"] < EFFECT_MEAN_LIMIT and within >= EFFECT_SHARE
    worst = int(np.argmax(np.maximum(beyond_mean, beyond_sd)))
    return row | {
        "effects_within": round(float(within), 3),
        "worst_scale": worst,
        "right": int(right),
    }


def run_cell(options: argparse.Namespace, target: str, seed: int, lengths: Lengths) -> Row:
    """A fit in this process, and its figures against the reference, if that is in the folder."""
    posterior = POSTERIORS[target]()
    reference = draw_reference(posterior, lengths, options.cache, known=True)
    if reference is not None and not (options.quick or reference.is_trusted(lengths.effective)):
        reference = None
    if options.linear_response:
        return run_rival(posterior, seed, reference)
    model, args = posterior.target.model, posterior.target.args
    data = dict(zip(inspect.signature(model).parameters, args, strict=True))
    steps = 80 if options.quick else 5_000
    fitted = fit_as_users_do(model, random.key(seed), data, steps, with_evidence=False)
    row = {name: fitted.said[name] for name in SAID} | {"peak_mb": round(peak_megabytes())}
    draws = fitted.draw(random.key(seed + 1), NUM_DRAWS, **data)
    row["dim"] = sum(draws[name][0].size for name in posterior.target.supports())
    if reference is not None:
        row |= measure(np.asarray(posterior.summarize(draws), float), reference)
    return row


def run_rival(posterior: LargePosterior, seed: int, reference: LongRun | None) -> Row:
    """Deterministic ADVI with linear response in this process, against the reference."""
    found = fit_linear_response(posterior, seed)
    row: Row = {"steps": found.steps, "fit_cpu": round(found.cpu, 1)}
    row |= {"converged": int(found.converged), "peak_mb": round(peak_megabytes())}
    return row if reference is None else row | compare(found.mean, found.sd, reference)


class Bench:
    """Computes the rows of the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lengths = options, QUICK if options.quick else LONG

    def reference(self, target: str, known: bool = False) -> LongRun | None:
        """The reference; None if only one that is in the folder is asked for."""
        return draw_reference(POSTERIORS[target](), self.lengths, self.options.cache, known)

    def rival(self, target: str, known: bool = False) -> LongRun | None:
        """The short run of NUTS by its defaults; None as above."""
        return draw_rival(POSTERIORS[target](), self.lengths, self.options.cache, known)

    def compute(self, target: str, seed: int) -> Row:
        """One row, by a process of its own."""
        options = self.options
        found: Row = dict.fromkeys(COLUMNS, "")
        reference, rival = self.reference(target, known=True), self.rival(target, known=True)
        if reference is not None:
            found |= {"rhat": round(float(reference.rhat.max()), 4)}
            found |= {"effective": round(reference.scale_ess)}
            found |= {"reference_cpu": round(reference.cpu_of_enough, 1)}
        if rival is not None:
            found["nuts_cpu"] = round(rival.cpu_of_enough, 1)
        command = [
            *(sys.executable, "-m", "benchmarks.accuracy.large_models"),
            *("--cache", str(options.cache), "--memory", str(options.memory)),
            *("--cell", target, str(seed), *(["--quick"] if options.quick else [])),
            *(["--linear-response"] if options.linear_response else []),
        ]
        begin = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
                found |= {"error": last[0][:200]}
            else:
                found |= json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            found["error"] = f"no answer in {options.limit:g} s"
        return found | {"seconds": round(time.perf_counter() - begin, 1)}


def classify(row: Row) -> str:
    """Right, wrong in one of two ways, without an answer, or unknown for want of a reference."""
    if row["steps"] == "":
        return "no answer"
    if row["right"] == "":
        return "unknown"
    if int(row["right"]):
        return "right"
    return "wrong and called good" if is_called_good(row | {"verdict": ""}) else "wrong, says so"


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Outcomes by kind, then a line a posterior with the CPU seconds of fits and of NUTS."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(classify(row), []).append(f"{row['target']} ({row['seed']})")
    for kind, names in sorted(kinds.items()):
        yield f"{kind}: {len(names)} of {len(rows)}: {', '.join(names)}"
    yield "posterior: outcomes; CPU s of a fit; of NUTS by its defaults and whitened, for 400 draws"
    for target in dict.fromkeys(row["target"] for row in rows):
        here = [row for row in rows if row["target"] == target]
        cpu = [float(row["fit_cpu"]) for row in here if row["fit_cpu"] != ""]
        seconds = f"{np.median(cpu):.0f}" if cpu else "-"
        nuts = " ".join(str(here[0][name] or "-") for name in ("nuts_cpu", "reference_cpu"))
        yield f"{target}: {', '.join(map(classify, here))}; {seconds}; {nuts}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw references, or fill the table and print its summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cache", type=Path, help="folder of moments, which take hours to draw")
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--targets", nargs="+", choices=POSTERIORS, metavar="TARGET")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a fit, elapsed")
    parser.add_argument("--memory", type=float, default=12.0, help="gigabytes of a fit, virtual")
    parser.add_argument("--references", action="store_true", help="draw references, and stop")
    parser.add_argument("--known", action="store_true", help="draw no references")
    parser.add_argument("--cell", nargs=2, metavar=("TARGET", "SEED"), help="one fit, in JSON")
    parser.add_argument("--quick", action="store_true", help="a small posterior, few steps")
    parser.add_argument("--linear-response", action="store_true", help="fit a rival")
    options = parser.parse_args(arguments)
    bench = Bench(options)
    if options.cell:
        bytes_ = int(options.memory * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))
        target, seed = options.cell
        print(json.dumps(run_cell(options, target, int(seed), bench.lengths)))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.cache = options.cache or (Path(folder) if options.quick else KEPT)
        # NumPyro compiles every piece of a chain anew, which takes longer than the piece.
        jax.config.update("jax_compilation_cache_dir", f"{folder}/programs")
        targets = options.targets or ([QUICK_TARGET] if options.quick else list(LARGE))
        wanted = [] if options.known else [bench.reference]
        for draw in [*wanted, *([bench.rival] if options.references else [])]:
            for target in targets:
                found = draw(target)
                print(f"{target}, {draw.__name__}: {found and found.describe()}", flush=True)
                jax.clear_caches()
        if options.references:
            return
        cells = [{"target": name, "seed": seed} for name in targets for seed in options.seeds]
        rows = fill(cells, bench.compute, COLUMNS, options.csv)
    print(*report(rows), sep="\n")


if __name__ == "__main__":
    main()
