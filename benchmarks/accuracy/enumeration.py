"""Models with discrete latents: accuracy against NUTS, and cost against marginal models.

    python -m benchmarks.accuracy.enumeration [--models mixture hmm topics subsampled]
        [--seeds 0 1 2] [--csv FILE] [--quick]

Every model is written twice: with discrete latents, which NUTS and ``ImplicitELBO`` sum out by
themselves, and marginal, with the sum written by hand. The first is fitted by the five lines of
``docs/discrete.md`` with all defaults and compared with four chains of NUTS: means in standard
deviations, and ratios of standard deviations, at their worst over all numbers of all latents. Then
one step of both is taken at equal keys: losses must agree, and times are medians of alternating
calls in one process. Rows that the CSV file has are not computed again.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from jax.scipy.special import logsumexp
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import MCMC, NUTS, SVI, init_to_median

from numpyro_kscore import AutoImplicit, ImplicitELBO, diagnose, fit

NUM_CHAINS = 4
FIELDS = (
    "model", "seed", "latents", "rhat", "ess", "mean_error", "sd_low", "sd_high", "ending",
    "verdict", "findings", "fit_seconds", "loss_difference", "step_ms", "marginal_ms", "ratio",
)  # fmt: skip


def ordered_means(count: int) -> Array:
    """Means of components in increasing order, so that labels cannot be exchanged."""
    base = dist.Normal(jnp.zeros(count), 1.5).to_event(1)
    return numpyro.sample("means", dist.TransformedDistribution(base, OrderedTransform()))


def mixture(y: Array, by_hand: bool = False, rows: int | None = None) -> None:
    """A mixture of three Gaussians by assignments."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(3, 2.0)))
    means = ordered_means(3)
    # One for all: a component with a width of its own may shrink to a few rows, another mode.
    sd = numpyro.sample("sd", dist.LogNormal(-0.5, 0.5))
    with numpyro.plate("rows", len(y), subsample_size=rows) as index:
        batch = y[index] if rows else y
        if by_hand:
            of_each = jnp.log(weights) + dist.Normal(means, sd).log_prob(batch[:, None])
            numpyro.factor("y", logsumexp(of_each, axis=1))
        else:
            kind = numpyro.sample("kind", dist.Categorical(weights))
            numpyro.sample("y", dist.Normal(means[kind], sd), obs=batch)


