"""Samples divided over several devices, by JAX's own partitioner and ``shard_map``.

A row of every matrix of pairs belongs to one sample, and so to the device that holds it. Each
device works on its own rows against all columns: a vector of O(n d) numbers is gathered for that,
and O(n² d) operations divide evenly. Everything else, which is O(n d²) or less, is left to the
partitioner, which follows the layout of its operands.

Nothing here knows about processes: a mesh may span those that ``jax.distributed`` has joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

EXAMPLE = "NamedSharding(jax.make_mesh((jax.device_count(),), ('samples',)), P('samples'))"


def check_sharding(sharding: Any) -> NamedSharding | None:
    """Check a layout of rows, and bring it to the form the package relies on.

    It is None, or a ``NamedSharding`` whose specification names the axes of the mesh that rows are
    divided over and leaves all other dimensions whole. The result has a specification of one entry,
    on axes of type ``Auto``: the types of a mesh say how programs on it are checked, not where data
    lies.
    """
    if sharding is None:
        return None
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise TypeError(f"sharding: expected None or {EXAMPLE}; got {sharding!r}")
    entries = tuple(sharding.spec)
    if not entries or entries[0] is None or any(entry is not None for entry in entries[1:]):
        raise ValueError(
            "sharding: expected a specification that divides rows and nothing else, such as "
            f"P('samples'); got {sharding.spec}"
        )
    mesh: Any = sharding.mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types != types:
        mesh = Mesh(mesh.devices, mesh.axis_names, types)
    return NamedSharding(mesh, PartitionSpec(entries[0]))


def sharding_of(x: Any) -> NamedSharding | None:
    """The layout of an array's rows on devices; None if they are not divided, or under ``jit``."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return None
    if not isinstance(x.sharding, NamedSharding) or x.sharding.shard_shape(x.shape) == x.shape:
        return None
    if not x.sharding.spec or x.sharding.spec[0] is None:
        return None
    return check_sharding(NamedSharding(x.sharding.mesh, PartitionSpec(x.sharding.spec[0])))


def place(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Shard the rows of (n, ...); replicate them if n does not divide evenly.

    Under ``jit`` an array on a mesh with ``Explicit`` axes is refused.
    """
    if sharding is None:
        return x
    if isinstance(x, jax.core.Tracer):
        if getattr(jax.typeof(x).sharding.mesh, "explicit_axes", ()):
            raise ValueError(
                "sharding: expected axes of type Auto under jit; got an array on "
                f"{jax.typeof(x).sharding}. Make the mesh with "
                "axis_types=(jax.sharding.AxisType.Auto,)"
            )
        return constrain_rows(x, sharding)
    return jax.device_put(x, _layout_of(x, sharding))


def constrain_rows(tree: Any, sharding: NamedSharding | None) -> Any:
    """Shard rows as :func:`place` does, inside ``jit``, for every array (n, ...) of a pytree."""
    if sharding is None:
        return tree
    return jax.tree.map(
        lambda a: jax.lax.with_sharding_constraint(a, _layout_of(a, sharding)), tree
    )


def constrain_columns(a: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Shard the last axis of (..., n), inside ``jit``."""
    if sharding is None:
        return a
    spec = PartitionSpec()
    if divides(sharding, a.shape[-1]):
        spec = PartitionSpec(*[None] * (a.ndim - 1), *sharding.spec)
    return jax.lax.with_sharding_constraint(a, NamedSharding(sharding.mesh, spec))


def by_rows(
    fn: Callable[[Any, Any], Any], sharding: NamedSharding | None, rows: Any, whole: Any
) -> Any:
    """Call ``fn(rows, whole)``, where row i of the result depends on row i of ``rows`` only.

    Every device calls it with its own ``rows`` (n, ...) and all of ``whole``, which is gathered if
    it is divided; without a layout it is called once. Zeros are added where n does not divide
    evenly.
    """
    if sharding is None:
        return fn(rows, whole)
    n = jax.tree.leaves(rows)[0].shape[0]
    missing = -n % num_shards(sharding)
    if missing:
        rows = jax.tree.map(lambda a: jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)), rows)
    spec = sharding.spec
    result = mapped(fn, sharding, (spec, PartitionSpec()), spec)(rows, whole)
    return jax.tree.map(lambda a: a[:n], result) if missing else result


def mapped(
    fn: Callable[..., Any], sharding: NamedSharding, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``jax.shard_map`` on the mesh of a layout."""
    # Sums over tiles start from zeros, which are equal on all devices while the sums are not: the
    # check of replication would ask for a cast that has no meaning on one device.
    return jax.shard_map(
        fn, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def num_shards(sharding: NamedSharding) -> int:
    """Number of parts that rows are divided into."""
    entry = sharding.spec[0]
    names = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(sharding.mesh.shape[name] for name in names)


def divides(sharding: NamedSharding | None, count: int) -> bool:
    """Whether ``count`` rows divide evenly; False without a layout."""
    return sharding is not None and count % num_shards(sharding) == 0


def _layout_of(x: jax.Array, sharding: NamedSharding) -> NamedSharding:
    """The layout of rows, or a copy on every device if they do not divide evenly."""
    is_even = divides(sharding, x.shape[0])
    return sharding if is_even else NamedSharding(sharding.mesh, PartitionSpec())
