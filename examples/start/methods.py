"""The methods of the demo: each gives draws, the seconds it took and its gradients of all data."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, random
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit
from numpyro_kscore.diagnostics import sliced_wasserstein

# The default of ImplicitELBO up to 32 dimensions, and draws in each look of ``fit``.
NUM_PARTICLES, LOOK_DRAWS = 128, 1024
Flatten = Callable[[dict[str, Array]], Array]


class Result(NamedTuple):
    """Draws (m, d), seconds with compilation, and gradients: a batch counts by its share."""

    draws: Array
    seconds: float
    gradients: float


def fit_implicit(
    key: Array,
    model: Callable[..., Any],
    data: tuple[Any, ...],
    flatten: Flatten,
    num_draws: int,
    max_steps: int,
    share: float = 1.0,
) -> Result:
    """``AutoImplicit``, as the README has it; ``share`` is how many of the rows are in a batch."""
    start = time.perf_counter()
    guide = AutoImplicit(model)
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    result = fit(svi, key, *data, max_steps=max_steps)
    draws = flatten(guide.sample_posterior(key, result.params, sample_shape=(num_draws,)))
    seconds = time.perf_counter() - start
    num_looks = len(result.info.trace)
    evaluated = share * (NUM_PARTICLES * result.info.steps + LOOK_DRAWS * num_looks)
    if share < 1.0:
        # All rows are expanded before the first chunk and after 1, 2, 4, … of them: value, score
        # and Hessian, and 17 values of the rows, of which three take as long as a gradient.
        evaluated += (1 + (num_looks - 1).bit_length()) * (1 + 2 * draws.shape[1] + 6)
    return Result(draws, seconds, guide.start.num_gradients + evaluated)


def fit_explicit(
    key: Array,
    guide: Any,
    model: Callable[..., Any],
    data: tuple[Any, ...],
    flatten: Flatten,
    num_draws: int,
    num_steps: int,
    num_particles: int = 1,
    share: float = 1.0,
) -> Result:
    """One of NumPyro's automatic guides, by NumPyro's objective.

    Each particle draws rows of its own, which takes as long as a pass over all of them.
    """
    start = time.perf_counter()
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles))
    result = svi.run(key, num_steps, *data)
    draws = flatten(guide.sample_posterior(key, result.params, sample_shape=(num_draws,)))
    return Result(draws, time.perf_counter() - start, share * num_steps * num_particles)


def run_nuts(
    key: Array,
    model: Callable[..., Any],
    data: tuple[Any, ...],
    flatten: Flatten,
    num_draws: int,
    num_chains: int = 2,
) -> Result:
    """NUTS, with a quarter as many steps to adapt; the draws of all chains, one after another."""
    start = time.perf_counter()
    mcmc = MCMC(
        NUTS(model, target_accept_prob=0.9),
        num_warmup=max(num_draws // 4, 200),
        num_samples=num_draws,
        num_chains=num_chains,
        chain_method="vectorized",
    )
    mcmc.warmup(key, *data, extra_fields=("num_steps",), collect_warmup=True)
    gradients = int(jnp.sum(mcmc.get_extra_fields()["num_steps"]))
    mcmc.run(key, *data, extra_fields=("num_steps",))
    draws = flatten(jax.block_until_ready(mcmc.get_samples()))
    gradients += int(jnp.sum(mcmc.get_extra_fields()["num_steps"]))
    return Result(draws, time.perf_counter() - start, gradients)


HEADER = (
    f"{'':22}{'seconds':>8}{'gradients':>11}{'sliced W1':>11}{'mean error':>12}{'sd from':>9}"
    f"{'to':>6}"
)


def table_row(name: str, result: Result, reference: Array) -> str:
    """One line of a table; coordinates in units of the reference's standard deviations."""
    draws, reference = (
        (x - reference.mean(0)) / reference.std(0) for x in (result.draws, reference)
    )
    distance = sliced_wasserstein(draws, reference, random.key(0))
    error, sd = jnp.abs(draws.mean(0)).max(), draws.std(0)
    gradients = f"{result.gradients:,.{0 if result.gradients >= 10 else 1}f}"
    return (
        f"{name:22}{result.seconds:8.1f}{gradients:>11}{distance:11.3f}"
        f"{error:12.2f}{sd.min():9.2f}{sd.max():6.2f}"
    )