def subsampled(y: Array, by_hand: bool = False) -> None:
    """The same in minibatches of a tenth."""
    mixture(y, by_hand, rows=len(y) // 10)


def hmm(y: Array, by_hand: bool = False) -> None:
    """A hidden Markov model of three states, which begins in the first."""
    rows = numpyro.sample("rows", dist.Dirichlet(1.0 + 4.0 * jnp.eye(3)).to_event(1))
    means = ordered_means(3)
    sd = numpyro.sample("sd", dist.LogNormal(-0.5, 0.5))
    if by_hand:
        of_each = dist.Normal(means, sd).log_prob(y[:, None])

        def advance(state: Array, now: Array) -> tuple[Array, None]:
            return logsumexp(state[:, None] + jnp.log(rows), axis=0) + now, None

        last, _ = lax.scan(advance, jnp.log(rows[0]) + of_each[0], of_each[1:])
        numpyro.factor("y", logsumexp(last))
        return

    def step(state: Any, now: Array) -> tuple[Any, None]:
        state = numpyro.sample("state", dist.Categorical(rows[state]))
        numpyro.sample("y", dist.Normal(means[state], sd), obs=now)
        return state, None

    scan(step, 0, y)


def topics(words: Array, by_hand: bool = False) -> None:
    """A mixed-membership model: words in documents, each word of one of three topics.

    Args:
        words: number of each word, (length of a document, documents).
        by_hand: whether the sum over topics is written out.
    """
    # Each topic has words that are its own, as an analyst would say which topic is which.
    own = 0.5 + 10.0 * jnp.repeat(jnp.eye(3), 2, axis=1)
    topic = numpyro.sample("topic", dist.Dirichlet(own).to_event(1))
    with numpyro.plate("documents", words.shape[1]):
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
        with numpyro.plate("words", words.shape[0]):
            if by_hand:
                mixed = jnp.einsum("dk,kwd->wd", share, topic[:, words])
                numpyro.factor("word", jnp.log(mixed))
            else:
                kind = numpyro.sample("kind", dist.Categorical(share))
                numpyro.sample("word", dist.Categorical(topic[kind]), obs=words)


MODELS: dict[str, Callable[..., None]] = {
    "mixture": mixture,
    "hmm": hmm,
    "topics": topics,
    "subsampled": subsampled,
}


def make_data(name: str) -> Array:
    """Data simulated from a model, always the same."""
    rng = np.random.default_rng(20)
    if name == "topics":
        own = np.stack([rng.dirichlet(0.5 + 10.0 * row) for row in np.repeat(np.eye(3), 2, axis=1)])
        shares = rng.dirichlet(np.ones(3), size=10)
        draws = [rng.choice(6, size=40, p=share @ own) for share in shares]
        return jnp.asarray(np.stack(draws, axis=1))
    count = {"mixture": 200, "hmm": 150, "subsampled": 2_000}[name]
    means = np.array([-2.0, 0.0, 2.5])
    if name == "hmm":
        states = [0]
        for _ in range(count - 1):
            stay = 0.85 * np.eye(3) + 0.05
            states.append(rng.choice(3, p=stay[states[-1]]))
        return jnp.asarray(means[states] + 0.7 * rng.normal(size=count), jnp.float32)
    kinds = rng.choice(3, size=count, p=[0.3, 0.4, 0.3])
    return jnp.asarray(means[kinds] + 0.6 * rng.normal(size=count), jnp.float32)


def columns(draws: dict[str, Array], names: Sequence[str]) -> np.ndarray:
    """Draws of sites, leading axis n, as one matrix."""
    return np.concatenate([np.reshape(draws[n], (len(draws[n]), -1)) for n in names], axis=1)


def nuts(name: str, data: Array, quick: bool) -> tuple[dict[str, np.ndarray], float, float]:
    """Draws of NUTS with enumeration, the largest split R-hat, and the least effective size."""
    model = mixture if name == "subsampled" else MODELS[name]
    num = 200 if quick else 2_000
    kernel = NUTS(model, target_accept_prob=0.9, init_strategy=init_to_median)
    sampler = MCMC(
        kernel,
        num_warmup=num,
        num_samples=num,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    with warnings.catch_warnings():
        # NumPyro says that it sums out what is not marked.
        warnings.simplefilter("ignore", FutureWarning)
        sampler.run(random.key(1), data)
    chains = jax.device_get(sampler.get_samples(group_by_chain=True))
    # The last number of a simplex is one less the others.
    rhat = max(float(np.max(split_gelman_rubin(value))) for value in chains.values())
    ess = min(float(np.min(effective_sample_size(value))) for value in chains.values())
    return {n: value.reshape(-1, *value.shape[2:]) for n, value in chains.items()}, rhat, ess


def fitted_row(
    name: str, data: Array, seed: int, truth: dict[str, np.ndarray], quick: bool
) -> dict[str, Any]:
    """One fit with all defaults, compared with NUTS and diagnosed."""
    model = MODELS[name]
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        svi = SVI(model, AutoImplicit(model), optax.adam(1e-2), ImplicitELBO())
        settings = {"max_steps": 160} if quick else {}
        result = fit(svi, random.key(seed), data, progress_bar=False, **settings)
    seconds = time.perf_counter() - start
    names = list(truth)
    draws = svi.guide.sample_posterior(
        random.key(seed + 100), result.params, sample_shape=(1_000 if quick else 20_000,)
    )
    mine, theirs = columns(draws, names), columns(truth, names)
    sd = np.std(theirs, axis=0)
    ratios = np.std(mine, axis=0) / sd
    row = {
        "latents": svi.guide.latent_dim,
        "mean_error": float(np.max(np.abs(np.mean(mine, axis=0) - np.mean(theirs, axis=0)) / sd)),
        "sd_low": float(np.min(ratios)),
        "sd_high": float(np.max(ratios)),
        "ending": ", ".join(filter(None, [result.info.cause, result.info.doubt])),
        "fit_seconds": seconds,
    }
    if name == "subsampled":
        # A diagnosis is of all rows.
        svi = SVI(mixture, svi.guide, optax.adam(1e-2), ImplicitELBO())
    if not quick:
        found = diagnose(svi, result, data)
        row |= {"verdict": found.verdict, "findings": " ".join(map(str, found.codes))}
    return row


def compare_steps(name: str, data: Array, rounds: int) -> dict[str, Any]:
    """Loss and time of one step of the model and of the one with sums by hand.

    Args:
        name: name of the model.
        data: its data.
        rounds: timed calls of each, alternately.
    """
    model = MODELS[name]
    steps, losses = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for by_hand in (False, True):
            # A guide is of one model; both start from the same draws of the same parameters.
            guide = AutoImplicit(model, warm_start=False)
            svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
            state = svi.init(random.key(0), data)
            if by_hand:
                svi.model = lambda y: model(y, by_hand=True)
            update = jax.jit(svi.update).lower(state, data).compile()
            losses[by_hand] = float(update(state, data)[1])
            steps[by_hand] = lambda update=update, state=state: update(state, data)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for by_hand, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            seconds[by_hand].append(time.perf_counter() - start)
    medians = {by_hand: statistics.median(values) for by_hand, values in seconds.items()}
    return {
        "loss_difference": abs(losses[False] / losses[True] - 1),
        "step_ms": 1e3 * medians[False],
        "marginal_ms": 1e3 * medians[True],
        "ratio": medians[False] / medians[True],
    }


def _read(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and print one row a fit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--csv", type=Path, help="file of rows, which are not computed again")
    parser.add_argument("--quick", action="store_true", help="one short fit of each")
    options = parser.parse_args(arguments)
    rows = _read(options.csv)
    for name in options.models:
        done = {int(row["seed"]) for row in rows if row["model"] == name}
        seeds = [s for s in (options.seeds[:1] if options.quick else options.seeds)]
        if done.issuperset(seeds):
            continue
        data = make_data(name)
        steps = compare_steps(name, data, 5 if options.quick else 200)
        truth, rhat, ess = nuts(name, data, options.quick)
        for seed in sorted(set(seeds) - done):
            found = fitted_row(name, data, seed, truth, options.quick)
            found = {"model": name, "seed": seed, "rhat": rhat, "ess": ess, **found, **steps}
            rows.append({key: _rounded(value) for key, value in found.items()})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            _write(options.csv, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
