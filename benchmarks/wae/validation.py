"""Settings of the Wasserstein autoencoder compared on images held out from MNIST's training images.

    python -m benchmarks.wae.validation --data FOLDER --cache FOLDER --csv FILE
        [--variants "default, weight 1" "default, weight 1, vamp" "VAE, weight 1, flow" ...]
        [--latent-dims 128] [--epochs 300] [--seeds 0 1 2] [--decay] [--together]
        [--test] [--chosen FILE]
    python -m benchmarks.wae.validation --csv FILE --print [--rival "default, weight 1"]
    python -m benchmarks.wae.validation --quick

The last 10 000 training images are left out of the training, and the first of them are those whose
likelihood is estimated: no choice made by this table has seen a test image. Differences are means
over the same images and all seeds that both variants have.

``--decay`` lets the learning rate fall to zero along a cosine, over all epochs. ``--together``
trains variants that differ in weight, and all seeds, in one program, for an accelerator.
Variants with a prior "afterwards" are trained with N(0, I), and their prior is then fitted to the
codes. ``--chosen`` measures the runs of the best weight of each estimator on test images, too, and
``--test`` trains on all training images and measures on test images: for settings that have been
chosen, in a file of its own.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.wae.information import NUM_IMAGES
from benchmarks.wae.states import quick_images
from benchmarks.wae.table import likelihood_entries, nll_of_each
from benchmarks.wae.variants import VARIANTS, estimator_of, trained_as
from examples.common.tables import Row, fill, markdown_line, read
from examples.wae.afterwards import fit_prior
from examples.wae.ais import Annealing
from examples.wae.data import Images, load_images
from examples.wae.metrics import (
    code_divergences,
    held_out_batch,
    measure_aggregate,
    measure_likelihood,
)
from examples.wae.together import train_together
from examples.wae.training import Autoencoder, Settings, batches_of, train

COLUMNS = ("nll", "information", "mean", "sd", "distance", "cost", "nll_of_each")
# What differs between lines of the table.
CASE = ("latent_dim", "epochs", "schedule", "learning_rate", "variant")
SETTINGS = ("variant", *CASE[:-1], "seed", "images", "temperatures")
HELD_OUT = 10_000
# The learning rate that falls from there is that of the figure.
PEAK = 1e-3


def hold_out(images: Images, count: int) -> Images:
    """The training images without the last ones, which take the place of the test images."""
    labels = images.train_labels
    return Images(
        f"{images.name}, {count} held out",
        images.train[:-count],
        images.train[-count:],
        None if labels is None else labels[:-count],
        None if labels is None else labels[-count:],
    )


def make_settings(cell: Row, images: Images) -> Settings:
    """Settings of a row."""
    variant = VARIANTS[cell["variant"]]
    settings = Settings(
        latent_dim=cell["latent_dim"],
        learning_rate=cell["learning_rate"],
        seed=cell["seed"],
        weight=variant.weight,
        prior=variant.prior,
    )
    if cell["schedule"] == "constant":
        return settings
    steps = cell["epochs"] * batches_of(images, settings.batch_size)
    return settings._replace(decay_steps=steps)


def make_run(images: Images, cache: Path, cell: Row) -> tuple[Autoencoder, Path]:
    """The autoencoder of a row, and the file of its state."""
    settings = make_settings(cell, images)
    objective = VARIANTS[cell["variant"]].objective(settings.latent_dim)
    rest = [str(cell[name]) for name in ("latent_dim", "learning_rate", "seed")]
    if settings.decay_steps:
        rest.append(f"decay-{cell['epochs']}")
    rest.append(images.name)
    path = cache / f"{trained_as(cell['variant'])}-{'-'.join(rest)}.npz"
    return Autoencoder(settings, images.shape, objective), path


def alike(cells: Sequence[Row]) -> list[list[Row]]:
    """Cells that differ in weight and seed only, together."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for cell in cells:
        rest = [cell[name] for name in CASE if name != "variant"]
        variant = VARIANTS[cell["variant"]]
        kind = estimator_of(cell), variant.prior, variant.later, *rest
        groups.setdefault(kind, []).append(cell)
    return list(groups.values())


