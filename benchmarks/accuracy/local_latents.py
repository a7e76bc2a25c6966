"""Local latents in minibatches, by ``AutoImplicit(model, amortize=...)``, against exact integrals.

    python -m benchmarks.accuracy.local_latents [--models intercepts factors] [--groups 100000 ...]
        [--batch 100] [--seeds 0 1 2] [--steps 3000] [--csv FILE] [--quick]

* ``intercepts``: groups of 6 to 20 binary observations in two conditions, an effect for each;
* ``factors``: rows of eight binary items that two factors explain, with the upper triangle of the
  loadings zero and their diagonal positive.

Rows with the same data have the same likelihood, so the marginal likelihood of all rows is a sum
over the few hundred different ones, by Gauss and Hermite's quadrature: NUTS on it is the reference
for the global latents. Given its draws, the means and standard deviations of a row's latents are
quadratures, too.

For the global latents the table has the largest error of a mean in standard deviations and the
smallest and largest ratio of standard deviations; for 200 rows the share with all ratios from .9 to
1.1, the median error of a mean and its 95 % quantile, in standard deviations; then seconds, those
of a step, and the peak of memory.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro.infer import MCMC, NUTS, SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit

NUM_ROWS = 200
ITEMS, FACTORS = 8, 2
COLUMNS = (
    "model", "groups", "batch", "seed", "mean", "sd_low", "sd_high", "rows_right", "row_mean",
    "row_mean_95", "seconds", "step_ms", "peak_mb",
)  # fmt: skip


class Case(NamedTuple):
    """A model with local latents and its data.

    Attributes:
        model: from data and the size of a minibatch.
        data: arrays with a row for each group.
        local: name of the local site.
        log_likelihood: from global latents by name, nodes (m, k) and data to (rows, m).
        nodes: from global latents by name to nodes (m, k) of the prior of a row, and weights (m,).
    """

    model: Callable[..., None]
    data: tuple[np.ndarray, ...]
    local: str
    log_likelihood: Callable[..., Array]
    nodes: Callable[[dict[str, Array]], tuple[Array, Array]]


def hermite(dim: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes (count**dim, dim) and weights for expectations under a standard normal."""
    x, w = np.polynomial.hermite_e.hermegauss(count)
    nodes = np.array(list(itertools.product(x, repeat=dim)))
    weights = np.array([np.prod(row) for row in itertools.product(w, repeat=dim)])
    return nodes, weights / weights.sum()


