"""New environments, and commands that run in them."""

import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path


def run(*command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Output of a command, which must not fail."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def install(python: str, *packages: str) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)


def environment(folder: Path, *packages: str) -> str:
    """The Python of a new environment with some packages."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    install(python, *packages)
    return python
