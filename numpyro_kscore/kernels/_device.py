"""Which program sums over very many pairs: XLA's tiles, or one kernel on a GPU.

The kernel (:mod:`numpyro_kscore.kernels._pallas`) keeps the weights of a tile on the chip. It takes
over where JAX's default backend is a GPU, for float32 and a bounded dimension, and only where it
can be lowered: without Pallas or its Triton backend, or for a profile with an operation that
Triton lacks, tiles are used. The platform is settled when a program is lowered, so that one
for the CPU of a machine with a GPU has tiles. On a machine without one nothing of this is traced
or imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# How sums over pairs are computed: all weights at once, tile by tile, or by the kernel.
MATRIX, TILES, KERNEL = 0, 1, 2

# From so many pairs on the kernel is used: wherever tiles are. On an H200 it takes 1.6 times as
# long as matrices at four million pairs, and as long at 67 million
# (benchmarks/results/2026-11-26-h200.md).
FEWEST_PAIRS = 4096 * 2048
# There a program's rows and sums begin to spill from the registers of an H100 (the same note).
MOST_DIMENSIONS = 64
# Points and coefficients of the trial in :func:`_lowers`.
TRIAL_POINTS = 128

Field = Callable[[Any, Any, jax.Array], jax.Array]


def suits_kernel(kernel: Any, expansion: Any, y: jax.Array) -> bool:
    """Whether a program with the kernel in it is worth tracing; known from shapes."""
    points, dim = expansion.points, y.shape[1]
    if not _gpu_is_default() or y.shape[0] * points.shape[0] <= FEWEST_PAIRS:
        return False
    arrays = jax.tree.leaves((expansion, y))
    if dim > MOST_DIMENSIONS or any(a.dtype != jnp.float32 for a in arrays):
        return False
    leaves, structure = jax.tree.flatten(kernel)
    if any(jnp.ndim(leaf) > 0 for leaf in leaves):
        return False
    has = (expansion.coefficients is not None, expansion.zeta_weight is not None)
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    # Whole numbers of the kernel have the width that is set when it is traced.
    return _lowers(structure, dim, *has, precision, jnp.result_type(int).name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def field_or(
    tiles: Field, kernel: Any, expansion: Any, y: jax.Array, direct: jax.Array
) -> jax.Array:
    """The expansion at ``y``, (m, d), by the kernel on a GPU and by ``tiles`` of XLA elsewhere.

    Its derivatives are those of ``tiles``, which are used on a GPU, too, where ``direct`` says that
    points are so many bandwidths apart that an expanded square cancels.
    """

    def on_gpu(direct: jax.Array, *operands: Any) -> jax.Array:
        return lax.cond(direct, tiles, _on_chip, *operands)

    def elsewhere(direct: jax.Array, *operands: Any) -> jax.Array:
        return tiles(*operands)

    return lax.platform_dependent(direct, kernel, expansion, y, cuda=on_gpu, default=elsewhere)


@field_or.defjvp
def _field_jvp(tiles: Field, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(tiles, primals[:-1], tangents[:-1])


def path_or(direct: jax.Array) -> jax.Array:
    """The code of :func:`field_or`: KERNEL on a GPU unless ``direct``, TILES elsewhere."""
    return lax.platform_dependent(
        direct,
        cuda=lambda direct: jnp.where(direct, TILES, KERNEL).astype(jnp.int32),
        default=lambda direct: jnp.full_like(direct, TILES, dtype=jnp.int32),
    )


def _gpu_is_default() -> bool:
    return jax.default_backend() == "gpu"


def _on_chip(kernel: Any, expansion: Any, y: jax.Array) -> jax.Array:
    from numpyro_kscore.kernels._pallas import field_on_chip

    points, coefficients = expansion.points, expansion.coefficients
    return field_on_chip(kernel, points, coefficients, expansion.zeta_weight_each, y)


@functools.lru_cache(maxsize=256)
def _lowers(
    structure: Any,
    dim: int,
    has_coefficients: bool,
    has_zeta: bool,
    precision: str | None,
    integers: str,
) -> bool:
    """Whether the kernel can be lowered for CUDA with this kernel of pairs; tried once."""
    del integers  # part of the key

    def abstract(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    points = abstract(TRIAL_POINTS, dim)
    kernel = jax.tree.unflatten(structure, [abstract()] * structure.num_leaves)
    coefficients = points if has_coefficients else None
    each = abstract() if has_zeta else None
    try:
        from numpyro_kscore.kernels._pallas import field_on_chip

        with jax.default_matmul_precision(precision):
            traced = jax.jit(field_on_chip).trace(kernel, points, coefficients, each, points)
            traced.lower(lowering_platforms=("cuda",))
    # Pallas is experimental, and a profile may be any function: whatever fails here, with
    # whatever error, is what tiles are for.
    except Exception:
        return False
    return True
