"""Two models of the same data, compared by their evidence.

    python -m examples.start.model_comparison [--seed 0] [--quick]

The data are differences in height of 15 pairs of maize plants, cross- and self-fertilized, in
eighths of an inch (Darwin 1876). Two of the differences are far below the others. Is the noise
Gaussian, or has it heavy tails? Both models are fitted, ``log_evidence`` weighs the draws of both
guides, and the difference is the logarithm of the Bayes factor, printed with its error.
"""

import argparse
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit, log_evidence
from numpyro_kscore.diagnostics import Evidence

DIFFERENCES = jnp.array(
    [49.0, -67.0, 8.0, 16.0, 6.0, 23.0, 28.0, 41.0, 14.0, 29.0, 56.0, 24.0, 75.0, 60.0, -48.0]
)
DEGREES = 2.0  # of freedom of the noise with heavy tails


def gaussian(y: Array) -> None:
    """Gaussian noise."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 50.0))
    scale = numpyro.sample("scale", dist.LogNormal(3.0, 1.0))
    numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def heavy(y: Array) -> None:
    """Student's t with few degrees of freedom."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 50.0))
    scale = numpyro.sample("scale", dist.LogNormal(3.0, 1.0))
    numpyro.sample("y", dist.StudentT(DEGREES, mean, scale), obs=y)


def evidence_of(model: Callable[..., None], seed: int, is_quick: bool) -> Evidence:
    """Fit a model and weigh its guide."""
    svi = SVI(model, AutoImplicit(model), optax.adam(1e-2), ImplicitELBO())
    max_steps, num_samples = (40, 500) if is_quick else (20_000, 10_000)
    result = fit(svi, random.key(seed), DIFFERENCES, max_steps=max_steps, progress_bar=False)
    return log_evidence(svi, result, DIFFERENCES, num_samples=num_samples)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    parser.add_argument("--quick", action="store_true", help="few steps and draws, to see it run")
    options = parser.parse_args(arguments)
    first, second = (evidence_of(model, options.seed, options.quick) for model in (gaussian, heavy))
    print(f"Gaussian noise: {first}")
    print(f"heavy tails:    {second}")
    # The two fits are independent, and so are their errors.
    value, error = second.value - first.value, math.hypot(first.error, second.error)
    print(f"log Bayes factor for heavy tails: {value:.3f} ± {error:.3f} nats")
    low, high = math.exp(value - 2 * error), math.exp(value + 2 * error)
    print(f"Bayes factor: {math.exp(value):.2f}, from {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
