"""Loaders of any kind: how they are opened, and what their items stand for.

An item becomes a *batch*: the pair of a tuple and a dict of NumPy arrays, which are arguments and
keyword arguments of model and guide.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AGAIN = (
    "Give something that can be iterated over again, such as a list or a DataLoader, or a function "
    "that returns a new iterator"
)
# Dtypes that JAX converts in single precision.
SINGLE = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


def opener(loader: Any) -> Callable[[int], Iterator[Any]]:
    """Return a function from the number of an epoch to an iterator over it.

    A loader that is a function gets that number as ``epoch``, or as its first argument if that has
    no default.
    """
    is_data = isinstance(loader, np.ndarray | jax.Array | dict | str | bytes)
    is_iterable = isinstance(loader, Iterable)
    if is_data or not (is_iterable or callable(loader)):
        raise TypeError(
            f"loader: expected an iterable of batches, or a function that returns one; got "
            f"{type(loader).__name__ if is_data else repr(loader)}. Data in memory are arguments "
            "of fit; a list of slices of them is a loader"
        )
    if is_iterable:
        return lambda epoch: iter(loader)
    of_epoch = _of_epoch(loader)

    def open_epoch(epoch: int) -> Iterator[Any]:
        made = of_epoch(epoch)
        if not isinstance(made, Iterable):
            raise TypeError(
                f"loader: expected a function that returns an iterator; it gave {made!r}"
            )
        return iter(made)

    return open_epoch


def _of_epoch(function: Callable[..., Any]) -> Callable[[int], Any]:
    """The function, given the number of the epoch where it asks for one."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # Some functions in C have no signature.
        parameters = []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    in_place = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    if any(p.name == "epoch" and p.kind in by_name for p in parameters):
        return lambda epoch: function(epoch=epoch)
    # An argument with a default and another name, such as the size of batches, is no epoch.
    if any(p.default is p.empty and p.kind in in_place for p in parameters):
        return function
    return lambda epoch: function()


def as_batch(item: Any, is_double: bool) -> Any:
    """Turn an item of a loader into a batch of NumPy arrays.

    The item is a dict of keyword arguments, a tuple or list of arguments, or one argument.
    """

    def as_array(path: Any, leaf: Any) -> np.ndarray:
        try:
            array = np.asarray(leaf)
            is_number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)
        except TypeError:
            is_number = False
        if not is_number:
            raise TypeError(
                f"loader: expected batches of arrays of numbers; got {type(leaf).__name__} as "
                f"{_name_of(path)}"
            )
        name = str(array.dtype)
        # Only converted arrays are read here; maps of files are read when batches are stacked.
        return array if is_double or name not in SINGLE else array.astype(SINGLE[name])

    if isinstance(item, dict):
        pair: Any = ((), item)
    else:
        pair = (tuple(item) if isinstance(item, tuple | list) else (item,), {})
    batch = jax.tree_util.tree_map_with_path(as_array, pair)
    if not jax.tree.leaves(batch):
        raise ValueError(f"loader: expected arrays in every batch; got {item!r}")
    return batch


class Form:
    """The structure, shapes and dtypes that all batches of a loader have.

    ``numbers`` are the names of the leaves that are single numbers.
    """

    def __init__(self, example: Any) -> None:
        leaves, structure = jax.tree.flatten(example)
        self.structure: Any = structure
        self.types = [(leaf.shape, leaf.dtype) for leaf in leaves]
        found = jax.tree_util.tree_leaves_with_path(example)
        self.numbers = [_name_of(path) for path, leaf in found if not leaf.shape]

    @property
    def num_rows(self) -> int:
        """The longest of the leading axes; 1 if there is none."""
        return max([1, *(shape[0] for shape, _ in self.types if shape)])

    def check(self, batch: Any, epoch: int, index: int) -> None:
        """Raise ``ValueError`` if a batch has another form; epoch and index say which it is."""
        where = f"batch {index} of epoch {epoch}"
        structure = jax.tree.structure(batch)
        if structure != self.structure:
            raise ValueError(
                f"loader: expected batches of one structure, {self.structure}; got {structure} in "
                f"{where}"
            )
        found = jax.tree_util.tree_leaves_with_path(batch)
        for (path, leaf), (shape, dtype) in zip(found, self.types, strict=True):
            if (leaf.shape, leaf.dtype) != (shape, dtype):
                raise ValueError(
                    f"loader: expected batches of equal shapes and dtypes, {dtype}{list(shape)} as "
                    f"{_name_of(path)}; got {leaf.dtype}{list(leaf.shape)} in {where}. "
                    f"{_advice(leaf.shape, shape)}"
                )


def _advice(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """The advice about a shape that differs from the first one, or else a dtype."""
    if shape == expected:
        return "Convert it"
    if len(shape) != len(expected):
        return (
            "A tuple of arrays of all data is no loader: give them to fit as arguments, or cut "
            "them into batches"
        )
    return "Drop the last short one (drop_last)"


def _name_of(path: Any) -> str:
    """The argument that a leaf of a batch is in, and where."""
    _, argument, *inside = path
    is_keyword = isinstance(argument, jax.tree_util.DictKey)
    name = f"'{argument.key}'" if is_keyword else f"argument {argument.idx}"
    return name + jax.tree_util.keystr(tuple(inside))


def state_of(iterator: Any) -> str | None:
    """The state of an iterator with ``get_state`` and ``set_state``, if JSON can hold it."""
    if not (hasattr(iterator, "get_state") and hasattr(iterator, "set_state")):
        return None
    state = iterator.get_state()
    try:
        # Data loaders of grain have JSON in bytes.
        held = {"bytes": state.decode()} if isinstance(state, bytes) else {"state": state}
        return json.dumps(held)
    except (TypeError, ValueError):
        return None


def restore_state(iterator: Any, state: str) -> None:
    """Put an iterator into a state of :func:`state_of`."""
    held = json.loads(state)
    iterator.set_state(held["bytes"].encode() if "bytes" in held else held["state"])
