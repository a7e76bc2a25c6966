"""Toys whose prior is a simulator: the simulator as a program, and a prior learned from its draws.

A program's guide is over its random numbers. A learned prior is a density of function values, and
its guide is a network. Both are compared with the posterior by importance sampling, and on a
predator-prey series by their forecasts.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.infer import Predictive

from examples.common import tables
from examples.functions.fit import Settings, functional
from examples.functions.fit import run as run_fit
from examples.functions.metrics import crps, log_likelihood
from examples.functions.networks import RandomFunction
from examples.functions.programs import PROGRAMS
from examples.functions.samplers import jump_fraction
from examples.functions.tasks import Task, make_task
from examples.functions.toys import KIND, TOY
from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore.functions import learn_prior
from numpyro_kscore.functions._learned_prior import draw_functions

# Functions behind a comparison: the standard error of their mean is 1.6 % of a standard deviation.
DRAWS = 4000
# White noise in function values of a learned prior: that of the observations of most toys.
JITTER = 0.1
LEARNING_STEPS = 12_000
# Functions that are sharper than a Gaussian process need a sharper network, and points as close as
# the functions vary. Beyond the data the network determines how a function continues: flat with
# tanh, whatever the prior, and periodic with sines.
WAVES = {"hidden": (50,), "activation": jnp.sin}
NETWORKS = {
    "piecewise": replace(TOY, num_steps=3000, num_particles=100, frequency=15.0),
    "periodic": replace(TOY, num_steps=3000, num_particles=160, frequency=8.0, **WAVES),
    "monotone": replace(TOY, num_steps=3000, num_particles=100),
    "lotka-volterra": replace(TOY, num_steps=3000, num_particles=160, frequency=1.5, **WAVES),
}
# Steps and first step size of the fit of a program.
PROGRAM_STEPS, PROGRAM_STEP_SIZE = 2000, 1e-2

# A jump's place gets no gradient from values beside it, so the piecewise program cannot be fitted.
METHODS = ("program", "learned", "Gaussian")
SETTINGS = ("toy", "seed", "method", "steps")
COLUMNS = ("error_inside", "sd_inside", "error_beyond", "sd_beyond", "jump_fraction", "rmse",
           "nll", "crps", "coverage", "seconds")  # fmt: skip


Draw = Callable[[Array], Array]


def fit_program(task: Task, num_steps: int, seed: int) -> Draw:
    """A fit of the program's random numbers by ``AutoImplicit``; the program draws functions."""
    program = PROGRAMS[task.name]

    def model(x: Array, y: Array) -> None:
        numpyro.sample("y", dist.Normal(program(x), task.noise).to_event(1), obs=y)

    def functions(points: Array) -> None:
        numpyro.deterministic("f", program(points))

    guide = AutoImplicit(model)
    settings = Settings(num_steps, PROGRAM_STEP_SIZE)
    result = run_fit(model, guide, ImplicitELBO(), settings, random.key(seed), task.x, task.y)
    numbers = guide.sample_posterior(random.key(1), result.params, sample_shape=(DRAWS,))
    predictive = Predictive(functions, numbers, parallel=True)
    return jax.jit(lambda points: predictive(random.key(2), points)["f"])


def fit_learned(
    task: Task, settings: Settings, learning_steps: int, seed: int, gaussian: bool
) -> Draw:
    """A functional network with a learned prior, or the Gaussian of the same moments."""
    points = jnp.concatenate([task.x, task.points])
    prior: Any = learn_prior(
        random.key(6), task.sampler, points, jitter=JITTER,
        num_steps=1 if gaussian else learning_steps,
    )  # fmt: skip
    if gaussian:
        covariance = prior.root @ prior.root
        prior = dist.MultivariateNormal(prior.mean, (covariance + covariance.T) / 2)
    else:
        print(f"{task.name}: held-out loss of the learned prior {prior.info.held_out:.3f}, that "
              f"of its Gaussian {prior.info.gaussian:.3f}")  # fmt: skip
    settings = replace(settings, batch_size=len(task.y), num_points=len(task.points))
    function = RandomFunction(KIND, settings.hidden, settings.activation, settings.frequency)
    return functional(
        task.x, task.y, lambda given, _: given, prior, task.noise, settings, random.key(seed),
        pool=task.points, function=lambda _, points: function(points), jitter=JITTER,
        learn_noise=False, num_draws=DRAWS,
    )[0].draw  # fmt: skip


