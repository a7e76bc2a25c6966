"""Log likelihoods and times of Wasserstein autoencoders on MNIST: Table 2 of Zhou et al. (2020).

    python -m benchmarks.wae.table --data FOLDER --cache FOLDER --csv FILE
        [--estimators nu ssge ...] [--latent-dims 8 128] [--epochs 20 1000] [--seeds 0 1 2]
    python -m benchmarks.wae.table --data FOLDER --csv FILE --times
    python -m benchmarks.wae.table --csv FILE --print
    python -m benchmarks.wae.table --quick [--times]

Networks, optimizer, batches and binarization are those of the paper. Nothing is searched over; the
table names the number that each estimator is given. Training resumes from the states in the cache
folder, also for more epochs, and every row is written to the CSV file as soon as it is computed.

NLL is that of the Bernoulli decoder on the first test images, binarized once, by annealed
importance sampling. All rows of one table use the same images and random numbers, so differences
between rows are more precise than the values.

``--times`` measures seconds per epoch of all estimators alternately in one process, against the
same autoencoder trained without a score term. ``--quick`` needs no data: it trains one epoch on a
few of scikit-learn's digits.
"""

import argparse
import csv
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import optax
from jax import Array, random
from tqdm import tqdm

from benchmarks.wae.states import quick_images, train_state
from examples.common.tables import Row, fill, markdown_line
from examples.wae.ais import Annealing
from examples.wae.data import Images, load_images
from examples.wae.metrics import measure_aggregate, measure_likelihood
from examples.wae.objectives import ESTIMATORS
from examples.wae.training import (
    Autoencoder,
    Settings,
    batches_of,
    compile_epoch,
    reconstruction_cost,
)

COLUMNS = (
    "nll", "nll_error", "mean", "sd", "distance", "distance_floor", "mmd", "cost", "acceptance",
    "nll_of_each",
)  # fmt: skip
TIME_COLUMNS = ("ms_a_step", "seconds_an_epoch", "ratio", "cores")
PLAIN = "no score term"
MNIST_STEPS = 60_000 // 64  # per epoch
# NLL at latent 8, 32, 64 and 128, and seconds an epoch at 128 on a TITAN X, as published.
PUBLISHED = {
    "stein": (97.15, 92.10, 101.60, 114.41, 4.2), "ssge": (97.24, 92.24, 101.92, 114.57, 9.2),
    "kef": (97.07, 90.93, 91.58, 92.40, 201.1), "nkef-20": (97.71, 92.29, 92.82, 94.14, 36.4),
    "nkef-40": (97.59, 91.19, 91.80, 92.94, 97.5), "nkef-80": (97.23, 90.86, 92.39, 92.49, 301.2),
    "kef-cg": (97.39, 90.77, 92.66, 92.05, 13.7), "nu": (97.28, 90.94, 91.48, 92.10, 78.1),
    "ssm": (96.98, 89.06, 93.06, 96.92, 6.0),
}  # fmt: skip
PUBLISHED_DIMS = (8, 32, 64, 128)


def compute(images: Images, cache: Path, cell: Row) -> Row:
    """One row: train to the given number of epochs, then measure."""
    autoencoder, trained = train_state(images, cache, cell, cell["epochs"])
    annealing = Annealing(cell["temperatures"])
    found = measure_likelihood(
        autoencoder, trained.params, images, cell["images"], annealing, progress=True
    )
    aggregate = measure_aggregate(autoencoder, trained.params, images)
    nll = -found.log_likelihood
    jax.clear_caches()
    figures = {name: value for name, value in aggregate._asdict().items() if name in COLUMNS}
    figures["nll_error"] = float(nll.std(ddof=1) / np.sqrt(len(nll)))
    figures["acceptance"] = float(found.acceptance.mean())
    return likelihood_entries(nll, figures)


def likelihood_entries(nll: np.ndarray, figures: dict[str, Any]) -> Row:
    """Entries of a row: the mean of the NLL of each image, further figures, and each."""
    rounded = {k: float(f"{v:.5g}") for k, v in {"nll": nll.mean(), **figures}.items()}
    return rounded | {"nll_of_each": " ".join(f"{value:.2f}" for value in nll)}


