"""Measurements for the speed benchmarks: alternating times, memory, compilations; and tables."""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
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
    """Smallest time of each function, in seconds.

    The functions are called alternately, so that a change of the machine's speed or load affects
    all of them: ratios between the times are more reliable than the times.

    Args:
        functions: functions to time; the first call of each compiles and does not count.
        budget: seconds per function.
        fewest: smallest number of rounds.
    """

    def seconds(function: Callable[[], Any]) -> float:
        before = time.perf_counter()
        jax.block_until_ready(function())
        return time.perf_counter() - before

    for function in functions.values():
        jax.block_until_ready(function())
    best = {name: seconds(function) for name, function in functions.items()}
    # Fast functions get as much time as slow ones, up to 50 calls a round: the minimum of a few
    # calls would be too large.
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
    """``count`` steps in one compiled loop, because one call costs as much as a small product."""

    @jax.jit
    def run(operands: Any, v: Array) -> Array:
        def body(v: Array, _: None) -> tuple[Array, None]:
            # Each step depends on the one before, and values stay of order one.
            return 0.5 * v + 1e-3 * step(operands, v), None

        return lax.scan(body, v, length=count)[0]

    return run


def temporary_megabytes(function: Callable[..., Any], *args: Any) -> float:
    """Memory of a compiled program in MB, without its input and output."""
    compiled = jax.jit(function).lower(*args).compile()
    return float(compiled.memory_analysis().temp_size_in_bytes) / 1e6


def compile_seconds(function: Callable[..., Any], *args: Any) -> float:
    """Seconds to trace and compile with empty caches."""
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(function).lower(*args).compile()
    return time.perf_counter() - start


@contextmanager
def counted_compilations() -> Iterator[list[float]]:
    """Collect the seconds of every compilation inside the ``with`` block."""
    found: list[float] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == COMPILED:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def device_name() -> str:
    """Name of the device that JAX computes on, by its driver."""
    device = jax.devices()[0]
    return "CPU" if device.platform == "cpu" else str(device.device_kind)


def rounded(value: Any) -> Any:
    """A number with three digits as text, "" for NaN; any other value unchanged."""
    if isinstance(value, float):
        return "" if value != value else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return value


def write_table(path: Path | None, rows: Sequence[Row], shown: Sequence[Row] | None = None) -> None:
    """Print the rows, or only those in ``shown``; write all of them as CSV if a path is given."""
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def cells(row: Row) -> list[Any]:
        return [rounded(row.get(column, "")) for column in columns]

    for line in (columns, *(cells(row) for row in (rows if shown is None else shown))):
        print(" | ".join(str(cell) for cell in line), flush=True)
    if path is not None:
        write_csv(path, columns, rows)


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write these columns of the rows, numbers with three digits."""
    table = [[rounded(row.get(column, "")) for column in columns] for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *table])


def run_table(
    description: str | None, rows: Callable[[bool], Iterable[Row]], arguments: Sequence[str] | None
) -> None:
    """Run a benchmark that is one table.

    Args:
        description: the module's docstring; its first paragraph is the help text.
        rows: makes the table; its argument says whether a quick one is wanted.
        arguments: command line; None takes the program's.
    """
    parser = make_parser(description)
    options = parser.parse_args(arguments)
    write_table(options.csv, list(rows(options.quick)))


def row_of_a_process(module: str, *options: str) -> Row:
    """The only row that a benchmark prints, run in a process of its own.

    Args:
        module: its full name.
        *options: what it is called with.
    """
    command = [sys.executable, "-m", module, *options]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    names, values = (line.split(" | ") for line in found.stdout.splitlines()[-2:])
    return dict(zip(names, values, strict=True))


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every speed benchmark has; the help text is the first paragraph."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, help="file to write the rows to")
    parser.add_argument(
        "--quick", action="store_true", help="few small sizes and repetitions, to see it run"
    )
    return parser
