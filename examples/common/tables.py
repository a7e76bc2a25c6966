"""Tables that can be resumed: each row is written to a CSV file as soon as it is computed.

A *cell* is a dictionary of settings, which identify the row. :func:`fill` computes the rows that
the file does not hold yet, so an interrupted script continues where it stopped.
"""

import csv
import io
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.common.output import output_file

Row = dict[str, Any]


def make_parser(description: str, quick: str = "few samples, to see it run") -> ArgumentParser:
    """Command-line options that every table has; ``quick`` is the help of ``--quick``."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=output_file, help="table to write, and to resume from")
    parser.add_argument("--figure", type=output_file, help="picture to write")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def fill(
    cells: Sequence[Row], compute: Callable[..., Row], columns: Sequence[str], path: Path | None
) -> list[Row]:
    """Rows of all cells: the settings and the results of ``compute(**cell)``.

    Args:
        cells: settings of each row, all with the same names.
        compute: returns the results, numbers, under the names in ``columns``.
        columns: names of the results.
        path: CSV file; None writes nothing. Rows of other cells in the file are kept.

    Raises:
        ValueError: if the file holds another table.
    """
    names = [*cells[0], *columns]
    rows = read(path, names)
    known = {_name(row, cells[0]): row for row in rows}
    progress = tqdm(cells)
    for cell in progress:
        progress.set_description(" ".join(str(value) for value in cell.values()))
        name = _name(cell, cells[0])
        if name not in known:
            known[name] = cell | compute(**cell)
            rows.append(known[name])
            write(path, names, rows)
    return [known[_name(cell, cells[0])] for cell in cells]


def read(path: Path | None, names: Sequence[str]) -> list[Row]:
    """Rows of a file; an empty list if the file does not exist yet."""
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or []) != list(names):
            raise ValueError(
                f"{path}: expected the columns {', '.join(names)}; got "
                f"{', '.join(reader.fieldnames or ['none'])}. Give the path of another file"
            )
        return [{name: _parse(text) for name, text in row.items()} for row in reader]


def write(path: Path | None, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Replace the file in one step, so that an interruption never leaves half a file."""
    if path is None:
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    part = path.with_name(path.name + ".part")
    part.write_text(text.getvalue(), newline="")
    part.replace(path)


def markdown_line(entries: Sequence[Any]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(str(entry) for entry in entries)} |"


def _name(row: Row, settings: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in settings)


def _parse(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
