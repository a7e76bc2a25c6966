"""Decoded draws of the prior against images, for several estimators, a VAE and an MMD autoencoder.

    python -m benchmarks.wae.samples --csv FILE [--dataset patches] [--latent-dims 64] [--seeds 0 1]
        [--methods default nu kef-cg ssge mmd "vae, weight .01" ...] [--epochs 40] [--data FOLDER]
    python -m benchmarks.wae.samples --csv FILE --print
    python -m benchmarks.wae.samples --quick

By default the images are squares of 16 x 16 pixels from the photographs that come with
scikit-learn, and the networks are convolutions. The Fréchet distance is that of features of a
classifier trained on the same images: between decoded draws and test images, and, as the least
that can be expected, between training and test images. The cost is that of reconstructions of test
images. The weight of a VAE's divergence is the variance of its pixels, which has to be chosen.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from examples.common.tables import Row, fill, markdown_line, read
from examples.wae.data import Images, load_images
from examples.wae.metrics import (
    Features,
    frechet_distance,
    measure_aggregate,
    measure_samples,
    train_features,
)
from examples.wae.rivals import make_autoencoder
from examples.wae.training import Settings, train

SETTINGS = ("dataset", "method", "latent_dim", "epochs", "width", "seed")
COLUMNS = ("cost", "sd", "distance", "distance_floor", "frechet", "frechet_floor", "seconds")
METHODS = ("default", "nu", "kef-cg", "ssge", "stein", "mmd", "vae, weight 0.1",
           "vae, weight 0.01", "vae, weight 0.001")  # fmt: skip


def make_settings(cell: Row) -> Settings:
    """Settings of a row; the method is an estimator or a rival, with a weight if not 1."""
    name, _, weight = cell["method"].partition(", weight ")
    return Settings(
        name,
        latent_dim=cell["latent_dim"],
        learning_rate=1e-3,
        cost="squared",
        seed=cell["seed"],
        width=cell["width"],
        weight=float(weight or 1),
    )


def floor_of(images: Images, features: Features) -> float:
    """Fréchet distance between as many training as test images, and test images."""
    few = images.train[:: max(1, len(images.train) // len(images.test))][: len(images.test)]
    return frechet_distance(*(features(a / np.float32(255)) for a in (few, images.test)))


def compute(images: Images, features: Features, floor: float, cell: Row) -> Row:
    """One row: train, then compare codes with the prior and decoded draws with images."""
    autoencoder = make_autoencoder(make_settings(cell), images.shape)
    trained = train(autoencoder, images, cell["epochs"])
    found = measure_aggregate(autoencoder, trained.params, images)._asdict()
    found["frechet"] = measure_samples(autoencoder, trained.params, images, features)
    found["frechet_floor"] = floor
    found["seconds"] = float(np.median(trained.seconds[-len(trained.seconds) // 2 :]))
    jax.clear_caches()
    return {column: float(f"{found[column]:.4g}") for column in COLUMNS}


def table(rows: Sequence[Row]) -> list[str]:
    """The table in Markdown, one line for each method: means over seeds, and their range."""
    names = ("images", "latent", "method", "seeds", "Fréchet distance", "of training images",
             "cost", "code sd", "sliced W")  # fmt: skip
    lines = [markdown_line(names), "|---" * len(names) + "|"]
    key = lambda row: (row["dataset"], row["latent_dim"], METHODS.index(row["method"]))  # noqa: E731
    for (dataset, dim, _), group in itertools.groupby(sorted(rows, key=key), key):
        runs = list(group)
        mean = {column: np.mean([row[column] for row in runs]) for column in COLUMNS}
        distances = [row["frechet"] for row in runs]
        found = f"{mean['frechet']:.2f} ({min(distances):.2f}–{max(distances):.2f})"
        entries = (
            dataset, dim, runs[0]["method"], len(runs), found, f"{mean['frechet_floor']:.2f}",
            f"{mean['cost']:.2f}", f"{mean['sd']:.2f}", f"{mean['distance']:.3f}",
        )  # fmt: skip
        lines.append(markdown_line(entries))
    return lines


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dataset", default="patches", help="as for examples.wae.run")
    parser.add_argument("--data", type=Path, help="folder with the files of mnist or celeba")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME",
                        choices=METHODS)  # fmt: skip
    parser.add_argument("--latent-dims", nargs="+", type=int, default=[64])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--width", type=int, default=8, help="channels after one convolution")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--print", action="store_true", help="print the table and do nothing else")
    parser.add_argument("--quick", action="store_true", help="one epoch on few patches")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table and print it in Markdown."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.print and options.csv:
        print(*table(read(options.csv, (*SETTINGS, *COLUMNS))), sep="\n")
        return
    if options.quick:
        options.dataset, options.methods, options.latent_dims = "patches", ["stein", "mmd"], [2]
        options.epochs, options.width = 1, 8
    elif options.csv is None:
        parser.error("expected --csv FILE, or --quick")
    images = load_images(options.dataset, options.data, 128 if options.quick else None)
    features, _ = train_features(images, 20 if options.quick else 1500)
    floor = floor_of(images, features)
    cells = [
        dict(
            zip(
                SETTINGS,
                (images.name, method, dim, options.epochs, options.width, seed),
                strict=True,
            )
        )
        for seed in options.seeds
        for dim in options.latent_dims
        for method in options.methods
    ]
    rows = fill(cells, lambda **cell: compute(images, features, floor, cell), COLUMNS, options.csv)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
