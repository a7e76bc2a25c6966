"""Exact samplers, as a user would run them: one chain with default settings, warm-up included."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from blackjax import adjusted_mclmc_dynamic, adjusted_mclmc_find_L_and_step_size
from blackjax.mcmc.adjusted_mclmc_dynamic import build_kernel, rescale
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import initialize_model

from benchmarks.accuracy.fits import Fit, timed
from benchmarks.accuracy.posterior import Posterior

__all__ = ["mams", "nuts"]

NUM_WARMUP, NUM_SAMPLES = 1_000, 1_000
# MAMS's transitions are short: two steps on average, at two gradients each.
MAMS_SAMPLES, MAMS_LENGTH, MAMS_GRADIENTS = 10_000, 2.0, 2
# The acceptance rate that its authors advise.
MAMS_ACCEPTANCE = 0.9


def _repeated(draws: dict[str, Array], key: Array, num_draws: int) -> dict[str, Array]:
    """Draws, as many as are compared, some of them more than once."""
    count = len(next(iter(draws.values())))
    rows = random.choice(key, count, (num_draws,), replace=count < num_draws)
    return {name: values[rows] for name, values in draws.items()}


def nuts(posterior: Posterior, seed: int, num_steps: int, num_draws: int) -> Fit:
    """NumPyro's NUTS of the model as it is written; ``num_steps`` limits warm-up and draws."""
    target = posterior.target
    run_key, draw_key = random.split(random.key(seed))
    mcmc = MCMC(
        NUTS(target.model),
        num_warmup=min(NUM_WARMUP, num_steps),
        num_samples=min(NUM_SAMPLES, num_steps),
        progress_bar=False,
    )
    fields = ("num_steps",)

    def run() -> Any:
        mcmc.warmup(run_key, *target.args, extra_fields=fields, collect_warmup=True)
        warmup = mcmc.get_extra_fields()["num_steps"].sum()
        mcmc.run(random.fold_in(run_key, 1), *target.args, extra_fields=fields)
        return warmup + mcmc.get_extra_fields()["num_steps"].sum(), mcmc.get_samples()

    (gradients, found), *seconds = timed(run)
    sites = {name: found[name] for name in target.supports()}
    draws = posterior.summarize(_repeated(sites, draw_key, num_draws))
    return Fit(draws, *seconds, mcmc.num_samples, float(gradients))


def mams(posterior: Posterior, seed: int, num_steps: int, num_draws: int) -> Fit:
    """Metropolis-adjusted microcanonical sampling by BlackJAX (Robnik, Cohn-Gordon, Seljak 2025).

    Its step size, and a diagonal preconditioner, are tuned in a fifth of as many transitions.
    """
    target = posterior.target
    init_key, run_key, draw_key = random.split(random.key(seed), 3)
    initial, potential, postprocess, _ = initialize_model(
        init_key, target.model, model_args=target.args
    )
    start, unflatten = ravel_pytree(initial.z)
    count = min(MAMS_SAMPLES, 2 * num_steps)
    run = jax.jit(partial(_run_mams, lambda flat: -potential(unflatten(flat)), count))
    (flat, steps), *seconds = timed(lambda: run(run_key, start))
    sites = jax.vmap(lambda row: postprocess(unflatten(row)))(flat)
    sites = {name: sites[name] for name in target.supports()}
    draws = posterior.summarize(_repeated(sites, draw_key, num_draws))
    return Fit(draws, *seconds, count, float(steps) * MAMS_GRADIENTS)


def _num_steps(key: Array, average: Array) -> Array:
    return jnp.ceil(random.uniform(key) * rescale(average)).astype(int)


def _run_mams(log_density: Any, count: int, key: Array, start: Array) -> tuple[Array, Array]:
    """Draws (count, d), and integration steps of tuning and sampling."""
    start_key, tune_key, run_key = random.split(key, 3)
    kernel = build_kernel(integration_steps_fn=_num_steps)
    init = partial(adjusted_mclmc_dynamic.init, logdensity_fn=log_density)
    state = init(start, random_generator_arg=start_key)
    state, tuned, tuning = adjusted_mclmc_find_L_and_step_size(
        kernel, log_density, count, state, tune_key, MAMS_ACCEPTANCE,
        target_num_integration_steps=MAMS_LENGTH,
    )  # fmt: skip

    def transition(state: Any, key: Array) -> tuple[Any, tuple[Array, Array]]:
        state, info = kernel(
            key, state, log_density, tuned.step_size,
            inverse_mass_matrix=tuned.inverse_mass_matrix,
            integration_steps_params=(tuned.L / tuned.step_size,),
        )  # fmt: skip
        return state, (state.position, info.num_integration_steps)

    _, (draws, steps) = lax.scan(transition, state, random.split(run_key, count))
    return draws, jnp.sum(steps) + tuning
