"""Functions of one variable: posteriors of functional networks against exact ones.

The prior is a Gaussian process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random

from examples.functions.fit import PATHWISE_POOL, Settings, draw_values, pathwise_fit, run
from examples.functions.gp import LEAST_NOISE, Hyperparameters, condition, fit_hyperparameters
from examples.functions.networks import RandomFunction
from numpyro_kscore import ImplicitELBO
from numpyro_kscore.functions import measure

GRID = 121
# Functions behind a comparison: the standard error of a standard deviation is .6 % of it, and the
# largest of a hundred ratios is off by some three of those.
DRAWS = 16_000
# The share of the variance of observations that is white noise in function values.
SHARE = 0.5

# Every measurement set contains all data, so the objective is a lower bound of the evidence. There
# are four times as many functions as values, because few functions make spreads too narrow.
TOY = Settings(
    num_steps=12_000,
    step_size=2e-3,
    batch_size=20,
    num_points=10,
    num_particles=128,
    hidden=(50, 50),
    activation=jnp.tanh,
    frequency=3.0,
)
# All weights are linear in the same noise: with independent noise, the spread of the cubic at an
# end of the data was .85 of the exact one, not .91.
KIND = "hypernetwork"
PROCESSES = ("cubic", "sine", "gap")


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
    """``cubic`` and ``sine`` of Sun et al. (2019), and a sine with a gap."""
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
    else:
        raise ValueError(f"toy: expected cubic, sine or gap; got {name!r}")
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


def solve(name: str, settings: Settings = TOY, seed: int = 0, guide: str = "network") -> Solved:
    """Fit a toy whose prior is a Gaussian process.

    Args:
        name: one of ``cubic``, ``sine`` and ``gap``.
        settings: settings of the fit; the frequency is for a length scale of 1.
        seed: seed of data and fit.
        guide: one of ``GUIDES``.
    """
    toy = make_toy(name, seed)
    pool = random.uniform(random.key(3), (4000, 1), minval=toy.low, maxval=toy.high)
    found = fit_hyperparameters(toy.x, toy.y, num_parts=1)
    # The noise is known; the other hyperparameters maximize the marginal likelihood.
    found = found._replace(log_noise=jnp.log(jnp.asarray(toy.noise - LEAST_NOISE)))
    # Functions of the network should be as smooth as those of the prior, which allows rougher ones
    # little spread.
    frequency = settings.frequency / float(jnp.exp(found.log_scales[0, 0]))
    settings = replace(settings, frequency=frequency)
    start = time.process_time()
    draw = GUIDES[guide](toy, found, pool, settings, seed)
    draws, seconds = np.asarray(draw(toy.grid)), time.process_time() - start
    return Solved(
        toy,
        np.asarray(found.prior(toy.grid).sample(random.key(4), (300,))),
        draws,
        condition(found, toy.x, toy.y).moments(np.asarray(toy.grid)),
        seconds,
    )


def noise_given_data(clean: Array, y: Array, noise: float) -> tuple[Array, Array]:
    """Mean and standard deviation of function values (m,) given clean ones and their data (N,).

    Targets are ``y = f + rest`` with ``f = clean + white``, and the two noises share the variance
    ``noise²``. Given the function, data tell of the white noise too; at further points they do not.

    Args:
        clean: values without noise, those at the data first, (m,).
        y: targets, (N,).
        noise: standard deviation of targets about the clean values.
    """
    has_data = jnp.arange(len(clean)) < len(y)
    target = jnp.concatenate([y, clean[len(y) :]])
    left = jnp.where(has_data, 1 - SHARE, 1.0)
    return clean + SHARE * (target - clean), noise * jnp.sqrt(SHARE * left)


def fit_network(
    toy: Toy, found: Hyperparameters, pool: Array, settings: Settings, seed: int
) -> Callable[[Array], Array]:
    """A functional network with all data in every measurement set: inputs (m, 1) -> draws (S, m).

    The white noise that the density of function values needs is a part of the known noise of the
    targets. So it may be large, which makes the values far from dependent, and the posterior of the
    function is the same as without.
    """
    function = RandomFunction(KIND, settings.hidden, settings.activation, settings.frequency)
    white, rest = toy.noise * SHARE**0.5, toy.noise * (1 - SHARE) ** 0.5

    def model(x: Array, y: Array, pool: Array, found: Hyperparameters) -> None:
        at = measure(x, pool=pool, num_points=settings.num_points)
        f = numpyro.sample("f", found.prior(at.points, white))
        with at.data:
            numpyro.sample("y", dist.Normal(at.of_data(f), rest), obs=y[at.rows])

    def guide(x: Array, y: Array, pool: Array, found: Hyperparameters) -> None:
        at = measure(x, pool=pool, num_points=settings.num_points)
        loc, sd = noise_given_data(function(at.points), y[at.rows], toy.noise)
        numpyro.sample("f", dist.Normal(loc, sd).to_event(1))

    loss = ImplicitELBO(settings.num_particles, base="moments")
    params = run(model, guide, loss, settings, random.key(seed), toy.x, toy.y, pool, found).params
    return draw_values(function, params, DRAWS)


def fit_pathwise(
    toy: Toy, found: Hyperparameters, pool: Array, settings: Settings, seed: int
) -> Callable[[Array], np.ndarray]:
    """Draws of the process that data correct: inputs (m, 1) -> draws (S, m).

    The guide starts at the exact posterior; what is measured is whether the fit stays there.
    """
    data = condition(found, toy.x, toy.y)
    return pathwise_fit(
        data, pool[:PATHWISE_POOL], settings, random.key(seed), learn_noise=False, num_priors=32
    )[0].draw


# (toy, hyperparameters, pool, settings, seed) -> (inputs (m, 1) -> draws (S, m))
GUIDES: dict[str, Callable[..., Callable[[Array], Any]]] = {
    "network": fit_network,
    "pathwise": fit_pathwise,
}


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
