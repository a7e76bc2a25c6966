"""A picture of what importance weights see of a guide, and what they cannot see.

    python -m examples.start.weights [--figure FILE] [--quick]

The model has two modes, .6 and .4 of the probability, and no data: its log evidence is 0. The
guides are made by hand. One is right, one leaves out a mode, and one is too narrow. A line for each
says what ``log_evidence`` returns.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from examples.common.output import output_file
from numpyro_kscore import Implicit, ImplicitELBO, log_evidence
from numpyro_kscore.diagnostics import Evidence

SHARE, CENTERS, NARROW = 0.6, (-5.0, 5.0), 0.4
# Draws whose weights are plotted.
NUM_PLOTTED = 400


class Mixture(NamedTuple):
    """Two Gaussians: the share of the first, and their standard deviation."""

    share: float
    scale: float = 1.0

    def log_density(self, z: Array) -> Array:
        """The logarithm of the density at z, (...)."""
        parts = dist.Normal(jnp.array(CENTERS), self.scale)
        shares = dist.Categorical(jnp.array([self.share, 1 - self.share]))
        return dist.MixtureSameFamily(shares, parts).log_prob(z)

    def push(self, noise: Array, coin: Array) -> Array:
        """A draw by standard normal noise and a number in (0, 1)."""
        return jnp.where(coin < self.share, *CENTERS) + self.scale * noise


MODEL = Mixture(SHARE)
GUIDES = {
    "right": MODEL,
    "a mode is missing": Mixture(1.0),
    "too narrow": Mixture(SHARE, NARROW),
}


def model() -> None:
    """The two modes."""
    z = numpyro.sample("z", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.factor("modes", MODEL.log_density(z))


def guide_of(mixture: Mixture) -> Callable[[], None]:
    """A guide that draws from a mixture and knows its density."""

    def guide() -> None:
        noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
        coin = numpyro.sample("coin", dist.Uniform(), infer={"is_auxiliary": True})
        z = mixture.push(noise, coin)
        site = Implicit(z, unconstrained=z, local_log_density=mixture.log_density(z))
        numpyro.sample("z", site)

    return guide


def weighed(mixture: Mixture, num_samples: int) -> Evidence:
    """The evidence by weights of the guide."""
    svi = SVI(model, guide_of(mixture), optax.adam(1e-3), ImplicitELBO())
    key = random.key(0)
    result = SVIRunResult({}, SVIState(None, None, key), jnp.zeros(1))
    return log_evidence(svi, result, num_samples=num_samples, rng_key=key)


def plot(path: Path, found: dict[str, Evidence]) -> None:
    """Densities above, and the weights of draws below."""
    figure, panels = plt.subplots(
        2, len(found), figsize=(10, 5.2), sharex=True, sharey="row", layout="constrained"
    )
    x = jnp.linspace(-8.5, 8.5, 400)
    for column, (name, evidence) in enumerate(found.items()):
        above, below = panels[:, column]
        mixture = GUIDES[name]
        above.fill_between(x, jnp.exp(MODEL.log_density(x)), color="0.8", label="model")
        above.plot(x, jnp.exp(mixture.log_density(x)), "C0", label="guide")
        khat = "-∞" if np.isneginf(evidence.khat) else f"{evidence.khat:.2f}"
        above.set_title(
            f"{name}\nk̂ = {khat}, {evidence.num_effective:.0f} effective of "
            f"{evidence.num_draws}\nlog evidence {evidence.value:.2f} ± {evidence.error:.2f}, "
            "truth 0",
            fontsize=10,
        )
        keys = random.split(random.key(1))
        noise, coins = (
            random.normal(keys[0], (NUM_PLOTTED,)),
            random.uniform(keys[1], (NUM_PLOTTED,)),
        )
        draws = mixture.push(noise, coins)
        log_weights = MODEL.log_density(draws) - mixture.log_density(draws)
        below.axhline(0.0, color="0.8", lw=1)
        below.plot(draws, log_weights, ".", color="C0", ms=3)
        below.set(xlabel="z")
    panels[0, 0].legend(frameon=False, fontsize=9)
    panels[0, 0].set(ylabel="density")
    panels[1, 0].set(ylabel="log weight of draws")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Weigh the guides, print and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--figure", type=output_file, help="picture to write")
    parser.add_argument("--quick", action="store_true", help="few draws, to see it run")
    options = parser.parse_args(arguments)
    num_samples = 500 if options.quick else 10_000
    found = {name: weighed(guide, num_samples) for name, guide in GUIDES.items()}
    for name, evidence in found.items():
        print(f"{name:20} {evidence}")
    if options.figure is not None:
        plot(options.figure, found)


if __name__ == "__main__":
    main()
