"""What an H100 should do, by arithmetic: a model, not a measurement.

    python -m benchmarks.speed.cost_model [--csv FILE] [--quick]

Three limits, of which a program cannot be faster than the largest, nor, roughly, than launches and
the larger of the other two together:

* *flops*: float32 operations (docs/scaling) over 67 Tflop/s, without tensor cores;
* *issue*: instructions of the compiled kernel (``chip_code``) over the rate at which the device can
  start them. It counts what flops leave out: loads, addresses, selects;
* *launches*: programs that the host starts, at 2 and 5 µs. Those of a step of SVI are operations of
  the program for another device, loops unrolled, but fused as XLA does for a CPU: so this is an
  order of magnitude.

Kernels of this kind reach 60 to 80 % of their limit; no such factor is in the table. The command
``accelerator`` measures what is modelled here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import jax
import optax
from jax import lax, random
from numpyro.infer import SVI

from benchmarks.speed import many_posteriors
from benchmarks.speed.measuring import Row, rounded, run_table
from benchmarks.speed.step_time import gaussian
from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore.kernels import _pairwise as pairwise

DEVICE = "H100 SXM, a model"
FLOPS = 67e12
# 132 multiprocessors start four instructions of 32 threads a cycle, at 1.98 GHz.
ISSUES = 132 * 4 * 32 * 1.98e9
LAUNCH = (2e-6, 5e-6)
# Instructions a pair, from docs/performance_gpu_code.csv.
INSTRUCTIONS = {
    (16, "float32"): 119.0,
    (16, "tensorfloat32"): 78.5,
    (64, "float32"): 409.0,
    (64, "tensorfloat32"): 193.0,
}
# Launches of a tile by XLA: two products of points, one fused pass over the weights, and two
# products with them; and the update of the loop.
LAUNCHES_OF_A_TILE = 6
# Products with all pairs of a fit by 100 ν-steps in 16 dimensions: ζ, the target, 13 Krylov steps.
PRODUCTS_OF_A_FIT = 15
# Instructions of a compiled program that start nothing.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota",
    "broadcast", "reshape", "copy", "transpose",
}  # fmt: skip
# The loop that turns pivots of LU factors into a permutation, which is one program on a GPU.
PIVOTS = "jit(inv)/jit(solve)/while"


def product_rows(quick: bool) -> Iterator[Row]:
    """One product with the Gram operator, curl-free IMQ."""
    sizes = [(32768, 16), (32768, 64), (131072, 16), (1_000_000, 16)]
    for n, dim in sizes[: 1 if quick else None]:
        for precision in ("float32", "tensorfloat32"):
            flops = (8 * dim + 21) * float(n) ** 2 / FLOPS
            issue = INSTRUCTIONS[dim, precision] * float(n) ** 2 / ISSUES
            yield {"what": f"product, kernel, {precision}", "n": n, "d": dim,
                   "flops, ms": 1e3 * flops, "issue, ms": 1e3 * issue, "launches": 3,
                   "share of flop bound at most": flops / issue}  # fmt: skip
        tiles = -(-n // pairwise.TILE_ROWS) * -(-n // pairwise.TILE_COLUMNS)
        yield {"what": "product, tiles", "n": n, "d": dim, "flops, ms": 1e3 * flops,
               "launches": LAUNCHES_OF_A_TILE * tiles}  # fmt: skip


def fit_row() -> Row:
    """A fit to a million samples, all pairs."""
    pairs, count = 1e12, PRODUCTS_OF_A_FIT
    # The target and ζ are in full precision.
    issue = 2 * INSTRUCTIONS[16, "float32"] + (count - 2) * INSTRUCTIONS[16, "tensorfloat32"]
    return {"what": "fit, 100 ν-steps, kernel", "n": 1_000_000, "d": 16,
            "flops, ms": 1e3 * count * 149 * pairs / FLOPS,
            "issue, ms": 1e3 * issue * pairs / ISSUES}  # fmt: skip


def started(text: str) -> int:
    """Operations that a compiled program starts, those in loops as often as they are run.

    Of a conditional the first branch counts, that of a condition which does not hold.
    """
    text = re.sub(r"/\*index=\d+\*/", "", text)
    bodies = dict(
        re.findall(r"^(?:ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    )
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
    assert entry is not None

    @cache
    def of(name: str) -> int:
        total = 0
        for line in bodies[name].splitlines():
            found = re.search(r" = (?:\([^=]*?\)|\S+) ([a-z][\w-]*)\(", line)
            if found is None:
                continue
            if found[1] == "while" and PIVOTS in line:
                total += 1
            elif found[1] == "while":
                body = re.search(r"body=%?([\w.-]+)", line)
                count = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                total += (int(count[1]) if count else 1) * of(body[1])
            elif found[1] == "conditional":
                branches = re.search(r"false_computation=%?([\w.-]+)", line)
                branches = branches or re.search(r"branch_computations=\{%?([\w.-]+)", line)
                total += 1 + of(branches[1])
            elif found[1] == "call":
                total += of(re.search(r"to_apply=%?([\w.-]+)", line)[1])
            else:
                total += found[1] not in FREE
        return total

    return of(entry[1])


def step_rows(quick: bool) -> Iterator[Row]:
    """Steps of ``AutoImplicit``: what is started in one."""
    cases: list[tuple[str, Any, tuple[Any, ...], int]] = [
        (f"SVI step, d = {dim}", gaussian, (dim,), 512) for dim in ((4,) if quick else (10, 100))
    ]
    cases.append(("step of eight schools, one or 1000", many_posteriors.model, (), 64))
    for what, model, args, particles in cases:
        objective = ImplicitELBO(particles)
        svi = SVI(model, AutoImplicit(model, warm_start=False), optax.adam(1e-3), objective)
        state = svi.init(random.key(0), *args)
        update = jax.jit(lambda state, svi=svi, args=args: svi.update(state, *args))
        with for_another_device():
            program = update.lower(state)
        launches = started(program.compile().as_text())
        yield {"what": what, "n": particles, "launches": launches}


@contextmanager
def for_another_device() -> Iterator[None]:
    """Programs that are traced here take the ways that are not for a CPU, nor for one GPU."""
    default = lambda *operands, default, **_: default(*operands)  # noqa: E731
    with (
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.object(lax, "platform_dependent", default),
    ):
        yield


def rows(quick: bool) -> Iterator[Row]:
    """All rows, with the time of their launches."""
    for row in (*product_rows(quick), fit_row(), *step_rows(quick)):
        if "launches" in row:
            low, high = (1e3 * cost * row["launches"] for cost in LAUNCH)
            row["launches, ms"] = f"{rounded(low)} to {rounded(high)}"
        yield {"device": DEVICE, **row}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows and write them."""
    run_table(__doc__, rows, arguments)


if __name__ == "__main__":
    main()
