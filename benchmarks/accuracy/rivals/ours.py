"""Fits by the defaults of this library: of a network of noise, and of ``AutoImplicit``.

Evaluations of the model's gradient are counted from above: a step of a falling step size counts
as many particles as a fit settles with, and every look its draws.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
from jax import Array, random
from numpyro.infer import SVI, Predictive
from numpyro.optim import Adam

from benchmarks.accuracy.guides import fit_implicit, num_particles
from benchmarks.accuracy.own_guides import METHODS, fitted, network_guide
from benchmarks.accuracy.rivals.problem import Outcome, Problem
from numpyro_kscore import ImplicitELBO
from numpyro_kscore._fit.progress import EVALUATION_DRAWS
from numpyro_kscore._objective.elbo import SETTLING_PARTICLES

MOST_STEPS = 5_000


@contextmanager
def expected_warnings() -> Iterator[None]:
    """A context without the warnings that a benchmark expects."""
    with warnings.catch_warnings():
        # These are in the column that says how the fit ended.
        warnings.filterwarnings("ignore", message="fit: ", category=UserWarning)
        # Toys are priors.
        warnings.filterwarnings("ignore", message="model: expected data", category=UserWarning)
        yield


def drawn_by_guide(
    problem: Problem, guide: Callable[..., Any], params: Any
) -> Callable[[Array, int], Array]:
    """A function that draws from a guide, in unconstrained coordinates."""
    target = problem.posterior.target

    def draw(key: Array, count: int) -> Array:
        samples = Predictive(guide, params=params, num_samples=count)(key, *target.args)
        return target.unconstrained({name: samples[name] for name in problem.shapes})

    return draw


def fit_network(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of a network of noise, fitted as a user would; only a quick run is shorter."""
    target, method = problem.posterior.target, METHODS["fit"]
    run_key, network_key = random.split(key)
    guide = network_guide(target, network_key, method.width)
    looks: list[tuple[int, float]] = []

    def note(step: int, state: Any, metrics: dict[str, float]) -> None:
        del state
        looks.append((step, metrics["step_size"]))

    with expected_warnings():
        params, row = fitted(method, guide, run_key, target, share < 1, callback=note)
    svi = SVI(target.model, guide, Adam(1e-2), ImplicitELBO())
    few = num_particles(svi, params, target.args)
    gradients, before = 0, 0
    for step, factor in looks:
        # At full step size a fit searches, and settles at any other.
        gradients += (step - before) * (few if factor >= 1 else max(few, SETTLING_PARTICLES))
        gradients, before = gradients + EVALUATION_DRAWS, step
    draw = drawn_by_guide(problem, guide, params)
    return Outcome(draw, int(row["steps"]), gradients, str(row["reason"]))


def fit_auto(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of ``AutoImplicit``, fitted as a user would; only a quick run is shorter."""
    posterior = problem.posterior
    with expected_warnings():
        fitted_guide = fit_implicit(posterior, key, MOST_STEPS if share >= 1 else 100)
    guide, result = fitted_guide.svi.guide, fitted_guide.result

    def draw(key: Array, count: int) -> Array:
        args = posterior.target.args
        found = guide.sample_posterior(key, result.params, *args, sample_shape=(count,))
        return jnp.asarray(posterior.target.unconstrained(found))

    return Outcome(draw, result.info.steps, fitted_guide.gradients, result.info.reason)