def best(rows: Sequence[Row]) -> list[Row]:
    """Rows of the variant with the smallest NLL, of the means over seeds."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["variant"], []).append(row)
    return min(groups.values(), key=lambda group: np.mean([row["nll"] for row in group]))


def fill_group(
    cells: Sequence[Row], images: Images, cache: Path, csv: Path | None, together: bool = False
) -> list[Row]:
    """Rows of cells that differ in weight and seed only."""
    cells = [{name: cell[name] for name in SETTINGS} for cell in cells]
    if together:
        runs = [make_run(images, cache, cell) for cell in cells]
        train_together(runs, images, cells[0]["epochs"])
    return fill(cells, lambda **cell: compute(images, cache, cell), COLUMNS, csv)


def compute(images: Images, cache: Path, cell: Row) -> Row:
    """One row: train to the given number of epochs, then measure on images held out."""
    autoencoder, path = make_run(images, cache, cell)
    params = train(autoencoder, images, cell["epochs"], path).params
    later = VARIANTS[cell["variant"]].later
    if later:
        autoencoder, params = fit_prior(autoencoder, params, images, later)
    found = measure_likelihood(
        autoencoder, params, images, cell["images"], Annealing(cell["temperatures"]), progress=True
    )
    aggregate = measure_aggregate(autoencoder, params, images)._asdict()
    mean, sd = autoencoder.encode(params, held_out_batch(images, NUM_IMAGES))
    divergences = code_divergences(mean, sd, autoencoder.prior(params))
    figures = {"information": divergences.mean()}
    figures |= {name: aggregate[name] for name in ("mean", "sd", "distance", "cost")}
    return likelihood_entries(-found.log_likelihood, figures)


def differences(rows: Sequence[Row], other: Sequence[Row]) -> np.ndarray:
    """NLL of one variant minus another's, (seeds, images), for all seeds that both have."""
    found, rivals = ({row["seed"]: nll_of_each(row) for row in part} for part in (rows, other))
    return np.array([found[seed] - rivals[seed] for seed in found if seed in rivals])


def table(rows: Sequence[Row], rival: str = "default, weight 1") -> list[str]:
    """The table in Markdown, one line for each variant, means over its seeds.

    The error of a difference is that over seeds where there are three, and over images otherwise.
    """
    names = ("latent", "epochs", "schedule", "step size", "variant", "seeds", "NLL",
             f"less that of {rival}", "KL of a code", "cost", "code sd", "sliced W")  # fmt: skip
    lines = [markdown_line(names), "|---" * len(names) + "|"]
    key = lambda row: tuple(row[name] for name in CASE)  # noqa: E731
    groups = {k: list(g) for k, g in itertools.groupby(sorted(rows, key=key), key)}
    for (*case, variant), group in groups.items():
        apart = differences(group, groups.get((*case, rival), []))
        difference = ""
        if variant != rival and len(apart):
            sample = apart.mean(1) if len(apart) > 2 else apart.mean(0)
            error = sample.std(ddof=1) / np.sqrt(len(sample))
            difference = f"{apart.mean():+.2f} ± {error:.2f}"
        mean = {name: np.mean([row[name] for row in group]) for name in COLUMNS[:-1]}
        entries = (
            *case, variant, len(group), f"{mean['nll']:.2f}", difference,
            f"{mean['information']:.0f}", f"{mean['cost']:.2f}", f"{mean['sd']:.3f}",
            f"{mean['distance']:.3f}",
        )  # fmt: skip
        lines.append(markdown_line(entries))
    return lines


