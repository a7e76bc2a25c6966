"""Bounds on the error of the annealed likelihoods of trained decoders.

    python -m benchmarks.wae.bounds --cache FOLDER --csv FILE [--estimators nu ssge]
        [--latent-dims 128] [--seeds 0] [--images 16] [--temperatures 300 1000]
    python -m benchmarks.wae.bounds --quick

The decoders come from the training states that ``benchmarks.wae.table`` leaves in the cache folder.
Each decoder makes images from codes of the prior, so a code of every image is known. Chains from
the prior bound the log likelihood of an image from below on average, and backward chains from its
code bound it from above (Grosse, Ghahramani and Adams 2015). The gap bounds the error of a
likelihood. ``--quick`` trains a small autoencoder on scikit-learn's digits instead.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax import Array, random

from benchmarks.wae.states import QUICK, load_trained, quick_states
from examples.common.tables import Row, fill, markdown_line
from examples.wae.ais import Annealing, sandwich
from examples.wae.metrics import log_likelihood_of
from examples.wae.objectives import ESTIMATORS

COLUMNS = ("epochs", "lower", "gap", "gap_error", "largest", "acceptance")
MNIST = (28, 28, 1)


def compute(cache: Path, shape: tuple[int, int, int], cell: Row) -> Row:
    """Bounds for images that one decoder makes."""
    autoencoder, params, epochs = load_trained(cache, cell, shape)

    def simulate(key: Array, z: Array) -> Array:
        white = random.bernoulli(key, jax.nn.sigmoid(autoencoder.decode(params, z[None])[0]))
        return white.astype(z.dtype)

    lower, upper = sandwich(
        random.key(cell["seed"]),
        log_likelihood_of(autoencoder, params),
        simulate,
        cell["images"],
        autoencoder.prior(params),
        Annealing(cell["temperatures"]),
    )
    gap = upper.log_likelihood - lower.log_likelihood
    jax.clear_caches()
    return {
        "epochs": epochs,
        "lower": round(float(lower.log_likelihood.mean()), 2),
        "gap": round(float(gap.mean()), 3),
        "gap_error": round(float(gap.std(ddof=1) / np.sqrt(len(gap))), 3),
        "largest": round(float(np.abs(gap).max()), 2),
        "acceptance": round(float(np.mean([lower.acceptance, upper.acceptance])), 3),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """The table in Markdown."""
    names = ("latent", "estimator", "epochs", "images", "temperatures", "lower bound",
             "gap, mean ± error", "largest")  # fmt: skip
    lines = [markdown_line(names), "|---" * len(names) + "|"]
    for row in rows:
        settings = ("latent_dim", "estimator", "epochs", "images", "temperatures", "lower")
        gap = f"{row['gap']:.2f} ± {row['gap_error']:.2f}"
        lines.append(markdown_line((*(row[name] for name in settings), gap, row["largest"])))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the gaps and print them in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cache", type=Path, help="folder of training states")
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, metavar="NAME",
                        default=["nu", "ssge"])  # fmt: skip
    parser.add_argument("--latent-dims", nargs="+", type=int, default=[128])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--temperatures", nargs="+", type=int, default=[300, 1000])
    parser.add_argument("--quick", action="store_true", help="one small autoencoder, no data")
    options = parser.parse_args(arguments)
    if options.quick:
        run_quickly()
        return
    if options.cache is None or options.csv is None:
        parser.error("expected --cache FOLDER (of benchmarks.wae.table) and --csv FILE; or --quick")
    cells = [
        {
            "estimator": name,
            "value": ESTIMATORS[name][2],
            "latent_dim": latent_dim,
            "seed": seed,
            "images": options.images,
            "temperatures": temperatures,
        }
        for latent_dim in options.latent_dims
        for seed in options.seeds
        for name in options.estimators
        for temperatures in options.temperatures
    ]
    rows = fill(cells, lambda **cell: compute(options.cache, MNIST, cell), COLUMNS, options.csv)
    print(*table(rows), sep="\n")


def run_quickly() -> None:
    """Bounds for one small autoencoder."""
    with quick_states() as (images, cache):
        cell = QUICK | {"images": 4, "temperatures": 20}
        print(*table([cell | compute(cache, images.shape, cell)]), sep="\n")


if __name__ == "__main__":
    main()
