"""Accuracy and time of ``AutoImplicit`` with ``ImplicitELBO``, both with default settings.

    python -m benchmarks.accuracy.engine [--data PATH] [--seeds 5] [--targets banana ...] [--csv FILE]

Every target and seed is one call ``svi.run(key, 5_000, progress_bar=False)`` with Adam, its step
size falling from 1e-2 to 0 along a cosine, as in the README. Its seconds include compilation.
Figures with a limit are checked, and the exit status is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random
from numpyro.infer import SVI

from benchmarks.accuracy.targets import TARGETS, Target, make_target, reference
from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore.diagnostics import mmd_squared, sliced_wasserstein

NUM_STEPS = 5_000
NUM_DRAWS = 2_000  # in each of the sets a distance is computed between
EXACT_REPLICATES = 200  # pairs of such sets that sliced Wasserstein distances are averaged over
MMD_REPLICATES = 20  # the same for MMD², and for all distances where the reference is NUTS
REFERENCE_SEED = 20_200_519

# Lowest and highest admissible value of each figure that is held to one.
LIMITS: dict[tuple[str, str], tuple[float, float]] = {
    **{(name, "seconds"): (0, 10) for name in ("banana", "multimodal", "x_shape")},
    **{(name, "sliced W1 / floor"): (0, 1.3) for name in ("banana", "multimodal", "x_shape")},
    ("waveform", "mean sd ratio"): (0.98, 1.02),
    ("waveform", "rms correlation error"): (0, 0.03),
    ("eight_schools_centered", "MMD²"): (-np.inf, 0.005),
    ("eight_schools_centered", "log τ sd ratio"): (0.9, 1.1),
}
DEFAULT_TARGETS = tuple(dict.fromkeys(target for target, _ in LIMITS))


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        target: name of the target.
        seed: seed of the fit.
        name: name of the figure.
        value: the number.
        error: its Monte Carlo standard error given the fitted guide; NaN if not estimated.
        floor: the same number between independent reference draws; NaN if it has none.
    """

    target: str
    seed: int
    name: str
    value: float
    error: float = np.nan
    floor: float = np.nan

    @property
    def limits(self) -> tuple[float, float] | None:
        """Lowest and highest admissible value, if the figure is held to one."""
        return LIMITS.get((self.target, self.name))

    @property
    def passed(self) -> bool:
        """Whether the value keeps its limits; a figure without limits always does."""
        return self.limits is None or bool(self.limits[0] <= self.value <= self.limits[1])


def fit(
    target: Target, seed: int, num_draws: int, num_steps: int = NUM_STEPS
) -> tuple[float, float, Array]:
    """Fits the guide with default settings and draws from it.

    Args:
        target: the posterior.
        seed: seed of the fit.
        num_draws: number of draws.
        num_steps: number of SVI steps.

    Returns:
        Seconds that ``svi.run`` took by the clock, seconds of all cores together, and unconstrained
        draws of the guide, shape (num_draws, dim).
    """
    run_key, draw_key = random.split(random.key(seed))
    guide = AutoImplicit(target.model)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))
    svi = SVI(target.model, guide, optimizer, ImplicitELBO())
    start, cpu_start = time.perf_counter(), time.process_time()
    result = svi.run(run_key, num_steps, *target.args, progress_bar=False)
    jax.block_until_ready(result.params)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    draws = guide.sample_posterior(draw_key, result.params, *target.args, sample_shape=(num_draws,))
    return seconds, cpu_seconds, target.unconstrained(draws)