def plot(rows: Sequence[Row], path: Path, estimator: str) -> None:
    """NLL against the weight of an estimator's divergence: one line for each latent dimension.

    Of runs whose learning rate falls; a dot is one seed, and a line goes through the means.
    """
    plt.switch_backend("agg")
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    chosen = [
        (row["latent_dim"], VARIANTS[row["variant"]].weight, row["nll"])
        for row in rows
        if row["schedule"] == "cosine" and row["learning_rate"] == PEAK
        and row["variant"] == f"{estimator}, weight {VARIANTS[row['variant']].weight:g}"
    ]  # fmt: skip
    for number, dim in enumerate(sorted({dim for dim, *_ in chosen})):
        each = [(weight, nll) for of, weight, nll in chosen if of == dim]
        axes.plot(*zip(*each, strict=True), ".", color=f"C{number}", alpha=0.5)
        weights = sorted({weight for weight, _ in each})
        means = [np.mean([nll for of, nll in each if of == weight]) for weight in weights]
        axes.plot(weights, means, color=f"C{number}", label=f"{dim} dimensions")
    axes.set(xscale="log", xlabel="weight of the divergence", ylabel="NLL of images held out, nats")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table and print it in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="folder of MNIST's idx files")
    parser.add_argument("--cache", type=Path, help="folder for training states")
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME",
                        default=[v for v in VARIANTS if v.endswith("weight 1")])  # fmt: skip
    parser.add_argument("--latent-dims", nargs="+", type=int, default=[128])
    parser.add_argument("--epochs", nargs="+", type=int, default=[300])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-4])
    parser.add_argument("--decay", action="store_true", help="let the learning rate fall to 0")
    parser.add_argument("--together", action="store_true", help="weights and seeds in one program")
    parser.add_argument("--images", type=int, default=100, help="images behind an NLL")
    parser.add_argument("--temperatures", type=int, default=1000, help="of the annealing")
    parser.add_argument("--test", action="store_true", help="hold out nothing; use test images")
    parser.add_argument("--chosen", type=Path,
                        help="table of the best weights on test images to write")  # fmt: skip
    parser.add_argument("--rival", choices=VARIANTS, metavar="NAME", default="default, weight 1",
                        help="whose likelihood others are compared with")  # fmt: skip
    parser.add_argument("--figure", type=Path,
                        help="picture of the rival's estimator to write, with --print")  # fmt: skip
    parser.add_argument("--print", action="store_true", help="print the table and do nothing else")
    parser.add_argument("--quick", action="store_true", help="one epoch on scikit-learn's digits")
    options = parser.parse_args(arguments)
    schedule = "cosine" if options.decay else "constant"
    if options.print and options.csv:
        rows = read(options.csv, (*SETTINGS, *COLUMNS))
        print(*table(rows, options.rival), sep="\n")
        if options.figure:
            plot(rows, options.figure, estimator_of({"variant": options.rival}))
        return
    if options.quick:
        options.latent_dims, options.epochs, options.seeds = [2], [1], [0]
        options.images, options.temperatures = 4, 20
        all_images, count = quick_images(), 64
    elif options.data is None or options.cache is None or options.csv is None:
        parser.error("expected --data FOLDER, --cache FOLDER and --csv FILE; or --quick")
    else:
        all_images, count = load_images("mnist", options.data), HELD_OUT
    cells = [
        dict(
            zip(
                SETTINGS,
                (variant, dim, epochs, schedule, rate, seed, options.images, options.temperatures),
                strict=True,
            )
        )
        for epochs in sorted(options.epochs)
        for rate in options.learning_rates
        for seed in options.seeds
        for dim in options.latent_dims
        for variant in options.variants
    ]
    held = all_images if options.test else hold_out(all_images, count)
    unseen = held._replace(test=all_images.test, test_labels=all_images.test_labels)
    rows, chosen = [], []
    with TemporaryDirectory() as folder:
        cache = options.cache or Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        for group in alike(cells):
            found = fill_group(group, held, cache, options.csv, options.together)
            rows += found
            if options.chosen:
                chosen += fill_group(best(found), unseen, cache, options.chosen)
    for each in filter(None, (rows, chosen)):
        print(*table(each, options.rival), sep="\n")


if __name__ == "__main__":
    main()
