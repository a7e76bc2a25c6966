"""Rows of a step that are drawn by how much the expansion of all rows leaves of them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_kscore._model.all_rows import expand
from numpyro_kscore._model.coreset import draw_rows, row_remainders, row_table
from numpyro_kscore._model.joint import evaluate_particles
from numpyro_kscore._model.program import Program, inspect_program


@pytest.mark.thorough
def test_the_weights_of_a_row_add_up_to_one_on_average():
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(0.0, 3.0, 300).astype(np.float32)
    sizes[[3, 7]] = np.nan, np.inf
    table = row_table(jnp.asarray(sizes))
    count, repeats = 40, 20_000

    @jax.jit
    @jax.vmap
    def weights(key):
        drawn = draw_rows(key, table, count)
        return jnp.zeros(300).at[drawn.rows].add(drawn.weights)

    found = np.asarray(weights(random.split(random.key(0), repeats)), np.float64)
    error = found.std(0) / repeats**0.5
    # The largest of 300 standard normals is above four and a half once in 500 times.
    np.testing.assert_array_less(np.abs(found.mean(0) - 1), 4.5 * error + 1e-6)
    # A quarter of the rows is drawn whatever they matter: no weight is above four times N/B, but
    # for the two strata that a row may lie in.
    assert found.max() < 2 * 4 * 300 / count
    # A row that matters much is in every batch, with a small error of its weight.
    assert found[:, np.argmax(np.nan_to_num(sizes, posinf=0.0))].std() < 0.2


@pytest.mark.parametrize("is_curved", [True, False])
def test_remainders_are_those_of_the_expansion(is_curved):
    """Three quarters of the cubic and the quartic are left, and nothing of expanded orders."""
    point, draws = jnp.array([0.3]), jnp.array([[1.3], [0.3]])
    orders = jnp.arange(5)
    found = row_remainders(lambda x: (x[0] - 0.3) ** orders, point, draws, is_curved)
    # The second draw is the point, where nothing is left.
    expected = np.array([0.0, 0.0, 0.0, 0.75, 0.75] if is_curved else [0.0, 0.0, 1.0, 0.75, 1.0])
    np.testing.assert_allclose(found, expected / 2**0.5, atol=1e-6)


GROUPS = jnp.asarray(np.where(np.arange(4_000) < 3, 1, 0))
COUNTS = jnp.asarray(np.random.default_rng(5).poisson(1.0, 4_000))


def model(batch):
    effects = numpyro.sample("effects", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", 4_000, subsample_size=batch) as rows:
        rate = jnp.exp(effects[GROUPS[rows]])
        numpyro.sample("y", dist.Poisson(rate), obs=COUNTS[rows])


def guide(batch):
    scales = jnp.array([0.02, 0.5])
    numpyro.sample("effects", dist.Normal(jnp.zeros(2), scales).to_event(1))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.slow
def test_a_group_of_three_rows_is_in_every_step(x64):
    """Third orders of its likelihood matter, and one batch in 67 has a row if all are as likely."""
    with jax.enable_x64(x64):
        program = Program({}, model, guide, (20,), {}, {})
        layout = inspect_program(random.key(0), program)
        every = program._replace(model=lambda batch: model(None))

        @jax.jit
        def run(keys):
            control_variate = expand(random.key(1), program, layout, 10_000)
            anchors = control_variate, control_variate._replace(rows=None)
            programs = [*(program._replace(control_variate=one) for one in anchors), every]

            def each(key):
                return [evaluate_particles(key, one, layout, 32, 32)[0].scores for one in programs]

            return jax.lax.map(each, keys)

        scores = [np.asarray(one, np.float64) for one in run(random.split(random.key(2), 400))]
    chosen, alike = (one - scores[2] for one in scores[:2])
    noise = [np.sqrt(np.mean(one**2, axis=tuple(range(one.ndim - 1)))) for one in (chosen, alike)]
    # In standard deviations. That of the large group is now the larger one.
    noise = [one * np.array([0.02, 0.5]) for one in noise]
    assert noise[0].max() < 0.1 * noise[1].max()
    # Particles of a key share rows: a mean over them for each key.
    by_key = chosen.mean(axis=tuple(range(1, chosen.ndim - 1)))
    error = by_key.std(0) / len(by_key) ** 0.5
    np.testing.assert_array_less(np.abs(by_key.mean(0)), 4 * error)
