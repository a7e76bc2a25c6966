"""The benchmark of posteriordb's posteriors: comparison, check, densities."""

import itertools

import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro.infer.util import log_density

from benchmarks.accuracy import posteriordb
from benchmarks.accuracy.outcomes import SAID, classify, is_wrong_and_good
from benchmarks.accuracy.posteriordb import Folder, check, compare
from benchmarks.accuracy.posteriordb_models import PROGRAMS, _eta, _gp_poisson, _hidden_states


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    path = tmp_path_factory.mktemp("example")
    posteriordb.make_example(path)
    return Folder(path)


def test_there_are_fifty():
    assert len(PROGRAMS) == 50
    # Those that the specification marks: ten collinear regressions, and a jitter.
    assert sum(program.float64 for program in PROGRAMS.values()) == 11


def test_figures_of_a_known_error(example):
    reference = example.reference("nes1972")
    z = reference.sets.reshape(-1, 3)
    # The mean and spread of the two sets, 4000 of 10 000 draws: errors of 0.012 and 0.9 %.
    right = compare(reference, reference.mean + reference.sd * z)
    assert right["W"] < 1
    assert right["mean"] < 0.05
    assert 0.96 < right["low"] <= right["high"] < 1.04
    wrong = compare(reference, reference.mean + reference.sd * (z * [1.2, 1, 1] + [0, 0, -0.3]))
    np.testing.assert_allclose([wrong["mean"], wrong["high"]], [0.3, 1.2], atol=0.05)
    assert wrong["W"] > 2
    assert np.isnan(compare(reference, np.full((2000, 3), np.nan))["mean"])


@pytest.mark.thorough
def test_check_tells_the_model(example, monkeypatch):
    assert check(example, "nes1972") < posteriordb.LARGEST_T
    other = PROGRAMS["kidscore_momhs"].model  # a half-Cauchy prior, flat next to these 40 rows
    halved = lambda features, response: other(2 * features, response)  # noqa: E731
    monkeypatch.setitem(PROGRAMS, "nes1972", PROGRAMS["nes1972"]._replace(model=halved))
    assert check(example, "nes1972") > 10 * posteriordb.LARGEST_T


def test_hidden_states_sum_over_all_paths():
    rng = np.random.default_rng(3)
    emissions, moves = rng.normal(size=(5, 2)), rng.dirichlet([1, 1], size=2)
    paths = [
        np.prod([moves[a, b] for a, b in itertools.pairwise(path)])
        * np.exp(sum(emissions[t, s] for t, s in enumerate(path)))
        for path in itertools.product((0, 1), repeat=5)
    ]
    density, _ = log_density(lambda: _hidden_states(*moves, jnp.asarray(emissions)), (), {}, {})
    np.testing.assert_allclose(density, np.log(np.sum(paths)), rtol=1e-5)


def test_noise_of_a_process_is_found_again(x64):
    x, eta = jnp.linspace(-10, 10, 5), jnp.array([0.5, -1, 2, 0.1, 0.7])
    latents = {"rho": 3.0, "alpha": 1.5, "eta": eta}
    seeded = numpyro.handlers.substitute(_gp_poisson, latents)
    f = numpyro.handlers.trace(seeded).get_trace(x, jnp.ones(5, int))["f"]["value"]
    columns = {"rho": jnp.log(3.0), "alpha": jnp.log(1.5), "f": f}
    np.testing.assert_allclose(_eta(columns, x)["eta"], eta, rtol=1e-6)


def test_outcomes_are_told_apart():
    row = dict.fromkeys(SAID, "") | {"error": "", "converged": 1, "khat": 0.2}
    right, off = {"mean": 0.1, "low": 0.95, "high": 1.05}, {"mean": 0.1, "low": 0.8, "high": 1.05}
    assert classify(row | right) == "right"
    assert classify(row | right | {"doubt": "tail"}) == "right"
    assert classify(row | off) == "wrong and called good"
    for said in ({"doubt": "tail"}, {"warned": "fit: far"}, {"converged": 0}, {"verdict": "bad"}):
        assert classify(row | off | said) == "called wrong"
        assert not is_wrong_and_good(row | off | said)
    assert classify(row | off | {"khat": 0.9}) == "called wrong"
    assert is_wrong_and_good(row | off | {"khat": 0.9})
    assert classify(row | {"mean": "", "error": "ValueError: no"}) == "crash"
    assert classify(row | {"mean": ""}) == "put aside"
    assert classify(row | right | {"mean": float("nan")}) == "wrong and called good"


@pytest.mark.thorough
def test_a_model_that_fails_is_a_row(example, monkeypatch, tmp_path, capsys):
    def broken(**data):
        raise ValueError("no such\nmodel")

    monkeypatch.setitem(PROGRAMS, "nes1972", PROGRAMS["nes1972"]._replace(model=broken))
    table = tmp_path / "rows.csv"
    arguments = ["--quick", "--csv", str(table)]
    assert posteriordb.main(arguments) == 0
    assert "crash: 1 of 1: nes1972 (0)" in capsys.readouterr().out
    assert "ValueError: no such model" in table.read_text()
    monkeypatch.setattr(posteriordb, "fit_as_users_do", None)  # rows are not computed again
    assert posteriordb.main(arguments) == 0


def test_an_interrupt_keeps_no_row(monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(posteriordb, "fit_as_users_do", interrupted)
    table = tmp_path / "rows.csv"
    assert posteriordb.main(["--quick", "--csv", str(table)]) == 130
    assert not table.exists()
    assert "stopped" in capsys.readouterr().out


def test_a_folder_without_files_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        posteriordb.main(["--path", str(tmp_path)])
    assert "expected a folder with data.npz" in capsys.readouterr().err
