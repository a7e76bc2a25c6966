"""PSIS k̂ from the energy of a guide, beside the exact one, on guides whose density is known.

    python -m benchmarks.khat_calibration --csv FILE [--figure FILE] [--dims 2 5 10 20]
        [--draws 1000 4000] [--seeds 10] [--cases narrow.8 ...] [--quick]

Every row is one run: fresh draws of a guide, k̂ of its exact log weights, and k̂ as it is reported
where the density is not known, with interval and verdict. The guide's density is hidden from the
estimate. What must hold, for at most ten dimensions: where the exact k̂ is below 0.5 a value below
0.7 is reported, where it is above 0.9 one above 0.7, each in at least 90 % of the runs; and at no
dimension is the verdict "good" where the exact k̂ is above 0.9, or "bad" where it is below 0.5, more
often than the level of the interval allows, one run in ten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import Array, random

from examples.cells import Row, fill, make_parser
from numpyro_kscore.draws import GuideDraws, whitening
from numpyro_kscore.importance import GOOD_KHAT, khat, pareto_smooth

COLUMNS = ("exact", "value", "low", "high", "verdict", "energy_error", "correlation")
VERDICTS = ("good", "bad", "cannot tell")


class Density(NamedTuple):
    """A distribution with draws ``(key, n, d) -> (n, d)`` and a log density of one point."""

    draw: Callable[[Array, int, int], Array]
    log_density: Callable[[Array], Array]


def gaussian(scale: float = 1.0, shift: float = 0.0) -> Density:
    """Independent; the mean is ``shift`` long whatever the dimension."""

    def draw(key: Array, n: int, d: int) -> Array:
        return shift / d**0.5 + scale * random.normal(key, (n, d))

    def log_density(x: Array) -> Array:
        return -0.5 * jnp.sum(((x - shift / x.size**0.5) / scale) ** 2)

    return Density(draw, log_density)


def student(nu: float) -> Density:
    """Elliptical, with identity scale."""

    def draw(key: Array, n: int, d: int) -> Array:
        first, second = random.split(key)
        chi2 = 2 * random.gamma(second, nu / 2, (n, 1))
        return random.normal(first, (n, d)) * jnp.sqrt(nu / chi2)

    return Density(draw, lambda x: -0.5 * (nu + x.size) * jnp.log1p(jnp.sum(x**2) / nu))


def banana(bend: float) -> Density:
    """The second coordinate is bent along the first; the rest are standard normal."""

    def draw(key: Array, n: int, d: int) -> Array:
        x = random.normal(key, (n, d))
        return x.at[:, 1].add(bend * (x[:, 0] ** 2 - 1))

    def log_density(x: Array) -> Array:
        return -0.5 * jnp.sum(x.at[1].add(-bend * (x[0] ** 2 - 1)) ** 2)

    return Density(draw, log_density)


def funnel(rate: float) -> Density:
    """The first coordinate is the log variance, over ``rate``, of the others."""

    def draw(key: Array, n: int, d: int) -> Array:
        x = random.normal(key, (n, d))
        return x.at[:, 1:].multiply(jnp.exp(0.5 * rate * x[:, :1]))

    def log_density(x: Array) -> Array:
        rest = jnp.sum(x[1:] ** 2) * jnp.exp(-rate * x[0]) + (x.size - 1) * rate * x[0]
        return -0.5 * (x[0] ** 2 + rest)

    return Density(draw, log_density)


# Name: guide, model. Scale, shift, tails and shape; and guides that are right.
CASES = {
    "right": (gaussian(), gaussian()),
    "right, heavy tails": (student(5), student(5)),
    "right, bent": (banana(0.5), banana(0.5)),
    "wide 1.2": (gaussian(1.2), gaussian()),
    "narrow .8": (gaussian(0.8), gaussian()),
    "narrow .6": (gaussian(0.6), gaussian()),
    "narrow .4": (gaussian(0.4), gaussian()),
    "shift 1": (gaussian(shift=1.0), gaussian()),
    "shift 3": (gaussian(shift=3.0), gaussian()),
    "light tails": (gaussian(), student(5)),
    "heavy tails": (student(5), gaussian()),
    "not bent": (gaussian(), banana(0.5)),
    "bent": (banana(0.8), gaussian()),
    "no funnel": (gaussian(), funnel(0.7)),
}


def make_draws(guide: Density, model: Density, key: Array, n: int, d: int) -> GuideDraws:
    """Draws of the guide with the model's score and Laplacian, and the guide's log density."""
    x = guide.draw(key, n, d)
    coordinates = whitening(x)
    factor = coordinates.scale[:, None] * (
        jnp.eye(d) if coordinates.cholesky is None else coordinates.cholesky
    )

    def laplacian(point: Array) -> Array:
        return jnp.sum(factor * (jax.hessian(model.log_density)(point) @ factor))

    return GuideDraws(
        x,
        jax.vmap(model.log_density)(x),
        jax.vmap(jax.grad(model.log_density))(x),
        jax.lax.map(laplacian, x, batch_size=500),
        jax.vmap(guide.log_density)(x),
    )


def compute(case: str, dim: int, num_draws: int, seed: int) -> Row:
    """One run."""
    guide, model = CASES[case]
    draws = make_draws(guide, model, random.key(seed), num_draws, dim)
    exact = np.asarray(draws.log_density, float) - np.asarray(draws.log_q, float)
    found = khat(draws._replace(log_q=None), num_bootstrap=50, seed=seed)
    varies = min(np.ptp(exact), np.ptp(found.log_weights)) > 1e-2
    correlation = np.corrcoef(exact, found.log_weights)[0, 1] if varies else np.nan
    numbers = {
        "exact": pareto_smooth(exact)[1],
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "energy_error": found.energy_error,
        "correlation": correlation,
    }
    # A dictionary's columns in the order of COLUMNS; the verdict by number, as all results are.
    rounded = {name: round(float(value), 3) for name, value in numbers.items()}
    return {name: rounded.get(name, VERDICTS.index(found.verdict)) for name in COLUMNS}


def table(rows: Sequence[Row]) -> list[str]:
    """Shares of runs by dimension and number of draws, of those that decide."""
    lines = [f"{'':28}{'runs':>6}{'right':>8}{'verdict right':>15}{'cannot tell':>13}{'wrong':>8}"]
    groups = sorted({(row["dim"], row["num_draws"]) for row in rows})
    claims: dict[str, list[bool]] = {"below": [], "above": []}
    for dim, num_draws in groups:
        inside = [row for row in rows if (row["dim"], row["num_draws"]) == (dim, num_draws)]
        for name, is_in in (("below", lambda k: k < 0.5), ("above", lambda k: k > 0.9)):
            part = [row for row in inside if is_in(row["exact"])]
            if not part:
                continue
            good = name == "below"
            right = [(row["value"] < GOOD_KHAT) == good for row in part]
            verdicts = [VERDICTS[int(row["verdict"])] for row in part]
            shares = [
                np.mean(right),
                np.mean([v == ("good" if good else "bad") for v in verdicts]),
                np.mean([v == "cannot tell" for v in verdicts]),
                np.mean([v == ("bad" if good else "good") for v in verdicts]),
            ]
            if dim <= 10:
                claims[name] += right
            label = f"d={dim}, n={num_draws}, exact {'< 0.5' if good else '> 0.9'}"
            lines.append(
                f"{label:28}{len(part):6}{shares[0]:8.0%}{shares[1]:15.0%}{shares[2]:13.0%}"
                f"{shares[3]:8.0%}"
            )
    for name, right in claims.items():
        if right:
            lines.append(f"d <= 10, {name}: {np.mean(right):.1%} of {len(right)} runs")
    return lines


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Reported against exact k̂, a panel for each dimension."""
    dims = sorted({row["dim"] for row in rows})
    figure, panels = plt.subplots(
        1, len(dims), figsize=(3.2 * len(dims), 3.4), sharey=True, layout="constrained"
    )
    for panel, dim in zip(np.atleast_1d(panels), dims, strict=True):
        for mark, verdict in zip("ovx", VERDICTS, strict=True):
            part = [
                (max(row["exact"], -1.0), max(row["value"], -1.0))
                for row in rows
                if row["dim"] == dim and VERDICTS[int(row["verdict"])] == verdict
            ]
            if part:
                panel.plot(*np.transpose(part), mark, ms=4, alpha=0.7, label=verdict)
        panel.plot([-1, 1.6], [-1, 1.6], "k:", lw=1)
        panel.axhline(GOOD_KHAT, color="0.7", zorder=0)
        panel.axvline(GOOD_KHAT, color="0.7", zorder=0)
        panel.set(title=f"d = {dim}", xlabel="exact k̂ (-1 stands for less)", xlim=(-1.1, 1.7))
    np.atleast_1d(panels)[0].set(ylabel="reported k̂", ylim=(-1.1, 1.7))
    np.atleast_1d(panels)[0].legend(loc="upper left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__.split("\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--draws", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--seeds", type=int, default=10, help="runs of every cell")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args(arguments)
    if options.quick:
        options.dims, options.draws, options.seeds = [2], [400], 1
    cells = [
        {"case": case, "dim": dim, "num_draws": draws, "seed": options.seed + seed}
        for draws in options.draws
        for seed in range(options.seeds)
        for dim in options.dims
        for case in options.cases
    ]
    rows = fill(cells, compute, COLUMNS, options.csv)
    print("\n".join(table(rows)))
    if options.figure is not None:
        plot(options.figure, rows)


if __name__ == "__main__":
    main()
