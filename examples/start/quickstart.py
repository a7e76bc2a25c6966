"""Variational inference without a density, compared with NumPyro's own guides and NUTS.

``AutoImplicit`` pushes noise through a neural network. The density of its draws is unknown, and
``ImplicitELBO`` does not need it. The rest is plain NumPyro:

    guide = AutoImplicit(model)
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    result = fit(svi, random.key(0), *data)  # stops by itself; svi.run does as well
    draws = guide.sample_posterior(random.key(1), result.params, *data, sample_shape=(4_000,))

This script does that for two posteriors that no Gaussian fits, compares the draws with those of
NUTS, and saves a picture of them in ``quickstart.png``:

    python examples/start/quickstart.py [--num-steps 4000] [--seed 0] [--out FOLDER] [--quick]
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, psis_diagnostic
from numpyro.infer.autoguide import AutoBNAFNormal, AutoIAFNormal, AutoMultivariateNormal
from numpyro.infer.reparam import LocScaleReparam
from sklearn.datasets import load_breast_cancer

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit
from numpyro_kscore.diagnostics import sliced_wasserstein

GUIDES = (AutoImplicit, AutoMultivariateNormal, AutoIAFNormal, AutoBNAFNormal)
NUM_PARTICLES = 128  # per step, for NumPyro's guides; ImplicitELBO chooses the same number here
Draws = dict[str, Array]


def tumors(features: Array, malignant: Array) -> None:
    """Logistic regression with strongly collinear features and a prior with heavy tails."""
    intercept = numpyro.sample("intercept", dist.Cauchy(0, 10))
    weights = numpyro.sample("weights", dist.Cauchy(0, 2.5).expand([features.shape[1]]).to_event(1))
    numpyro.sample(
        "malignant", dist.Bernoulli(logits=intercept + features @ weights), obs=malignant
    )


def schools(effects: Array, errors: Array) -> None:
    """Eight schools, centered: a funnel, because theta is close to mu where tau is small."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(effects)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effects", dist.Normal(theta, errors), obs=effects)


class Problem(NamedTuple):
    """A model with its data and the layout of its draws as a matrix."""

    title: str
    model: Callable
    data: tuple[Array, ...]
    flatten: Callable[[Draws], Array]  # draws -> unconstrained coordinates, one row per draw
    plotted: dict[str, int]  # labels and columns of two coordinates
    nuts_model: Callable  # the same posterior in a form that suits NUTS


def make_problems() -> list[Problem]:
    """The two posteriors of this script."""
    table = load_breast_cancer()
    features = table.data[:, :10]  # size, shape and texture of the cell nuclei in one image
    features = jnp.asarray((features - features.mean(0)) / features.std(0), jnp.float32)
    malignant = jnp.asarray(table.target == 0, jnp.int32)
    effects = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    return [
        Problem(
            title="Logistic regression on 569 tumors",
            model=tumors,
            data=(features, malignant),
            flatten=lambda draws: jnp.column_stack([draws["intercept"], draws["weights"]]),
            plotted={"weight of radius": 1, "weight of area": 4},
            nuts_model=tumors,
        ),
        Problem(
            title="Eight schools, centered",
            model=schools,
            data=(effects, errors),
            flatten=lambda draws: jnp.column_stack(
                [draws["mu"], jnp.log(draws["tau"]), draws["theta"]]
            ),
            plotted={"effect of the first school": 2, "log tau": 1},
            # The neck of the funnel is too narrow for NUTS, which samples (theta - mu) / tau.
            nuts_model=numpyro.handlers.reparam(schools, {"theta": LocScaleReparam(0)}),
        ),
    ]


def run_guide(
    problem: Problem, guide_class: type, options: argparse.Namespace
) -> tuple[float, Array, float | None]:
    """Fit one guide: seconds with compilation, draws, and the PSIS k-hat of its weights p/q."""
    run_key, draw_key, khat_key = random.split(random.key(options.seed), 3)
    implicit = guide_class is AutoImplicit
    guide = guide_class(problem.model)
    start = time.perf_counter()
    if implicit:
        svi = SVI(problem.model, guide, optax.adam(1e-2), ImplicitELBO())
        result = fit(svi, run_key, *problem.data, max_steps=options.num_steps)
    else:
        optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, options.num_steps))
        svi = SVI(problem.model, guide, optimizer, Trace_ELBO(num_particles=NUM_PARTICLES))
        result = svi.run(run_key, options.num_steps, *problem.data)
    jax.block_until_ready(result.params)
    seconds = time.perf_counter() - start
    draws = guide.sample_posterior(
        draw_key, result.params, *problem.data, sample_shape=(options.num_draws,)
    )
    khat = None  # an implicit guide has no density q for importance weights
    if not implicit:
        model, data = problem.model, problem.data
        khat = psis_diagnostic(khat_key, result.params, model, guide, *data, num_particles=4_000)
    return seconds, problem.flatten(draws), khat


