"""Checkpoint files of a fit: arrays and JSON in one ``.npz``, never pickled objects.

A tree of arrays is stored leaf by leaf. Its structure comes from the program that reads the file:
a file cannot carry code, and one that was written for another program is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.keys import as_numbers, is_typed_key

FORMAT = "numpyro_kscore fit, version 1"


def save_checkpoint(
    path: str | os.PathLike[str], tree: Any, record: dict[str, Any], series: np.ndarray
) -> None:
    """Write a tree of arrays, numbers and keys, a record for JSON, and an array of any length.

    An older file is replaced as a whole or not at all. Numbers of the record are restored exactly.
    """
    target = Path(path)
    header = json.dumps({"format": FORMAT, "leaves": _layout(tree), "record": record})
    arrays: dict[str, Any] = {"header": np.frombuffer(header.encode(), np.uint8), "series": series}
    arrays.update({f"leaf{k}": as_numbers(x) for k, x in enumerate(jax.tree.leaves(tree))})
    # Write another file and rename it: a stop at any moment leaves the old file or the new one.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_checkpoint(
    path: str | os.PathLike[str], template: Any
) -> tuple[Any, dict[str, Any], np.ndarray]:
    """Read the tree, the record and the series in a file of :func:`save_checkpoint`.

    ``template`` is a tree with the structure, shapes and dtypes of the one that was written; a file
    that is damaged, of another kind or with another tree is refused by ``ValueError``.
    """
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                header = json.loads(archive["header"].tobytes())
                if header["format"] != FORMAT:
                    raise ValueError(header["format"])
                stored, record, series = header["leaves"], header["record"], archive["series"]
                # Reading every array checks its checksum.
                arrays = [archive[f"leaf{k}"] for k in range(len(stored))]
        except OSError:
            raise
        except Exception as error:
            # A damaged archive raises anything from zlib.error to KeyError.
            raise ValueError(
                f"checkpoint: expected a file written by fit; got {os.fspath(path)!r}, which is "
                f"damaged or of another kind ({type(error).__name__}: {error}). Delete it to start "
                "anew, or give another path"
            ) from error
    expected = _layout(template)
    if stored != expected:
        raise ValueError(
            f"checkpoint: expected the state of this model, guide and optimizer; got "
            f"{len(stored)} arrays where there are {len(expected)} in {os.fspath(path)!r}, the "
            f"first difference being: {_first_difference(stored, expected)}. Give another path, or "
            "delete the file to start anew"
        )
    leaves, structure = jax.tree.flatten(template)
    restored = [_from_numpy(a, like) for a, like in zip(arrays, leaves, strict=True)]
    return jax.tree.unflatten(structure, restored), record, series


def _first_difference(stored: list[str], expected: list[str]) -> str:
    for there, here in zip(stored, expected, strict=False):
        if there != here:
            return f"{there} in the file, {here} here"
    longer, where = (stored, "in the file") if len(stored) > len(expected) else (expected, "here")
    return f"{longer[min(len(stored), len(expected))]} only {where}"


def _layout(tree: Any) -> list[str]:
    """Path, dtype and shape of every leaf."""
    return [
        f"{jax.tree_util.keystr(path)} {jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _from_numpy(array: np.ndarray, like: Any) -> Any:
    if is_typed_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    # Types beyond numpy's own, such as bfloat16, come back as bytes.
    return jnp.asarray(array.view(jnp.result_type(like)))
