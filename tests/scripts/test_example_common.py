"""Helpers of examples and benchmarks: options, resumable tables, a cache of compiled programs."""

import csv
import os
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from examples.common import tables
from examples.common.output import output_folder
from examples.start import picture

ROOT = Path(__file__).parents[2]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_interrupted_table_keeps_what_it_has(tmp_path):
    path, computed = tmp_path / "table.csv", []

    def compute(name, size):
        if len(computed) == 2:
            raise KeyboardInterrupt
        computed.append((name, size))
        return {"value": size / 3}

    todo = [{"name": name, "size": size} for name in ("a, b", "ν") for size in (1, 2)]
    with pytest.raises(KeyboardInterrupt):
        tables.fill(todo, compute, ("value",), path)
    assert [row["size"] for row in read(path)] == ["1", "2"]
    first, computed = list(computed), []
    rows = tables.fill(todo, compute, ("value",), path)
    assert first == [("a, b", 1), ("a, b", 2)]
    assert computed == [("ν", 1), ("ν", 2)]
    assert rows == [cell | {"value": cell["size"] / 3} for cell in todo]


def test_another_table_is_not_overwritten(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("name,other\na,1\n")
    with pytest.raises(ValueError, match="expected the columns name, value; got name, other"):
        tables.fill([{"name": "a"}], lambda name: {"value": 1}, ("value",), path)
    assert path.read_text() == "name,other\na,1\n"


@pytest.mark.slow
def test_compiled_programs_are_found_again(tmp_path):
    """They are in the user's cache folder, or in the folder that the environment names."""
    code = "from examples.common.compiled import keep_compiled; import jax; print(keep_compiled());"
    code += "jax.jit(lambda x: x + 1)(1)"
    settings = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    settings |= {"XDG_CACHE_HOME": str(tmp_path / "caches"), "PYTHONPATH": str(ROOT)}
    expected = tmp_path / "caches" / "numpyro_kscore" / "compiled"
    for folder in (expected, tmp_path / "chosen"):
        found = subprocess.run(
            [sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == str(folder)
        settings["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "chosen")
    assert any(expected.iterdir())


def test_folders_of_output_are_made(tmp_path, monkeypatch, capsys):
    """Reading the options makes the folders: before the work whose result is written."""
    made = tmp_path / "missing" / "folder"
    options = tables.make_parser("table").parse_args(["--csv", str(made / "table.csv")])
    tables.fill([{"name": "a"}], lambda name: {"value": 1}, ("value",), options.csv)
    assert read(options.csv) == [{"name": "a", "value": "1"}]

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(picture, "run_nuts", stop)
    with pytest.raises(KeyboardInterrupt):
        picture.main(["--out", str(tmp_path / "other" / "folder")])
    assert (tmp_path / "other" / "folder").is_dir()
    with pytest.raises(ArgumentTypeError, match=r"expected a folder; got x.png. Give the folder"):
        output_folder("x.png")
    with pytest.raises(SystemExit):
        picture.main(["--out", str(options.csv / "below a file")])
    assert "expected a folder that can be made" in capsys.readouterr().err
