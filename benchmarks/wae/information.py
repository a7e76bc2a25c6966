"""Information about images in the codes of trained Wasserstein autoencoders.

    python -m benchmarks.wae.information --data FOLDER --cache FOLDER --csv FILE
        [--estimators default nu kef-cg ssge] [--latent-dims 128] [--seeds 0]
    python -m benchmarks.wae.information --quick

The encoders come from the training states that ``benchmarks.wae.table`` leaves in the cache folder.
The mean of KL(q(z|x) || p(z)) over test images is the sum of two terms: the information in a code,
and the divergence of the aggregate of all codes from the prior. The objective penalizes only the
second; a likelihood penalizes both. ``--quick`` trains a small autoencoder on scikit-learn's digits
instead.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
from jax import random

from benchmarks.wae.states import QUICK, load_trained, quick_states
from examples.common.tables import Row, fill, markdown_line
from examples.wae.data import Images, load_images
from examples.wae.metrics import code_divergences, held_out_batch
from examples.wae.objectives import ESTIMATORS
from examples.wae.training import reconstruction_cost

COLUMNS = ("epochs", "cost", "divergence", "sd_of_means", "noise")
NUM_IMAGES = 5_000


def compute(images: Images, cache: Path, cell: Row) -> Row:
    """Figures of one encoder on test images."""
    autoencoder, params, epochs = load_trained(cache, cell, images.shape)
    x = held_out_batch(images, NUM_IMAGES)
    mean, sd = autoencoder.encode(params, x)
    codes = mean + sd * random.normal(random.key(2), mean.shape)
    cost = reconstruction_cost(autoencoder.settings.cost, x, autoencoder.decode(params, codes))
    divergence = code_divergences(mean, sd, autoencoder.prior(params))
    jax.clear_caches()
    return {
        "epochs": epochs,
        "cost": round(float(cost.mean()), 3),
        "divergence": round(float(divergence.mean()), 1),
        "sd_of_means": round(float(mean.std(0).mean()), 3),
        "noise": round(float((sd**2).mean() ** 0.5), 3),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """The table in Markdown."""
    names = ("latent", "estimator", "seed", "epochs", "cost", "KL of a code, nats",
             "sd of means", "noise of a code")  # fmt: skip
    keys = ("latent_dim", "estimator", "seed", *COLUMNS)
    lines = [markdown_line(names), "|---" * len(names) + "|"]
    return lines + [markdown_line([row[key] for key in keys]) for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the figures and print them in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="folder of MNIST's idx files")
    parser.add_argument("--cache", type=Path, help="folder of training states")
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, metavar="NAME",
                        default=["default", "nu", "kef-cg", "ssge"])  # fmt: skip
    parser.add_argument("--latent-dims", nargs="+", type=int, default=[128])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--quick", action="store_true", help="one small autoencoder, no data")
    options = parser.parse_args(arguments)
    if options.quick:
        with quick_states() as (images, cache):
            print(*table([QUICK | compute(images, cache, QUICK)]), sep="\n")
        return
    if options.data is None or options.cache is None or options.csv is None:
        parser.error("expected --data FOLDER, --cache FOLDER and --csv FILE; or --quick")
    images = load_images("mnist", options.data)
    cells = [
        {
            "estimator": name,
            "value": ESTIMATORS[name][2],
            "latent_dim": latent_dim,
            "seed": seed,
        }
        for latent_dim in options.latent_dims
        for seed in options.seeds
        for name in options.estimators
    ]
    rows = fill(cells, lambda **cell: compute(images, options.cache, cell), COLUMNS, options.csv)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
