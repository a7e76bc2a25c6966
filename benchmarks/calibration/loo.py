"""Leave-one-out predictive densities of implicit fits converted for ArviZ, against those of NUTS.

    python -m benchmarks.calibration.loo [--seeds 3] [--quick]

The models are eight schools, non-centered, and a Poisson regression. The difference of the two sums
over observations must be below two of its standard errors, which combine the standard error of the
pointwise differences with the Monte Carlo error of each side, from blocks of consecutive draws.
``weighted`` is the difference after weighting the guide's draws by the ratio of the model's density
to the estimated density of the guide, as ``az.loo_approximate_posterior`` does.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import MCMC, NUTS, SVI, log_likelihood

from numpyro_kscore import AutoImplicit, ImplicitELBO, to_arviz
from numpyro_kscore.diagnostics import pareto_smooth


def eight_schools(sigma: jax.Array, y: jax.Array | None = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("school", sigma.shape[0]):
        z = numpyro.sample("z", dist.Normal())
        theta = numpyro.deterministic("theta", mu + tau * z)
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def poisson_regression(x: jax.Array, y: jax.Array | None = None) -> None:
    slopes = numpyro.sample("slopes", dist.Normal(jnp.zeros(x.shape[1]), 1.0).to_event(1))
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    with numpyro.plate("row", x.shape[0]):
        numpyro.sample("obs", dist.Poisson(jnp.exp(intercept + x @ slopes)), obs=y)


def make_data() -> dict[str, tuple[Callable[..., Any], tuple[jax.Array, jax.Array]]]:
    y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    keys = random.split(random.key(7))
    x = random.normal(keys[0], (100, 4))
    rate = jnp.exp(0.5 + x @ jnp.array([0.5, -0.3, 0.0, 0.2]))
    counts = random.poisson(keys[1], rate).astype(float)
    return {
        "eight schools": (eight_schools, (sigma, y)),
        "Poisson regression": (poisson_regression, (x, counts)),
    }


def pointwise_loo(values: np.ndarray, log_weights: np.ndarray | float = 0.0) -> np.ndarray:
    """Log predictive density of each observation when it is left out, (n,).

    Args:
        values: log likelihoods, (draws, n).
        log_weights: log importance weights of the draws, (draws,); 0 for posterior draws.
    """
    found = []
    for column in values.T.astype(float):
        weights = pareto_smooth(log_weights - column)[0]
        found.append(np.logaddexp.reduce(weights + column))
    return np.array(found)


def monte_carlo_error(values: np.ndarray, num_blocks: int = 8) -> float:
    """Standard error of the sum of :func:`pointwise_loo`, from blocks of consecutive draws."""
    sums = [pointwise_loo(block).sum() for block in np.array_split(values, num_blocks)]
    return float(np.std(sums, ddof=1) / num_blocks**0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one line for each fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="fits of each model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first fit")
    parser.add_argument("--quick", action="store_true", help="one fit, few steps and draws")
    options = parser.parse_args(arguments)
    steps, draws = (200, 200) if options.quick else (4_000, 4_000)
    num_seeds = 1 if options.quick else options.seeds
    names = ("NUTS", "implicit", "difference", "its error", "weighted", "az.loo", "its error")
    print(f"{'':20}" + "".join(f"{name:>12}" for name in names))
    for name, (model, data) in make_data().items():
        # Every fourth draw of a chain: nearly independent, like draws of a guide.
        mcmc = MCMC(
            NUTS(model), num_warmup=draws // 4, num_samples=4 * draws, thinning=4,
            progress_bar=False,
        )  # fmt: skip
        mcmc.run(random.key(0), *data)
        reference = np.asarray(log_likelihood(model, mcmc.get_samples(), *data)["obs"])
        theirs = pointwise_loo(reference)
        for seed in range(num_seeds):
            optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
            svi = SVI(model, AutoImplicit(model), optimizer, ImplicitELBO())
            key = random.key(options.seed + seed)
            result = svi.run(key, steps, *data, progress_bar=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = to_arviz(svi, result, *data, num_samples=draws, log_likelihood=True)
                loo = az.loo(tree)
            values = np.asarray(tree["log_likelihood"]["obs"])[0]
            ours = pointwise_loo(values)
            stats = tree["sample_stats"]
            weights = np.asarray(stats["lp"] - stats["log_q"])[0]
            known = np.isfinite(weights)
            weighted = pointwise_loo(values[known], weights[known]) - theirs
            apart = ours - theirs
            noise = [monte_carlo_error(v) for v in (reference, values)]
            error = (apart.shape[0] * np.var(apart, ddof=1) + noise[0] ** 2 + noise[1] ** 2) ** 0.5
            total = float(loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo)
            row = (theirs.sum(), ours.sum(), apart.sum(), error, weighted.sum(), total, loo.se)
            print(f"{name:20}" + "".join(f"{value:12.3f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
