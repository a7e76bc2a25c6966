"""One guide for many data sets: learned once, then a posterior takes milliseconds.

    python -m examples.start.many_data_sets [--studies 4000] [--batch 16] [--steps 3000]
                                            [--figure FILE] [--quick]

A psychometric function, as measured of every subject in an experiment: the share of correct answers
rises from chance with the level of a stimulus, at a threshold, with a slope and up to a lapse rate
that differ from subject to subject. The guide is a network that takes a whole data set, in any
order of its trials, and noise; it is fitted to subjects simulated from the prior. For a new subject
its draws are one pass of the network.

Two checks follow. Simulation-based calibration ranks the true parameters of new subjects among
draws (Talts et al. 2018); NUTS, subject by subject, tells errors of means and standard deviations.
"""

import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from numpyro.contrib.module import flax_module
from numpyro.infer import MCMC, NUTS, SVI, Predictive
from scipy.stats import kstest

from numpyro_kscore import Implicit, ImplicitELBO, fit

NUM_TRIALS, NUM_LATENTS, HIDDEN = 60, 3, 64
LATENTS = ("threshold", "log_slope", "lapse")


def model(levels: Array, correct: Array | None = None, total: int | None = None) -> None:
    """Answers of some of ``total`` subjects: levels and correct answers are (subjects, trials)."""
    with numpyro.plate("subjects", total or len(levels), subsample_size=len(levels)):
        threshold = numpyro.sample("threshold", dist.Normal(0.0, 1.0))
        log_slope = numpyro.sample("log_slope", dist.Normal(0.5, 0.7))
        lapse = numpyro.sample("lapse", dist.Beta(1.0, 9.0))
        logits = jnp.exp(log_slope)[:, None] * (levels - threshold[:, None])
        chance = 0.5 + (0.5 - 0.5 * lapse)[:, None] * jax.nn.sigmoid(logits)
        numpyro.sample("correct", dist.Bernoulli(chance).to_event(1), obs=correct)


class Encoder(nn.Module):
    """Summary of a data set: a network of its trials, averaged, and a network of that."""

    @nn.compact
    def __call__(self, trials: Array) -> Array:
        each = nn.Dense(HIDDEN)(nn.gelu(nn.Dense(HIDDEN)(trials)))
        return nn.gelu(nn.Dense(HIDDEN)(nn.gelu(each).mean(axis=-2)))


class Sampler(nn.Module):
    """Latents from noise and what the data say: a Gaussian, and a network that bends it."""

    @nn.compact
    def __call__(self, said: Array, noise: Array) -> Array:
        loc = nn.Dense(NUM_LATENTS)(said)
        log_scale = nn.Dense(NUM_LATENTS, bias_init=nn.initializers.constant(-0.7))(said)
        mixing = nn.Dense(NUM_LATENTS**2)(said).reshape(*noise.shape, NUM_LATENTS)
        mixed = noise + jnp.einsum("...ij,...j->...i", jnp.tril(mixing, -1), noise)
        bent = nn.gelu(nn.Dense(HIDDEN)(jnp.concatenate([said, noise], axis=-1)))
        bent = nn.Dense(NUM_LATENTS, kernel_init=nn.initializers.normal(0.01))(bent)
        return loc + jnp.exp(log_scale) * (mixed + bent)


def guide(levels: Array, correct: Array, total: int | None = None) -> None:
    """The latents of every subject from its trials and noise of its own."""
    encode = flax_module("encoder", Encoder(), input_shape=(1, NUM_TRIALS, 2))
    sampler = flax_module("sampler", Sampler(), jnp.zeros((1, HIDDEN)), jnp.zeros((1, NUM_LATENTS)))
    with numpyro.plate("subjects", total or len(levels), subsample_size=len(levels)):
        unit = dist.Normal(jnp.zeros(NUM_LATENTS), 1.0).to_event(1)
        noise = numpyro.sample("noise", unit, infer={"is_auxiliary": True})
        trials = jnp.stack([levels, 2.0 * correct - 1.0], axis=-1)
        threshold, log_slope, lapse = jnp.moveaxis(sampler(encode(trials), noise), -1, 0)
        numpyro.sample("threshold", Implicit(threshold))
        numpyro.sample("log_slope", Implicit(log_slope))
        numpyro.sample("lapse", Implicit(jax.nn.sigmoid(lapse), unconstrained=lapse))


@partial(jax.jit, static_argnums=1)
def simulate(key: Array, num_subjects: int) -> tuple[Array, Array, dict[str, Array]]:
    """Levels, answers and latents of subjects from the prior."""
    levels = random.uniform(key, (num_subjects, NUM_TRIALS), minval=-3.0, maxval=3.0)
    drawn = Predictive(model, num_samples=1)(random.fold_in(key, 1), levels)
    drawn = {name: value[0] for name, value in drawn.items()}
    return levels, drawn.pop("correct").astype(float), drawn


def studies(key: Array, total: int, batch: int) -> Callable[[int], Iterator[tuple[Array, Array]]]:
    """A loader whose every epoch has ``total`` new subjects, less those of a short last batch."""

    def batches(epoch: int) -> Iterator[tuple[Array, Array]]:
        levels, correct, _ = simulate(random.fold_in(key, epoch), total)
        for start in range(0, total - batch + 1, batch):
            yield levels[start : start + batch], correct[start : start + batch]

    return batches


