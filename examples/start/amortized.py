"""Local latents in minibatches, with three guides that can only be sampled.

    python -m examples.start.amortized [--groups 300] [--batch 30] [--steps 3000] [--figure FILE]
                                       [--quick]

In a hierarchical model hundreds of groups share a mean and a spread, and each has its own effect,
observed through a count: too many local latents to learn one by one. An amortizing network maps a
group's data and noise to its effect, given the shared latents; each step of the fit uses a
minibatch of groups. The shared latents come from

* a network of noise,
* a network with dropout, whose masks are the noise,
* an ensemble, of which a random member is drawn.

The objective finds out which sites of the guide have a density; only the noise is declared. The
results are compared with NUTS, which uses all groups at every step.
"""

import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro import handlers
from numpyro.contrib.module import flax_module
from numpyro.infer import MCMC, NUTS, SVI

from numpyro_kscore import Implicit, ImplicitELBO

AUXILIARY = {"is_auxiliary": True}
SHARED = ("level", "log_spread")


def simulate(num_groups: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and exposures of the groups, (groups,) each."""
    rng = np.random.default_rng(seed)
    effects = rng.normal(0.7, 0.6, num_groups)
    exposures = rng.uniform(0.5, 4.0, num_groups)
    return rng.poisson(exposures * np.exp(effects)).astype(float), exposures


def model(counts: Array, exposures: Array, batch: int | None = None) -> None:
    """Poisson counts with a rate for each group."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    log_spread = numpyro.sample("log_spread", dist.Normal(-1.0, 1.0))
    with numpyro.plate("groups", len(counts), subsample_size=batch) as rows:
        effect = numpyro.sample("effect", dist.Normal(level, jnp.exp(log_spread)))
        rate = exposures[rows] * jnp.exp(effect)
        numpyro.sample("count", dist.Poisson(rate), obs=counts[rows])


class Network(nn.Module):
    """Two hidden layers, optionally with dropout; the output starts small."""

    size: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(2):
            x = nn.gelu(nn.Dense(32)(x))
            x = nn.Dropout(self.dropout, deterministic=self.dropout == 0)(x)
        return nn.Dense(self.size, kernel_init=nn.initializers.normal(0.01))(x)


def draw_noise(name: str, size: int) -> Array:
    """Standard normal noise, (size,), marked as auxiliary: it is not a latent."""
    unit = dist.Normal(jnp.zeros(size), 1.0).to_event(1)
    return numpyro.sample(name, unit, infer=AUXILIARY)


def from_network() -> Array:
    """Shared latents from a network of noise, (2,)."""
    noise = draw_noise("noise", 2)
    spread = numpyro.param("spread", jnp.full(2, 0.1))
    shift = flax_module("network", Network(2), input_shape=(2,))(noise)
    return numpyro.param("loc", jnp.array([0.0, -1.0])) + spread * noise + shift


def from_dropout() -> Array:
    """Shared latents from a network with constant input and dropout as noise, (2,)."""
    network = flax_module(
        "network", Network(2, dropout=0.3), input_shape=(2,), apply_rng=["dropout"]
    )
    # Masks are discrete, so a little noise gives the draws a density.
    jitter = numpyro.param("jitter", jnp.full(2, 0.05)) * draw_noise("noise", 2)
    loc = numpyro.param("loc", jnp.array([0.0, -1.0]))
    return loc + network(jnp.ones(2), rngs={"dropout": numpyro.prng_key()}) + jitter


def from_ensemble(members: int = 8) -> Array:
    """Shared latents of a random member, which is a point with noise around it, (2,)."""
    start = 0.1 * random.normal(random.key(0), (members, 2)) + jnp.array([0.0, -1.0])
    member = random.randint(numpyro.prng_key(), (), 0, members)
    locs = numpyro.param("locs", start)
    spreads = numpyro.param("spreads", jnp.full((members, 2), 0.1))
    return locs[member] + spreads[member] * draw_noise("noise", 2)


GUIDES = {"network": from_network, "dropout": from_dropout, "ensemble": from_ensemble}


def make_guide(shared: Callable[[], Array]) -> Callable[..., None]:
    """The guide: shared latents from ``shared``, effects from an amortizing network."""

    def guide(counts: Array, exposures: Array, batch: int | None = None) -> None:
        level, log_spread = shared()
        level = numpyro.sample("level", Implicit(level))
        log_spread = numpyro.sample("log_spread", Implicit(log_spread))
        network = flax_module("effects", Network(2), input_shape=(5,))
        with numpyro.plate("groups", len(counts), subsample_size=batch) as rows:
            # A Gaussian approximation of the conditional posterior; the network corrects it.
            seen = jnp.log((counts[rows] + 0.5) / exposures[rows])
            precision = jnp.exp(-2 * log_spread)
            weight = (counts[rows] + 0.5) / (counts[rows] + 0.5 + precision)
            center = level + weight * (seen - level)
            width = 1 / jnp.sqrt(counts[rows] + 0.5 + precision)
            noise = numpyro.sample("noises", dist.Normal(0.0, 1.0), infer=AUXILIARY)
            inputs = jnp.stack(
                [seen, weight, noise, center, jnp.broadcast_to(log_spread, seen.shape)], axis=1
            )
            shift, gate = network(inputs).T
            numpyro.sample("effect", Implicit(center + width * (noise * jnp.exp(gate) + shift)))

    return guide


def fit(name: str, data: tuple[Array, Array], batch: int, num_steps: int) -> tuple[dict, float]:
    """Draws of all latents from one fitted guide, and seconds of the fit."""
    guide = make_guide(GUIDES[name])
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))
    start = time.perf_counter()
    svi = SVI(model, guide, optimizer, ImplicitELBO())
    result = svi.run(random.key(0), num_steps, *data, batch, stable_update=True)
    seconds = time.perf_counter() - start

    @jax.jit
    def draw(key: Array) -> dict[str, Any]:
        seeded = handlers.substitute(handlers.seed(guide, key), result.params)
        trace = handlers.trace(seeded).get_trace(*data)
        return {site: trace[site]["value"] for site in (*SHARED, "effect")}

    return jax.vmap(draw)(random.split(random.key(1), 4000)), seconds


