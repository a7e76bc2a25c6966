"""Functions of one variable: what a functional network makes of few points, beside what is exact.

Three have a Gaussian process as prior, whose posterior is known; two have a prior of which only
draws are at hand, of piecewise-constant and of periodic functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
from jax import Array, random

from examples.functional_gp import Hyperparameters, exact_posterior, fit_hyperparameters
from examples.functional_methods import Fitted, Settings, functional
from examples.functional_networks import RandomFunction
from numpyro_kscore.functions import sampled_prior

GRID = 121
# Functions behind a comparison: their mean is known to 1.6 % of a standard deviation.
DRAWS = 4000
# Noise in function values: far below the posterior's own standard deviation where the prior is a
# Gaussian process, and that of the observations where it is a sampler.
EXPLICIT_JITTER, IMPLICIT_JITTER = 0.01, 0.1

# All data in every set: the objective is a lower bound of the evidence.
TOY = Settings(
    num_steps=6000,
    batch_size=20,
    num_points=10,
    hidden=(50, 50),
    activation=jnp.tanh,
    frequency=3.0,
)


@dataclass(frozen=True)
class Toy:
    """Data on a line, in units in which targets are of order one.

    Attributes:
        x: inputs, (N, 1).
        y: targets, (N,).
        noise: standard deviation of targets.
        low: left end of the region that measurement points are drawn from.
        high: right end.
        inside: which inputs count as near the data.
    """

    x: Array
    y: Array
    noise: float
    low: float
    high: float
    inside: Callable[[np.ndarray], np.ndarray]

    @property
    def grid(self) -> Array:
        """Inputs at which functions are looked at, (121, 1)."""
        return jnp.linspace(self.low, self.high, GRID)[:, None]


def make_toy(name: str, seed: int = 0) -> Toy:
    """``cubic`` and ``sine`` of Sun et al. (2019), a sine with a gap, and a step."""
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
        toy = (x, y, 0.1, -2.0, 2.0, lambda x: np.abs(x) < 2)
    elif name == "periodic":
        x = rng.uniform(-2, 0.5, 12)
        y = np.sin(2 * np.pi * x / 1.5) + 0.1 * rng.normal(size=12)
        toy = (x, y, 0.1, -2.0, 4.0, lambda x: x < 0.5)
    else:
        raise ValueError(f"toy: expected one of {', '.join(TOYS)}; got {name!r}")
    x, y, *rest = toy
    return Toy(jnp.asarray(x[:, None], jnp.float32), jnp.asarray(y, jnp.float32), *rest)


def piece_numbers(key: Array, points: Array) -> Array:
    """Which of up to 7 pieces each point is in, (m,): between 1 and 6 jumps anywhere."""
    count_key, place_key = random.split(key)
    places = random.uniform(place_key, (6,), minval=-2.0, maxval=2.0)
    # Jumps that are not there are beyond the end.
    there = jnp.arange(6) < random.randint(count_key, (), 1, 7)
    return jnp.sum(points[:, 0, None] > jnp.where(there, places, jnp.inf), axis=1)


def piecewise_function(key: Array, points: Array) -> Array:
    """A piecewise-constant function with standard normal levels."""
    jump_key, level_key = random.split(key)
    return random.normal(level_key, (7,))[piece_numbers(jump_key, points)]


def periodic_function(key: Array, points: Array) -> Array:
    """Three harmonics of a period between 1 and 2, with random phases and sizes."""
    period_key, weight_key = random.split(key)
    period = random.uniform(period_key, (), minval=1.0, maxval=2.0)
    angle = 2 * jnp.pi * points[:, 0, None] * jnp.arange(1, 4) / period
    weights = random.normal(weight_key, (2, 3)) / jnp.arange(1, 4)
    return jnp.sin(angle) @ weights[0] + jnp.cos(angle) @ weights[1]


SAMPLERS = {"piecewise": piecewise_function, "periodic": periodic_function}
TOYS = ("cubic", "sine", "gap", *SAMPLERS)


class Solved(NamedTuple):
    """A toy with its fit.

    Attributes:
        toy: the data.
        prior: draws of the prior on the grid, (S, 121).
        draws: draws of the functional posterior on the grid, (S, 121).
        exact: mean and standard deviation of the exact posterior, or None.
        fitted: the fit.
    """

    toy: Toy
    prior: np.ndarray
    draws: np.ndarray
    exact: tuple[np.ndarray, np.ndarray] | None
    fitted: Fitted


def solve(
    name: str,
    settings: Settings = TOY,
    kind: str = "gaussian",
    seed: int = 0,
    gaussian_prior: bool = False,
) -> Solved:
    """Fit one toy.

    Args:
        name: one of ``TOYS``.
        settings: of the fit.
        kind: of network, see :data:`examples.functional_networks.KINDS`.
        seed: of data and fit.
        gaussian_prior: put the Gaussian with the same covariance in the place of a sampler.
    """
    toy = make_toy(name, seed)
    function = RandomFunction(kind, settings.hidden, settings.activation, settings.frequency)
    pool = random.uniform(random.key(3), (4000, 1), minval=toy.low, maxval=toy.high)
    common: dict[str, Any] = {
        "pool": pool, "function": function, "learn_noise": False, "num_draws": DRAWS,
    }  # fmt: skip
    key = random.key(seed)
    if name in SAMPLERS:
        sampler = SAMPLERS[name]

        def implicit(_: Any, points: Array) -> dist.Distribution:
            if not gaussian_prior:
                return sampled_prior(sampler, points, jitter=IMPLICIT_JITTER)
            keys = random.split(random.key(6), 4000)
            values = jax.vmap(lambda key: sampler(key, points))(keys)
            noise = IMPLICIT_JITTER**2 * jnp.eye(len(points))
            return dist.MultivariateNormal(0.0, values.T @ values / len(values) + noise)

        fitted, _ = functional(
            toy.x, toy.y, implicit, None, toy.noise, settings, key,
            jitter=IMPLICIT_JITTER, **common,
        )  # fmt: skip
        keys = random.split(random.key(4), 300)
        prior = jax.vmap(lambda key: sampler(key, toy.grid))(keys)
        exact = None
    else:
        found = fit_hyperparameters(toy.x, toy.y)
        # The noise is known; the rest is the marginal likelihood's.
        found = found._replace(log_noise=jnp.log(jnp.asarray(toy.noise - 0.05)))
        fitted, _ = functional(
            toy.x, toy.y, partial(Hyperparameters.prior, jitter=EXPLICIT_JITTER), found,
            toy.noise, settings, key, jitter=EXPLICIT_JITTER, **common,
        )  # fmt: skip
        prior = found.prior(toy.grid).sample(random.key(4), (300,))
        exact = exact_posterior(found, toy.x, toy.y, toy.grid)
        exact = tuple(np.asarray(values) for values in exact)
    draws = np.asarray(fitted.draw(toy.grid))
    return Solved(toy, np.asarray(prior), draws, exact, fitted)


def compare(solved: Solved) -> dict[str, float]:
    """Errors of the mean in posterior standard deviations, and ratios of those, in two regions."""
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


def exact_piecewise(toy: Toy, num_draws: int = 500, num_proposals: int = 40_000) -> np.ndarray:
    """Draws of the exact posterior under :func:`piecewise_function` on the grid, (S, 121).

    Jumps are proposed from the prior and weighted by the likelihood, with the levels between them
    integrated out; levels given jumps are Gaussian.
    """
    # What piece an input is in, read off functions whose levels are the numbers of the pieces.
    keys = random.split(random.key(7), num_proposals)
    both = jnp.concatenate([toy.x, toy.grid])
    pieces = np.asarray(jax.vmap(lambda key: piece_numbers(key, both))(keys))
    n, variance = len(toy.y), toy.noise**2
    one_hot = np.eye(7)[pieces[:, :n]]
    y = np.asarray(toy.y, float)
    count, total = one_hot.sum(1), np.einsum("kip,i->kp", one_hot, y)
    # Of levels with a standard normal prior, given what falls on them.
    precision = 1 + count / variance
    mean = total / variance / precision
    log_weight = np.sum(0.5 * precision * mean**2 - 0.5 * np.log(precision), axis=1)
    weight = np.exp(log_weight - log_weight.max())
    rng = np.random.default_rng(0)
    chosen = rng.choice(num_proposals, num_draws, p=weight / weight.sum())
    levels = mean[chosen] + rng.normal(size=(num_draws, 7)) / np.sqrt(precision[chosen])
    return np.take_along_axis(levels, pieces[chosen, n:], axis=1)


def jump_share(draws: np.ndarray) -> float:
    """Share of the variation of functions (S, m) that their steepest tenth of increments makes.

    A piecewise-constant function with few jumps has 1, independent Gaussian increments .26.
    """
    increments = np.sort(np.abs(np.diff(draws, axis=1)), axis=1)
    tenth = increments.shape[1] // 10
    return float(np.mean(increments[:, -tenth:].sum(1) / increments.sum(1)))


def describe(name: str, solved: Solved, settings: Settings) -> list[str]:
    """What a sampled prior has done to a posterior, in lines to print."""
    if name == "piecewise":
        control = solve(name, settings, gaussian_prior=True)
        exact = exact_piecewise(solved.toy)
        error = np.sqrt(np.mean((solved.draws.mean(0) - exact.mean(0)) ** 2))
        return [
            "share of the variation in the steepest tenth of increments: "
            f"{jump_share(solved.draws):.2f}",
            f"  the same, Gaussian prior of equal covariance: {jump_share(control.draws):.2f}",
            f"  the same, exact posterior: {jump_share(exact):.2f}",
            f"rms error of the mean: {error:.2f}, sd of the exact posterior "
            f"{exact.std(0).mean():.2f}",
        ]
    grid = np.asarray(solved.toy.grid[:, 0])
    beyond = ~solved.toy.inside(grid)
    truth = np.sin(2 * np.pi * grid / 1.5)[beyond]
    error = np.sqrt(np.mean((solved.draws.mean(0)[beyond] - truth) ** 2))
    return [f"rms error of the mean beyond the data: {error:.2f}; of a mean of 0: .71"]


def plot(solved: dict[str, Solved], path: Any) -> None:
    """For each toy its prior, and below it the posterior beside the exact one."""
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
        if found.exact is not None:
            mean, sd = found.exact
            below.plot(grid, mean, "k-", lw=1)
            below.plot(grid, np.stack([mean - 2 * sd, mean + 2 * sd]).T, "k--", lw=0.8)
        below.plot(toy.x[:, 0], toy.y, "r.", ms=6)
        below.set(title="posterior" + ("; black: exact" if found.exact is not None else ""))
        above.set_ylim(below.get_ylim() if found.exact is not None else None)
    figure.savefig(path, dpi=90)
    plt.close(figure)
