"""How benchmarks of speed measure: times in turns, memory of compiled programs, compilations."""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax import Array, lax

Row = dict[str, Any]
MOST_ROUNDS = 300
COMPILED = "/jax/core/compile/backend_compile_duration"


def minimum_seconds(
    functions: dict[str, Callable[[], Any]], budget: float = 2.0, fewest: int = 3
) -> dict[str, float]:
    """Smallest time of each function, called in turns.

    In turns, so that a change of the machine's speed or load meets all alike: ratios between
    them hold better than any of the times.

    Args:
        functions: what to time; the first call of each, with its compilation, does not count.
        budget: seconds for the slowest of them together.
        fewest: rounds at least.
    """

    def seconds(function: Callable[[], Any]) -> float:
        before = time.perf_counter()
        jax.block_until_ready(function())
        return time.perf_counter() - before

    for function in functions.values():
        jax.block_until_ready(function())
    best = {name: seconds(function) for name, function in functions.items()}
    # As much time for the fast ones as for the slow, within reason: the least of few is too long.
    calls = {name: int(min(50, max(1, max(best.values()) / t))) for name, t in best.items()}
    done, start = 0, time.perf_counter()
    while done < fewest or time.perf_counter() - start < budget * len(functions):
        for name, function in functions.items():
            best[name] = min(best[name], *(seconds(function) for _ in range(calls[name] + 1)))
        done += 1
        if done == MOST_ROUNDS:
            break
    return best


def iterated(step: Callable[[Any, Array], Array], count: int) -> Callable[[Any, Array], Array]:
    """``count`` steps in one compiled loop: a call costs as much as several small products."""

    @jax.jit
    def run(operands: Any, v: Array) -> Array:
        def body(v: Array, _: None) -> tuple[Array, None]:
            # The next step needs this one, and values stay of order one.
            return 0.5 * v + 1e-3 * step(operands, v), None

        return lax.scan(body, v, length=count)[0]

    return run


def temporary_megabytes(function: Callable[..., Any], *args: Any) -> float:
    """What a compiled program needs beside its input and output, in MB."""
    compiled = jax.jit(function).lower(*args).compile()
    return float(compiled.memory_analysis().temp_size_in_bytes) / 1e6


def compile_seconds(function: Callable[..., Any], *args: Any) -> float:
    """Time to trace and compile, as if for the first time."""
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(function).lower(*args).compile()
    return time.perf_counter() - start


@contextmanager
def counted_compilations() -> Iterator[list[float]]:
    """The seconds of every compilation within."""
    found: list[float] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == COMPILED:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def rounded(value: Any) -> Any:
    """Numbers to three digits; the rest as it is."""
    if isinstance(value, float):
        return "" if value != value else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return value


def write_table(path: Path | None, rows: Sequence[Row], shown: Sequence[Row] | None = None) -> None:
    """Print rows, or those of them that are new, and write all as CSV if there is a path."""
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def cells(row: Row) -> list[Any]:
        return [rounded(row.get(column, "")) for column in columns]

    for line in (columns, *(cells(row) for row in (rows if shown is None else shown))):
        print(" | ".join(str(cell) for cell in line), flush=True)
    table = [cells(row) for row in rows]
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *table])


def run_table(
    description: str | None, rows: Callable[[float], Iterable[Row]], arguments: Sequence[str] | None
) -> None:
    """The command line of a benchmark that is one table of times.

    Args:
        description: the module's, whose first paragraph is shown as help.
        rows: from seconds for each comparison to the table.
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, help="file to write the rows to")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args(arguments)
    write_table(options.csv, list(rows(0.3 if options.quick else 2.0)))
