"""Fits by the defaults on random small models, against NUTS.

    python -m benchmarks.accuracy.random_models [--models 200] [--first 0] [--csv FILE]
        [--references FOLDER] [--seeds 0 ...] [--diagnose] [--quick]

Each number draws a model and its data (``grammar.py``). The reference is four chains of NUTS in
float64, in which centered hierarchies are decentered. A model is put aside, with the reason, if
R-hat is not below 1.01, fewer than 1000 draws are effective, or more than one in 200 diverge, even
in a second run of three times the length; or if no data of its prior are finite and small.
References take most of the time. ``--references`` keeps them in a folder, about a megabyte each,
and takes from it those that an earlier run has left.

Compared are the means and standard deviations of all unconstrained latents. Errors are reduced by
two standard errors, those of the reference and of 10 000 draws: ``mean`` is the largest error of a
mean, in standard deviations, ``low`` and ``high`` are the extreme ratios of standard deviations. A
fit is right if they are within 0.15, and 0.9 to 1.1. Otherwise ``fit`` may say so, by a doubt, a
warning or a k̂ above 0.7; if it does not, the fit is wrong and called good. A scan in a scope is
refused: NumPyro's own density does not depend on its latents. Words are the choices of
the grammar; the printed table has the share of right fits for each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS, init_to_feasible

from benchmarks.accuracy.grammar import RandomModel, draw_model
from benchmarks.accuracy.outcomes import SAID, classify, fit_as_users_do, report
from examples.common.output import output_file
from examples.common.tables import Row, fill

COLUMNS = ("dim", "words", "mean", "low", "high", "worst", "outcome", "rhat", "ess", *SAID, "error")
NUM_CHAINS, NUM_DRAWS = 4, 10_000
# A part of the error for models whose density NumPyro itself does not know: a scan in a scope.
REFUSED = "expected a model that takes the values of its latents"
LARGEST_RHAT, SMALLEST_ESS, MOST_DIVERGENT = 1.01, 1_000, 0.005


class Reference(NamedTuple):
    """Draws of NUTS.

    Attributes:
        draws: unconstrained, (n, d), in float64.
        ess: effective draws of each coordinate, and of its squared deviations, (2, d).
        rhat: the largest split R-hat.
        divergent: share of draws whose trajectory diverged.
    """

    draws: np.ndarray
    ess: np.ndarray
    rhat: float
    divergent: float

    @property
    def fault(self) -> str:
        """Why the draws are not to be trusted; empty if they are."""
        if not self.rhat < LARGEST_RHAT:
            return f"R-hat {self.rhat:.3f}"
        if not self.ess.min() >= SMALLEST_ESS:
            return f"{self.ess.min():.0f} effective draws"
        return f"{self.divergent:.1%} divergent" if self.divergent > MOST_DIVERGENT else ""


def latent_supports(model: Callable[..., Any], y: Array) -> dict[str, Any]:
    """Supports of the latents, in sampling order."""
    found: dict[str, Any] = {}

    def run() -> None:
        seeded = handlers.seed(model, random.key(0))
        chosen = handlers.substitute(seeded, substitute_fn=init_to_feasible())
        for name, site in handlers.trace(chosen).get_trace(y).items():
            if site["type"] == "sample" and not site["is_observed"]:
                found[name] = site["fn"].support

    jax.eval_shape(run)
    return found


def unconstrained(draws: dict[str, Array], supports: dict[str, Any]) -> np.ndarray:
    """Unconstrained coordinates, (n, d) in float64, of draws of the latents."""
    columns = [biject_to(support).inv(jnp.asarray(draws[n])) for n, support in supports.items()]
    return np.concatenate([np.asarray(c, float).reshape(len(c), -1) for c in columns], axis=1)


def sample_reference(drawn: RandomModel, num_samples: int, seed: int) -> Reference:
    """Four chains of NUTS, ``num_samples`` draws each after a thousand of warm-up."""
    with jax.enable_x64(True):
        y = jnp.asarray(drawn.y, float if drawn.y.dtype == np.float32 else int)
        kernel = NUTS(drawn.reference, target_accept_prob=0.95, dense_mass=True)
        mcmc = MCMC(
            kernel, num_warmup=1_000, num_samples=num_samples, num_chains=NUM_CHAINS,
            chain_method="vectorized", progress_bar=False,
        )  # fmt: skip
        mcmc.run(random.fold_in(random.key(drawn.number), seed), y)
        draws = unconstrained(mcmc.get_samples(), latent_supports(drawn.model, y))
        divergent = float(np.mean(mcmc.get_extra_fields()["diverging"]))
    chains = draws.reshape(NUM_CHAINS, num_samples, -1)
    squares = (chains - draws.mean(0)) ** 2
    ess = np.stack([effective_sample_size(x) for x in (chains, squares)])
    return Reference(draws, ess, float(np.max(split_gelman_rubin(chains))), divergent)


def compare(draws: np.ndarray, reference: Reference) -> Row:
    """The figures, reduced by two standard errors, and the coordinate that is furthest off."""
    if not np.isfinite(draws).all():
        return dict.fromkeys(("mean", "low", "high"), float("nan")) | {"worst": -1}
    truth, n = reference.draws, len(draws)
    center, sd = truth.mean(0), truth.std(0)
    mean = np.abs(draws.mean(0) - center) / sd - 2 * np.sqrt(1 / reference.ess[0] + 1 / n)
    log_ratio = np.log(draws.std(0) / sd)
    # A log standard deviation has the variance (kurtosis - 1)/4, over the number of draws.
    kurtosis = np.mean(((truth - center) / sd) ** 4, axis=0)
    error = 2 * np.sqrt((kurtosis - 1) / 4 * (1 / reference.ess[1] + 1 / n))
    log_ratio = np.sign(log_ratio) * np.maximum(np.abs(log_ratio) - error, 0)
    worst = np.argmax(np.maximum(mean / 0.15, np.abs(log_ratio) / 0.1))
    figures = (max(mean.max(), 0.0), np.exp(log_ratio.min()), np.exp(log_ratio.max()))
    rounded = (float(f"{value:.4g}") for value in figures)
    return dict(zip(("mean", "low", "high"), rounded, strict=True)) | {"worst": int(worst)}


def reference_of(drawn: RandomModel, folder: Path | None) -> Reference:
    """Draws of NUTS, three times as many where they are needed; from ``folder`` if it has them."""
    kept = folder / f"{drawn.number}.npz" if folder else None
    if kept and kept.exists():
        with np.load(kept) as arrays:
            rhat, divergent = float(arrays["rhat"]), float(arrays["divergent"])
            return Reference(arrays["draws"], arrays["ess"], rhat, divergent)
    reference = sample_reference(drawn, 1_500, 0)
    if reference.fault:
        reference = sample_reference(drawn, 4_500, 1)
    if kept:
        np.savez(kept, **reference._asdict())
    return reference


class Bench:
    """Computes the rows of the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def compute(self, model: int, seed: int) -> Row:
        """One row: a model, its fit and its reference."""
        row: Row = dict.fromkeys(COLUMNS, "")
        try:
            drawn = draw_model(model)
        except (ValueError, ImportError) as fault:  # some inverse functions need another package
            return row | {"outcome": "put aside", "reason": str(fault)}
        row["words"] = " ".join(drawn.words)
        try:
            row |= self._fit(drawn, seed)
        except Exception as error:  # the row of a model that fails
            row["error"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        row["outcome"] = "refused" if REFUSED in row["error"] else classify(row)
        jax.clear_caches()
        figures = ", ".join(f"{n} {row[n]}" for n in ("dim", "mean", "low", "high", "steps"))
        print(f"{model} ({seed}): {row['outcome']}; {row['error'] or figures}", flush=True)
        return row

    def _fit(self, drawn: RandomModel, seed: int) -> Row:
        quick = self.options.quick
        fit_key, draw_key = random.split(random.key(seed))
        data = {"y": jnp.asarray(drawn.y)}
        steps = 80 if quick else 5_000
        fitted = fit_as_users_do(drawn.model, fit_key, data, steps, self.options.diagnose)
        supports = latent_supports(drawn.model, data["y"])
        draws = unconstrained(fitted.draw(draw_key, NUM_DRAWS, **data), supports)
        row = fitted.said | {"dim": draws.shape[1]}
        if quick:
            reference = sample_reference(drawn, 500, 0)
        else:
            reference = reference_of(drawn, self.options.references)
        row |= {"rhat": round(reference.rhat, 4), "ess": round(float(reference.ess.min()))}
        if reference.fault and not quick:
            return row | {"worst": reference.fault}
        return row | compare(draws, reference)


def by_word(rows: Sequence[Row]) -> list[str]:
    """Lines with the share of right fits for each word that a model with a wrong one has."""
    counts: dict[str, list[bool]] = {}
    for row in rows:
        if row["outcome"] != "put aside":
            for word in set(str(row["words"]).split()):
                counts.setdefault(word, []).append(row["outcome"] == "right")
    shares = {word: (sum(right), len(right)) for word, right in counts.items() if not all(right)}
    order = sorted(shares, key=lambda word: shares[word][0] / shares[word][1])
    return [f"{word}: {shares[word][0]} of {shares[word][1]} right" for word in order]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the table and print it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--csv", type=output_file, help="table to write, and to resume from")
    parser.add_argument("--references", type=Path, help="folder in which draws of NUTS are kept")
    parser.add_argument("--diagnose", action="store_true", help="add verdicts, slow")
    parser.add_argument("--quick", action="store_true", help="one model, few steps and draws")
    options = parser.parse_args(arguments)
    if options.references:
        options.references.mkdir(parents=True, exist_ok=True)
    last = options.first + (1 if options.quick else options.models)
    numbers = range(options.first, last)
    cells = [{"model": number, "seed": seed} for number in numbers for seed in options.seeds]
    print(f"{len(cells)} fits of models {options.first} to {last - 1}", flush=True)
    try:
        rows = fill(cells, Bench(options).compute, COLUMNS, options.csv)
    except KeyboardInterrupt:
        print("stopped; finished rows are in the table")
        return 130
    print(*report(rows, "model"), *by_word(rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
