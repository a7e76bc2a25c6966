"""Random models start, have finite densities, and are compared as they should be."""

import jax
import numpy as np
import numpyro
import pytest
from numpyro import handlers
from numpyro.infer.util import initialize_model, log_density

from benchmarks.accuracy import random_models
from benchmarks.accuracy.grammar import LIKELIHOODS, TERMS, Plan, draw_model
from benchmarks.accuracy.random_models import Reference, compare, latent_supports
from support.compiling import quick_jit

FEW = (8, 16, 20)


def check_density(number):
    try:
        drawn = draw_model(number)
    except ImportError as error:  # some inverse functions need another package
        pytest.skip(str(error))

    @quick_jit
    def evaluate(key, y):
        info = initialize_model(key, drawn.model, model_args=(y,), validate_grad=False)
        return jax.value_and_grad(info.potential_fn)(info.param_info.z)

    for leaf in jax.tree.leaves(evaluate(jax.random.key(0), drawn.y)):
        assert np.all(np.isfinite(leaf)), drawn.words


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Continuous inference poorly handles circular")
@pytest.mark.parametrize(
    "number", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in range(60)]
)
def test_density_is_finite_where_fits_start(number):
    check_density(number)


def test_a_number_is_a_model():
    first, again = draw_model(8), draw_model(8)
    assert first.words == again.words
    np.testing.assert_array_equal(first.y, again.y)


def test_many_numbers_have_every_word():
    words = set()
    for number in range(400):
        plan = Plan(np.random.default_rng([number, 20_261_129]), 20)
        kind = list(TERMS)[number % len(TERMS)]
        TERMS[kind](plan, "x")
        words |= {word.partition(":")[0] for word in plan.words}
        LIKELIHOODS[list(LIKELIHOODS)[number % len(LIKELIHOODS)]](plan)
    assert words >= {"real", "positive", "unit", "slopes", "groups", "form", "path", "levels"}


def test_figures_are_reduced_by_two_standard_errors():
    rng = np.random.default_rng(1)
    z = rng.normal(size=(10_000, 2))
    z = (z - z.mean(0)) / z.std(0)
    reference = Reference(z, np.full((2, 2), 10_000.0), 1.0, 0.0)
    found = compare(z * [1.0, 1.3] + [0.5, 0.0], reference)
    # Two standard errors of a difference of means are 2 sqrt(2/10000); the kurtosis is near 3.
    np.testing.assert_allclose(found["mean"], 0.5 - 0.0283, atol=1e-3)
    np.testing.assert_allclose(found["high"], 1.3 * np.exp(-0.02), rtol=2e-3)
    assert found["low"] == 1.0
    assert found["worst"] == 0
    assert np.isnan(compare(np.full((5, 2), np.nan), reference)["mean"])


def test_references_that_are_not_trusted():
    draws, good = np.zeros((4, 1)), np.full((2, 1), 2_000.0)
    assert not Reference(draws, good, 1.001, 0.0).fault
    assert Reference(draws, good, np.nan, 0.0).fault == "R-hat nan"
    assert Reference(draws, good / 4, 1.001, 0.0).fault == "500 effective draws"
    assert Reference(draws, good, 1.001, 0.02).fault == "2.0% divergent"


@pytest.mark.thorough
def test_a_model_that_fails_is_a_row_and_a_model_without_data_is_put_aside(
    monkeypatch, tmp_path, capsys
):
    def fail(*_):
        raise TypeError("no fit")

    def no_data(number):
        raise ValueError(f"model {number}: expected finite data; got none")

    table = tmp_path / "rows.csv"
    monkeypatch.setattr(random_models, "fit_as_users_do", fail)
    assert random_models.main(["--models", "1", "--first", "8", "--csv", str(table)]) == 0
    assert "crash: 1 of 1: 8 (0)" in capsys.readouterr().out
    monkeypatch.setattr(random_models, "draw_model", no_data)
    assert random_models.main(["--models", "2", "--first", "8", "--csv", str(table)]) == 0
    printed = capsys.readouterr().out
    assert "put aside: 1 of 2: 9 (0)" in printed
    assert "TypeError: no fit" in table.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(6))
def test_a_walk_of_the_reference_has_the_same_density(number):
    plan = Plan(np.random.default_rng(number), 12)
    term = TERMS["walk"](plan, "x")

    def walk():
        numpyro.deterministic("rows", term())

    trace = handlers.trace(handlers.seed(plan.as_reference(walk), 0)).get_trace()
    values = {name: site["value"] for name, site in trace.items()}
    steps = values.pop("x_steps")
    ours = log_density(plan.as_reference(walk), (), {}, {**values, "x_steps": steps})[0]
    theirs, found = log_density(walk, (), {}, values)
    # Steps are the path over the scale, up to a shear.
    volume = steps.size * np.log(values["x_scale"])
    np.testing.assert_allclose(ours, theirs + volume, rtol=1e-4)
    np.testing.assert_array_equal(found["rows"]["value"], values["rows"])


@pytest.mark.thorough
def test_sites_of_the_reference_are_those_of_the_model():
    """Decentered sites are there as deterministic ones."""
    drawn = draw_model(4)
    assert drawn.reference is not drawn.model
    sites = set(latent_supports(drawn.model, drawn.y))
    sampled = set(latent_supports(drawn.reference, drawn.y))
    assert {f"{name}_decentered" for name in sites - sampled} == sampled - sites
    assert sites - sampled == {"groups1_parent"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [20, 8])
def test_fits_are_right_or_say_that_they_are_not(number):
    row = random_models.Bench(random_models.argparse.Namespace(quick=False, diagnose=False))
    assert row.compute(number, 0)["outcome"] in ("right", "called wrong", "put aside")