def reference(data: tuple[Array, Array], num_draws: int) -> tuple[dict, float]:
    """Draws by NUTS, and its seconds."""
    mcmc = MCMC(NUTS(model), num_warmup=num_draws // 2, num_samples=num_draws, progress_bar=True)
    start = time.perf_counter()
    mcmc.run(random.key(2), *data)
    return mcmc.get_samples(), time.perf_counter() - start


def row_of(draws: dict, truth: dict) -> list[float]:
    """Mean errors in sd and sd ratios of the shared latents; worst and mean ones of the effects."""
    out = []
    for site in SHARED:
        sd = np.std(truth[site])
        out += [(np.mean(draws[site]) - np.mean(truth[site])) / sd, np.std(draws[site]) / sd]
    sd = np.std(truth["effect"], axis=0)
    errors = np.abs(np.mean(draws["effect"], axis=0) - np.mean(truth["effect"], axis=0)) / sd
    return [*out, errors.max(), np.mean(np.std(draws["effect"], axis=0) / sd)]


def plot(path: Path, found: dict[str, dict]) -> None:
    """Plot the shared latents of every guide over those of NUTS."""
    names = [name for name in found if name != "NUTS"]
    figure, panels = plt.subplots(1, len(names), figsize=(4 * len(names), 3.6), sharex=True)
    for panel, name in zip(np.atleast_1d(panels), names, strict=True):
        for draws, color in ((found["NUTS"], "0.7"), (found[name], "C0")):
            some = slice(None, None, max(1, len(draws["level"]) // 1500))
            panel.plot(draws["level"][some], draws["log_spread"][some], ".", ms=2, color=color)
        panel.set(title=name, xlabel="level", ylabel="log spread")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, print the table and draw the figure."""
    parser = ArgumentParser(description="local latents in minibatches")
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--batch", type=int, default=30, help="groups per step")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="picture to write")
    parser.add_argument("--quick", action="store_true", help="few steps, to see it run")
    options = parser.parse_args(arguments)
    num_draws = 2000
    if options.quick:
        options.groups, options.batch, options.steps, num_draws = 20, 5, 20, 50

    data = tuple(jnp.asarray(x) for x in simulate(options.groups, options.seed))
    found, seconds = {}, {}
    found["NUTS"], seconds["NUTS"] = reference(data, num_draws)
    for name in GUIDES:
        found[name], seconds[name] = fit(name, data, options.batch, options.steps)
    print(f"\n{'':10}{'level':>16}{'log spread':>16}{'effects':>16}{'seconds':>9}")
    print(f"{'':10}" + f"{'mean':>8}{'sd':>8}" * 2 + f"{'worst':>8}{'sd':>8}")
    for name in GUIDES:
        numbers = "".join(f"{x:8.2f}" for x in row_of(found[name], found["NUTS"]))
        print(f"{name:10}{numbers}{seconds[name]:9.1f}")
    print(f"{'NUTS':10}{'':48}{seconds['NUTS']:9.1f}")
    print(
        "\nErrors of means in posterior sd and ratios of sd to NUTS; for the effects the worst "
        "error and the average ratio."
    )
    if options.figure:
        plot(options.figure, found)


if __name__ == "__main__":
    main()
