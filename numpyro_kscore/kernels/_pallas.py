"""Sums over pairs in one GPU kernel: the weights of a tile never leave the chip.

Compiled by XLA, a tile of :mod:`numpyro_kscore.kernels._pairwise` is a chain of matrix products
with elementwise work between them, and writes and reads its weights in memory at every link. Here
a program holds some rows ``y`` and their sums in registers, walks over the points ``x`` in tiles
and computes, for each tile,

    s = |y|² + |x|² - 2 y·x ,  W = outer(s) ∘ (y·c - x·c) + (a/n) zeta(s) ,
    f += y (W 1) - W x + inner(s) c ,

so that only points, coefficients and results travel: O(n d) numbers for each group of rows.

The kernel is written for the Triton backend of Pallas, whose products need sizes that are powers
of two and at least 16: dimensions and points are padded with zeros, which add nothing. Products
take the precision of the context they are traced in, except that of the distances, which is full.
Full products are three passes of tensor cores over operands in two parts (3xTF32): on an H200 twice
as fast as float32 without tensor cores, or five times in 64 dimensions, and more accurate.
Triton has no product of seven bits from float32 operands, so ``bfloat16`` is tensorfloat32 here.

This module imports Pallas, which takes half a second; :mod:`numpyro_kscore.kernels._device`
imports it where there is a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from numpyro_kscore.kernels._contract import Kernel

FEW_DIMENSIONS = 3
SMALLEST_SIDE = 16
THREE_PASSES = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
Precision = lax.Precision | lax.DotAlgorithmPreset | None


class Tiling(NamedTuple):
    """How pairs are divided over programs; all but ``splits`` are powers of two.

    Attributes:
        rows: rows y of a program.
        columns: points x of a tile.
        warps: groups of 32 threads that share a program.
        stages: tiles whose loads are under way at the same time.
        splits: programs that share the points of one group of rows; their sums are added.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    splits: int


# JAX's names for a float32 product without coarser parts.
FULL = ("float32", "highest")
# Enough programs to keep all multiprocessors of a large GPU busy (an H100 has 132) several times.
ENOUGH_PROGRAMS = 512


