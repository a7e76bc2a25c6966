"""The speed benchmarks compare equal results, and compute what they say."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.speed import gram, growth, large_n, measuring, out_of_core, precision, solving
from numpyro_kscore.kernels import CurlFree
from numpyro_kscore.kernels._gram import make_gram
from numpyro_kscore.kernels._pairwise import squared_distances
from numpyro_kscore.regularizers import Tikhonov
from numpyro_kscore.solvers import ConjugateGradient


def test_both_forms_of_a_product_are_one_product():
    points, v = gram.problem(20, 3)
    s = squared_distances(points, points, jnp.asarray(True))
    operator = make_gram(CurlFree(), points, s, jnp.ones(()), 3, False)
    np.testing.assert_allclose((operator @ v.T).T, gram.plain_product(points, v), atol=1e-6)


@pytest.mark.parametrize("form", [solving.blocks, solving.hessians], ids=["blocks", "autodiff"])
def test_dense_solution_is_that_of_conjugate_gradients(form):
    x = solving.draws(12, 2)
    scores = solving.plain(Tikhonov(1e-2), ConjugateGradient(100, 1e-6), 2).at_samples(x).scores
    assert solving.difference(scores, solving.dense_kef(form, 1e-2, x)) < 1e-4


def test_score_of_the_bananas():
    """Its mean is zero and its covariance with x the negative identity: Stein's identity.

    50 000 draws: entries have a standard error of at most .012.
    """
    x = large_n.bananas(jax.random.key(0), 50_000, 4)
    s = large_n.score_of_bananas(x)
    np.testing.assert_allclose(s.mean(0), 0.0, atol=0.05)
    np.testing.assert_allclose(s.T @ x / len(x), -np.eye(4), atol=0.06)


@pytest.mark.parametrize(("bits", "unit"), [(10, 2.0**-10), (7, 2.0**-7)])
def test_rounded_mantissas(bits, unit):
    values = jnp.linspace(1.0, 2.0, 1001)
    short = precision.shortened(values, bits)
    np.testing.assert_array_equal(short / unit, np.round(short / unit))
    assert float(jnp.max(jnp.abs(short - values))) <= unit / 2
    np.testing.assert_array_equal(precision.shortened(-values, bits), -short)


def test_growth_of_a_known_law():
    table = [{"what": "samples", "n": n, "d": 2, "ms": 3e-4 * n**1.5} for n in (9, 64, 128, 256)]
    assert growth.exponents(table) == {"samples": pytest.approx(1.5)}


def test_times_and_tables(tmp_path, capsys):
    fast, slow = jnp.ones((2, 2)), jnp.ones((700, 700))
    times = measuring.minimum_seconds(
        {"fast": lambda: fast @ fast, "slow": lambda: slow @ slow @ slow}, budget=0.05
    )
    assert 0 < times["fast"] < times["slow"]
    with measuring.counted_compilations() as found:
        jax.jit(lambda x: x + 41)(1.0)
    assert len(found) == 1
    path = tmp_path / "table.csv"
    measuring.write_table(path, [{"a": 1.23456, "b": "x"}, {"a": float("nan"), "c": 12345.6}])
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["a", "b", "c"], ["1.23", "x", ""], ["", "", "12346"]]
    assert "1.23 | x" in capsys.readouterr().out


def test_the_reference_of_data_in_a_file(tmp_path):
    """It is where the gradient vanishes; blocks are the rows of the file, and are written once."""
    path = out_of_core.write_data(tmp_path, 3_000)
    rows = np.concatenate(list(out_of_core.blocks(path, 1_000)))
    assert rows.shape == (3_000, out_of_core.DIM + 1)
    found = out_of_core.reference(path)
    x, y = rows[:, :-1].astype(float), rows[:, -1]
    p = 1 / (1 + np.exp(-x @ found.mean))
    np.testing.assert_allclose(x.T @ (y - p), found.mean, atol=1e-6)
    curvature = (x * (p * (1 - p))[:, None]).T @ x + np.eye(out_of_core.DIM)
    np.testing.assert_allclose(found.sd**2, np.diag(np.linalg.inv(curvature)), rtol=1e-9)
    written = path.stat().st_mtime_ns
    assert out_of_core.write_data(tmp_path, 3_000).stat().st_mtime_ns == written
