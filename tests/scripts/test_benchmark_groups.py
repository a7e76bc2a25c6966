"""The benchmark of groups of samples."""

import csv

import numpy as np
import pytest
from jax import random

from benchmarks.accuracy import groups


@pytest.mark.parametrize("name", groups.SEVERAL)
def test_there_are_as_many_modes_as_the_table_says(name):
    """The density between modes is a third of theirs at most, so a level of a half divides them."""
    number, draw = groups.of_target(name, 2)
    samples = np.asarray(draw(random.key(0), 4000), float)
    # Cells of one unit above the level, joined to their eight neighbors. A cell at a mode has 127
    # samples or more, with errors of a tenth.
    cells, counts = np.unique(np.floor(samples + 0.5), axis=0, return_counts=True)
    least = 0.5 * np.sort(counts)[-number]
    left, found = {tuple(cell) for cell in cells[counts > least]}, 0
    while left:
        found, edge = found + 1, [left.pop()]
        while edge:
            x, y = edge.pop()
            near = {(x + i, y + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            edge.extend(near)
    assert found == number


@pytest.mark.slow
def test_groups_are_counted_printed_and_written(tmp_path, capsys):
    path = tmp_path / "groups.csv"
    groups.main(["--quick", "--csv", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["ring", "far modes"]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert sum(int(row[name]) for name in groups.COLUMNS) == int(row["sets"])
    assert rows[1]["found_2"] == rows[1]["sets"]
