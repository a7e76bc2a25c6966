"""The benchmark of weights of distant modes."""

import csv
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy import modes
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.regularizers import NuMethod


@pytest.mark.parametrize("name", modes.TARGETS)
def test_densities_integrate_to_one_with_three_tenths_on_the_left(name):
    log_density = jax.vmap(modes.two(modes.TARGETS[name], 2).log_density)
    # Beyond these limits there is less than 1e-6; the trapezoid rule is exact for smooth densities.
    x, y = np.linspace(-9, 9, 721), np.linspace(-32, 6, 1521)
    points = np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)
    values = np.exp(np.asarray(log_density(jnp.asarray(points)), float))
    weights = values * (x[1] - x[0]) * (y[1] - y[0])
    assert np.sum(weights) == pytest.approx(1.0, abs=1e-4)
    # Half a cell of the density between the modes, which is below 1e-4, is on the line.
    assert np.sum(weights[points[:, 0] < 0]) == pytest.approx(modes.WEIGHT, abs=1e-4)


@pytest.mark.slow
def test_two_modes_are_printed_and_written(tmp_path, capsys, monkeypatch):
    # To choose a strength takes most of the time, and changes nothing here.
    cheap = functools.partial(ScoreEstimator, regularizer=NuMethod(20))
    monkeypatch.setattr(modes, "ScoreEstimator", cheap)
    path, bases = tmp_path / "modes.csv", ["student", "scikit-learn"]
    # The default base takes longest, and is in tests/estimators/test_mixture_base.py.
    modes.main(["--quick", "--csv", str(path), "--bases", *bases])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(bases)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["base"] for row in rows] == [base for base in bases for _ in range(2)]
    for line, base in zip(lines[2:], bases, strict=True):
        share, weight = (
            np.array([float(row[name]) for row in rows if row["base"] == base])
            for name in ("share", "weight")
        )
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[3] == base
        expected = [
            np.sqrt(np.mean((share / 0.3 - 1) ** 2)),
            np.sqrt(np.mean((weight / 0.3 - 1) ** 2)),
            np.sqrt(np.mean((weight - share) ** 2)) / 0.3,
        ]
        np.testing.assert_allclose([float(c) for c in cells[4:7]], expected, atol=2e-3)
