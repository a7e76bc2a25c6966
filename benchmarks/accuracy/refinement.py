"""``refine`` and ``warm_start``, which make a guide exact, against NUTS from scratch.

    python -m benchmarks.accuracy.refinement --cache FOLDER --csv FILE [--data PATH]
        [--targets banana ...] [--starts AutoImplicit ...] [--seeds 0 ...] [--no-nuts] [--quick]

Every posterior is fitted in up to three ways, the last two of them poor on purpose: AutoImplicit by
``fit`` as the README says; the same with at most 200 steps; and NumPyro's ``AutoNormal`` after 500
steps. Then ``refine`` starts from the fit, with its defaults.

* W/floor, mean, sd: of the fit and of the refined draws, see ``posterior_accuracy``;
* gradients: those of the fit, those of the chains of ``refine``, and those of NUTS from scratch, a
  chain of 1000 draws after 1000 of warm-up; ``same_ess`` is NUTS's for as many effective draws of
  the worst mean as ``refine`` has;
* ``warmup``: of AutoImplicit's fit only, the shortest of 50, 100, 200 and 500 warm-up steps after
  which NUTS from ``warm_start`` has at least nine tenths of the effective draws, of the worst mean,
  in 1000 draws that NUTS from scratch has; NaN if none is enough.

The lines at the end say on how many posteriors draws are right: all means within .15 standard
deviations, all standard deviations within 10 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from benchmarks.accuracy.guides import NUM_STEPS, STEP_SIZE, TRACE_PARTICLES, fit_implicit
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.posterior_accuracy import (
    FIGURES,
    Bench,
    add_files,
    measure,
    usable_targets,
)
from benchmarks.accuracy.posteriors import POSTERIORS, SUITES
from benchmarks.accuracy.report import within_limits
from examples.common.tables import Row, fill
from numpyro_kscore import refine, warm_start

FIT, SHORT, NORMAL = "AutoImplicit", "AutoImplicit, 200 steps", "AutoNormal, 500 steps"
STARTS = (FIT, SHORT, NORMAL)
WARMUPS = (50, 100, 200, 500)
COLUMNS = (
    "dim", *(f"fit_{name}" for name in FIGURES), *FIGURES, "verdict", "codes", "converged",
    "fit_gradients", "gradients", "ess", "nuts_gradients", "nuts_ess", "same_ess", "warmup",
    "warm_ess",
)  # fmt: skip
QUICK_TARGETS = ("banana",)
# Part of the effective draws from scratch that a warm start must reach.
ENOUGH = 0.9


class Run(NamedTuple):
    """A chain of NUTS.

    Attributes:
        ess: effective draws of the worst mean.
        warmup: gradients of the warm-up.
        gradients: of the draws.
    """

    ess: float
    warmup: float
    gradients: float


class Refinements(Bench):
    """Computes the rows of the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.num_samples = 20 if options.quick else 1_000
        self.warmups = (10,) if options.quick else WARMUPS
        self.limit = 20_000 if options.quick else 1_000_000

    def compute(self, target: str, start: str, seed: int) -> Row:  # type: ignore[override]
        """One row: a fit, what becomes of it, and NUTS."""
        posterior, reference = self.posterior(target), self.reference(target)
        fit_key, draw_key, run_key = random.split(random.key(seed), 3)
        svi, result, gradients = self._fit(posterior, start, fit_key)
        args, count = posterior.target.args, len(reference.truth)

        def figures(sites: dict[str, Any]) -> Row:
            names = posterior.target.supports()
            rows = random.choice(draw_key, len(sites[next(iter(names))]), (count,), replace=True)
            draws = posterior.summarize({n: jnp.asarray(sites[n])[rows] for n in names})
            found = measure(draws, reference, posterior.heavy_tails, self.sizes.num_pairs)
            return {name: float(f"{found[name]:.5g}") for name in FIGURES}

        draws = svi.guide.sample_posterior(draw_key, result.params, *args, sample_shape=(count,))
        refined = refine(svi, result, *args, rng_key=run_key, max_gradients=self.limit)
        flat = {n: v.reshape(-1, *v.shape[2:]) for n, v in refined.samples.items()}
        before = {f"fit_{name}": value for name, value in figures(draws).items()}
        ess = 1 / float(np.max(refined.mean_error)) ** 2
        row = {
            "dim": reference.truth.shape[1], **before, **figures(flat),
            "verdict": refined.verdict, "codes": "; ".join(refined.codes),
            "converged": int(refined.converged), "fit_gradients": gradients,
            "gradients": refined.num_gradients, "ess": round(ess),
        }  # fmt: skip
        row |= self._nuts(posterior, svi, result, run_key, ess, start == FIT)
        jax.clear_caches()
        return row

    def _fit(self, posterior: Posterior, start: str, key: Array) -> tuple[SVI, Any, float]:
        if start != NORMAL:
            num_steps = 20 if self.options.quick else NUM_STEPS if start == FIT else 200
            fitted = fit_implicit(posterior, key, num_steps)
            return fitted.svi, fitted.result, fitted.gradients
        target, num_steps = posterior.target, 20 if self.options.quick else 500
        loss = Trace_ELBO(num_particles=TRACE_PARTICLES)
        svi = SVI(target.model, AutoNormal(target.model), optax.adam(STEP_SIZE), loss)
        result = svi.run(key, num_steps, *target.args, progress_bar=False)
        return svi, result, num_steps * TRACE_PARTICLES

    def _nuts(
        self, posterior: Posterior, svi: SVI, result: Any, key: Array, ess: float, with_warm: bool
    ) -> Row:
        """NUTS from scratch, and how much less of a warm-up it needs from a guide."""
        names = ("nuts_gradients", "nuts_ess", "same_ess", "warmup", "warm_ess")
        if not with_warm or self.options.no_nuts:
            return dict.fromkeys(names, np.nan)
        cold = self._chain(posterior, NUTS(posterior.target.model), key, self.num_samples, None)
        same = cold.warmup + cold.gradients * ess / cold.ess
        start = warm_start(svi, result, 1, *posterior.target.args)
        enough = np.nan
        for warmup in self.warmups:
            found = self._chain(posterior, start.nuts(), key, warmup, start.init_params)
            if found.ess >= ENOUGH * cold.ess:
                enough = warmup
                break
        figures = cold.warmup + cold.gradients, cold.ess, same, enough, found.ess
        return {n: float(f"{x:.5g}") for n, x in zip(names, figures, strict=True)}

    def _chain(
        self, posterior: Posterior, kernel: NUTS, key: Array, warmup: int, start: Any
    ) -> Run:
        args = posterior.target.args
        mcmc = MCMC(kernel, num_warmup=warmup, num_samples=self.num_samples, progress_bar=False)
        fields = ("num_steps",)
        mcmc.warmup(key, *args, init_params=start, extra_fields=fields, collect_warmup=True)
        warming = float(mcmc.get_extra_fields()["num_steps"].sum())
        mcmc.run(random.fold_in(key, 1), *args, extra_fields=fields)
        found = mcmc.get_samples()
        draws = posterior.summarize({name: found[name] for name in posterior.target.supports()})
        ess = float(np.min(effective_sample_size(np.asarray(draws, np.float64)[None])))
        return Run(ess, warming, float(mcmc.get_extra_fields()["num_steps"].sum()))