class Yardstick:
    """Reference draws of one target, and what every guide on it is measured against.

    Args:
        target: the posterior.
    """

    def __init__(self, target: Target) -> None:
        # NUTS draws are dear; exact ones are free, and bring the Monte Carlo error down.
        self.num_replicates = MMD_REPLICATES if target.exact is None else EXACT_REPLICATES
        self.num_draws = self.num_replicates * NUM_DRAWS
        draws = reference(target, random.key(REFERENCE_SEED), 2 * self.num_draws)
        self.target = target
        self.truth, self.other_truth = jnp.split(draws, 2)
        self.scale = self.truth.std(0)
        thinned = self.truth[:500] / self.scale
        rows, columns = np.triu_indices(len(thinned), k=1)
        self.bandwidth = jnp.median(jnp.linalg.norm(thinned[rows] - thinned[columns], axis=1))
        self.sliced_floors = self._sliced(self.other_truth)
        self.mmd_floors = self._mmd(self.other_truth)

    def figures(self, seed: int) -> Iterator[Figure]:
        """Fits one guide and yields its figures."""
        seconds, cpu_seconds, draws = fit(self.target, seed, self.num_draws)

        def figure(name: str, value: Any, *rest: Any) -> Figure:
            return Figure(self.target.name, seed, name, float(value), *map(float, rest))

        yield figure("seconds", seconds)
        # On a busy machine the clock counts what others do: far below it, do not trust the clock.
        yield figure("CPU seconds", cpu_seconds)

        distances = self._sliced(draws)
        ratio = distances.mean() / self.sliced_floors.mean()
        # Both share their reference draws, so the error of the ratio is that of the residuals.
        residuals = (distances - ratio * self.sliced_floors) / self.sliced_floors.mean()
        yield figure("sliced W1 / floor", ratio, _standard_error(residuals), 1.0)

        discrepancies = self._mmd(draws)
        # The estimate is unbiased, so its floor is 0 on average: print the typical size instead.
        floor = np.sqrt((self.mmd_floors**2).mean())
        yield figure("MMD²", discrepancies.mean(), _standard_error(discrepancies), floor)

        if self.target.name == "student":
            return  # no variance exists
        moments = zip(
            self._moment_figures(draws), self._moment_figures(self.other_truth), strict=True
        )
        for (name, value), (_, floor) in moments:
            yield figure(name, value, np.nan, floor)

    def _sliced(self, draws: Array) -> np.ndarray:
        # Directions count little in the error, and all distances share them.
        key = random.key(REFERENCE_SEED)
        return self._replicates(lambda x, y: sliced_wasserstein(x, y, key, 50), draws)

    def _mmd(self, draws: Array) -> np.ndarray:
        # In units of the posterior's spread, so that every coordinate counts alike.
        def distance(x: Array, y: Array) -> Array:
            return mmd_squared(x / self.scale, y / self.scale, self.bandwidth)

        return self._replicates(distance, draws, MMD_REPLICATES)

    def _replicates(
        self, distance: Callable[[Array, Array], Array], draws: Array, number: int | None = None
    ) -> np.ndarray:
        pairs = (
            x.reshape(self.num_replicates, NUM_DRAWS, -1)[:number] for x in (draws, self.truth)
        )
        return np.asarray(lax.map(lambda pair: distance(*pair), tuple(pairs)))

    def _moment_figures(self, draws: Array) -> Iterator[tuple[str, Array]]:
        ratios = draws.std(0) / self.scale
        yield "mean sd ratio", ratios.mean()
        yield "smallest sd ratio", ratios.min()
        yield "largest sd ratio", ratios.max()
        yield (
            "largest mean error / sd",
            (jnp.abs(draws.mean(0) - self.truth.mean(0)) / self.scale).max(),
        )
        error = jnp.corrcoef(draws, rowvar=False) - jnp.corrcoef(self.truth, rowvar=False)
        yield (
            "rms correlation error",
            jnp.sqrt((error[np.triu_indices(len(error), k=1)] ** 2).mean()),
        )
        if self.target.name.startswith("eight_schools"):
            # The second coordinate is log τ: the width of the funnel.
            yield "log τ sd ratio", ratios[1]


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)


def report(figures: Sequence[Figure]) -> Iterator[str]:
    """Lines of the summary: every figure over the seeds, with its limits."""
    yield f"{'target':22} {'figure':24} {'mean':>8} {'worst':>8} {'floor':>8}  limits"
    for target, name in dict.fromkeys((f.target, f.name) for f in figures):
        group = [f for f in figures if (f.target, f.name) == (target, name)]
        values = [f.value for f in group]
        limits = group[0].limits
        worst = max(values, key=lambda v: abs(v - 1) if "sd ratio" in name else v)
        verdict = ""
        if limits is not None:
            verdict = f"[{limits[0]:g}, {limits[1]:g}] " + (
                "kept" if all(f.passed for f in group) else "MISSED"
            )
        yield (
            f"{target:22} {name:24} {np.mean(values):8.4f} {worst:8.4f} "
            f"{_blank_nan(np.mean([f.floor for f in group])):>8}  {verdict}"
        )


def _blank_nan(value: Any) -> str:
    return "" if np.isnan(value) else f"{value:.4f}"


def write_csv(path: Path, figures: Iterable[Figure]) -> None:
    """Writes one row per figure."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Figure)])
        writer.writeheader()
        writer.writerows(asdict(figure) for figure in figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="waveform.mat, or the folder that holds it")
    parser.add_argument("--seeds", type=int, default=5, help="number of fits per target")
    parser.add_argument(
        "--targets", nargs="+", choices=(*TARGETS, "all"), default=DEFAULT_TARGETS, metavar="TARGET"
    )
    parser.add_argument("--csv", type=Path, help="file to write the figures to")
    options = parser.parse_args(arguments)
    names = TARGETS if "all" in options.targets else options.targets

    figures: list[Figure] = []
    for name in names:
        yardstick = Yardstick(make_target(name, options.data))
        for seed in range(options.seeds):
            for figure in yardstick.figures(seed):
                figures.append(figure)
                error = "" if np.isnan(figure.error) else f" ± {figure.error:.4f}"
                floor = "" if np.isnan(figure.floor) else f" (floor {figure.floor:.4f})"
                failed = "" if figure.passed else "  MISSED"
                print(
                    f"{name} seed {seed}: {figure.name} {figure.value:.4f}{error}{floor}{failed}",
                    flush=True,
                )
            if options.csv:
                write_csv(options.csv, figures)
    print("", *report(figures), sep="\n")
    return int(not all(figure.passed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
