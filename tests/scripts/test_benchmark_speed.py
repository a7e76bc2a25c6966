"""The speed benchmarks compare equal results, and compute what they say."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.speed import (
    accelerator,
    gram,
    growth,
    large_n,
    many_posteriors,
    measuring,
    out_of_core,
    performance,
    precision,
    solving,
)
from numpyro_kscore.kernels import CurlFree
from numpyro_kscore.kernels._gram import make_gram
from numpyro_kscore.kernels._pairwise import squared_distances
from numpyro_kscore.regularizers import Tikhonov
from numpyro_kscore.solvers import ConjugateGradient


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.slow
def test_the_table_of_an_accelerator_goes_on(tmp_path, capsys, monkeypatch):
    """Rows that are there are kept; those of another device, and of failures, are rows, too."""
    path = tmp_path / "table.csv"
    call = ["--quick", "--csv", str(path), "--only"]
    accelerator.main([*call, "products"])
    capsys.readouterr()
    first = path.read_text()
    accelerator.main([*call, "products"])
    assert path.read_text() == first
    assert not capsys.readouterr().out
    accelerator.main(["--quick", "--only", "kernel"])
    assert float(capsys.readouterr().out.split("error ")[1]) < 1e-6

    def too_large():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nin detail")

    monkeypatch.setitem(accelerator.PARTS, "fits", lambda _: iter([("all", too_large)]))
    monkeypatch.setattr(accelerator, "device_name", lambda: "NVIDIA H100 80GB HBM3")
    accelerator.main([*call, "products", "fits"])
    rows = accelerator.read_table(path)
    assert [row["device"] for row in rows] == 2 * ["CPU"] + 3 * ["NVIDIA H100 80GB HBM3"]
    assert [row["path"] for row in rows[:4]] == 2 * ["matrix", "tiles"]
    assert all(float(row["ms"]) > 0 for row in rows[:4])
    assert rows[0]["share of float32 bound"] == ""
    assert 0 < float(rows[2]["share of float32 bound"]) < 0.1
    assert rows[4]["failed"] == "RESOURCE_EXHAUSTED: Out of memory"


def test_make_bench_measures_what_is_there(monkeypatch):
    assert "gpu" not in performance.default_parts()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert performance.default_parts() == ["gpu"]


def test_exact_moments_of_eight_schools():
    """Against a weighted sample of the prior: 200 000 draws, some tens of thousands effective."""
    y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    rng, scale = np.random.default_rng(0), many_posteriors.PRIOR_SCALE
    mu, tau = scale * rng.normal(size=200_000), scale * np.abs(rng.standard_cauchy(200_000))
    error2 = many_posteriors.ERRORS.astype(float) ** 2
    v = tau[:, None] ** 2 + error2
    log_weight = -0.5 * np.sum(np.log(v) + (y - mu[:, None]) ** 2 / v, axis=1)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    assert 1 / np.sum(weight**2) > 4e4
    theta = (tau[:, None] ** 2 * y + error2 * mu[:, None]) / v
    theta = theta + np.sqrt(tau[:, None] ** 2 * error2 / v) * rng.normal(size=theta.shape)
    x = np.column_stack([mu, np.log(tau), theta])
    mean = weight @ x
    sd = np.sqrt(weight @ (x - mean) ** 2)
    exact_mean, exact_sd = many_posteriors.exact_moments(y)
    # A standard error of at most 1/√40 000 = .005 of a standard deviation.
    np.testing.assert_allclose((mean - exact_mean) / exact_sd, 0.0, atol=0.025)
    np.testing.assert_allclose(sd / exact_sd, 1.0, atol=0.025)
