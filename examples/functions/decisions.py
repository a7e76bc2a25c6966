"""Decisions by functions as latents: Thompson sampling of doses, against an exact Gaussian process.

    python -m examples.functions.decisions [--figure decisions.png]

Each round draws one function from the fitted guide and gives its best dose, so nothing but draws
is needed. Campaigns are for unknown functions from the prior: smooth ones, from a Gaussian process;
and effects that rise with the dose up to a tolerated one, which is unknown, and drop beyond it,
from a simulator whose density is learned first. The guide moves draws of the prior to draws of the
posterior. It is fitted in each round, from its last parameters, in one program for all rounds.
"""

import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from numpyro import handlers
from numpyro.infer import SVI, Predictive
from tinygp import GaussianProcess, kernels

from numpyro_kscore import Implicit, ImplicitELBO
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore.functions import learn_prior, measure

DOSES = jnp.linspace(0.0, 1.0, 25)[:, None]
# Standard deviations of observations, and of white noise in function values.
NOISE, JITTER = 0.15, 0.05
LENGTH = 0.15
NUM_PARTICLES, HIDDEN = 64, 64
# Draws of a posterior in each round; the first decides, the others are for the figure.
DRAWS = 20
# Simulated functions behind the exact posterior, by their likelihoods as weights.
PROPOSALS = 50_000


# Distribution of function values at the doses, and the symmetric root of its covariance.
Prior = tuple[dist.Distribution, Array]
# state, means (m,) and numbers (m,) of observations, key -> state, draws of the posterior (S, m)
Belief = Callable[[Any, Array, Array, Array], tuple[Any, Array]]


def tolerated(key: Array, points: Array) -> Array:
    """An effect proportional to the dose up to an unknown one, and harm beyond it: (m,)."""
    limit_key, slope_key, harm_key = random.split(key, 3)
    limit = random.uniform(limit_key, minval=0.1, maxval=1.0)
    slope = random.uniform(slope_key, minval=0.5, maxval=1.5)
    return jnp.where(points[:, 0] < limit, slope * points[:, 0], -random.uniform(harm_key))


def draw_tolerated(seed: int, count: int) -> Array:
    """Draws of the simulator at the doses, (count, m)."""
    return jax.vmap(tolerated, (0, None))(random.split(random.key(seed), count), DOSES)


def smooth_prior() -> Prior:
    """A Gaussian process."""
    covariance = kernels.ExpSquared(LENGTH)(DOSES, DOSES) + JITTER**2 * jnp.eye(len(DOSES))
    values, vectors = jnp.linalg.eigh(covariance)
    density = dist.MultivariateNormal(jnp.zeros(len(DOSES)), covariance)
    return density, (vectors * jnp.sqrt(values)) @ vectors.T


def simulated_prior(num_steps: int) -> Prior:
    """The simulator's, learned from its draws."""
    learned = learn_prior(
        random.key(0), tolerated, DOSES, jitter=JITTER, hidden_dims=(128, 128), num_steps=num_steps
    )
    return learned, learned.root


def functional(prior: Prior, num_steps: int) -> tuple[Any, Belief]:
    """The first state of a guide, and its fit to the observations so far."""
    (density, root), size = prior, len(DOSES)

    def model(means: Array, counts: Array) -> None:
        at = measure(DOSES)
        f = numpyro.sample("f", density)
        # The mean of observations at a dose says all that they say.
        sd = NOISE / jnp.sqrt(jnp.maximum(counts, 1))
        with at.data, handlers.mask(mask=counts > 0):
            numpyro.sample("y", dist.Normal(at.of_data(f), sd), obs=means)

    def guide(means: Array, counts: Array) -> None:
        measure(DOSES)
        key, noise_key = random.split(numpyro.prng_key())
        start = lax.stop_gradient(density.sample(key))
        noise = random.normal(noise_key, (size,))
        first = random.normal(random.key(3), (size, HIDDEN)) / 2
        hidden = jnp.tanh(start @ numpyro.param("first", first) + zeros("bias", HIDDEN))
        moved = zeros("shift", size) + start @ zeros("linear", size, size)
        moved += noise @ zeros("spread", size, size) + hidden @ zeros("last", HIDDEN, size)
        # In the prior's own coordinates, so that changes are as smooth as its functions.
        numpyro.sample("f", Implicit(start + root @ moved, 1))

    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(NUM_PARTICLES))
    nothing = jnp.zeros(size), jnp.zeros(size)

    def belief(state: Any, means: Array, counts: Array, key: Array) -> tuple[Any, Array]:
        def step(state: Any, _: None) -> tuple[Any, Array]:
            return svi.stable_update(state, means, counts)

        state = lax.scan(step, state, length=num_steps)[0]
        draw = Predictive(guide, params=svi.get_params(state), num_samples=DRAWS, parallel=True)
        return state, draw(key, means, counts)["f"]

    return quick_jit(svi.init)(random.key(2), *nothing), belief


