"""Variational inference without a density: three posteriors, and NUTS for comparison.

``AutoImplicit`` pushes noise through a neural network. The density of its draws is unknown, and
``ImplicitELBO`` does not need it. The rest is plain NumPyro:

    guide = AutoImplicit(model)
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    result = fit(svi, random.key(0), *data)  # stops by itself; svi.run does as well
    draws = guide.sample_posterior(random.key(1), result.params, *data, sample_shape=(4_000,))

This script does that for a posterior that bends and for one of two million rows, and fits a random
function, a guide that can only be drawn from. It prints a table and saves ``quickstart.png``:

    python -m examples.start.quickstart [--seed 0] [--out FOLDER] [--nuts] [--quick]

For the two million rows draws of NUTS are stored, since they took minutes; ``--nuts`` takes them
anew.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax import Array, random
from numpyro.infer.autoguide import AutoIAFNormal

from examples.common.output import output_folder
from examples.start import bend, random_function, tall
from examples.start.methods import HEADER, Result, fit_explicit, fit_implicit, run_nuts, table_row


def announce(text: str) -> None:
    """Print to stderr, where progress bars go, what the next one belongs to."""
    print(f"\n{text}", file=sys.stderr, flush=True)


def rows_of(title: str, found: dict[str, Result], reference: Array) -> list[str]:
    """A table with its title."""
    head = f"\n{title} (d = {reference.shape[1]})\n{HEADER}"
    return [head, *(table_row(name, result, reference) for name, result in found.items())]


def scatter(panel: plt.Axes, draws: Array, reference: Array, columns: dict[str, int]) -> None:
    """Plot two coordinates of draws over those of NUTS."""
    (x_label, x), (y_label, y) = columns.items()
    for points, label, color in ((reference, "NUTS", "0.75"), (draws, "AutoImplicit", "C0")):
        panel.plot(points[:, x], points[:, y], ".", color=color, ms=2, alpha=0.4, label=label)
    panel.set(xlabel=x_label, ylabel=y_label)


def intervals(panel: plt.Axes, draws: Array, reference: Array) -> None:
    """Plot the effect of each clinic, by its mean and two standard deviations."""
    order = jnp.argsort(reference.mean(0))
    for points, label, color, shift in (
        (reference, "NUTS", "0.6", -0.15),
        (draws, "AutoImplicit", "C0", 0.15),
    ):
        mean, sd = points.mean(0)[order], points.std(0)[order]
        places = jnp.arange(len(order)) + shift
        panel.errorbar(places, mean, 2 * sd, fmt=".", color=color, ms=4, lw=1, label=label)
    panel.set(xlabel="clinic", ylabel="effect, two standard deviations")


def functions(panel: plt.Axes, draws: Array, reference: Array, counts: Array) -> None:
    """Plot some functions that the guide draws, and the band of NUTS."""
    times, seen = random_function.TIMES, random_function.SEEN
    low, high = jnp.quantile(reference, jnp.array([0.025, 0.975]), axis=0)
    panel.fill_between(times, low, high, color="0.85", label="NUTS, 95 %")
    panel.plot(times, draws[:40].T, color="C0", lw=0.5, alpha=0.6)
    for edge in jnp.quantile(draws, jnp.array([0.025, 0.975]), axis=0):
        panel.plot(times, edge, color="C0", lw=1.5)
    panel.plot([], [], color="C0", label="random function, 95 %")
    logs = jnp.log(jnp.maximum(counts, 0.5))
    panel.plot(times[seen], logs[seen], "k.", ms=4, label="log of the counts")
    panel.set(xlabel="time", ylabel="log rate")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit the three posteriors, print their tables and save the figure."""
    parser = argparse.ArgumentParser(description="AutoImplicit, a flow, a random function, NUTS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=output_folder, default=Path(), help="folder for quickstart.png"
    )
    parser.add_argument("--nuts", action="store_true", help="NUTS on the two million rows, anew")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see it run")
    options = parser.parse_args(arguments)
    num_draws, num_steps, max_steps = (100, 20, 160) if options.quick else (1_500, 2_000, 5_000)
    fit_key, nuts_key = random.split(random.key(options.seed))
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    tables = []

    announce("Eight schools")
    args = bend.DATA, bend.flatten, num_draws
    found = {"AutoImplicit": fit_implicit(fit_key, bend.model, *args, max_steps)}
    nuts = run_nuts(nuts_key, bend.noncentered, *args)
    reference, again = jnp.split(nuts.draws, 2)
    found["NUTS, two chains"] = nuts._replace(draws=again)
    tables += rows_of("A posterior that bends: eight schools, centered", found, reference)
    scatter(
        panels[0], found["AutoImplicit"].draws, reference,
        {"log tau": 1, "effect of the first school": 2},
    )  # fmt: skip

    announce("Two million visits")
    visits = tall.simulate(20_000 if options.quick else tall.NUM_ROWS)
    share = tall.BATCH_SIZE / len(visits.missed)
    args = (visits, tall.BATCH_SIZE), tall.flatten, num_draws
    found = {
        "AutoImplicit": fit_implicit(fit_key, tall.model, *args, max_steps, share),
        "AutoIAFNormal": fit_explicit(
            fit_key, AutoIAFNormal(tall.model), tall.model, *args, num_steps // 2, share=share
        ),
    }
    nuts = tall.stored()
    if options.nuts:
        nuts = run_nuts(nuts_key, tall.model, (visits,), tall.flatten, 1_000, num_chains=1)
        tall.store(nuts)
    reference, again = jnp.split(nuts.draws, 2)
    found["NUTS, stored"] = nuts._replace(draws=again)
    tables += rows_of("Tall data: two million rows in batches of 500", found, reference)
    intervals(
        panels[1], found["AutoImplicit"].draws[:, -tall.NUM_CLINICS :],
        nuts.draws[:, -tall.NUM_CLINICS :],
    )  # fmt: skip

    announce("A random function")
    counts = random_function.simulate()
    found = {"random function": random_function.fit_guide(fit_key, counts, num_draws, num_steps)}
    args = (counts,), random_function.flatten, num_draws
    nuts = run_nuts(nuts_key, random_function.whitened, *args)
    reference, again = jnp.split(nuts.draws, 2)
    found["NUTS, two chains"] = nuts._replace(draws=again)
    tables += rows_of("A guide without a density: a random function", found, reference)
    functions(panels[2], found["random function"].draws, reference, counts)

    print(*tables, sep="\n")
    print(
        "\nSeconds include compilation. Gradients are those of all data; a batch counts by its "
        "share. Distances and\nerrors are relative to one half of the draws of NUTS, in its "
        "standard deviations; its row is the other half,\nand shows the noise of sampling."
    )
    for panel, title in zip(panels, ("It bends", "Two million rows", "It only draws"), strict=True):
        panel.set_title(title)
        panel.legend(fontsize=8, markerscale=3)
    figure.savefig(options.out / "quickstart.png", dpi=110)
    print(f"\nThe figure is {options.out / 'quickstart.png'}.")


if __name__ == "__main__":
    main()
