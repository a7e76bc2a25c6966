"""The parts of the demo that are not calls of the library."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer.util import log_density

from examples.start import bend, many_data_sets, model_comparison, random_function, tall, weights
from examples.start.methods import HEADER, Result, table_row
from support.compiling import quick_jit


def test_stored_draws_of_nuts_are_of_the_model():
    """The draws have a coordinate for each number of the model, and their two halves agree."""
    found = tall.stored()
    assert found.seconds > 60
    assert found.draws.shape[1] == 2 + tall.NUM_FEATURES + tall.NUM_CLINICS
    # The two halves agree: four standard errors at some 200 effective draws each.
    first, second = np.split(np.asarray(found.draws), 2)
    assert np.max(np.abs(first.mean(0) - second.mean(0)) / first.std(0)) < 4 * (2 / 200) ** 0.5


def test_the_tall_model_sees_its_batch():
    visits = tall.simulate(2_000)
    latents = {
        "mean": np.float32(-3.0),
        "spread": np.float32(0.5),
        "weights": np.zeros(tall.NUM_FEATURES, np.float32),
        "effects": np.full(tall.NUM_CLINICS, -3.0, np.float32),
    }
    shapes = []

    @quick_jit
    def density(latents, *visits):
        value, trace = log_density(tall.model, (tall.Visits(*visits),), {}, latents)
        shapes.append(trace["missed"]["fn"].shape())
        return value

    assert np.isfinite(density(latents, *visits))
    assert tall.flatten({k: v[None] for k, v in latents.items()}).shape == (1, 30)
    assert shapes == [(2_000,)]


def test_rows_of_the_table():
    draws = random.normal(random.key(0), (400, 3))
    row = table_row("NUTS", Result(2 * draws, 1.0, 10_000), draws)
    assert "10,000" in row
    assert row.split()[-1] == row.split()[-2] == "2.00"
    assert len(row) == len(HEADER)


@pytest.mark.thorough
def test_subjects_of_an_epoch_are_new_in_every_epoch():
    batches = many_data_sets.studies(random.key(0), 7, 2)
    epochs = [np.concatenate([levels for levels, _ in batches(k)]) for k in (0, 0, 1)]
    # The seventh is left out: all batches have one size.
    assert epochs[0].shape == (6, many_data_sets.NUM_TRIALS)
    np.testing.assert_array_equal(epochs[0], epochs[1])
    assert np.all(epochs[0] != epochs[2])


@pytest.mark.slow
def test_the_quick_run_for_many_data_sets_draws_its_figure(tmp_path):
    with pytest.warns(UserWarning, match="not converged"):
        many_data_sets.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").exists()


def test_the_encoder_does_not_see_the_order_of_trials():
    trials = random.normal(random.key(0), (2, 5, 2))
    encoder = many_data_sets.Encoder()
    params = quick_jit(encoder.init)(random.key(1), trials)
    apply = quick_jit(encoder.apply)
    np.testing.assert_allclose(apply(params, trials[:, ::-1]), apply(params, trials), atol=1e-5)


def test_ranks_are_uniform_where_draws_are_those_of_the_truth():
    draws = np.asarray(random.normal(random.key(0), (2_000, 400, 3)))
    truth = np.asarray(random.normal(random.key(1), (400, 3)))
    below = many_data_sets.ranks(draws, truth)
    # Four standard errors of a mean and of a share.
    assert np.all(np.abs(below.mean(0) - 0.5) < 4 * (1 / 12 / 400) ** 0.5)
    assert np.all(np.abs((below < 0.1).mean(0) - 0.1) < 4 * (0.09 / 400) ** 0.5)


@pytest.mark.thorough
def test_the_random_function_is_one_at_all_times():
    counts = random_function.simulate()
    assert counts.shape == random_function.TIMES.shape
    for model in (random_function.model, random_function.whitened):
        name = "log_rate" if model is random_function.model else "noise"
        value = np.zeros(random_function.NUM_TIMES, np.float32)
        density = quick_jit(
            lambda u, model=model, name=name: log_density(model, (counts,), {}, {name: u})[0]
        )
        assert np.isfinite(density(value))
    assert bend.flatten(
        {"mu": jnp.zeros(2), "tau": jnp.ones(2), "theta": jnp.zeros((2, 8))}
    ).shape == (2, 10)


@pytest.mark.thorough
def test_two_models_of_maize_by_their_evidence(capsys):
    model_comparison.main(["--quick"])
    said = capsys.readouterr().out
    found = re.search(r"heavy tails: ([\d.-]+) ± ([\d.]+) nats", said)
    assert found
    value, error = (float(number) for number in found.groups())
    # Quadrature over mean and log scale gives -77.9293 and -78.8731.
    assert abs(value - 0.9438) < 4 * error
    assert error < 0.2


@pytest.mark.thorough
def test_weights_do_not_see_a_mode_that_is_missing(tmp_path, capsys):
    weights.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").exists()
    lines = dict(re.findall(r"^(.*?)  +log evidence ([\d.-]+)", capsys.readouterr().out, re.M))
    assert float(lines["right"]) == pytest.approx(0.0, abs=1e-3)
    # There are no draws where the other mode is: all weights are .6, the share of this one.
    assert float(lines["a mode is missing"]) == pytest.approx(np.log(0.6), abs=1e-2)
