"""The machine code of the GPU's kernel, compiled without a GPU: registers, spills, instructions.

    python -m benchmarks.speed.chip_code [--csv FILE] [--quick]

It needs ``pip install triton`` (of which it uses the compiler, not the language) and a version of
JAX that lowers Pallas to Triton. The program is compiled for an H100 (sm_90). What is counted are
instructions of a thread in the whole program, of which nearly all are in its loop, over the pairs
that a thread computes in one turn of it. XLA has its own version of the same compiler, so that its
code may differ a little.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from benchmarks.speed.measuring import Row, run_table
from numpyro_kscore._util.precision import products_in
from numpyro_kscore.kernels import CurlFree
from numpyro_kscore.kernels._pallas import Tiling, field_on_chip, tiling_for

NUM_POINTS = 32768
DIMENSIONS = (3, 16, 32, 64)
PRECISIONS = ("float32", "tensorfloat32")
TARGET = "sm_90a"
THREADS = 32


def triton_text(dim: int, tiling: Tiling, precision: str) -> str:
    """The kernel in Triton's own intermediate form."""
    from jax._src.pallas.triton import lowering

    lower, found = lowering.lower_jaxpr_to_triton_module, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = lower(*args, **kwargs)
        found.append(result.module.operation.get_asm(enable_debug_info=False))
        return result

    shape = jax.ShapeDtypeStruct((NUM_POINTS, dim), jnp.float32)
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with (
        mock.patch.object(lowering, "lower_jaxpr_to_triton_module", spy),
        jax.sharding.use_abstract_mesh(mesh),
        warnings.catch_warnings(),
        products_in(precision),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = jax.jit(
            lambda x, c: field_on_chip(CurlFree(), x, c, None, x, tiling=tiling)
        ).trace(shape, shape)
        traced.lower(lowering_platforms=("cuda",))
    return found[0]


def compiled_row(dim: int, precision: str) -> Row:
    """Registers and instructions of one kernel."""
    import triton
    from triton.backends.compiler import GPUTarget

    tiling = tiling_for(NUM_POINTS, NUM_POINTS)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, ptx, cubin = (folder / f"kernel.{end}" for end in ("ttir", "ptx", "cubin"))
        source.write_text(triton_text(dim, tiling, precision))
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        kernel = triton.compile(str(source), target=GPUTarget("cuda", 90, 32), options=options)
        ptx.write_text(kernel.asm["ptx"])
        command = [tools / "ptxas", f"-arch={TARGET}", "-v", ptx, "-o", cubin]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        command = [tools / "nvdisasm", "-c", cubin]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", code, re.MULTILINE)
    pairs = tiling.rows * tiling.columns / (THREADS * tiling.warps)
    return {
        "d": dim,
        "precision": precision,
        "rows x columns, warps": f"{tiling.rows} x {tiling.columns}, {tiling.warps}",
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled bytes": int(re.search(r"(\d+) bytes spill stores", said)[1]),
        "shared kB": kernel.metadata.shared / 1024,
        "instructions a pair": len(names) / pairs,
        "multiply-adds a pair": names.count("FFMA") / pairs,
    }


def rows(quick: bool) -> Iterator[Row]:
    """All rows of the table."""
    for dim in DIMENSIONS[1:2] if quick else DIMENSIONS:
        for precision in PRECISIONS:
            yield compiled_row(dim, precision)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, print the rows and write them."""
    run_table(__doc__, rows, arguments)


if __name__ == "__main__":
    main()