def is_right(row: Row, prefix: str = "") -> bool:
    """True if the draws of a row are within the limits."""
    names = ("mean_error", "sd_low", "sd_high")
    return within_limits(*(float(row[prefix + name]) for name in names))


def summary(rows: Sequence[Row]) -> list[str]:
    """A summary of the table, for each way to start."""
    lines = []
    for start in dict.fromkeys(row["start"] for row in rows):
        own = [row for row in rows if row["start"] == start]
        silent = [row["target"] for row in own if not is_right(row) and row["verdict"] == "good"]
        lines += [
            f"{start}: right before {sum(is_right(row, 'fit_') for row in own)}, after "
            f"{sum(map(is_right, own))} of {len(own)}; wrong, and called good: {silent}",
            f"  median gradients: fit {_median(own, 'fit_gradients'):.3g}, refine "
            f"{_median(own, 'gradients'):.3g}, NUTS {_median(own, 'nuts_gradients'):.3g}, NUTS to "
            f"the same effective draws {_median(own, 'same_ess'):.3g}",
        ]
        with_nuts = [row for row in own if np.isfinite(float(row["nuts_gradients"]))]
        fewer = [float(row["gradients"]) < float(row["nuts_gradients"]) for row in with_nuts]
        same = [float(row["gradients"]) < float(row["same_ess"]) for row in with_nuts]
        warm = [np.isfinite(float(row["warmup"])) for row in with_nuts]
        lines.append(
            f"  of {len(with_nuts)}: refine takes fewer gradients than NUTS on {sum(fewer)}, than "
            f"NUTS to the same effective draws on {sum(same)}; half of the warm-up or less is "
            f"enough on {sum(warm)}"
        )
    return lines


def _median(rows: Sequence[Row], name: str) -> float:
    return float(np.median([float(row[name]) for row in rows]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table and print it with its summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_files(parser)
    parser.add_argument("--targets", nargs="+", choices=POSTERIORS, metavar="TARGET")
    parser.add_argument("--starts", nargs="+", choices=STARTS, metavar="START")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--no-nuts", action="store_true", help="leave out NUTS")
    parser.add_argument("--quick", action="store_true", help="few draws and steps, to see it run")
    options = parser.parse_args(arguments)

    bench = Refinements(options)
    targets = options.targets or (QUICK_TARGETS if options.quick else SUITES["familiar"])
    cells = [
        {"target": target, "start": start, "seed": seed}
        for target in usable_targets(bench, targets)
        for start in options.starts or ((FIT,) if options.quick else STARTS)
        for seed in options.seeds
    ]
    rows = fill(cells, bench.compute, COLUMNS, options.csv)
    for row in rows:
        before, after = (
            f"W {float(row[p + 'distance']):6.2f} mean {float(row[p + 'mean_error']):.3f} sd "
            f"{float(row[p + 'sd_low']):.3f} to {float(row[p + 'sd_high']):.3f}"
            for p in ("fit_", "")
        )
        print(
            f"{row['target']:24}{row['start']:24}{before} | {after} {row['verdict']}, "
            f"{float(row['gradients']):.3g} gradients, NUTS {float(row['nuts_gradients']):.3g}, "
            f"warm-up {row['warmup']}"
        )
    print("", *summary(rows), sep="\n")


if __name__ == "__main__":
    main()