def nll_of_each(row: Row) -> np.ndarray:
    """NLL of each image of a row, (images,)."""
    return np.array(str(row["nll_of_each"]).split(), float)


def without_score_term(images: Images, latent_dim: int) -> tuple[Callable[..., Any], Any]:
    """One epoch of the autoencoder without a prior, in plain JAX, and its first state."""
    autoencoder = Autoencoder(Settings(latent_dim=latent_dim), images.shape)
    params = autoencoder.svi.get_params(autoencoder.init())
    optimizer = optax.adam(1e-4, b1=0.5)

    def loss(params: Any, x: Array, key: Array) -> Array:
        mean, sd = autoencoder.encode(params, x)
        logits = autoencoder.decode(params, mean + sd * random.normal(key, mean.shape))
        return reconstruction_cost("norm", x, logits).sum()

    def update(state: Any, x: Array) -> tuple[Any, Array]:
        params, moments, key = state
        key, noise_key = random.split(key)
        value, gradient = jax.value_and_grad(loss)(params, x, noise_key)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments, key), value

    # Copies, because arrays of the parameters may be shared and the epoch donates its input.
    state = jax.tree.map(lambda a: a.copy(), (params, optimizer.init(params), random.key(0)))
    return compile_epoch(update, images, 64), state


def measure_times(images: Images, estimators: Sequence[str], latent_dim: int) -> list[Row]:
    """Time of a step with each estimator and with none: the minimum over several epochs."""
    runs = {PLAIN: without_score_term(images, latent_dim)}
    for name in estimators:
        autoencoder = Autoencoder(Settings(name, latent_dim=latent_dim), images.shape)
        runs[name] = (autoencoder.make_epoch(images), autoencoder.init())
    least = dict.fromkeys(runs, np.inf)
    steps = batches_of(images, 64)
    # Alternately, so that other load on the machine affects all of them.
    for repetition in tqdm(range(6)):
        for name, (epoch, state) in runs.items():
            start = time.perf_counter()
            state, loss = epoch(state, random.key(repetition))
            loss.block_until_ready()
            runs[name] = (epoch, state)
            if repetition:  # the first compiles
                least[name] = min(least[name], time.perf_counter() - start)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        {
            "estimator": name,
            "latent_dim": latent_dim,
            "ms_a_step": round(1e3 * seconds / steps, 3),
            "seconds_an_epoch": round(seconds / steps * MNIST_STEPS, 2),
            "ratio": round(seconds / least[PLAIN], 2),
            "cores": cores,
        }
        for name, seconds in least.items()
    ]


def difference(row: Row, other: Row) -> str:
    """NLL minus that of another row on the same images, with its standard error."""
    apart = nll_of_each(row) - nll_of_each(other)
    return f"{apart.mean():+.1f} ± {apart.std(ddof=1) / np.sqrt(len(apart)):.1f}"


def table(rows: Sequence[Row]) -> list[str]:
    """The table in Markdown, one line for each row of the CSV file; seeds but 0 are named."""
    names = (
        "latent", "estimator", "epochs", "images", "NLL", "less ν-method's", "published",
        "code sd", "sliced W",
    )  # fmt: skip
    lines = [markdown_line(names), "|---" * len(names) + "|"]
    order = list(ESTIMATORS)
    shared = ("latent_dim", "epochs", "seed", "images", "temperatures")
    for row in sorted(
        rows, key=lambda r: (r["latent_dim"], r["epochs"], order.index(r["estimator"]), r["seed"])
    ):
        rivals = [r for r in rows if r["estimator"] == "nu" and all(r[k] == row[k] for k in shared)]
        apart = difference(row, rivals[0]) if rivals and row is not rivals[0] else ""
        published = ""
        if row["estimator"] in PUBLISHED and row["latent_dim"] in PUBLISHED_DIMS:
            place = PUBLISHED_DIMS.index(row["latent_dim"])
            published = f"{PUBLISHED[row['estimator']][place]:.2f}"
        what = ESTIMATORS[row["estimator"]][1]
        named = row["estimator"]
        named += f", {what} {row['value']:g}" if what else ""
        named += f", seed {row['seed']}" if row["seed"] else ""
        entries = (
            row["latent_dim"],
            named,
            *(row[name] for name in ("epochs", "images")),
            f"{row['nll']:.1f} ± {row['nll_error']:.1f}",
            apart,
            published,
            f"{row['sd']:.2f}",
            f"{row['distance']:.3f}",
        )
        lines.append(markdown_line(entries))
    return lines