def coordinates(draws: dict[str, Any]) -> np.ndarray:
    """Unconstrained latents, in a last axis."""
    lapse = np.asarray(draws["lapse"])
    lapse = np.log(lapse) - np.log1p(-lapse)
    return np.stack([draws["threshold"], draws["log_slope"], lapse], axis=-1)


def ranks(draws: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Shares of draws (n, subjects, d) below the truth (subjects, d)."""
    return np.mean(draws < truth, axis=0)


def reference(levels: Array, correct: Array, num_draws: int) -> tuple[np.ndarray, float]:
    """Draws by NUTS of one subject after the other, (n, subjects, d), and seconds of each."""
    mcmc = MCMC(
        NUTS(model, target_accept_prob=0.95),
        num_warmup=min(1_000, num_draws),
        num_samples=num_draws,
        progress_bar=False,
        jit_model_args=True,
    )
    found = []
    for k in range(len(levels)):
        if k == 1:
            start = time.perf_counter()  # after compilation
        mcmc.run(random.fold_in(random.key(3), k), levels[k : k + 1], correct[k : k + 1])
        found.append(coordinates(mcmc.get_samples())[:, 0])
    return np.stack(found, axis=1), (time.perf_counter() - start) / (len(levels) - 1)


def plot(path: Path, below: np.ndarray, draws: np.ndarray, truth: np.ndarray) -> None:
    """Histograms of ranks; draws of guide and NUTS of the first subjects."""
    figure, panels = plt.subplots(2, 3, figsize=(10, 6), layout="constrained")
    count = len(below)
    for panel, name, values in zip(panels[0], LATENTS, below.T, strict=True):
        panel.hist(values, np.linspace(0, 1, 11), color="C0", alpha=0.7)
        # Where nine of ten bars of calibrated ranks are.
        for sign in (-1.64, 1.64):
            panel.axhline(count / 10 + sign * (0.09 * count) ** 0.5, color="k", lw=1, ls=":")
        panel.set(title=f"rank of the true {name}", xticks=[0, 0.5, 1], yticks=[])
    for k, panel in enumerate(panels[1]):
        panel.plot(*truth[:1_500, k, 1:].T, ".", ms=2, color="0.7", label="NUTS")
        panel.plot(*draws[:1_500, k, 1:].T, ".", ms=2, color="C0", alpha=0.6, label="guide")
        panel.set(xlabel="log slope", ylabel="logit lapse", title=f"subject {k + 1}")
    panels[1, 0].legend(markerscale=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, check calibration, compare with NUTS, print and draw."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--studies", type=int, default=4_000, help="simulated data sets of an epoch"
    )
    parser.add_argument("--batch", type=int, default=16, help="data sets of a step")
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="picture to write")
    parser.add_argument("--quick", action="store_true", help="few of all, to see it run")
    options = parser.parse_args(arguments)
    num_checked, num_new, num_draws = 500, 20, 2_000
    if options.quick:
        options.studies, options.steps = 40, 20
        num_checked, num_new, num_draws = 20, 3, 50

    key = random.key(options.seed)
    loader = studies(key, options.studies, options.batch)
    svi = SVI(model, guide, optax.adam(3e-3), ImplicitELBO())
    start = time.perf_counter()
    result = fit(
        svi, key, options.studies, loader=loader, max_steps=options.steps, criterion="loss"
    )
    print(f"{result.info.steps} steps, {time.perf_counter() - start:.0f} s: {result.info.reason}")

    posterior = Predictive(guide, params=result.params, num_samples=num_draws)
    draw = jax.jit(lambda key, levels, correct: posterior(key, levels, correct))
    levels, correct, latents = simulate(random.key(100 + options.seed), num_checked)
    draws = coordinates(draw(random.key(1), levels, correct))
    below = ranks(draws, coordinates(latents))
    for name, values in zip(LATENTS, below.T, strict=True):
        print(f"{name:10} ranks of {num_checked}: p = {kstest(values, 'uniform').pvalue:.2f}")

    new = levels[:num_new], correct[:num_new]
    jax.block_until_ready(draw(random.key(2), *new))
    start = time.perf_counter()
    jax.block_until_ready(draw(random.key(2), *new))
    seconds = (time.perf_counter() - start) / num_new
    truth, seconds_nuts = reference(*new, num_draws)
    draws = draws[:, :num_new]
    errors = np.abs(draws.mean(0) - truth.mean(0)) / truth.std(0)
    sd_ratios = draws.std(0) / truth.std(0)
    for name, error, ratio in zip(LATENTS, errors.T, sd_ratios.T, strict=True):
        print(
            f"{name:10} error of the mean {np.median(error):.2f} sd (largest {error.max():.2f}), "
            f"sd ratio {np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f})"
        )
    print(f"a data set takes {1e3 * seconds:.1f} ms, NUTS {seconds_nuts:.1f} s")
    if options.figure:
        plot(options.figure, below, draws, truth)


if __name__ == "__main__":
    main()