def run_nuts(problem: Problem, options: argparse.Namespace) -> tuple[float, Array, Array]:
    """Run two chains: one is the reference, and the other shows the sampling noise."""
    mcmc = MCMC(
        NUTS(problem.nuts_model, target_accept_prob=0.95),
        num_warmup=options.num_draws // 4,
        num_samples=options.num_draws,
        num_chains=2,
        chain_method="vectorized",
    )
    start = time.perf_counter()
    mcmc.run(random.key(options.seed + 1), *problem.data)
    draws = jax.block_until_ready(mcmc.get_samples())
    seconds = time.perf_counter() - start
    reference, second_chain = jnp.split(problem.flatten(draws), 2)
    return seconds, reference, second_chain


def table_row(name: str, seconds: float, draws: Array, reference: Array, khat: float | None) -> str:
    """One line of the table; coordinates in units of the reference's standard deviations."""
    draws, reference = ((x - reference.mean(0)) / reference.std(0) for x in (draws, reference))
    distance = sliced_wasserstein(draws, reference, random.key(0))
    mean_error, sd = jnp.abs(draws.mean(0)).max(), draws.std(0)
    return (
        f"{name:24}{seconds:9.1f}{distance:11.3f}{mean_error:12.2f}"
        f"{sd.min():9.2f}{sd.max():7.2f}{'—' if khat is None else f'{khat:.2f}':>8}"
    )


def plot(panel: plt.Axes, name: str, draws: Array, reference: Array, problem: Problem) -> None:
    """Plot draws of one guide over those of NUTS."""
    (x_label, x), (y_label, y) = problem.plotted.items()
    for points, label, color in ((reference, "NUTS", "0.75"), (draws, name, "C0")):
        panel.plot(points[:, x], points[:, y], ".", color=color, ms=2, alpha=0.3, label=label)
    panel.set(title=name, xlabel=x_label)
    # Limits follow the reference, so that a few far draws of a guide do not shrink the picture.
    panel.set_xlim(*jnp.quantile(reference[:, x], jnp.array([0.001, 0.999])))
    panel.set_ylim(*jnp.quantile(reference[:, y], jnp.array([0.001, 0.999])))
    if name == GUIDES[0].__name__:
        panel.set_ylabel(f"{problem.title}\n\n{y_label}")


def announce(text: str) -> None:
    """Print to stderr, where progress bars go, which fit the next one belongs to."""
    print(f"\n{text}", file=sys.stderr, flush=True)


def main() -> None:
    """Fit all guides, print a table for each posterior and save the figure."""
    parser = argparse.ArgumentParser(description="AutoImplicit, NumPyro's guides and NUTS")
    parser.add_argument(
        "--num-steps", type=int, default=4_000, help="SVI steps, of AutoImplicit the most"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for quickstart.png")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see it run")
    options = parser.parse_args()
    options.num_draws = 200 if options.quick else 4_000
    options.num_steps = 20 if options.quick else options.num_steps

    problems = make_problems()
    figure, panels = plt.subplots(
        len(problems), len(GUIDES), figsize=(13, 6.5), sharex="row", sharey="row",
        layout="constrained",
    )  # fmt: skip
    header = f"{'':24}{'seconds':>9}{'sliced W1':>11}{'mean error':>12}{'sd from':>9}{'to':>7}"
    tables = []
    for problem, row in zip(problems, panels, strict=True):
        announce(f"{problem.title}: NUTS")
        nuts_seconds, reference, second_chain = run_nuts(problem, options)
        tables += ["", f"{problem.title} (d = {reference.shape[1]})", f"{header}{'k-hat':>8}"]
        for guide_class, panel in zip(GUIDES, row, strict=True):
            name = guide_class.__name__
            announce(f"{problem.title}: {name}")
            seconds, draws, khat = run_guide(problem, guide_class, options)
            tables.append(table_row(name, seconds, draws, reference, khat))
            plot(panel, name, draws, reference, problem)
        tables.append(table_row("NUTS, another chain", nuts_seconds, second_chain, reference, None))
    print(*tables, sep="\n")
    print(
        f"\nAutoImplicit by fit, which stops by itself; the others by {options.num_steps} steps of "
        f"Adam with {NUM_PARTICLES} particles,\nstep size 1e-2 falling to 0 along a cosine. "
        "Seconds include compilation; those of NUTS are for both chains.\nDistances and mean "
        "errors are relative to NUTS, in its standard deviations; its other chain shows the\n"
        "sampling noise. With a k-hat above 0.7 the guide's importance weights are unreliable."
    )
    figure.savefig(options.out / "quickstart.png", dpi=110)


if __name__ == "__main__":
    main()
