"""Calibration of PSIS k̂ from a guide's energy, on guides whose exact k̂ is known.

    python -m benchmarks.calibration.khat --csv FILE [--figure FILE] [--dims 2 5 10 20]
        [--draws 1000 4000] [--seeds 10] [--cases "narrow .8" ...] [--quick]

A row is one run: fresh draws of a guide, k̂ of its exact log weights, and k̂ as reported for an
implicit guide, with interval and verdict; the guide's density is hidden from this estimate. There
are two groups of guides. The *familiar* ones differ from the model in ways that the features of
energies were designed for (scale, shift, tails, bends, funnels, skew). The *others* have sharp
edges, several modes, or are flows fitted by NumPyro, some of them stopped early.

Requirements, for at most ten dimensions: if the exact k̂ is below 0.5, the reported one is below
0.7; if it is above 0.9, the reported one is above 0.7; each in at least 90 % of the runs. In any
dimension, the verdict is "good" for an exact k̂ above 0.9, or "bad" for one below 0.5, in at most
one run in ten, the level of the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoIAFNormal

from benchmarks.calibration.densities import (
    Density,
    banana,
    edges,
    funnel,
    gaussian,
    logistic,
    mixture,
    skewed,
    student,
)
from examples.common.tables import Row, fill, make_parser
from numpyro_kscore import khat
from numpyro_kscore._util.pareto import GOOD_KHAT
from numpyro_kscore.diagnostics import GuideDraws, pareto_smooth
from numpyro_kscore.estimators._base.standardization import whiten_samples

COLUMNS = ("exact", "value", "low", "high", "verdict", "energy_error", "correlation")
VERDICTS = ("good", "bad", "cannot tell")


class Flow(NamedTuple):
    """NumPyro's inverse autoregressive flow, fitted to the model for ``num_steps`` steps."""

    num_steps: int


# Name: guide and model. In a case named "right" the two are equal.
CASES: dict[str, tuple[Density | Flow, Density]] = {
    "right": (gaussian(), gaussian()),
    "right, heavy tails": (student(5), student(5)),
    "right, bent": (banana(0.5), banana(0.5)),
    "wide 1.2": (gaussian(1.2), gaussian()),
    "narrow .8": (gaussian(0.8), gaussian()),
    "narrow .6": (gaussian(0.6), gaussian()),
    "narrow .4": (gaussian(0.4), gaussian()),
    "narrow .2": (gaussian(0.2), gaussian()),
    "shift 1": (gaussian(shift=1.0), gaussian()),
    "shift 3": (gaussian(shift=3.0), gaussian()),
    "shift 4": (gaussian(shift=4.0), gaussian()),
    "light tails": (gaussian(), student(5)),
    "heavy tails": (student(5), gaussian()),
    "not bent": (gaussian(), banana(0.5)),
    "bent": (banana(0.8), gaussian()),
    "no funnel": (gaussian(), funnel(0.7)),
    "funnel": (funnel(0.7), gaussian()),
    "skewed": (skewed(), gaussian(1.3)),
    "not skewed": (gaussian(), skewed()),
    "skewed the other way": (skewed(-1.0), skewed()),
    "edges": (edges(), gaussian()),
    "edges, narrow": (edges(scale=0.5), gaussian()),
    "no edges": (gaussian(0.5), edges()),
    "two modes": (mixture(4.0), gaussian(2.0)),
    "two modes, narrow": (mixture(3.0, 0.5), mixture(3.0)),
    "modes filled in": (gaussian(2.0), mixture(4.0)),
    "modes too near": (mixture(2.0, 0.8), mixture(4.0)),
    "flow, bent": (Flow(1_000), banana(0.5)),
    "flow, bent, early": (Flow(100), banana(0.5)),
    "flow, funnel": (Flow(1_000), funnel(0.7)),
    "flow, logistic": (Flow(1_000), logistic()),
    "flow, logistic, early": (Flow(50), logistic()),
    "flow, two modes": (Flow(1_000), mixture(4.0)),
    "flow, heavy tails": (Flow(1_000), student(5)),
}
# The features of energies were chosen on the familiar kinds only.
FIRST_OTHER = list(CASES).index("edges")
FAMILIAR = tuple(CASES)[:FIRST_OTHER]


