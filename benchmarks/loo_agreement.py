"""Leave-one-out predictive densities of converted implicit fits beside those of NUTS.

    python -m benchmarks.loo_agreement [--seeds 1] [--quick]

Eight schools, non-centred, and a Poisson regression. The difference of the two sums over
observations must be below two of its standard errors: that of the pointwise differences, and of
the Monte-Carlo error of each, taken from the two halves of the draws.
"""

from __future__ import annotations

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

from examples.cells import make_parser
from numpyro_kscore import AutoImplicit, ImplicitELBO, to_arviz
from numpyro_kscore.pareto import pareto_smooth


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


def pointwise_loo(values: np.ndarray) -> np.ndarray:
    """Log predictive density of each observation left out, from log likelihoods (draws, n)."""
    found = []
    for column in values.T.astype(float):
        weights = pareto_smooth(-column)[0]
        found.append(np.logaddexp.reduce(weights + column))
    return np.array(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args(arguments)
    steps, draws = (200, 200) if options.quick else (4_000, 4_000)
    print(f"{'':20}{'NUTS':>9}{'implicit':>10}{'difference':>12}{'its error':>11}{'az.loo':>9}")
    for name, (model, data) in make_data().items():
        mcmc = MCMC(NUTS(model), num_warmup=draws // 4, num_samples=draws, progress_bar=False)
        mcmc.run(random.key(0), *data)
        reference = np.asarray(log_likelihood(model, mcmc.get_samples(), *data)["obs"])
        for seed in range(options.seeds):
            optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
            svi = SVI(model, AutoImplicit(model), optimizer, ImplicitELBO())
            result = svi.run(random.key(options.seed + seed), steps, *data, progress_bar=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = to_arviz(
                    svi, result, *data, num_samples=draws, log_likelihood=True, khat=False
                )
                loo = az.loo(tree)
            ours = np.asarray(tree["log_likelihood"]["obs"])[0]
            parts = [pointwise_loo(values) for values in (reference, ours)]
            # Half the difference of two halves has the error of their mean.
            halves = [
                [pointwise_loo(values[k::2]).sum() for k in (0, 1)] for values in (reference, ours)
            ]
            noise = sum((0.5 * (a - b)) ** 2 for a, b in halves)
            apart = parts[1] - parts[0]
            error = (apart.shape[0] * np.var(apart, ddof=1) + noise) ** 0.5
            total = float(loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo)
            print(
                f"{name:20}{parts[0].sum():9.2f}{parts[1].sum():10.2f}{apart.sum():12.3f}"
                f"{error:11.3f}{total:9.2f}"
            )


if __name__ == "__main__":
    main()
