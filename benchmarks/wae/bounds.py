"""How far the annealed likelihoods of trained decoders can be from the truth.

    python -m benchmarks.wae.bounds --cache FOLDER --csv FILE [--estimators nu ssge]
        [--latent-dims 128] [--seeds 0] [--images 16] [--temperatures 300 1000]

The decoders are those of the training states that ``benchmarks.wae.table`` left in the cache
folder. Each makes images from codes of the prior, so that a code of every image is known: chains
from the prior bound the log likelihood of an image from below on average, chains backwards from
its code from above (Grosse, Ghahramani and Adams 2015). A likelihood can be wrong by the gap.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax import Array, random

from benchmarks.wae.table import load_trained, markdown_line
from examples.common.tables import Row, fill
from examples.wae.ais import Annealing, sandwich
from examples.wae.metrics import log_likelihood_of
from examples.wae.training import ESTIMATORS

COLUMNS = ("epochs", "lower", "gap", "gap_error", "largest", "acceptance")
MNIST = (28, 28, 1)


def compute(cache: Path, cell: Row) -> Row:
    """Bounds for images that one decoder made."""
    autoencoder, params, epochs = load_trained(cache, cell, MNIST)

    def simulate(key: Array, z: Array) -> Array:
        white = random.bernoulli(key, jax.nn.sigmoid(autoencoder.decode(params, z[None])[0]))
        return white.astype(z.dtype)

    lower, upper = sandwich(
        random.key(cell["seed"]),
        log_likelihood_of(autoencoder, params),
        simulate,
        cell["images"],
        cell["latent_dim"],
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
    """Measures the gaps and prints them in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cache", type=Path, required=True, help="folder of training states")
    parser.add_argument("--csv", type=Path, required=True, help="table to write and go on from")
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, metavar="NAME",
                        default=["nu", "ssge"])  # fmt: skip
    parser.add_argument("--latent-dims", nargs="+", type=int, default=[128])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--temperatures", nargs="+", type=int, default=[300, 1000])
    options = parser.parse_args(arguments)
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
    rows = fill(cells, lambda **cell: compute(options.cache, cell), COLUMNS, options.csv)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