def intercepts(groups: int, seed: int) -> Case:
    """Counts of two conditions with an effect for each group."""
    rng = np.random.default_rng(seed)
    effects = rng.normal(0.5, 0.8, groups)
    trials = rng.integers(3, 11, groups)[:, None] * np.ones(2)
    logits = effects[:, None] + 0.7 * np.arange(2)
    counts = rng.binomial(trials.astype(int), 1 / (1 + np.exp(-logits)))

    def model(counts: Array, trials: Array, batch: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("groups", len(counts), subsample_size=batch) as rows:
            effect = numpyro.sample("effect", dist.Normal(level, spread))
            logits = effect[:, None] + slope * jnp.arange(2)
            fn = dist.Binomial(trials[rows], logits=logits).to_event(1)
            numpyro.sample("count", fn, obs=counts[rows])

    def log_likelihood(g: dict[str, Array], nodes: Array, counts: Array, trials: Array) -> Array:
        logits = nodes[:, 0, None] + g["slope"] * jnp.arange(2)
        fn = dist.Binomial(trials[:, None], logits=logits, validate_args=False)
        return fn.log_prob(counts[:, None]).sum(-1)

    x, w = hermite(1, 61)

    def nodes(g: dict[str, Array]) -> tuple[Array, Array]:
        return g["level"] + g["spread"] * jnp.asarray(x), jnp.asarray(w)

    data = (counts.astype(np.float32), trials.astype(np.float32))
    return Case(model, data, "effect", log_likelihood, nodes)


def factors(groups: int, seed: int) -> Case:
    """Binary items that two latent factors of each row explain."""
    rng = np.random.default_rng(seed)
    loadings = np.concatenate([1.2 * np.eye(FACTORS), rng.normal(0, 1, (ITEMS - FACTORS, FACTORS))])
    loadings[1, 0] = 0.5
    z = rng.normal(size=(groups, FACTORS))
    logits = z @ loadings.T + rng.normal(0, 0.5, ITEMS)
    answers = rng.binomial(1, 1 / (1 + np.exp(-logits))).astype(np.float32)

    def matrix(g: dict[str, Array]) -> Array:
        top = jnp.diag(g["diagonal"]) + jnp.zeros((FACTORS, FACTORS)).at[1, 0].set(g["below"])
        return jnp.concatenate([top, g["loadings"]])

    def model(answers: Array, batch: int | None = None) -> None:
        g = {
            "diagonal": numpyro.sample("diagonal", dist.HalfNormal(1.5).expand([FACTORS])),
            "below": numpyro.sample("below", dist.Normal(0.0, 1.0)),
            "loadings": numpyro.sample(
                "loadings", dist.Normal(0, 1).expand([ITEMS - FACTORS, FACTORS]).to_event(2)
            ),
            "level": numpyro.sample("level", dist.Normal(0.0, 2.0).expand([ITEMS]).to_event(1)),
        }
        with numpyro.plate("rows", len(answers), subsample_size=batch) as rows:
            z = numpyro.sample("z", dist.Normal().expand([FACTORS]).to_event(1))
            fn = dist.Bernoulli(logits=z @ matrix(g).T + g["level"]).to_event(1)
            numpyro.sample("answers", fn, obs=answers[rows])

    def log_likelihood(g: dict[str, Array], nodes: Array, answers: Array) -> Array:
        logits = nodes @ matrix(g).T + g["level"]
        fn = dist.Bernoulli(logits=logits, validate_args=False)
        return fn.log_prob(answers[:, None]).sum(-1)

    x, w = hermite(FACTORS, 25)
    return Case(model, (answers,), "z", log_likelihood, lambda g: (jnp.asarray(x), jnp.asarray(w)))


MODELS = {"intercepts": intercepts, "factors": factors}


def reference(case: Case, num_draws: int) -> dict[str, Array]:
    """Draws of the global latents by NUTS, the local ones integrated out."""
    table = np.concatenate([a.reshape(len(a), -1) for a in case.data], axis=1)
    _, first, counts = np.unique(table, axis=0, return_index=True, return_counts=True)
    distinct = tuple(jnp.asarray(a[first]) for a in case.data)

    def marginal() -> None:
        with numpyro.handlers.block(hide_fn=lambda site: site["name"] in hidden):
            found = numpyro.handlers.trace(
                numpyro.handlers.substitute(case.model, data={case.local: local})
            ).get_trace(*one)
        g = {name: site["value"] for name, site in found.items() if name not in hidden}
        nodes, weights = case.nodes(g)
        terms = case.log_likelihood(g, nodes, *distinct) + jnp.log(weights)
        total = jnp.sum(counts * jax.scipy.special.logsumexp(terms, axis=1))
        numpyro.factor("likelihood", total)

    one = tuple(jnp.asarray(a[:1]) for a in case.data)
    trace = numpyro.handlers.trace(numpyro.handlers.seed(case.model, random.key(0))).get_trace(*one)
    local = jnp.zeros_like(trace[case.local]["value"])
    hidden = {n for n, site in trace.items() if site["type"] != "sample" or site["is_observed"]}
    hidden.add(case.local)
    mcmc = MCMC(
        NUTS(marginal), num_warmup=num_draws // 2, num_samples=num_draws, progress_bar=False
    )
    mcmc.run(random.key(1))
    return mcmc.get_samples()


def row_moments(case: Case, draws: dict[str, Array], data: tuple[Array, ...]) -> Any:
    """Means and standard deviations of rows' latents, (rows, k), by quadrature at draws."""

    @jax.jit
    def at(g: dict[str, Array]) -> tuple[Array, Array]:
        nodes, weights = case.nodes(g)
        terms = case.log_likelihood(g, nodes, *data) + jnp.log(weights)
        share = jax.nn.softmax(terms, axis=1)
        return share @ nodes, share @ nodes**2

    some = {name: value[:: max(1, len(value) // 500)] for name, value in draws.items()}
    first, second = (np.asarray(a, float).mean(0) for a in jax.lax.map(at, some))
    return first, np.sqrt(second - first**2)


def run(name: str, groups: int, batch: int, seed: int, steps: int, num_draws: int) -> dict:
    """One row of the table."""
    case = MODELS[name](groups, seed)
    data = tuple(jnp.asarray(a) for a in case.data)
    start = time.perf_counter()
    plate = "groups" if name == "intercepts" else "rows"
    guide = AutoImplicit(case.model, amortize=plate)
    svi = SVI(case.model, guide, optax.adam(1e-2), ImplicitELBO())
    result = fit(svi, random.key(seed), *data, batch, max_steps=steps, progress_bar=False)
    seconds = time.perf_counter() - start
    some = tuple(a[:NUM_ROWS] for a in data)
    draws = guide.sample_posterior(random.key(1), result.params, *some, sample_shape=(num_draws,))
    step = step_seconds(svi, result.state, (*data, batch))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    truth = reference(case, num_draws)
    shifts, ratios = [], []
    for site, value in truth.items():
        sd = np.asarray(value).std(0)
        shifts.append(np.ravel(np.abs(np.asarray(draws[site]).mean(0) - value.mean(0)) / sd))
        ratios.append(np.ravel(np.asarray(draws[site]).std(0) / sd))
        print(f"    {site}: {shifts[-1].round(2)} {ratios[-1].round(2)}", flush=True)
    means, sds = row_moments(case, truth, some)
    local = np.asarray(draws[case.local], float).reshape(num_draws, *means.shape)
    errors = np.abs(local.mean(0) - means) / sds
    row_ratios = local.std(0) / sds
    right = np.all((row_ratios > 0.9) & (row_ratios < 1.1), axis=1)
    numbers = (
        np.concatenate(shifts).max(), np.concatenate(ratios).min(), np.concatenate(ratios).max(),
        right.mean(), np.median(errors), np.quantile(errors, 0.95), seconds, 1e3 * step, peak,
    )  # fmt: skip
    return dict(zip(COLUMNS, (name, groups, batch, seed, *numbers), strict=True))


def step_seconds(svi: SVI, state: Any, args: tuple[Any, ...]) -> float:
    """Seconds of a step, the shortest of three times twenty."""
    *data, batch = args
    update = jax.jit(lambda state, *data: svi.update(state, *data, batch)[0])
    state = jax.block_until_ready(update(state, *data))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(20):
            state = update(state, *data)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / 20)
    return min(times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, compare and print the table."""
    parser = argparse.ArgumentParser(description="local latents in minibatches")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--groups", type=int, nargs="+", default=[100_000])
    parser.add_argument("--batch", type=int, default=100, help="rows in a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=3_000, help="most steps of a fit")
    parser.add_argument("--draws", type=int, default=2_000)
    parser.add_argument("--csv", type=Path, help="file to append to; rows it has are not repeated")
    parser.add_argument("--quick", action="store_true", help="few of everything, to see it run")
    options = parser.parse_args(arguments)
    if options.quick:
        options.groups, options.batch, options.seeds = [300], 20, [0]
        options.steps, options.draws = 160, 100
    done = set()
    if options.csv and options.csv.exists():
        lines = options.csv.read_text().splitlines()[1:]
        done = {tuple(line.split(",")[:4]) for line in lines}
    print(" ".join(f"{column:>11}" for column in COLUMNS))
    for name, groups, seed in itertools.product(options.models, options.groups, options.seeds):
        if (name, str(groups), str(options.batch), str(seed)) in done:
            continue
        row = run(name, groups, options.batch, seed, options.steps, options.draws)
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        print(" ".join(f"{cell:>11}" for cell in cells), flush=True)
        if options.csv:
            if not options.csv.exists():
                options.csv.write_text(",".join(COLUMNS) + "\n")
            with options.csv.open("a") as file:
                file.write(",".join(cells) + "\n")


if __name__ == "__main__":
    main()