def solve(task: Task, method: str, num_steps: int | None, seed: int) -> Draw:
    """A fit by one of ``METHODS``; ``num_steps`` replaces the number of all steps."""
    if method == "program":
        return fit_program(task, num_steps or PROGRAM_STEPS, seed)
    settings = NETWORKS[task.name]
    settings = replace(settings, num_steps=num_steps or settings.num_steps)
    return fit_learned(task, settings, num_steps or LEARNING_STEPS, seed, method == "Gaussian")


def describe(draws: np.ndarray, exact: np.ndarray, inside: np.ndarray) -> dict[str, float]:
    """Errors and spreads against draws of the exact posterior, (S, m) each.

    Inside and beyond the data, these are the root mean square error of the mean and the mean
    standard deviation, in units of the exact posterior's mean standard deviation.
    """
    found = {"jump_fraction": jump_fraction(draws)}
    error, sd = draws.mean(0) - exact.mean(0), exact.std(0)
    for place, where in (("inside", inside), ("beyond", ~inside)):
        if where.any():
            unit = sd[where].mean()
            found[f"error_{place}"] = float(np.sqrt(np.mean(error[where] ** 2)) / unit)
            found[f"sd_{place}"] = float(draws.std(0)[where].mean() / unit)
    return found


def forecast(draws: np.ndarray, noise: float, y: np.ndarray) -> dict[str, float]:
    """Figures of a forecast of noisy targets (m,) by functions (S, m).

    ``nll`` is the mean negative log density, ``crps`` the continuous ranked probability score, and
    ``coverage`` the fraction of targets in the interval between the quantiles .05 and .95.
    """
    around = dist.Normal(0.0, noise)
    noisy = draws + noise * np.random.default_rng(0).normal(size=draws.shape)
    low, high = np.quantile(noisy, [0.05, 0.95], axis=0)
    density = log_likelihood(jnp.asarray(draws), around, jnp.asarray(y))
    return {
        "rmse": float(np.sqrt(np.mean((draws.mean(0) - y) ** 2))),
        "nll": -float(jnp.mean(density)),
        "crps": crps(jnp.asarray(draws), around, jnp.asarray(y)),
        "coverage": float(np.mean((low <= y) & (y <= high))),
    }


@dataclass(frozen=True)
class Panel:
    """The content of a toy's column of the figure: draws on the grid, (S, m)."""

    task: Task
    prior: np.ndarray
    exact: np.ndarray
    fits: dict[str, np.ndarray]


def run(
    names: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    num_steps: int | None,
    csv: Path | None,
) -> tuple[list[tables.Row], dict[str, Panel]]:
    """Fit toys, and write each row to the file as soon as it is known.

    Args:
        names: some of ``tasks.TOYS``.
        methods: some of ``METHODS``.
        seeds: data sets of each toy.
        num_steps: steps of everything, or None.
        csv: table to write; rows of other settings in it are kept.

    Returns:
        All rows of these settings, and for each toy the fits to its first data set.
    """
    known = {_key(row): row for row in tables.read(csv, [*SETTINGS, *COLUMNS])}
    rows, panels = [], {}
    for name in names:
        for seed in range(seeds):
            task = make_task(name, seed)
            exact, fits = task.exact(), {}
            for method in ("exact", *methods):
                if name == "piecewise" and method == "program":
                    continue
                start, draws = time.process_time(), exact
                if method != "exact":
                    draw = solve(task, method, num_steps, seed)
                    draws = fits[method] = np.asarray(draw(task.grid))
                found = describe(draws, exact, task.inside)
                found["seconds"] = time.process_time() - start
                if task.held_out is not None:
                    at, y = task.held_out
                    found |= forecast(_at(draws, task.grid, at), task.noise, np.asarray(y))
                values = [name, seed, method, num_steps or 0]
                row = dict(zip(SETTINGS, values, strict=True))
                row |= {column: round(found.get(column, np.nan), 4) for column in COLUMNS}
                known[_key(row)] = row
                rows.append(row)
                tables.write(csv, [*SETTINGS, *COLUMNS], list(known.values()))
            if seed == 0:
                prior = draw_functions(task.sampler, random.key(4), task.grid, 300)
                panels[name] = Panel(task, np.asarray(prior), exact, fits)
    return rows, panels