@lru_cache
def flow_fitter(
    num_steps: int, log_density: Callable[[Array], Array], dim: int
) -> tuple[AutoIAFNormal, Callable[[Array], dict[str, Any]]]:
    """A flow and a function that fits it: random key -> parameters."""

    def model() -> None:
        whole = dist.ImproperUniform(dist.constraints.real_vector, (), (dim,))
        numpyro.factor("model", log_density(numpyro.sample("x", whole)))

    guide = AutoIAFNormal(model, num_flows=2, hidden_dims=[max(8, dim), max(8, dim)])
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(16))
    # Sets up the guide, which must not happen while tracing.
    svi.init(random.key(0))

    @jax.jit
    def fit(key: Array) -> dict[str, Any]:
        state = jax.lax.fori_loop(0, num_steps, lambda _, s: svi.update(s)[0], svi.init(key))
        return svi.get_params(state)

    return guide, fit


def make_draws(case: str, seed: int, n: int, d: int) -> GuideDraws:
    """Draws of the guide with the model's score and Laplacian, and the guide's log density."""
    guide, model = CASES[case]
    key = random.key(seed)
    if isinstance(guide, Flow):
        flow, fit = flow_fitter(guide.num_steps, model.log_density, d)
        posterior = flow.get_posterior(fit(random.key(1_000 + seed)))
        x, steps = posterior.sample_with_intermediates(key, (n,))
        log_q = posterior.log_prob(x, steps)
    else:
        if guide.draw is None:
            raise ValueError(f"{case}: expected a guide with draws; got none")
        x = guide.draw(key, n, d)
        log_q = jax.vmap(guide.log_density)(x)
    return evaluate(model.log_density, x, log_q)


@partial(jax.jit, static_argnums=0)
def evaluate(log_density: Callable[[Array], Array], x: Array, log_q: Array) -> GuideDraws:
    """The model at the draws, with its Laplacian in coordinates whitened by the draws."""
    coordinates = whiten_samples(x)
    factor = coordinates.root()

    def laplacian(point: Array) -> Array:
        return jnp.sum(factor * (jax.hessian(log_density)(point) @ factor))

    return GuideDraws(
        x,
        jax.vmap(log_density)(x),
        jax.vmap(jax.grad(log_density))(x),
        jax.lax.map(laplacian, x, batch_size=500),
        log_q,
    )


def compute(case: str, dim: int, num_draws: int, seed: int) -> Row:
    """One run: the exact and the reported k̂."""
    draws = make_draws(case, seed, num_draws, dim)
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
    # In the order of COLUMNS; the verdict is a number, as all results are.
    rounded = {name: round(float(value), 3) for name, value in numbers.items()}
    return {name: rounded.get(name, VERDICTS.index(found.verdict)) for name in COLUMNS}


def table(rows: Sequence[Row]) -> list[str]:
    """Fractions of runs by group, number of draws and dimension."""
    lines = [f"{'':36}{'runs':>6}{'right':>8}{'verdict right':>15}{'cannot tell':>13}{'wrong':>8}"]
    groups = {"familiar": FAMILIAR, "other": tuple(CASES)[FIRST_OTHER:]}
    for num_draws in sorted({row["num_draws"] for row in rows}):
        for kind, cases in groups.items():
            part = [row for row in rows if row["num_draws"] == num_draws and row["case"] in cases]
            for dim in sorted({row["dim"] for row in part}):
                lines += claims(
                    f"{kind}, n={num_draws}, d={dim}", part, lambda d, dim=dim: d == dim
                )
            lines += claims(f"{kind}, n={num_draws}, d<=10", part, lambda d: d <= 10)
    return lines


def claims(label: str, rows: Sequence[Row], of_dim: Callable[[int], bool]) -> list[str]:
    """Two lines: runs with an exact k̂ below 0.5, and runs with one above 0.9."""
    lines = []
    for sign, verdict, is_in in (
        ("<.5", "good", lambda k: k < 0.5),
        (">.9", "bad", lambda k: k > 0.9),
    ):
        part = [row for row in rows if of_dim(row["dim"]) and is_in(row["exact"])]
        if not part:
            continue
        verdicts = [VERDICTS[int(row["verdict"])] for row in part]
        fractions = [
            np.mean([(row["value"] < GOOD_KHAT) == (verdict == "good") for row in part]),
            np.mean([v == verdict for v in verdicts]),
            np.mean([v == "cannot tell" for v in verdicts]),
            np.mean([v not in (verdict, "cannot tell") for v in verdicts]),
        ]
        lines.append(
            f"{f'{label}, {sign}':36}{len(part):6}{fractions[0]:8.0%}{fractions[1]:15.0%}"
            f"{fractions[2]:13.0%}{fractions[3]:8.1%}"
        )
    return lines


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Plot reported against exact k̂, one panel for each dimension."""
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
        panel.set(title=f"d = {dim}", xlabel="exact k̂ (-1: or less)", xlim=(-1.1, 1.7))
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
        # Flows take most of the time.
        quick = [case for case in options.cases if not isinstance(CASES[case][0], Flow)]
        options.cases = quick or options.cases
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
