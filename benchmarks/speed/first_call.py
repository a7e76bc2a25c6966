"""Time of the first step of inference in a new process, which is mostly compilation.

    python -m benchmarks.speed.first_call [--csv FILE] [--repetitions 3] [--quick]

Each process runs eight schools: ``svi.init`` and the compiled first update, for
``AutoImplicit`` with ``ImplicitELBO`` and for NumPyro's own guides with ``Trace_ELBO`` and the same
number of particles. Seconds are the minimum over the repetitions, without imports. Compilations are
those of XLA; most are single operations that NumPyro runs outside a compiled program. ``again`` is
the time of a process that finds all programs in a persistent compilation cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoBNAFNormal, AutoIAFNormal, AutoNormal

from benchmarks.speed.measuring import Row, counted_compilations, make_parser, write_table
from numpyro_kscore import AutoImplicit, ImplicitELBO


def schools(effects: jax.Array, errors: jax.Array) -> None:
    """Eight schools, centered."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(effects)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effects", dist.Normal(theta, errors), obs=effects)


GUIDES: dict[str, Callable[[Callable[..., None]], tuple[object, object]]] = {
    "AutoImplicit, ImplicitELBO": lambda model: (AutoImplicit(model), ImplicitELBO()),
    "AutoNormal, Trace_ELBO": lambda model: (AutoNormal(model), Trace_ELBO(128)),
    "AutoIAFNormal, Trace_ELBO": lambda model: (AutoIAFNormal(model), Trace_ELBO(128)),
    "AutoBNAFNormal, Trace_ELBO": lambda model: (AutoBNAFNormal(model), Trace_ELBO(128)),
}


def measure(name: str) -> Row:
    """One cold start in this process."""
    effects = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    with counted_compilations() as compiled:
        start = time.perf_counter()
        guide, loss = GUIDES[name](schools)
        svi = SVI(schools, guide, optax.adam(1e-2), loss)
        state = svi.init(jax.random.key(0), effects, errors)
        initialized = time.perf_counter()
        jax.block_until_ready(jax.jit(svi.update)(state, effects, errors))
        end = time.perf_counter()
    return {
        "guide": name,
        "init, s": initialized - start,
        "first update, s": end - initialized,
        "together, s": end - start,
        "compilations": len(compiled),
    }


def in_new_processes(name: str, repetitions: int) -> Row:
    """Minimum over several new processes, without a persistent cache and with a full one."""
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    cold = _least(name, repetitions, environment)
    with TemporaryDirectory() as folder:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        _least(name, 1, environment)
        warm = _least(name, repetitions, environment)
    return cold | {"again, s": warm["together, s"]}


def _least(name: str, repetitions: int, environment: dict[str, str]) -> Row:
    command = [sys.executable, "-m", __spec__.name, "--measure", name]
    run = partial(
        subprocess.run, command, check=True, capture_output=True, text=True, env=environment
    )
    found = [json.loads(run().stdout) for _ in range(repetitions)]
    return min(found, key=lambda row: row["together, s"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3, help="processes behind a minimum")
    parser.add_argument("--measure", choices=GUIDES, help="one cold start here, as JSON")
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    names, repetitions = list(GUIDES), options.repetitions
    if options.quick:
        names, repetitions = names[:2], 1
    write_table(options.csv, [in_new_processes(name, repetitions) for name in names])


if __name__ == "__main__":
    main()