def zeros(name: str, *shape: int) -> Array:
    """A parameter that starts at zero."""
    return numpyro.param(name, jnp.zeros(shape))


class Table(kernels.Kernel):
    """A covariance given by a matrix; inputs are indices."""

    covariance: Array

    def evaluate(self, first: Array, second: Array) -> Array:
        return self.covariance[first, second]


def gaussian(prior: Prior) -> tuple[Any, Belief]:
    """The exact Gaussian process of the same mean and covariance."""
    (density, root), doses = prior, jnp.arange(len(DOSES))
    kernel = Table(root @ root)

    def belief(state: Any, means: Array, counts: Array, key: Array) -> tuple[Any, Array]:
        # A dose that was not given has an observation that says nothing.
        variance = jnp.where(counts > 0, NOISE**2 / jnp.maximum(counts, 1), 1e6)
        process = GaussianProcess(kernel, doses, mean=lambda i: density.mean[i], diag=variance)
        # tinygp would add its own noise to a covariance that has the jitter.
        posterior = process.condition(means, doses, diag=0.0).gp
        return state, posterior.sample(key, (DRAWS,))

    return None, belief


def exact(functions: Array) -> tuple[Any, Belief]:
    """The exact posterior, by draws of the prior with their likelihoods as weights."""

    def belief(state: Any, means: Array, counts: Array, key: Array) -> tuple[Any, Array]:
        square = jnp.square(means - functions) @ counts
        chosen = random.categorical(key, -0.5 * square / NOISE**2, shape=(DRAWS,))
        return state, functions[chosen]

    return None, belief


def no_belief(state: Any, means: Array, counts: Array, key: Array) -> tuple[Any, Array]:
    """Any dose may be the best."""
    return state, random.uniform(key, (DRAWS, len(DOSES)))


class Campaign(NamedTuple):
    """Record of T rounds.

    Attributes:
        regret: best effect less that of the dose given, (T,).
        dose: index of the dose, (T,).
        effect: as observed, (T,).
        draws: of the posterior before it, (T, S, m).
    """

    regret: Array
    dose: Array
    effect: Array
    draws: Array


def play(belief: Belief, start: Any, truth: Array, key: Array, num_rounds: int) -> Campaign:
    """Give the best dose of one drawn function, round after round.

    Args:
        belief: the posterior after observations.
        start: its first state.
        truth: the unknown function, (m,).
        key: random key.
        num_rounds: T.
    """

    def one_round(carry: Any, key: Array) -> tuple[Any, Campaign]:
        state, means, counts = carry
        fit_key, noise_key = random.split(key)
        state, draws = belief(state, means, counts, fit_key)
        dose = jnp.argmax(draws[0])
        effect = truth[dose] + NOISE * random.normal(noise_key)
        counts = counts.at[dose].add(1)
        means = means.at[dose].add((effect - means[dose]) / counts[dose])
        happened = Campaign(jnp.max(truth) - truth[dose], dose, effect, draws)
        return (state, means, counts), happened

    nothing = jnp.zeros_like(truth)
    return lax.scan(one_round, (start, nothing, nothing), random.split(key, num_rounds))[1]