def _key(row: tables.Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in SETTINGS)


def _at(draws: np.ndarray, grid: Array, points: Array) -> np.ndarray:
    """Values at points that are on the grid."""
    distance = np.abs(np.asarray(grid)[None] - np.asarray(points)[:, None]).sum(2)
    return draws[:, distance.argmin(1)]


def print_rows(rows: Iterable[tables.Row]) -> None:
    """Print means over the data sets of each toy and method."""
    rows = list(rows)
    for name in dict.fromkeys(row["toy"] for row in rows):
        print(f"\n{name}\n{'':10}" + "".join(f"{column:>14}" for column in COLUMNS))
        for method in dict.fromkeys(row["method"] for row in rows if row["toy"] == name):
            chosen = [r for r in rows if (r["toy"], r["method"]) == (name, method)]
            means = [np.mean([row[column] for row in chosen]) for column in COLUMNS]
            print(f"{method:10}" + "".join(f"{value:>14.3f}" for value in means))


def plot(panels: dict[str, Panel], path: Any) -> None:
    """Plot the prior of each toy and, below, its posteriors with the exact one."""
    shown = [m for m in METHODS if any(m in panel.fits for panel in panels.values())][:2]
    figure, axes = plt.subplots(
        1 + len(shown), len(panels), squeeze=False, layout="constrained",
        figsize=(3.6 * len(panels), 2.7 * (1 + len(shown))),
    )  # fmt: skip
    for (name, panel), column in zip(panels.items(), axes.T, strict=True):
        # Of two species the first is shown.
        grid, task = np.asarray(panel.task.grid), panel.task
        of_grid = grid[:, -1] == 0 if grid.shape[1] == 2 else np.full(len(grid), True)
        of_data = task.x[:, -1] == 0 if grid.shape[1] == 2 else np.full(len(task.y), True)
        places = grid[of_grid, 0]
        column[0].plot(places, panel.prior[:8, of_grid].T, lw=0.8)
        column[0].set(title=f"{name}: prior")
        for axis, method in zip(column[1:], shown, strict=True):
            if method not in panel.fits:
                axis.set_axis_off()
                continue
            draws, exact = panel.fits[method][:, of_grid], panel.exact[:, of_grid]
            axis.plot(places, draws[:8].T, color="C0", lw=0.6, alpha=0.7)
            mean, sd = draws.mean(0), draws.std(0)
            axis.fill_between(places, mean - 2 * sd, mean + 2 * sd, color="C0", alpha=0.2, lw=0)
            mean, sd = exact.mean(0), exact.std(0)
            axis.plot(places, mean, "k-", lw=1)
            axis.plot(places, np.stack([mean - 2 * sd, mean + 2 * sd]).T, "k--", lw=0.8)
            axis.plot(task.x[of_data, 0], task.y[of_data], "r.", ms=6)
            if task.held_out is not None:
                later, y = (np.asarray(part) for part in task.held_out)
                axis.plot(later[later[:, 1] == 0, 0], y[later[:, 1] == 0], "r+", ms=4)
            axis.set(title=f"{method}; black: exact")
    figure.savefig(path, dpi=90)
    plt.close(figure)
