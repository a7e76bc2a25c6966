"""All benchmarks of speed and scale, and the tables and figures of docs/performance.

    python -m benchmarks.speed.performance [--out docs] [--only products solvers ...] [--quick]

One part after another, each a table of ratios within one run; a part that is done is written
before the next begins. Run it on a quiet machine: about 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from benchmarks.speed import first_call, gram, growth, large_n, precision, solving, step_time

Part = Callable[[Path, list[str]], None]


def _path(folder: Path, name: str) -> list[str]:
    return ["--csv", str(folder / f"performance_{name}.csv")]


def _large(folder: Path, quick: list[str]) -> None:
    sizes = ["--samples", "2000", "--resident", "5000"] if quick else []
    large_n.main(_path(folder, "large_n") + sizes)


def _growth(folder: Path, quick: list[str]) -> None:
    figure = ["--figure", str(folder / "figures" / "performance_growth.png")]
    growth.main(_path(folder, "growth") + figure + quick)


def _steps(folder: Path, quick: list[str]) -> None:
    step_time.main(_path(folder, "steps") + (["--repetitions", "5"] if quick else []))


PARTS: dict[str, Part] = {
    "products": lambda folder, quick: gram.main(_path(folder, "products") + quick),
    "solvers": lambda folder, quick: solving.main(_path(folder, "solvers") + quick),
    "steps": _steps,
    "first_call": lambda folder, quick: first_call.main(
        _path(folder, "first_call") + (["--repetitions", "1"] if quick else [])
    ),
    "precision": lambda folder, _: precision.main(_path(folder, "precision")),
    "growth": _growth,
    "large_n": _large,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts and writes their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmark_results"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see it run")
    options = parser.parse_args(arguments)
    (options.out / "figures").mkdir(parents=True, exist_ok=True)
    devices = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    print(f"jax {jax.__version__} on {devices}, {platform.machine()}")
    for name in options.only:
        print(f"\n{name}", flush=True)
        PARTS[name](options.out, ["--quick"] if options.quick else [])
    print(f"\ntables and figures are in {options.out}")


if __name__ == "__main__":
    main()
