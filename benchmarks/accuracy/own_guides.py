"""Posteriors by a guide that a user would write: a network of noise, nothing else known.

    python -m benchmarks.accuracy.own_guides --csv FILE [--targets banana ...] [--seeds 0 1 2]
        [--methods fit ...] [--data FILE] [--quick]

The guide is a network with two hidden layers of 64 rectifiers, of 8 noises or twice as many as
there are latents. With ``framed`` its outputs are in the units of ``initial_gaussian``. It is
fitted by ``fit`` with the defaults, as README says, or by 5000 steps of ``svi.run`` with 128
particles and a cosine schedule from 3e-3. Every other method changes one of these settings, or two,
which tells what a fit loses to the estimate of the score (particles), to the optimizer (steps) and
to the network (width).

W is the sliced Wasserstein distance of 10 000 draws to exact ones, over that between exact ones, in
the mean over five sets of both. ``within`` is what ``fit`` claims, in standard deviations, if it
does. ``verdict`` is that of ``diagnose`` with the method "fit, judged", whose CPU seconds include
it. ``mean`` is the largest error of a mean, in standard deviations, and ``low`` and ``high`` are
ratios of these. A guide is right if it is as in ``weights``: up to 0.15, and within 0.9 and 1.1.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from numpyro.distributions import biject_to
from numpyro.infer import SVI, Predictive

from benchmarks.accuracy.posteriordb import sliced_wasserstein
from benchmarks.accuracy.report import within_limits
from benchmarks.accuracy.targets import TARGETS, Target, make_target, reference
from examples.common.tables import Row, fill
from numpyro_kscore import Implicit, ImplicitELBO, diagnose, fit, initial_gaussian
from numpyro_kscore._starts.initial_gaussian import InitialGaussian

TOYS = ("banana", "multimodal", "x_shape", "ring")
NUM_NOISES, NUM_DRAWS = 8, 10_000
# Sets of draws: W of two sets varies by a factor of two from one pair to another.
NUM_SETS = 5
COLUMNS = ("W", "mean", "low", "high", "cpu", "steps", "within", "reason", "verdict", "codes")


class Method(NamedTuple):
    """A way to fit the guide: by ``fit``, by ``svi.run``, or by one after the other.

    Attributes:
        by_fit: whether ``fit`` comes first.
        steps: of ``svi.run``; 0 leaves it out.
        particles: of its objective.
        width: of the hidden layers.
        fit_particles: of the objective that ``fit`` takes; None is the default.
        framed: whether the network works in the units of a Gaussian near the posterior.
        is_judged: whether ``diagnose`` is asked about what ``fit`` returns.
    """

    by_fit: bool = False
    steps: int = 0
    particles: int = 128
    width: int = 64
    fit_particles: int | None = None
    framed: bool = False
    is_judged: bool = False


METHODS = {
    "fit": Method(by_fit=True),
    "fit, judged": Method(by_fit=True, is_judged=True),
    "fit, framed": Method(by_fit=True, framed=True),
    "run": Method(steps=5_000),
    "run, 4 times the steps": Method(steps=20_000),
    "run, 4 times the particles": Method(steps=5_000, particles=512),
    "run, 4 times the width": Method(steps=5_000, width=256),
    "fit, 4 times the particles": Method(by_fit=True, fit_particles=512),
}


def noise_network(key: Array, widths: Sequence[int]) -> Callable[[], Array]:
    """A function, for a guide, that draws noise and returns a network of rectifiers of it.

    ``widths`` are the numbers of noises, of rectifiers in each hidden layer and of outputs.
    """
    keys = random.split(key, len(widths) - 1)
    layers = [
        {"w": random.normal(k, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for k, n, m in zip(keys, widths[:-1], widths[1:], strict=True)
    ]

    def output() -> Array:
        params = numpyro.param("network", layers)
        unit = dist.Normal().expand([widths[0]]).to_event(1)
        x = numpyro.sample("noise", unit, infer={"is_auxiliary": True})
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return output


def network_guide(
    target: Target, key: Array, width: int, start: InitialGaussian | None = None
) -> Callable[..., None]:
    """A guide whose latents are the outputs of a network of noise, in their order.

    Latents are in the standard units of a start, if one is given.
    """
    supports = target.supports()
    sites = list(supports)
    shapes = {name: jnp.shape(value) for name, value in target.example().items()}
    dim = sum(int(np.prod(shapes[name])) for name in sites)
    output = noise_network(key, (max(NUM_NOISES, 2 * dim), width, width, dim))

    def guide(*args: Any) -> None:
        del args
        x = output()
        if start is not None:
            start.sample(x)
            return
        first = 0
        for name in sites:
            size = int(np.prod(shapes[name]))
            free = x[first : first + size].reshape(shapes[name])
            value = biject_to(supports[name])(free)
            site = Implicit(value, event_dim=len(shapes[name]), unconstrained=free)
            numpyro.sample(name, site)
            first += size

    return guide


def fitted(
    method: Method,
    guide: Any,
    key: Array,
    target: Target,
    quick: bool,
    callback: Callable[..., Any] | None = None,
) -> tuple[Any, Row]:
    """Parameters of the guide, and what is said of the fit, which calls back after each look."""

    def svi_of(optimizer: Any, num_particles: int | None) -> SVI:
        return SVI(target.model, guide, optimizer, ImplicitELBO(num_particles=num_particles))

    params: Any = None
    said: Row = dict.fromkeys(("steps", "within", "reason", "verdict", "codes"), "")
    if method.by_fit:
        most = 100 if quick else 5_000
        svi = svi_of(numpyro.optim.Adam(1e-2), method.fit_particles)
        result = fit(svi, key, *target.args, max_steps=most, progress_bar=False, callback=callback)
        params, reason = result.params, result.info.reason
        claim = reason.partition("within ")[2].split(" ")[0]
        said |= {"steps": result.info.steps, "within": claim, "reason": reason}
        if method.is_judged:
            found = diagnose(svi, result, *target.args, progress_bar=False)
            said |= {"verdict": found.verdict, "codes": "; ".join(found.codes)}
    if method.steps:
        steps = 20 if quick else method.steps
        optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
        svi = svi_of(optimizer, method.particles)
        result = svi.run(key, steps, *target.args, progress_bar=False, init_params=params)
        params, said["steps"] = result.params, steps + int(said["steps"] or 0)
    return params, said


def compute(options: argparse.Namespace, method: str, target: str, seed: int) -> Row:
    """One row of the table."""
    jax.clear_caches()
    posterior = make_target(target, options.data)
    key, network_key, draw_key = random.split(random.key(seed), 3)
    begin = time.process_time()
    start = None
    if METHODS[method].framed:
        start = initial_gaussian(network_key, posterior.model, *posterior.args)
    guide = network_guide(posterior, network_key, METHODS[method].width, start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params, row = fitted(METHODS[method], guide, key, posterior, options.quick)
        params = jax.block_until_ready(params)
    cpu = time.process_time() - begin
    samples = Predictive(guide, params=params, num_samples=NUM_SETS * NUM_DRAWS)(draw_key)
    draws = np.asarray(posterior.unconstrained({n: samples[n] for n in posterior.supports()}))
    sets = np.split(np.asarray(reference(posterior, random.key(0), NUM_SETS * NUM_DRAWS)), NUM_SETS)
    floor = np.mean([sliced_wasserstein(a, b) for a, b in combinations(sets, 2)])
    truth = np.concatenate(sets)
    ratios = draws.std(0) / truth.std(0)
    pairs = zip(np.split(draws, NUM_SETS), sets, strict=True)
    found = np.mean([sliced_wasserstein(ours, theirs) for ours, theirs in pairs]) / floor
    errors = np.abs(draws.mean(0) - truth.mean(0)) / truth.std(0)
    figures = (found, errors.max(), ratios.min(), ratios.max())
    return row | {
        name: round(float(value), 3)
        for name, value in zip(COLUMNS[:4], figures, strict=True)
    } | {"cpu": round(cpu, 1)}  # fmt: skip


def report(rows: Sequence[Row]) -> Iterator[str]:
    """The worst and the median seed of every method on every posterior."""
    for method, target in dict.fromkeys((row["method"], row["target"]) for row in rows):
        here = [row for row in rows if (row["method"], row["target"]) == (method, target)]
        values = [float(row["W"]) for row in here]
        seconds = np.median([float(row["cpu"]) for row in here])
        yield (
            f"{method:26} {target:11} W/floor {np.median(values):.2f}, worst {max(values):.2f}; "
            f"{seconds:.0f} s of CPU"
        )
    right = [within_limits(*(float(row[name]) for name in COLUMNS[1:4])) for row in rows]
    claims = [
        true for row, true in zip(rows, right, strict=True) if row["within"] not in ("", None)
    ]
    if claims:
        yield f"claims of a distance: {len(claims)} of {len(rows)}, of which true: {sum(claims)}"
    verdicts = Counter((row["verdict"], true) for row, true in zip(rows, right, strict=True))
    for verdict in sorted({str(row["verdict"]) for row in rows} - {"", "None"}):
        yield f"{verdict}: {verdicts[verdict, True]} right, {verdicts[verdict, False]} wrong"


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table and print its summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TOYS, metavar="TARGET")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=("fit", "run"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data", type=Path, help="file of the waveform data, for that target")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    options = parser.parse_args(arguments)
    cells = [
        {"method": method, "target": target, "seed": seed}
        for method in options.methods
        for target in options.targets
        for seed in options.seeds
    ]
    rows = fill(cells, partial(compute, options), COLUMNS, options.csv)
    print(*report(rows), sep="\n")


if __name__ == "__main__":
    main()
