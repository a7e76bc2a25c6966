"""Resident memory of long fits over their steps, in NumPyro's loops and in ``fit``.

    python -m benchmarks.speed.memory [--csv FILE] [--steps 1000 10000 100000] [--quick]

Each cell is a process of its own, which compiles, takes so many steps and reports the largest
resident memory it ever had: JAX and compilation are in it, and are the same in each row. Memory
that does not grow gives equal numbers. The guides are a random function with the data of
docs/functions, ``AutoImplicit``, and NumPyro's ``AutoNormal`` with ``Trace_ELBO`` for comparison.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from benchmarks.speed.large_n import peak_megabytes
from benchmarks.speed.measuring import Row, make_parser, row_of_a_process, write_table
from numpyro_kscore import AutoImplicit, ImplicitELBO, fit
from numpyro_kscore.functions import measure

STEPS = (1_000, 10_000, 100_000)
QUICK_STEPS = (80, 160)
# Few, so that a hundred thousand steps take minutes: memory of a step is not what is asked.
PARTICLES = 40
JITTER = 0.05


def values(x: Any, y: Any, pool: Any) -> None:
    """Model: a Gaussian process."""
    at = measure(x, 8, pool, 4)
    square = jnp.exp(-0.5 * (at.points - at.points.T) ** 2)
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, square + JITTER**2 * jnp.eye(len(square))))
    with at.data:
        numpyro.sample("y", dist.Normal(at.of_data(f), 0.2), obs=y[at.rows])


def network(x: Any, y: Any, pool: Any) -> None:
    """Guide: a network with random weights."""
    at = measure(x, 8, pool, 4)
    start = random.normal(random.key(3), (3, 30))
    loc, log_sd = numpyro.param("loc", start), numpyro.param("log_sd", start - 2.0)
    unit = dist.Normal(jnp.zeros((3, 30)), 1.0).to_event(2)
    noise = numpyro.sample("noise", unit, infer={"is_auxiliary": True})
    slope, shift, out = loc + jnp.exp(log_sd) * noise
    f = jnp.tanh(at.points * slope + shift) @ out / 5
    numpyro.sample("f", dist.Normal(f, JITTER).to_event(1))


def location(y: Any) -> None:
    """Model: location and scale of heavy-tailed data."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    scale = numpyro.sample("scale", dist.HalfCauchy(5.0))
    numpyro.sample("y", dist.StudentT(3.0, mean, scale), obs=y)


def functional() -> tuple[SVI, tuple[Any, ...]]:
    """A random function, with its data."""
    x = random.uniform(random.key(0), (20, 1), minval=-2.0, maxval=2.0)
    y = jnp.sin(2 * x[:, 0]) + 0.2 * random.normal(random.key(1), (20,))
    pool = random.uniform(random.key(2), (2_000, 1), minval=-4.0, maxval=4.0)
    loss = ImplicitELBO(PARTICLES, base="moments")
    return SVI(values, network, optax.adam(1e-3), loss), (x, y, pool)


def automatic(guide: Callable[..., Any], loss: Any) -> tuple[SVI, tuple[Any, ...]]:
    """An automatic guide of location and scale, with the data."""
    svi = SVI(location, guide(location), optax.adam(1e-3), loss)
    return svi, (jnp.array([2.1, 3.4, 2.7, 9.5]),)


GUIDES = {
    "random function": functional,
    "AutoImplicit": lambda: automatic(AutoImplicit, ImplicitELBO(PARTICLES)),
    "AutoNormal": lambda: automatic(AutoNormal, Trace_ELBO(PARTICLES)),
}


def run(svi: SVI, args: Any, num_steps: int, **options: Any) -> Any:
    return svi.run(random.key(4), num_steps, *args, **options)


def run_updates(svi: SVI, args: Any, num_steps: int) -> Any:
    """A loop of one's own, which keeps the last loss."""
    state, update = svi.init(random.key(4), *args), jax.jit(svi.update)
    for _ in range(num_steps):
        state, loss = update(state, *args)
    return state, loss


def run_fit(svi: SVI, args: Any, num_steps: int) -> Any:
    """``fit`` to the last step: it neither converges nor has the patience to stop."""
    return fit(svi, random.key(4), *args, max_steps=num_steps, tol=1e-9, patience=num_steps)


LOOPS: dict[str, Callable[[SVI, Any, int], Any]] = {
    "svi.run, no bar": lambda *given: run(*given, progress_bar=False),
    "the same, stable_update": lambda *given: run(*given, progress_bar=False, stable_update=True),
    "svi.run": run,
    "jit(svi.update)": run_updates,
    "fit": run_fit,
}


def memory_row(guide: str, loop: str, num_steps: int) -> Row:
    """Peak memory of this process after a fit."""
    svi, args = GUIDES[guide]()
    # The bar, and what fit says of a fit that was not to converge.
    with contextlib.redirect_stderr(io.StringIO()):
        jax.block_until_ready(LOOPS[loop](svi, args, num_steps))
    return {"guide": guide, "loop": loop, "steps": num_steps, "resident MB": peak_megabytes()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--guides", nargs="+", choices=GUIDES, default=list(GUIDES))
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--here", action="store_true", help="one cell, in this process")
    options = parser.parse_args(arguments)
    if options.here:
        cell = options.guides[0], options.loops[0], options.steps[0]
        write_table(options.csv, [memory_row(*cell)])
        return
    if options.quick:
        options.steps, options.guides = QUICK_STEPS, ["AutoNormal"]
    table: list[Row] = []
    for guide in options.guides:
        for loop in options.loops:
            row: Row = {"guide": guide, "loop": loop}
            for num_steps in options.steps:
                cell = ("--guides", guide, "--loops", loop, "--steps", str(num_steps))
                found = row_of_a_process(__spec__.name, "--here", *cell)
                row[f"{num_steps} steps, MB"] = found["resident MB"]
            table.append(row)
            write_table(options.csv, table, shown=[row])


if __name__ == "__main__":
    main()
