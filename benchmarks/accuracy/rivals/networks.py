"""Bayesian networks of 50 rectifiers for UCI regressions, in standard units.

As in the papers that the rivals come from: weights have a common precision, observations another
one, both with the prior Gamma(1, .1); a tenth of the rows are for tests.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.rivals.problem import Outcome, Problem
from benchmarks.accuracy.targets import Target
from examples.functions.data import Split, load, split

NETWORKS = ("concrete", "yacht", "energy")
WIDTH, NUM_DRAWS = 50, 1_000


def network(weights: dict[str, Array], x: Array) -> Array:
    """Values of the network at x (n, p), (n,)."""
    hidden = jax.nn.relu(x @ weights["w"] + weights["b"])
    return hidden @ weights["v"] + weights["c"]


def model(x: Array, y: Array) -> None:
    """A network of rectifiers whose weights have a precision that is not known."""
    precision = numpyro.sample("precision", dist.Gamma(1.0, 0.1))
    prior = dist.Normal(0.0, precision**-0.5)
    weights = {
        "w": numpyro.sample("w", prior.expand([x.shape[1], WIDTH]).to_event(2)),
        "b": numpyro.sample("b", prior.expand([WIDTH]).to_event(1)),
        "v": numpyro.sample("v", prior.expand([WIDTH]).to_event(1)),
        "c": numpyro.sample("c", prior),
    }
    # Named apart from the noise of a guide.
    noise = numpyro.sample("noise_precision", dist.Gamma(1.0, 0.1))
    numpyro.sample("y", dist.Normal(network(weights, x), noise**-0.5), obs=y)


def make_network(path: Path, seed: int) -> tuple[Posterior, Split]:
    """The posterior of a network given the rows of a file, and the split into these and others."""
    name, x, y = load(str(path))
    parts = split(x, y, seed)
    args = (jnp.asarray(parts.x, jnp.float32), jnp.asarray(parts.y, jnp.float32))
    return Posterior(Target(name, model, args)), parts


def predict(problem: Problem, outcome: Outcome, key: Array, parts: Split) -> dict[str, float]:
    """The root mean square error and minus the mean log density of rows for tests."""
    draws = outcome.draw(random.fold_in(key, 1), NUM_DRAWS)

    def of_draw(x: Array) -> tuple[Array, Array]:
        sites = problem.constrain(x)
        means = network(sites, parts.x_test)
        return means, dist.Normal(means, sites["noise_precision"] ** -0.5).log_prob(parts.y_test)

    means, log_densities = jax.lax.map(of_draw, draws, batch_size=100)
    found = jax.nn.logsumexp(log_densities, axis=0) - np.log(len(draws))
    error = jnp.sqrt(((means.mean(0) - parts.y_test) ** 2).mean())
    return {"rmse": float(error), "nll": -float(found.mean())}
