"""Entropies and divergences from samples, against nearest neighbors.

    python -m benchmarks.accuracy.information [--dims 1 2 5 10] [--samples 300 1000 3000]
        [--seeds 10] [--csv FILE] [--quick]

``entropy`` and ``kl_divergence`` are compared with the k-nearest-neighbor estimators of
Kozachenko and Leonenko (1987; k = 3) and of Wang, Kulkarni and Verdú (2009; k = 3). Targets are
normal, a banana, two normals six standard deviations apart, and Student t with three degrees of
freedom. Divergences are from the target to a normal of the same mean and twice the variance in
every coordinate, or for the t distribution to one of twice the squared scale. The tables have root
mean squared errors in nats over the seeds, the mean error, and how often the truth is within two
standard errors.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import special, stats
from scipy.spatial import cKDTree

from numpyro_kscore.estimators import entropy, kl_divergence

NEIGHBORS = 3


class Target(NamedTuple):
    """A distribution with known log density, in any dimension.

    Attributes:
        draw: ``(rng, n, d) -> (n, d)``.
        log_density: ``(n, d) -> (n,)``.
    """

    draw: Callable[[np.random.Generator, int, int], np.ndarray]
    log_density: Callable[[np.ndarray], np.ndarray]


def normal_log_density(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    return np.sum(stats.norm.logpdf(x, scale=scale), axis=1)


def student(scale: float = 1.0, degrees: float = 3.0) -> Target:
    def draw(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
        chi2 = rng.chisquare(degrees, (n, 1))
        return scale * rng.standard_normal((n, d)) * np.sqrt(degrees / chi2)

    def log_density(x: np.ndarray) -> np.ndarray:
        d = x.shape[1]
        return stats.multivariate_t.logpdf(
            x, np.zeros(d), scale**2 * np.eye(d), df=degrees
        ).reshape(-1)

    return Target(draw, log_density)


def bent(x: np.ndarray, sign: float) -> np.ndarray:
    """The second coordinate moved along a parabola in the first."""
    x = x.copy()
    x[:, 1] += sign * (x[:, 0] ** 2 - 1.0)
    return x


def separated(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    x = rng.standard_normal((n, d))
    x[:, 0] += 3.0 * rng.choice([-1.0, 1.0], n)
    return x


def separated_log_density(x: np.ndarray) -> np.ndarray:
    shift = np.eye(x.shape[1])[0] * 3.0
    sides = normal_log_density(x - shift), normal_log_density(x + shift)
    return np.logaddexp(*sides) - np.log(2.0)


def gaussian(scale: float) -> Target:
    return Target(
        lambda rng, n, d: scale * rng.standard_normal((n, d)),
        lambda x: normal_log_density(x, scale),
    )


TARGETS = {
    "normal": gaussian(1.0),
    "banana": Target(
        lambda rng, n, d: bent(rng.standard_normal((n, d)), 1.0),
        lambda x: normal_log_density(bent(x, -1.0)),
    ),
    "mixture": Target(separated, separated_log_density),
    "student": student(),
}
OTHERS = {name: gaussian(2**0.5) for name in ("normal", "banana", "mixture")}
OTHERS["student"] = student(2**0.5)


def neighbor_entropy(x: np.ndarray) -> float:
    """Kozachenko and Leonenko's estimate."""
    n, d = x.shape
    distances = cKDTree(x).query(x, NEIGHBORS + 1)[0][:, -1]
    ball = 0.5 * d * np.log(np.pi) - special.gammaln(0.5 * d + 1)
    count = special.digamma(n) - special.digamma(NEIGHBORS)
    return float(count + ball + d * np.mean(np.log(distances)))


def neighbor_divergence(x: np.ndarray, y: np.ndarray) -> float:
    """Wang, Kulkarni and Verdú's estimate of the divergence of x from y."""
    own = cKDTree(x).query(x, NEIGHBORS + 1)[0][:, -1]
    other = cKDTree(y).query(x, NEIGHBORS)[0][:, -1]
    return float(x.shape[1] * np.mean(np.log(other / own)) + np.log(len(y) / (len(x) - 1)))


def truths(name: str, dim: int) -> tuple[float, float]:
    """Entropy and divergence, by a million draws where there is no formula: errors below .01."""
    target, other = TARGETS[name], OTHERS[name]
    x = target.draw(np.random.default_rng(123), 1_000_000, dim)
    log_p = target.log_density(x)
    # Where the entropy is exact, the divergence uses it.
    exact = -np.mean(log_p)
    if name in ("normal", "banana"):
        exact = 0.5 * dim * np.log(2 * np.pi * np.e)
    return float(exact), float(-exact - np.mean(other.log_density(x)))


def errors_of(name: str, dim: int, n: int, seeds: int) -> np.ndarray:
    """Error, standard error and neighbors' error, of entropy and of divergence: (seeds, 6)."""
    exact = truths(name, dim)
    rows = []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, dim, n])
        x = TARGETS[name].draw(rng, n, dim)
        y = OTHERS[name].draw(rng, n, dim)
        x, y = x.astype(np.float32), y.astype(np.float32)
        h, kl = entropy(x), kl_divergence(x, y)
        rows.append(
            [
                float(h.value) - exact[0],
                float(h.standard_error),
                neighbor_entropy(x) - exact[0],
                float(kl.value) - exact[1],
                float(kl.standard_error),
                neighbor_divergence(x, y) - exact[1],
            ]
        )
    return np.array(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--samples", type=int, nargs="+", default=[300, 1000, 3000])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--csv", type=Path, help="all errors, one seed a row")
    parser.add_argument("--quick", action="store_true", help="one dimension, two seeds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.dims, options.samples, options.seeds = [1], [64], 2

    file = None if options.csv is None else options.csv.open("w", newline="")
    writer = None if file is None else csv.writer(file)
    if writer is not None:
        columns = ["quantity", "target", "dim", "samples", "seed", "error", "standard_error"]
        writer.writerow([*columns, "neighbors_error"])
    print("| of | target | d | n | RMSE | neighbors' RMSE | bias | neighbors' bias | within 2 SE |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dim in options.dims:
        for n in options.samples:
            for name in TARGETS:
                if dim == 1 and name == "banana":
                    continue
                errors = errors_of(name, dim, n, options.seeds)
                for quantity, part in (("entropy", errors[:, :3]), ("divergence", errors[:, 3:])):
                    error, standard_error, neighbors = part.T
                    inside = np.sum(np.abs(error) < 2 * standard_error)
                    rmse = f"{np.mean(error**2) ** 0.5:.3f} | {np.mean(neighbors**2) ** 0.5:.3f}"
                    bias = f"{np.mean(error):.3f} | {np.mean(neighbors):.3f}"
                    start = f"{quantity} | {name} | {dim} | {n}"
                    print(f"| {start} | {rmse} | {bias} | {inside}/{len(error)} |", flush=True)
                    if writer is not None:
                        for seed, row in enumerate(part):
                            numbers = [f"{value:.4g}" for value in row]
                            writer.writerow([quantity, name, dim, n, seed, *numbers])
    if file is not None:
        file.close()


if __name__ == "__main__":
    main()
