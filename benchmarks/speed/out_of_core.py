"""Memory, time and accuracy of ``fit`` over a loader, for data in a file.

    python -m benchmarks.speed.out_of_core [FOLDER] [--rows N ...] [--seeds N ...] [--csv FILE]
                                           [--quick]

The files are logistic regressions with ten features, 44 bytes a row, written into FOLDER and left
there, or into a temporary one. Each fit runs in a process of its own, in batches of 1000 rows
mapped from the file one by one; the peak is of the resident memory of that process, the base what
it was before the fit. The reference is the Gaussian at the mode with the inverse Hessian there, by
Newton's method in double precision over the file: from 1e5 rows on the posterior differs from it by
less than one percent.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro.infer import SVI

from benchmarks.speed.measuring import Row, write_table
from numpyro_kscore import AutoImplicit, ImplicitELBO, fit

ROWS = (100_000, 1_000_000, 10_000_000)
QUICK_ROWS = (20_000,)
DIM, BATCH, BLOCK = 10, 1_000, 100_000
NEWTON_STEPS = 8
DRAWS = 20_000


class Reference(NamedTuple):
    """A Gaussian posterior.

    Attributes:
        mean: (d,).
        sd: (d,).
    """

    mean: np.ndarray
    sd: np.ndarray


def write_data(folder: Path, rows: int) -> Path:
    """A file of rows: features and a label in float32. One that is there is left alone."""
    path = folder / f"logistic_{rows}.f32"
    if path.exists() and path.stat().st_size == 4 * (DIM + 1) * rows:
        return path
    rng = np.random.default_rng(0)
    weights = 0.5 * rng.normal(size=DIM)
    with path.open("wb") as file:
        for start in range(0, rows, BLOCK):
            block = np.empty((min(BLOCK, rows - start), DIM + 1), np.float32)
            block[:, :DIM] = rng.normal(size=block[:, :DIM].shape)
            chance = 1 / (1 + np.exp(-block[:, :DIM] @ weights))
            block[:, DIM] = rng.random(len(block)) < chance
            file.write(block.tobytes())
    return path


def blocks(path: Path, size: int) -> Iterator[np.ndarray]:
    """Maps of rows of a file, (size, d + 1), each for itself: memory holds what is in use."""
    width = 4 * (DIM + 1)
    for k in range(path.stat().st_size // (width * size)):
        yield np.memmap(path, np.float32, "r", offset=k * size * width, shape=(size, DIM + 1))


def reference(path: Path) -> Reference:
    """Mode and curvature by Newton's method, a pass over the file for each step."""
    mean = np.zeros(DIM)
    size = min(BLOCK, path.stat().st_size // (4 * (DIM + 1)))
    for _ in range(NEWTON_STEPS):
        slope, bend = -mean, np.eye(DIM)
        for block in blocks(path, size):
            x, y = block[:, :DIM].astype(float), block[:, DIM]
            p = 1 / (1 + np.exp(-x @ mean))
            slope = slope + x.T @ (y - p)
            bend = bend + (x * (p * (1 - p))[:, None]).T @ x
        mean = mean + np.linalg.solve(bend, slope)
    return Reference(mean, np.sqrt(np.diag(np.linalg.inv(bend))))


def peak_megabytes() -> float:
    """Largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fit_file(path: Path, seed: int) -> dict[str, object]:
    """Fit the regression in a file; what it took, and moments of draws."""
    rows = path.stat().st_size // (4 * (DIM + 1))

    def model(block: Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(DIM), 1.0).to_event(1))
        with numpyro.plate("rows", rows, subsample_size=len(block)):
            logits = block[:, :DIM] @ weights
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=block[:, DIM])

    svi = SVI(model, AutoImplicit(model), optax.adam(1e-2), ImplicitELBO())
    base, begin = peak_megabytes(), time.perf_counter()
    result = fit(svi, random.key(seed), loader=lambda: blocks(path, BATCH), progress_bar=False)
    seconds = time.perf_counter() - begin
    draws = svi.guide.sample_posterior(random.key(1), result.params, sample_shape=(DRAWS,))
    return {
        "base": base,
        "peak": peak_megabytes(),
        "seconds": seconds,
        "steps": result.info.steps,
        "cause": result.info.cause,
        "mean": np.asarray(draws["weights"].mean(0), float).tolist(),
        "sd": np.asarray(draws["weights"].std(0), float).tolist(),
    }


def fit_row(folder: Path, rows: int, seed: int) -> Row:
    """A row of the table: a fit in a process of its own, against the reference."""
    path = write_data(folder, rows)
    exact = reference(path)
    command = [sys.executable, "-m", __spec__.name, "--fit", str(path), str(seed)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    ratios = np.array(found["sd"]) / exact.sd
    return {
        "rows": str(rows),
        "seed": str(seed),
        "file, MB": path.stat().st_size / 2**20,
        "base, MB": found["base"],
        "peak, MB": found["peak"],
        "s": found["seconds"],
        "steps": str(found["steps"]),
        "cause": found["cause"],
        "mean error": float(np.max(np.abs(np.array(found["mean"]) - exact.mean) / exact.sd)),
        "sd low": float(ratios.min()),
        "sd high": float(ratios.max()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="existing folder for the files")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows, multiples of 1000")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one fit for each")
    parser.add_argument("--csv", type=Path, help="file to write")
    parser.add_argument("--quick", action="store_true", help="20 000 rows only")
    parser.add_argument("--fit", nargs=2, metavar=("FILE", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.fit:
        print(json.dumps(fit_file(Path(options.fit[0]), int(options.fit[1]))))
        return
    sizes = options.rows or (QUICK_ROWS if options.quick else ROWS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        table = [fit_row(folder, rows, seed) for rows in sizes for seed in options.seeds]
    write_table(options.csv, table)


if __name__ == "__main__":
    main()
