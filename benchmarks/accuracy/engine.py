"""Accuracy and time of ``AutoImplicit`` with ``ImplicitELBO``, both with default settings.

    python -m benchmarks.accuracy.engine [--data PATH] [--seeds 5] [--targets banana ...]
        [--csv FILE] [--quick]

Each fit is one call ``svi.run(key, 5_000, progress_bar=False)`` with Adam, whose step size falls
from 1e-2 to 0 along a cosine, as in the README. Seconds include compilation. Some figures have
limits, and the exit status is 1 if one is missed; after ``--quick``, which misses them, it is 0.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random
from numpyro.infer import SVI

from benchmarks.accuracy.targets import TARGETS, Target, make_target, reference
from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore.diagnostics import mmd_squared, sliced_wasserstein

REFERENCE_SEED = 20_200_519


class Sizes(NamedTuple):
    """Sizes of a run.

    Attributes:
        num_steps: SVI steps of a fit.
        num_draws: draws in each of the two sets of a distance.
        num_exact: pairs of sets that a sliced Wasserstein distance is averaged over.
        num_mmd: the same for MMD², and for all distances where the reference is NUTS.
    """

    num_steps: int = 5_000
    num_draws: int = 2_000
    num_exact: int = 200
    num_mmd: int = 20


QUICK = Sizes(num_steps=20, num_draws=200, num_exact=3, num_mmd=2)

# Lowest and highest admissible value of each figure that has limits.
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
        """Lowest and highest admissible value; None for a figure without limits."""
        return LIMITS.get((self.target, self.name))

    @property
    def passed(self) -> bool:
        """True if the value is within its limits; always true for a figure without limits."""
        return self.limits is None or bool(self.limits[0] <= self.value <= self.limits[1])


def fit(
    target: Target, seed: int, num_draws: int, num_steps: int = Sizes().num_steps
) -> tuple[float, float, Array]:
    """Fit the guide with default settings and draw from it.

    Args:
        target: the posterior.
        seed: seed of the fit.
        num_draws: number of draws.
        num_steps: number of SVI steps.

    Returns:
        Elapsed seconds of ``svi.run``, CPU seconds of all cores together, and unconstrained draws
        of the guide, shape (num_draws, dim).
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
    """Reference draws of one target, with the distances between them, to measure guides against.

    Args:
        target: the posterior.
        sizes: sizes of the run.
    """

    def __init__(self, target: Target, sizes: Sizes) -> None:
        # NUTS draws are expensive. Exact ones cost nothing, so more of them reduce the Monte Carlo
        # error.
        self.sizes = sizes
        self.num_replicates = sizes.num_mmd if target.exact is None else sizes.num_exact
        self.num_draws = self.num_replicates * sizes.num_draws
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
        """Fit one guide and yield its figures."""
        num_steps = self.sizes.num_steps
        seconds, cpu_seconds, draws = fit(self.target, seed, self.num_draws, num_steps)

        def figure(name: str, value: Any, *rest: Any) -> Figure:
            return Figure(self.target.name, seed, name, float(value), *map(float, rest))

        yield figure("seconds", seconds)
        # On a busy machine elapsed seconds include waiting: distrust them if these are far fewer.
        yield figure("CPU seconds", cpu_seconds)

        distances = self._sliced(draws)
        ratio = distances.mean() / self.sliced_floors.mean()
        # Both use the same reference draws, so the error of the ratio is that of the residuals.
        residuals = (distances - ratio * self.sliced_floors) / self.sliced_floors.mean()
        yield figure("sliced W1 / floor", ratio, _standard_error(residuals), 1.0)

        discrepancies = self._mmd(draws)
        # The estimate is unbiased, so its floor is 0 on average; its root mean square is printed.
        floor = np.sqrt((self.mmd_floors**2).mean())
        yield figure("MMD²", discrepancies.mean(), _standard_error(discrepancies), floor)

        if self.target.name == "student":
            return  # the variance is infinite
        moments = zip(
            self._moment_figures(draws), self._moment_figures(self.other_truth), strict=True
        )
        for (name, value), (_, floor) in moments:
            yield figure(name, value, np.nan, floor)

    def _sliced(self, draws: Array) -> np.ndarray:
        # All distances use the same directions, which contribute little to the error.
        key = random.key(REFERENCE_SEED)
        return self._replicates(lambda x, y: sliced_wasserstein(x, y, key, 50), draws)

    def _mmd(self, draws: Array) -> np.ndarray:
        # In units of the posterior's standard deviation, so that coordinates have equal weights.
        def distance(x: Array, y: Array) -> Array:
            return mmd_squared(x / self.scale, y / self.scale, self.bandwidth)

        return self._replicates(distance, draws, self.sizes.num_mmd)

    def _replicates(
        self, distance: Callable[[Array, Array], Array], draws: Array, number: int | None = None
    ) -> np.ndarray:
        pairs = (
            x.reshape(self.num_replicates, self.sizes.num_draws, -1)[:number]
            for x in (draws, self.truth)
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
    """Lines of the summary: the mean and the worst value of each figure over the seeds."""
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
    """Write one row per figure."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Figure)])
        writer.writeheader()
        writer.writerows(asdict(figure) for figure in figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="waveform.mat, or the folder that holds it")
    parser.add_argument("--seeds", type=int, default=5, help="number of fits per target")
    parser.add_argument(
        "--targets", nargs="+", choices=(*TARGETS, "all"), metavar="TARGET",
        help=f"some of {', '.join(TARGETS)}; or all",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, help="file to write the figures to")
    parser.add_argument("--quick", action="store_true", help="one target, few steps and draws")
    options = parser.parse_args(arguments)
    names = options.targets or (["banana"] if options.quick else DEFAULT_TARGETS)
    names = TARGETS if "all" in names else names
    sizes, num_seeds = (QUICK, 1) if options.quick else (Sizes(), options.seeds)
    try:
        targets = [make_target(name, options.data) for name in names]
    except ValueError as error:
        parser.error(str(error))

    figures: list[Figure] = []
    for target in targets:
        yardstick = Yardstick(target, sizes)
        for seed in range(num_seeds):
            for figure in yardstick.figures(seed):
                figures.append(figure)
                print(line_of(figure), flush=True)
            if options.csv:
                write_csv(options.csv, figures)
    print("", *report(figures), sep="\n")
    return int(not options.quick and not all(figure.passed for figure in figures))


def line_of(figure: Figure) -> str:
    """One figure with its error, its floor and whether it misses its limits."""
    error = "" if np.isnan(figure.error) else f" ± {figure.error:.4f}"
    floor = "" if np.isnan(figure.floor) else f" (floor {figure.floor:.4f})"
    failed = "" if figure.passed else "  MISSED"
    value = f"{figure.name} {figure.value:.4f}{error}{floor}{failed}"
    return f"{figure.target} seed {figure.seed}: {value}"


if __name__ == "__main__":
    sys.exit(main())