def tiling_for(num_rows: int, num_points: int) -> Tiling:
    """Sizes of tiles: at most 15 % slower than the best of those timed on an H200, in 3 to 64 d.

    Loads of the next tile while one is under way (two stages) took twice the time.
    """
    rows, columns = 64, 64
    groups = -(-num_rows // rows)
    splits = max(1, min(ENOUGH_PROGRAMS // groups, -(-num_points // (8 * columns))))
    return Tiling(rows, columns, warps=4, stages=1, splits=splits)


def field_on_chip(
    kernel: Kernel,
    points: jax.Array,
    coefficients: jax.Array | None,
    each: jax.Array | None,
    y: jax.Array,
    *,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``each Σ_j zeta_ij (y_i - x_j) + Σ_j K(y_i, x_j) c_j``, (m, d) -> (m, d), in float32.

    Args:
        kernel: the kernel; its leaves must be scalars.
        points: the x_j, (n, d), centered, in units of the bandwidth.
        coefficients: the c_j, (n, d), or None.
        each: the weight a/n of every point in a ζ, a scalar, or None.
        y: points to evaluate at, (m, d).
        tiling: sizes of tiles; None takes :func:`tiling_for`.
        interpret: run the kernel as ordinary JAX operations, on any device; for tests.

    Cost: (8 d + 21) m n operations for a curl-free IMQ kernel, O((m + n) d) memory.
    """
    (m, dim), n = y.shape, points.shape[0]
    tiling = tiling or tiling_for(m, n)
    whole = tiling.columns * tiling.splits
    pad_points = -n % whole
    rows = _padded(y, -m % tiling.rows, dim)
    x = _padded(points, pad_points, dim)
    inputs: dict[str, Any] = {"y": rows, "x": x, "x_norms": jnp.sum(x * x, axis=1)}
    if coefficients is not None:
        c = _padded(coefficients, pad_points, dim)
        inputs |= {"c": c, "x_c": jnp.sum(x * c, axis=1)}
    if each is not None:
        inputs["each"] = jnp.pad(jnp.broadcast_to(each, (n,)).astype(y.dtype), (0, pad_points))
    leaves, structure = jax.tree.flatten(kernel)
    inputs["leaves"] = [jnp.asarray(leaf, y.dtype).reshape(1) for leaf in leaves]

    full: Precision = lax.Precision.HIGHEST if interpret else THREE_PASSES
    in_context = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    # None is that of the context.
    precision = full if in_context in FULL else None

    def program(inputs: Any, out: Any) -> None:
        own = jax.tree.unflatten(structure, [leaf[0] for leaf in inputs["leaves"]])
        _sum_of_program(own, inputs, out, dim, tiling, x.shape[0] // whole, full, precision)

    side = rows.shape[1]
    per_row = pl.BlockSpec((tiling.rows, side), lambda i, j: (i, 0))
    total = pl.pallas_call(
        program,
        grid=(rows.shape[0] // tiling.rows, tiling.splits),
        in_specs=[_specs(inputs, per_row)],
        out_specs=pl.BlockSpec((None, tiling.rows, side), lambda i, j: (j, i, 0)),
        out_shape=jax.ShapeDtypeStruct((tiling.splits, *rows.shape), y.dtype),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
    )(inputs)
    return jnp.sum(total, axis=0)[:m, :dim]


def _sum_of_program(
    kernel: Kernel,
    inputs: Any,
    out: Any,
    dim: int,
    tiling: Tiling,
    tiles: int,
    full: Precision,
    precision: Precision,
) -> None:
    """The sums of one program: its rows, and its share of the points, ``tiles`` tiles.

    Distances have ``full`` precision, other products the given one.
    """
    y = inputs["y"][...]
    y_norms = jnp.sum(y * y, axis=1)
    first = pl.program_id(1) * tiles
    dot = partial(jnp.dot, precision=precision)

    def squared_distances(at: Any, x: jax.Array) -> jax.Array:
        """Never negative, as :func:`_pairwise.squared_distances`."""
        if dim <= FEW_DIMENSIONS:
            columns = [(inputs["y"][:, k], inputs["x"][at, k]) for k in range(dim)]
            squares = [jnp.square(a[:, None] - b[None, :]) for a, b in columns]
            return sum(squares[1:], squares[0])
        norms = y_norms[:, None] + inputs["x_norms"][at][None, :]
        s = norms - 2.0 * jnp.dot(y, x.T, precision=full)
        # Values below rounding are noise around zero, where Matérn profiles have a kink. NaN stays.
        return jnp.where(s <= 4 * jnp.finfo(y.dtype).eps * norms, 0.0, s)

    def add(k: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        field, row_sums = sums
        at = pl.ds((first + k) * tiling.columns, tiling.columns)
        x = inputs["x"][at, :]
        weights = kernel.field_weights(squared_distances(at, x), dim)
        along = None
        if "each" in inputs:
            along = weights.zeta * inputs["each"][at][None, :]
        if "c" in inputs:
            c = inputs["c"][at, :]
            field = field + dot(weights.inner, c)
            if weights.outer is not None:
                part = weights.outer * (dot(y, c.T) - inputs["x_c"][at][None, :])
                along = part if along is None else along + part
        if along is not None:
            field = field - dot(along, x)
            row_sums = row_sums + jnp.sum(along, axis=1)
        return field, row_sums

    start = jnp.zeros(y.shape, y.dtype), jnp.zeros(y.shape[0], y.dtype)
    field, row_sums = lax.fori_loop(0, tiles, add, start)
    out[...] = field + y * row_sums[:, None]


def _padded(a: jax.Array, rows: int, dim: int) -> jax.Array:
    """(n, d) with rows of zeros added, and columns up to a power of two."""
    side = max(SMALLEST_SIDE, 1 << (dim - 1).bit_length())
    return jnp.pad(a, ((0, rows), (0, side - dim)))


def _specs(inputs: dict[str, Any], per_row: pl.BlockSpec) -> dict[str, Any]:
    """Rows in blocks, one a program; all else whole, to be read tile by tile."""
    whole = jax.tree.map(lambda a: pl.BlockSpec(a.shape, lambda i, j: (0,) * a.ndim), inputs)
    return whole | {"y": per_row}
