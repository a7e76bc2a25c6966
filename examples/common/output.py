"""Folders that scripts write to: missing ones are made when the options are read.

A fit of minutes should not end at a folder that does not exist.
"""

from argparse import ArgumentTypeError
from pathlib import Path

__all__ = ["output_file", "output_folder"]


def output_file(text: str) -> Path:
    """A file to write, in a folder that exists now: the ``type`` of an option."""
    path = Path(text)
    _make(path.parent)
    return path


def output_folder(text: str) -> Path:
    """A folder to write to, which exists now: the ``type`` of an option."""
    path = Path(text)
    if path.suffix in (".png", ".csv"):
        raise ArgumentTypeError(f"expected a folder; got {text}. Give the folder alone")
    _make(path)
    return path


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"expected a folder that can be made; got {folder}: {error}") from (
            error
        )
