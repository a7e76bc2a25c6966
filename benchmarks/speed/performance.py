"""All speed benchmarks, with the tables and figures of docs/performance.

    python -m benchmarks.speed.performance [--out benchmarks/results --figures docs/figures]
        [--only products solvers ...] [--quick]

The parts run one after another, and each writes its table before the next begins. Run them on an
idle machine: about 25 minutes on two cores. Where JAX's default device is no CPU, ``gpu`` alone is
run, the table of accelerators.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.speed import (
    accelerator,
    first_call,
    gram,
    growth,
    large_n,
    precision,
    solving,
    step_time,
    whole_calls,
)

PARTS = {
    "products": gram.main,
    "solvers": solving.main,
    "steps": step_time.main,
    "first_call": first_call.main,
    "whole_calls": whole_calls.main,
    "precision": precision.main,
    "growth": growth.main,
    "large_n": large_n.main,
    "gpu": accelerator.main,
}


def default_parts() -> list[str]:
    """The parts that ``make bench`` runs on this machine."""
    if jax.default_backend() != "cpu":
        return ["gpu"]
    return [name for name in PARTS if name != "gpu"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and write their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmark_results"))
    parser.add_argument("--figures", type=Path, help="folder of the figure, by default OUT/figures")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="quick runs of all parts")
    options = parser.parse_args(arguments)
    figures = options.figures or options.out / "figures"
    options.out.mkdir(parents=True, exist_ok=True)
    figures.mkdir(parents=True, exist_ok=True)
    devices = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    print(f"jax {jax.__version__} on {devices}, {platform.machine()}")
    for name in options.only or default_parts():
        print(f"\n{name}", flush=True)
        command = ["--csv", str(options.out / f"performance_{name}.csv")]
        if name == "growth":
            command += ["--figure", str(figures / "performance_growth.png")]
        PARTS[name](command + ["--quick"] * options.quick)
    print(f"\ntables and figures are in {options.out} and {figures}")


if __name__ == "__main__":
    main()
