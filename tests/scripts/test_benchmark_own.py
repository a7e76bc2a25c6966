"""The comparison of ways to fit a guide of one's own."""

import csv

import jax
import numpy as np
import pytest

from benchmarks.accuracy import own_guides
from benchmarks.accuracy.targets import make_target


def test_every_method_takes_steps():
    assert all(method.by_fit or method.steps for method in own_guides.METHODS.values())
    assert set(own_guides.TOYS) == {"banana", "multimodal", "x_shape", "ring"}


def test_the_network_draws_every_latent_of_a_flat_prior_too():
    guide = own_guides.network_guide(make_target("ring"), jax.random.key(0), 5)
    seeded = own_guides.numpyro.handlers.seed(guide, jax.random.key(1))
    trace = own_guides.numpyro.handlers.trace(seeded).get_trace()
    assert trace["x"]["value"].shape == (2,)
    assert trace["network"]["value"][1]["w"].shape == (5, 5)


@pytest.mark.thorough
def test_the_table_is_written(tmp_path, capsys):
    table = tmp_path / "own.csv"
    arguments = ["--quick", "--csv", str(table), "--targets", "banana", "--seeds", "0"]
    own_guides.main([*arguments, "--methods", "fit, framed"])
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert int(row["steps"]) == 100
    assert all(np.isfinite(float(row[name])) for name in ("W", "mean", "low", "high", "cpu"))
    assert "fit, framed" in capsys.readouterr().out
