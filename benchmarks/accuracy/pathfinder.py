"""Multi-path Pathfinder by BlackJAX: quasi-Newton paths, Gaussians along them, and resampling."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from blackjax.diagnostics import psis_weights
from blackjax.vi.pathfinder import PathfinderState, approximate, sample
from jax import Array, random
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform
from numpyro.infer.util import initialize_model

from benchmarks.accuracy.fits import Fit, timed
from benchmarks.accuracy.posterior import Posterior

__all__ = ["pathfinder"]

# Zhang, Carpenter, Gelman and Vehtari (2022), with the longer paths that raw units need.
NUM_PATHS = 8
NUM_ELBO_DRAWS = 25
NUM_ITERATIONS = 200


def pathfinder(posterior: Posterior, seed: int, num_steps: int, num_draws: int) -> Fit:
    """Draws of eight paths from NumPyro's initial values, resampled by Pareto-smoothed weights.

    Paths stop by themselves, after at most 200 iterations; ``num_steps`` is a limit too. The number
    of gradients counts every evaluation of the density along the paths once, but not those of line
    searches, which BlackJAX does not report.
    """
    target = posterior.target
    run_key, init_key, draw_key = random.split(random.key(seed), 3)
    initial, potential, postprocess, _ = initialize_model(
        random.split(init_key, NUM_PATHS), target.model, model_args=target.args,
        init_strategy=init_to_uniform,
    )  # fmt: skip
    flatten = lambda z: ravel_pytree(z)[0]  # noqa: E731
    starts = jax.vmap(flatten)(initial.z)
    unflatten = ravel_pytree(jax.tree.map(lambda x: x[0], initial.z))[1]
    limit = min(num_steps, NUM_ITERATIONS)
    run = _make_run(lambda flat: -potential(unflatten(flat)), limit, num_draws)
    (flat, iterations), *seconds = timed(lambda: run(run_key, draw_key, starts))
    draws = jax.vmap(lambda row: postprocess(unflatten(row)))(flat)
    sites = {name: draws[name] for name in target.supports()}
    evaluations = int(iterations) * (1 + NUM_ELBO_DRAWS) + num_draws
    return Fit(posterior.summarize(sites), *seconds, int(iterations), evaluations)


def _make_run(
    log_density: Callable[[Array], Array], num_iterations: int, num_draws: int
) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
    """A function of two keys and starts (paths, d): draws (num_draws, d), iterations of all."""
    per_path = -(-num_draws // NUM_PATHS)

    def follow(key: Array, start: Array) -> tuple[Array, Array, Array]:
        path_key, sample_key = random.split(key)
        best: PathfinderState
        best, info = approximate(
            path_key, log_density, start, NUM_ELBO_DRAWS, maxiter=num_iterations
        )
        draws, log_q = sample(sample_key, best, per_path)
        log_ratio = jax.vmap(log_density)(draws) - log_q
        # A path that never gave a finite bound has no draws.
        failed = ~jnp.isfinite(best.elbo) | ~jnp.isfinite(log_ratio)
        return draws, jnp.where(failed, -jnp.inf, log_ratio), jnp.isfinite(info.path.elbo).sum()

    @jax.jit
    def run(key: Array, draw_key: Array, starts: Array) -> tuple[Array, Array]:
        keys = random.split(key, NUM_PATHS)
        draws, log_ratios, iterations = jax.lax.map(lambda pair: follow(*pair), (keys, starts))
        log_weights, _ = psis_weights(log_ratios.reshape(-1))
        pool = draws.reshape(-1, draws.shape[-1])
        weights = jnp.nan_to_num(jnp.exp(log_weights))
        rows = random.choice(draw_key, len(pool), (num_draws,), p=weights)
        return pool[rows], iterations.sum()

    return run
