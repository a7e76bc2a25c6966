"""Functions of one variable: posteriors of functional networks against exact ones.

Three toys have a Gaussian process as prior. The other two use only draws of their prior, of
piecewise-constant and of periodic functions.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
from jax import Array, random

from examples.functions.fit import Fitted, Prior, Settings, functional
from examples.functions.gp import Hyperparameters, exact_posterior, fit_hyperparameters
from examples.functions.networks import RandomFunction
from examples.functions.samplers import EXACT, SAMPLERS, jump_fraction
from numpyro_kscore.functions import LearnedPriorInfo, learn_prior
from numpyro_kscore.functions._learned_prior import draw_functions

GRID = 121
# Functions behind a comparison: the standard error of their mean is 1.6 % of a standard deviation.
DRAWS = 4000
# Noise in function values: far below the posterior standard deviation for a Gaussian process as
# prior, and equal to the noise of the observations for a simulator.
EXPLICIT_JITTER, IMPLICIT_JITTER = 0.01, 0.1

# Every measurement set contains all data, so the objective is a lower bound of the evidence. There
# are five times as many functions as values, because few functions make spreads too narrow.
TOY = Settings(
    num_steps=12_000,
    step_size=2e-3,
    batch_size=20,
    num_points=10,
    num_particles=160,
    hidden=(50, 50),
    activation=jnp.tanh,
    frequency=3.0,
)
# Functions that are sharper than a Gaussian process need a sharper network, and points as close as
# the functions vary. Beyond the data the network determines how a function continues: flat with
# tanh, whatever the prior, and periodic with sines.
SAMPLED = {
    "piecewise": replace(TOY, num_steps=3000, num_points=21, num_particles=100, frequency=15.0),
    "periodic": replace(
        TOY, num_steps=3000, num_points=41, hidden=(50,), activation=jnp.sin, frequency=8.0
    ),
}
LEARNING_STEPS = 12_000
# All weights are linear in the same noise: with independent noise, the spread of the cubic at an
# end of the data was .85 of the exact one, not .91.
KIND = "hypernetwork"
PROCESSES = ("cubic", "sine", "gap")
TOYS = (*PROCESSES, *SAMPLED)


@dataclass(frozen=True)
class Toy:
    """Data on a line, in units in which targets are of order one.

    Attributes:
        x: inputs, (N, 1).
        y: targets, (N,).
        noise: standard deviation of targets.
        low: left end of the region that measurement points are drawn from.
        high: right end.
        inside: inputs -> whether they count as near the data.
    """

    x: Array
    y: Array
    noise: float
    low: float
    high: float
    inside: Callable[[np.ndarray], np.ndarray]

    @property
    def grid(self) -> Array:
        """Inputs at which functions are compared, (121, 1)."""
        return jnp.linspace(self.low, self.high, GRID)[:, None]


def make_toy(name: str, seed: int = 0) -> Toy:
    """``cubic`` and ``sine`` of Sun et al. (2019), a sine with a gap, steps, a periodic sine."""
    rng = np.random.default_rng(seed)
    if name == "cubic":
        x = rng.uniform(-4, 4, 20)
        y = (x**3 + 3 * rng.normal(size=20)) / 25
        toy = (x / 2, y, 3 / 25, -3.0, 3.0, lambda x: np.abs(x) < 2)
    elif name == "sine":
        x = rng.uniform(-1, 1, 20)
        y = 2 * np.sin(4 * x) + 0.2 * rng.normal(size=20)
        toy = (2 * x, y, 0.2, -4.0, 4.0, lambda x: np.abs(x) < 2)
    elif name == "gap":
        x = np.concatenate([rng.uniform(-2, -0.8, 10), rng.uniform(0.8, 2, 10)])
        y = np.sin(2 * x) + 0.1 * rng.normal(size=20)
        inside = lambda x: (np.abs(x) < 2) & (np.abs(x) > 0.8)  # noqa: E731
        toy = (x, y, 0.1, -3.0, 3.0, inside)
    elif name == "piecewise":
        x = np.array([-1.8, -1.5, -1.1, -0.8, -0.1, 0.2, 0.5, 1.3, 1.5, 1.8])
        y = np.where(x < -0.4, -0.8, np.where(x < 0.9, 1.0, 0.1)) + 0.1 * rng.normal(size=10)
        toy = (x, y, 0.1, -2.0, 2.0, lambda x: np.abs(x) <= 2)
    elif name == "periodic":
        x = rng.uniform(-2, 0.5, 12)
        y = np.sin(2 * np.pi * x / 1.5) + 0.1 * rng.normal(size=12)
        toy = (x, y, 0.1, -2.0, 4.0, lambda x: x < 0.5)
    else:
        raise ValueError(f"toy: expected one of {', '.join(TOYS)}; got {name!r}")
    x, y, *rest = toy
    return Toy(jnp.asarray(x[:, None], jnp.float32), jnp.asarray(y, jnp.float32), *rest)


class Solved(NamedTuple):
    """A toy with its fit.

    Attributes:
        toy: the data.
        prior: draws of the prior on the grid, (S, 121).
        draws: draws of the functional posterior on the grid, (S, 121).
        exact: mean and standard deviation of the exact posterior, (121,) each.
        seconds: processor seconds of the fit.
    """

    toy: Toy
    prior: np.ndarray
    draws: np.ndarray
    exact: tuple[np.ndarray, np.ndarray]
    seconds: float


class Sampled(NamedTuple):
    """A toy whose prior is a simulator.

    Attributes:
        learned: fit with the prior learned from draws.
        gaussian: fit with the Gaussian prior of the same mean and covariance.
        exact: draws of the exact posterior on the grid, (S, 121).
        info: report on the learning of the prior.
        seconds: processor seconds of that.
    """

    learned: Solved
    gaussian: Solved
    exact: np.ndarray
    info: LearnedPriorInfo
    seconds: float


def solve(name: str, settings: Settings = TOY, seed: int = 0) -> Solved:
    """Fit a toy whose prior is a Gaussian process.

    Args:
        name: one of ``cubic``, ``sine`` and ``gap``.
        settings: settings of the fit; the frequency is for a length scale of 1.
        seed: seed of data and fit.
    """
    toy = make_toy(name, seed)
    pool = random.uniform(random.key(3), (4000, 1), minval=toy.low, maxval=toy.high)
    found = fit_hyperparameters(toy.x, toy.y)
    # The noise is known; the other hyperparameters maximize the marginal likelihood.
    found = found._replace(log_noise=jnp.log(jnp.asarray(toy.noise - 0.05)))
    # Functions of the network should be as smooth as those of the prior, which allows rougher ones
    # little spread.
    frequency = settings.frequency / float(jnp.exp(found.log_scales[0]))
    settings = replace(settings, frequency=frequency)
    prior = partial(Hyperparameters.prior, jitter=EXPLICIT_JITTER)
    fitted = fit_toy(toy, prior, found, pool, settings, EXPLICIT_JITTER, seed)
    mean, sd = exact_posterior(found, toy.x, toy.y, toy.grid)
    return Solved(
        toy,
        np.asarray(found.prior(toy.grid).sample(random.key(4), (300,))),
        np.asarray(fitted.draw(toy.grid)),
        (np.asarray(mean), np.asarray(sd)),
        fitted.seconds,
    )


def solve_sampled(
    name: str, settings: Settings, learning_steps: int = LEARNING_STEPS, seed: int = 0
) -> Sampled:
    """Learn the prior of a toy from draws; fit with it and with the Gaussian of the same moments.

    Args:
        name: one of ``SAMPLERS``.
        settings: settings of the fits; every set contains ``num_points`` evenly spaced points.
        learning_steps: steps of learning the prior.
        seed: seed of data and fits.
    """
    toy, sampler = make_toy(name, seed), SAMPLERS[name]
    points = jnp.linspace(toy.low, toy.high, settings.num_points)[:, None]
    start = time.process_time()
    prior = learn_prior(
        random.key(6), sampler, jnp.concatenate([toy.x, points]),
        jitter=IMPLICIT_JITTER, num_steps=learning_steps,
    )  # fmt: skip
    jax.block_until_ready(prior.info)
    seconds = time.process_time() - start
    covariance = prior.root @ prior.root
    gaussian = dist.MultivariateNormal(prior.mean, (covariance + covariance.T) / 2)
    draws = draw_functions(sampler, random.key(4), toy.grid, 300)
    exact = EXACT[name](toy.x, toy.y, toy.noise, toy.grid)

    def solved(distribution: dist.Distribution) -> Solved:
        fitted = fit_toy(
            toy, lambda given, _: given, distribution, points, settings, IMPLICIT_JITTER, seed,
        )  # fmt: skip
        values = np.asarray(fitted.draw(toy.grid))
        of_exact = exact.mean(0), exact.std(0)
        return Solved(toy, np.asarray(draws), values, of_exact, fitted.seconds)

    return Sampled(solved(prior), solved(gaussian), exact, prior.info, seconds)


def fit_toy(
    toy: Toy,
    prior: Prior,
    prior_args: Any,
    pool: Array,
    settings: Settings,
    jitter: float,
    seed: int,
) -> Fitted:
    """A functional network with all data in every measurement set, and known noise."""
    function = RandomFunction(KIND, settings.hidden, settings.activation, settings.frequency)
    return functional(
        toy.x, toy.y, prior, prior_args, toy.noise, settings, random.key(seed), pool=pool,
        function=function, jitter=jitter, learn_noise=False, num_draws=DRAWS,
    )[0]  # fmt: skip


def compare(solved: Solved) -> dict[str, float]:
    """Largest errors of the mean in posterior sd, and ratios of sd, inside and outside the data."""
    mean, sd = solved.exact
    error = np.abs(solved.draws.mean(0) - mean) / sd
    ratio = solved.draws.std(0) / sd
    inside = solved.toy.inside(np.asarray(solved.toy.grid[:, 0]))
    found = {}
    for name, where in (("inside", inside), ("outside", ~inside)):
        found[f"mean_{name}"] = float(error[where].max())
        found[f"sd_{name}_least"] = float(ratio[where].min())
        found[f"sd_{name}_most"] = float(ratio[where].max())
    return found


def describe(found: Sampled) -> dict[str, dict[str, float]]:
    """Figures of the posteriors under the learned prior, under the Gaussian and of the exact one.

    For each: the fraction of the variation in jumps, and inside and beyond the data the root mean
    square error of the mean and the mean standard deviation, both in units of the exact posterior's
    mean standard deviation.
    """
    mean, sd = found.learned.exact
    inside = found.learned.toy.inside(np.asarray(found.learned.toy.grid[:, 0]))
    table = {}
    for name, draws in (
        ("exact posterior", found.exact),
        ("learned prior", found.learned.draws),
        ("Gaussian prior of the same covariance", found.gaussian.draws),
    ):
        error, spread = (draws.mean(0) - mean) ** 2, draws.std(0)
        row = {"fraction in jumps": jump_fraction(draws)}
        for place, where in (("inside", inside), ("beyond", ~inside)):
            if where.any():
                unit = sd[where].mean()
                row[f"error {place}"] = float(np.sqrt(error[where].mean()) / unit)
                row[f"sd {place}"] = float(spread[where].mean() / unit)
        table[name] = row
    return table


def plot(solved: dict[str, Solved], path: Any) -> None:
    """Plot the prior of each toy and, below, its posterior with the exact one."""
    figure, panels = plt.subplots(
        2, len(solved), figsize=(3.6 * len(solved), 6), squeeze=False, layout="constrained"
    )
    for (name, found), (above, below) in zip(solved.items(), panels.T, strict=True):
        toy, grid = found.toy, np.asarray(found.toy.grid[:, 0])
        above.plot(grid, found.prior[:8].T, lw=0.8)
        above.set(title=f"{name}: prior")
        below.plot(grid, found.draws[:8].T, color="C0", lw=0.6, alpha=0.7)
        mean, sd = found.draws.mean(0), found.draws.std(0)
        below.fill_between(grid, mean - 2 * sd, mean + 2 * sd, color="C0", alpha=0.2, lw=0)
        mean, sd = found.exact
        below.plot(grid, mean, "k-", lw=1)
        below.plot(grid, np.stack([mean - 2 * sd, mean + 2 * sd]).T, "k--", lw=0.8)
        below.plot(toy.x[:, 0], toy.y, "r.", ms=6)
        below.set(title="posterior; black: exact")
    figure.savefig(path, dpi=90)
    plt.close(figure)