def solve(
    methods: dict[str, tuple[Any, Belief]], truths: Array, num_rounds: int
) -> dict[str, Campaign]:
    """Campaigns for the same unknown functions (R, m) by each method, in one program each."""
    keys = random.split(random.key(5), len(truths))
    return {
        name: quick_jit(jax.vmap(partial(play, belief, start, num_rounds=num_rounds)))(truths, keys)
        for name, (start, belief) in methods.items()
    }


def print_table(problem: str, found: dict[str, Campaign]) -> None:
    """Print means over campaigns, with standard errors.

    They are of the regret of all rounds, of its difference from the Gaussian process for the same
    functions, and of the regret of one of the last five rounds.
    """
    reference = np.asarray(found["Gaussian process"].regret).sum(1)
    for method, campaigns in found.items():
        regret, line = np.asarray(campaigns.regret), ""
        for values in (regret.sum(1), regret.sum(1) - reference, regret[:, -5:].mean(1)):
            error = values.std(ddof=1) / len(values) ** 0.5
            line += f"{values.mean():>14.3f} ± {error:.3f}"
        print(f"{problem:12}{method:20}{line}")


def plot(found: dict[str, dict[str, Campaign]], truths: dict[str, Array], path: Path) -> None:
    """Plot the guide in one campaign, early and late, and mean regret, one row a prior."""
    figure, panels = plt.subplots(
        len(found), 3, figsize=(11, 3 * len(found)), squeeze=False, layout="constrained"
    )
    doses = np.asarray(DOSES[:, 0])
    for (problem, campaigns), row in zip(found.items(), panels, strict=True):
        one = jax.tree.map(lambda a: np.asarray(a[0]), campaigns["functional guide"])
        num_rounds = len(one.regret)
        for panel, place in zip(row, (min(5, num_rounds - 1), num_rounds - 1), strict=False):
            panel.plot(doses, one.draws[place].T, "C0", lw=0.7, alpha=0.6)
            panel.plot(doses, truths[problem][0], "k", lw=1.2)
            panel.plot(doses[one.dose[:place]], one.effect[:place], "r.")
            panel.set(title=f"{problem}: draws after {place} rounds", xlabel="dose")
        for method, each in campaigns.items():
            total = np.cumsum(np.asarray(each.regret), axis=1)
            mean, error = total.mean(0), total.std(0, ddof=1) / len(total) ** 0.5
            rounds = np.arange(1, num_rounds + 1)
            row[2].plot(rounds, mean, label=method)
            row[2].fill_between(rounds, mean - error, mean + error, alpha=0.2, lw=0)
        row[2].set(title="total regret", xlabel="round", yscale="log")
        row[2].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all campaigns, print the table and draw the figure."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--campaigns", type=int, default=16, help="unknown functions, 2 at least")
    parser.add_argument("--rounds", type=int, default=24, help="doses given to each")
    parser.add_argument("--steps", type=int, default=100, help="steps of the fit in a round")
    parser.add_argument("--figure", type=Path, default=Path("decisions.png"))
    parser.add_argument("--quick", action="store_true", help="few of all, to see it run")
    options = parser.parse_args(arguments)
    if options.quick:
        options.campaigns, options.rounds, options.steps = 2, 2, 2
    plt.switch_backend("agg")
    smooth, simulated = smooth_prior(), simulated_prior(20 if options.quick else 3000)
    # Functions that no other part has seen.
    truths = {
        "smooth": smooth[0].sample(random.key(4), (options.campaigns,)),
        "tolerated": draw_tolerated(4, options.campaigns),
    }
    found = {}
    for name, prior in (("smooth", smooth), ("tolerated", simulated)):
        methods = {
            "functional guide": functional(prior, options.steps),
            "Gaussian process": gaussian(prior),
            "random": (None, no_belief),
        }
        if name == "tolerated":
            methods["exact posterior"] = exact(draw_tolerated(1, PROPOSALS))
        found[name] = solve(methods, truths[name], options.rounds)
    columns = ("regret", "less that of a GP", "in a late round")
    print(f"{'prior':12}{'method':20}" + "".join(f"{column:>22}" for column in columns))
    for name in found:
        print_table(name, found[name])
    plot(found, truths, options.figure)
    print(f"\n{time.process_time():.0f} s of processor time; picture in {options.figure}")


if __name__ == "__main__":
    main()