def times_table(rows: Sequence[Row]) -> list[str]:
    """Times in Markdown, with the published ones at latent dimension 128."""
    names = ("latent", "estimator", "s / epoch", "ratio to plain", "cores", "published, TITAN X")
    lines = [markdown_line(names), "|---" * len(names) + "|"]
    for row in rows:
        published = ""
        if row["estimator"] in PUBLISHED and row["latent_dim"] == 128:
            published = f"{PUBLISHED[row['estimator']][4]:.1f}"
        columns = ("latent_dim", "estimator", "seconds_an_epoch", "ratio", "cores")
        lines.append(markdown_line((*(row[name] for name in columns), published)))
    return lines


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="folder of MNIST's idx files")
    parser.add_argument("--cache", type=Path, help="folder for training states")
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, metavar="NAME",
                        default=["default", "nu", "kef-cg", "ssge", "stein", "ssm"])  # fmt: skip
    parser.add_argument("--value", type=float, help="number for the estimator, for a search")
    parser.add_argument("--latent-dims", nargs="+", type=int, default=[128, 8])
    parser.add_argument("--epochs", nargs="+", type=int, default=[1000])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--images", type=int, default=100, help="test images behind an NLL")
    parser.add_argument("--temperatures", type=int, default=1000, help="of the annealing")
    parser.add_argument("--limit", type=int, help="largest number of training images")
    parser.add_argument("--times", action="store_true", help="measure times instead")
    parser.add_argument("--print", action="store_true", help="print the table and do nothing else")
    parser.add_argument(
        "--quick", action="store_true", help="one small run on scikit-learn's digits"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table, or measure times, and print them in Markdown."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.quick:
        options.estimators, options.latent_dims, options.epochs = ["default", "stein"], [2], [1]
        options.images, options.temperatures = 4, 20
    elif options.csv is None:
        parser.error("expected --csv FILE, or --quick")
    elif not options.print and (
        options.data is None or (options.cache is None and not options.times)
    ):
        parser.error("expected --data FOLDER and, without --times, --cache FOLDER; or --quick")

    if options.print:
        with options.csv.open(newline="") as file:
            rows: list[Row] = [dict(row) for row in csv.DictReader(file)]
        print(*(times_table(rows) if "ratio" in rows[0] else table(_typed(rows))), sep="\n")
        return
    images = quick_images() if options.quick else load_images("mnist", options.data, options.limit)
    if options.times:
        print(*times_table(write_times(options, images)), sep="\n")
        return
    with TemporaryDirectory() as folder:
        cache = options.cache or Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        compute_cell = lambda **cell: compute(images, cache, cell)  # noqa: E731
        rows = fill(make_cells(options), compute_cell, COLUMNS, options.csv)
    print(*table(rows), sep="\n")


def write_times(options: argparse.Namespace, images: Images) -> list[Row]:
    """Times for all latent dimensions, written to the CSV file."""
    rows = [
        row for dim in options.latent_dims for row in measure_times(images, options.estimators, dim)
    ]
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["estimator", "latent_dim", *TIME_COLUMNS])
            writer.writeheader()
            writer.writerows(rows)
    return rows


def make_cells(options: argparse.Namespace) -> list[Row]:
    """Settings of all rows."""
    return [
        {
            "estimator": name,
            "value": ESTIMATORS[name][2] if options.value is None else options.value,
            "latent_dim": latent_dim,
            "epochs": epochs,
            "seed": seed,
            "images": options.images,
            "temperatures": options.temperatures,
        }
        for epochs in sorted(options.epochs)
        for latent_dim in options.latent_dims
        for seed in options.seeds
        for name in options.estimators
    ]


def _typed(rows: Sequence[Row]) -> list[Row]:
    """Rows with numbers instead of the text of a CSV file."""
    whole = ("latent_dim", "epochs", "seed", "images", "temperatures")
    text = ("estimator", "nll_of_each")
    return [
        {k: v if k in text else int(v) if k in whole else float(v) for k, v in row.items()}
        for row in rows
    ]


if __name__ == "__main__":
    main()
