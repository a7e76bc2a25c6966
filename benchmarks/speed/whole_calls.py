"""Time of the calls a user makes, in a new process and again in the same one.

    python -m benchmarks.speed.whole_calls [--csv FILE] [--quick]

Eight schools, centered, with default settings: ``fit``, ``diagnose``, 1000 draws, a score fitted to
half of the effects' draws and its values at the others, without imports and outside of ``jit``. The
later round has a new guide, other data of the same shapes and another key. CPU seconds are those of
all threads; compilations those of XLA, of single operations too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from numpyro.infer import SVI

from benchmarks.speed.first_call import schools
from benchmarks.speed.measuring import Row, counted_compilations, make_parser, write_table
from numpyro_kscore import AutoImplicit, ImplicitELBO, ScoreEstimator, diagnose, fit

EFFECTS = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def timed(call: Callable[[], Any]) -> tuple[Any, Row]:
    """A result, and what it took."""
    with counted_compilations() as compiled:
        cpu, wall = time.process_time(), time.perf_counter()
        result = jax.block_until_ready(call())
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return result, {"CPU, s": cpu, "s": wall, "compilations": len(compiled)}


def measure(name: str, key: int, effects: jax.Array, max_steps: int) -> list[Row]:
    """One round of calls."""
    guide = AutoImplicit(schools)
    svi = SVI(schools, guide, optax.adam(1e-2), ImplicitELBO())
    data = effects, ERRORS
    run_key, draw_key = jax.random.split(jax.random.key(key))

    def fitted() -> Any:
        return fit(svi, run_key, *data, max_steps=max_steps, progress_bar=False)

    result, of_fit = timed(fitted)
    _, of_diagnosis = timed(lambda: diagnose(svi, result, *data).verdict and None)
    draws = (draw_key, result.params, *data)
    posterior, of_draws = timed(lambda: guide.sample_posterior(*draws, sample_shape=(1_000,)))
    here, there = posterior["theta"][:500], posterior["theta"][500:]
    score, of_score = timed(lambda: ScoreEstimator().fit(here))
    _, of_values = timed(lambda: score(there))
    rows = {
        f"fit, {result.info.steps} steps": of_fit,
        "diagnose": of_diagnosis,
        "draws": of_draws,
        "ScoreEstimator().fit": of_score,
        "score(x)": of_values,
    }
    return [{"round": name, "call": call, **row} for call, row in rows.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    options = make_parser(__doc__).parse_args(arguments)
    max_steps = 100 if options.quick else 5_000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if options.quick else "default")
        rows = measure("first", 0, EFFECTS, max_steps)
        rows += measure("later", 1, EFFECTS + 2.0, max_steps)
    write_table(options.csv, rows)


if __name__ == "__main__":
    main()
