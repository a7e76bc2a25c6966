"""Every benchmark can be started by its name and has a quick run."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    # One script only reads what another has measured.
    if "\ndef main(" in path.read_text() and path.stem != "tables"
]


def test_scripts_are_found():
    assert {name.split(".")[1] for name in SCRIPTS} == {
        "accuracy", "calibration", "mutation", "speed", "wae"
    }  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_there_is_a_quick_run(name, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(name).main(["--help"])
    assert stop.value.code == 0
    assert "--quick" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # Those that start processes or fit all parts are left out.
    [
        n
        for n in SCRIPTS
        if n.rpartition(".")[2] not in ("chip_code", "first_call", "mutation", "performance")
    ],
)
def test_quick_run(name, capsys):
    assert not importlib.import_module(name).main(["--quick"])
    assert len(capsys.readouterr().out.splitlines()) >= 2
