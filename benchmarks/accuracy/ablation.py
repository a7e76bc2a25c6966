"""Forms of the start, each switched off in turn: what its bound, its time and the fit lose.

    python -m benchmarks.accuracy.ablation --csv FILE [--suites familiar harder textbook]
        [--targets eight_schools ...] [--forms sizes ...] [--fits --cache FOLDER] [--quick]

The structure of a model, which comes first, is left out: it may need none of them. The search that
follows it runs with all forms, and then without one of them, from the same random numbers and with
the same compiled density. Bounds come from 4096 draws of their own, which no search has seen.
``changed`` says whether the start differs at all; if not, the form was not taken, and what it cost
is the difference in gradients and seconds. With ``--fits`` every start that differs is also fitted,
and compared with the reference as in ``posterior_accuracy``.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from jax import random

from benchmarks.accuracy.guides import METHODS, NUM_STEPS
from benchmarks.accuracy.posterior_accuracy import Bench, add_files, measure
from benchmarks.accuracy.posteriors import SUITES, make_posterior
from benchmarks.accuracy.report import within_limits
from examples.common.tables import Row, fill
from numpyro_kscore import AutoImplicit
from numpyro_kscore._starts import (
    batch_match,
    climb,
    from_model,
    gaussian_search,
)
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.centering import of_degrees
from numpyro_kscore._transports.transport import pulled_back

ALL = "all forms"
COLUMNS = (
    "dim", "taken", "changed", "bound", "bound_error", "gradients", "cpu_seconds",
    "right", "distance", "mean_error", "sd_low", "sd_high", "fit_cpu_seconds", "ending",
)  # fmt: skip
BOUND_DRAWS = 4096


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _known(*args: Any) -> Any:
    return args[-1]


def _stay(evaluate: Any, start: Any, rng: Any, weights: Sequence[float], num_draws: int) -> Any:
    return [start] * len(weights)


# Replacements that switch a form off: a module, a name in it, and its replacement.
FORMS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "hierarchical coordinates": [],  # no latent counts as hierarchical, see _latents
    "partial centering": [(climb, "recentered", _nothing)],
    "sizes": [(gaussian_search, "fit_sizes", _known)],
    "batch and match": [(batch_match, "match_scores", _stay)],
    "prior draws": [],  # see _latents
    "Newton at given scales": [(gaussian_search, "given_scales", lambda *_: [])],
}


def _latents(latents: Any, form: str) -> Any:
    if form == "hierarchical coordinates":
        return latents._replace(is_hierarchical=np.zeros_like(latents.is_hierarchical))
    if form == "prior draws":
        return latents._replace(from_prior=latents.from_prior[:0])
    return latents


def no_structure() -> Any:
    """A context in which no start comes from the structure of a model."""
    return patch.object(from_model, "find_by_structure", _nothing)


@contextmanager
def without(form: str) -> Iterator[None]:
    """Searches inside do without a form."""
    original = gaussian_search.find_gaussian

    def find(density: Any, latents: Any, *rest: Any, **options: Any) -> Any:
        return original(density, _latents(latents, form), *rest, **options)

    with ExitStack() as stack:
        for module, name, replacement in FORMS.get(form, []):
            stack.enter_context(patch.object(module, name, replacement))
        stack.enter_context(patch.object(from_model, "find_gaussian", find))
        stack.enter_context(no_structure())
        yield


def bound_of(start: Any, density: Any, rng: np.random.Generator) -> tuple[float, float]:
    """The evidence lower bound of a start by draws of its own, and its standard error."""

    def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = density(points, start.centering, start.centering)
        return found.energies, found.gradients

    inside = evaluate if start.sizes is None else pulled_back(evaluate, start.sizes)
    noise = rng.standard_normal((BOUND_DRAWS, len(start.gaussian.mean)))
    if start.parts:
        label = rng.choice(len(start.parts), size=BOUND_DRAWS, p=start.weights)
        draws = [part.push(noise) for part in start.parts]
        points = np.stack(draws)[label, np.arange(BOUND_DRAWS)]
        logs = np.stack([_log_density(part, points) for part in start.parts])
        logs += np.log(start.weights)[:, None]
        log_q = np.logaddexp.reduce(logs, axis=0)
    else:
        inside, points = pulled_back(inside, start.transports), noise
        log_q = -0.5 * np.sum(noise**2 + np.log(2 * np.pi), axis=1)
    gaps = -inside(points)[0] - log_q
    return float(np.mean(gaps)), float(np.std(gaps) / np.sqrt(len(gaps)))


def _log_density(gaussian: Affine, points: np.ndarray) -> np.ndarray:
    white = np.linalg.solve(gaussian.factor, (points - gaussian.mean).T)
    constant = 0.5 * len(gaussian.mean) * np.log(2 * np.pi) + gaussian.log_det
    return -0.5 * np.sum(white**2, axis=0) - constant


def digest(start: Any) -> str:
    """A fingerprint of all numbers of a start."""
    leaves = jax.tree.leaves((*start[:2], start.parts, start.weights, start.sizes))
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in leaves)).hexdigest()


def taken(start: Any) -> str:
    """Names of the forms that a start has."""
    degrees = start.centering.degrees
    names = {
        "non-centered": bool(np.all(np.isin(degrees, (0, 1))) and np.any(degrees == 0)),
        "partly centered": bool(np.any((degrees > 0) & (degrees < 1))),
        "sizes": start.sizes is not None,
        "modes": bool(start.parts),
    }
    return " + ".join(name for name, has in names.items() if has) or "plain"


class Searches:
    """The searches of one posterior, with all forms and without each."""

    def __init__(self, data: Path | None, forms: Sequence[str]) -> None:
        self._data, self._forms = data, forms
        self._target, self._found = "", {}

    def of(self, target: str) -> dict[str, Row]:
        """Rows by form."""
        if target == self._target:
            return self._found
        jax.clear_caches()
        posterior = make_posterior(target, self._data)
        original, found = gaussian_search.find_gaussian, {}

        def every(density: Any, latents: Any, rng: Any, *rest: Any, **options: Any) -> Any:
            density(latents.first[None], *[of_degrees(np.ones_like(latents.first))] * 2)  # compile
            for form in (ALL, *self._forms):
                before = time.process_time()
                try:
                    with without(form):
                        start = original(
                            density, _latents(latents, form), copy.deepcopy(rng), *rest, **options
                        )
                except (FloatingPointError, np.linalg.LinAlgError) as error:
                    found[form] = {"taken": type(error).__name__}
                    continue
                seconds = time.process_time() - before
                bound, error = bound_of(start, density, np.random.default_rng(0))
                found[form] = {
                    "dim": len(latents.first), "taken": taken(start), "digest": digest(start),
                    "bound": round(bound, 3), "bound_error": round(error, 3),
                    "gradients": start.num_gradients, "cpu_seconds": round(seconds, 2),
                }  # fmt: skip
            return original(density, latents, rng, *rest, **options)

        guide = AutoImplicit(posterior.target.model)
        with patch.object(from_model, "find_gaussian", every), no_structure():
            guide.set_up(random.split(random.key(0), 3)[2], *posterior.fit_args)
        self._target, self._found = target, found
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_files(parser)
    parser.add_argument("--suites", nargs="+", default=["familiar", "harder", "textbook"])
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--fits", action="store_true", help="also fit every start that differs")
    parser.add_argument("--quick", action="store_true", help="two posteriors")
    options = parser.parse_args(arguments)
    names = options.targets or [name for suite in options.suites for name in SUITES[suite]]
    names = list(dict.fromkeys(names))[: 2 if options.quick else None]
    searches = Searches(options.data, options.forms)
    options.quick, options.diagnose = False, False
    bench = Bench(options)

    def compute(target: str, form: str) -> Row:
        found = searches.of(target)
        row = dict.fromkeys(COLUMNS, "") | found.get(form, {"taken": "no search"})
        own = row.pop("digest", "")
        row["changed"] = int(form == ALL or own != found.get(ALL, {}).get("digest"))
        if options.fits and row["changed"]:
            row |= fitted(bench, target, form)
        return {name: row[name] for name in COLUMNS}

    cells = [{"target": name, "form": form} for name in names for form in (ALL, *options.forms)]
    rows = fill(cells, compute, COLUMNS, options.csv)
    print(*summary(rows), sep="\n")


def fitted(bench: Bench, target: str, form: str) -> Row:
    """The figures of ``fit`` from a start without a form."""
    posterior, reference = bench.posterior(target), bench.reference(target)
    with without(form):
        found = METHODS["AutoImplicit"](posterior, 0, NUM_STEPS, len(reference.truth))
    figures = measure(found.draws, reference, posterior.heavy_tails, bench.sizes.num_pairs)
    numbers = {
        n: float(f"{figures[n]:.4g}") for n in ("distance", "mean_error", "sd_low", "sd_high")
    }
    right = within_limits(numbers["mean_error"], numbers["sd_low"], numbers["sd_high"])
    return numbers | {
        "right": int(right), "fit_cpu_seconds": round(found.cpu_seconds, 1),
        "ending": found.ending,
    }  # fmt: skip


def summary(rows: Sequence[Row]) -> list[str]:
    """One line for each form: how often it counts, and what it brings."""
    by = {(row["target"], row["form"]): row for row in rows}
    targets = list(dict.fromkeys(row["target"] for row in rows))
    lines = [f"{'without':26}{'starts that differ':>20}{'nats lost: median, most':>28}"
             f"{'nats won: most':>16}{'CPU s saved':>13}"]  # fmt: skip
    for form in dict.fromkeys(row["form"] for row in rows if row["form"] != ALL):
        pairs = [(by[t, ALL], by[t, form]) for t in targets if (t, form) in by]
        pairs = [(a, b) for a, b in pairs if a["bound"] != "" and b["bound"] != ""]
        moved = [(a, b) for a, b in pairs if b["changed"]]
        losses = np.array([a["bound"] - b["bound"] for a, b in moved] or [0.0])
        saved = sum(a["cpu_seconds"] - b["cpu_seconds"] for a, b in pairs)
        lines.append(f"{form:26}{len(moved):>12} of {len(pairs):<5}"
                     f"{np.median(losses):>18.2f}, {losses.max():>8.2f}{-losses.min():>16.2f}"
                     f"{saved:>13.1f}")  # fmt: skip
    return lines


if __name__ == "__main__":
    main()
