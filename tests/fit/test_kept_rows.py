"""Rows of a loader that every step keeps: whose, how often they count, and where there are none."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI

from numpyro_kscore import ImplicitELBO
from numpyro_kscore._fit.expansion import RowCollector, make_expander
from numpyro_kscore._fit.svi import inspect_svi
from numpyro_kscore._model.control_variate import with_kept_rows
from numpyro_kscore._model.joint import evaluate_particles
from numpyro_kscore._util.batches import Batches
from support.fits import KEY

ROWS, BATCH = 240, 12


def table():
    """Rows of which some are equal, some have no number, and two differ by the sign of a zero."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 40, (ROWS, 2)).astype(np.float32)
    x[:3], x[3:5], x[5] = np.nan, 0.0, [-0.0, 0.0]
    label = rng.integers(0, 2, ROWS)
    label[:6] = [0, 0, 1, 1, 1, 1]
    return x, label.astype(np.int32)


def epoch(data, seed):
    order = np.random.default_rng(seed).permutation(ROWS).reshape(-1, BATCH)
    return [(tuple(a[rows] for a in data), {}) for rows in order]


def collected(batches, size, count, first=None):
    collector = RowCollector(batches[0] if first is None else first, count)
    for part in (batches[:3], batches[3:]):
        stack = jax.tree.map(lambda *leaves: np.stack(leaves), *part)
        collector.add(stack, np.stack([size(batch) for batch in part]))
    return collector.kept()


def size_of(batch):
    """Rows without a number matter most, and ties are frequent."""
    x, label = batch[0]
    return np.where(np.isnan(x).any(1), 9.0, 5.0 * (x[:, 0] == 0) + label)


def value_of(x, label):
    return jnp.where(jnp.isnan(x), 7.0, x) @ jnp.array([1.0, 0.1]) + 100.0 * label


@pytest.mark.parametrize("count", [2, 5, 8, 400])
@pytest.mark.thorough
def test_the_mean_over_the_batches_is_the_sum_over_all_rows(count):
    """Whichever rows are kept, in an epoch whose order is another than that of the pass."""
    data = table()
    kept = collected(epoch(data, 1), size_of, count)
    sums = []
    for args, kwargs in epoch(data, 2):
        given, _, weights = with_kept_rows(args, kwargs, kept, ROWS)
        sums.append(weights @ value_of(*given))
    np.testing.assert_allclose(np.mean(sums), np.sum(value_of(*data)), rtol=1e-5)


def test_the_rows_that_matter_most_are_kept_with_all_their_equals():
    data = table()
    kept = collected(epoch(data, 1), size_of, 5)
    (x, label), shares = kept.batch[0], np.asarray(kept.shares)
    found = sorted(
        (round(float(share) * ROWS), bool(np.isnan(row).any()), int(one))
        for row, one, share in zip(np.asarray(x), np.asarray(label), shares, strict=True)
        if share
    )
    # Rows with a first number of zero and label 1 matter as much as others that there is no room
    # for, unless there are few of them.
    assert [one for one in found if one[1]] == [(1, True, 1), (2, True, 0)]
    zeros = np.all(data[0] == 0, axis=1) & (data[1] == 1)
    assert zeros.sum() >= 3
    ties = len(np.unique(data[0][(data[0][:, 0] == 0) & (data[1] == 1)], axis=0))
    assert len(found) == (2 + ties if 2 + ties <= 5 else 2)


def test_ties_that_not_all_have_room_are_left_out():
    data = table()
    kept = collected(epoch(data, 1), lambda batch: np.ones(BATCH), 5)
    np.testing.assert_array_equal(kept.shares, 0.0)


def test_nothing_is_kept_of_a_loader_whose_rows_are_not_the_same_twice():
    data = table()
    other = epoch(tuple(a + 1 for a in data), 3)[0]
    kept = collected(epoch(data, 1), size_of, 5, first=other)
    np.testing.assert_array_equal(kept.shares, 0.0)
    args, kwargs = other
    _, _, weights = with_kept_rows(args, kwargs, kept, ROWS)
    np.testing.assert_array_equal(weights, np.repeat([ROWS / BATCH, 0.0], [BATCH, 5]))


GROUPS = np.where(np.arange(4_000) < 3, 1, 0).astype(np.int32)
COUNTS = np.random.default_rng(5).poisson(1.0, 4_000).astype(np.int32)
ORDER = np.random.default_rng(1).permutation(4_000).reshape(-1, 20)
LOADER = [{"groups": GROUPS[rows], "counts": COUNTS[rows]} for rows in ORDER]


def model(groups, counts):
    effects = numpyro.sample("effects", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", 4_000, subsample_size=len(counts)):
        numpyro.sample("y", dist.Poisson(jnp.exp(effects[groups])), obs=counts)


def guide(groups, counts):
    scales = jnp.array([0.02, 0.5])
    numpyro.sample("effects", dist.Normal(jnp.zeros(2), scales).to_event(1))


def expanded(model):
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(16))
    batches = Batches(LOADER, (), {})
    given = batches.arguments(batches.first)
    state = svi.init(KEY, *given[0], **given[1])
    inference = inspect_svi(svi, state, given, batches)
    return inference, state, make_expander(inference, 1)


@pytest.mark.thorough
def test_a_group_of_three_rows_is_in_every_step():
    """Third orders of its likelihood matter, and one batch in 67 has one of its rows."""
    inference, state, expander = expanded(model)
    control_variate = expander.expand(state)
    shapes = [jax.tree.map(jnp.shape, one) for one in (control_variate, expander.like(state))]
    assert shapes[0] == shapes[1]
    rows = np.asarray(control_variate.kept.shares) * 4_000
    # The three rows of the small group, and those of the large one by their counts.
    kept = {name: np.asarray(a)[rows > 0] for name, a in control_variate.kept.batch[1].items()}
    assert np.sum(rows[rows > 0][kept["groups"] == 1]) == pytest.approx(3, rel=1e-5)
    stack = {name: jnp.stack([batch[name] for batch in LOADER]) for name in LOADER[0]}

    @jax.jit
    def run(keys):
        def each(given):
            key, batch = given
            found = []
            for one in (control_variate, control_variate._replace(kept=None)):
                program = inference.program_at(state, ((), batch))._replace(control_variate=one)
                found.append(evaluate_particles(key, program, inference.layout, 32, 32)[0])
            return found

        return jax.lax.map(each, (keys, stack))

    draws = run(random.split(random.key(2), len(LOADER)))
    x = np.asarray(draws[0].samples, np.float64)
    totals = np.bincount(GROUPS, COUNTS), np.bincount(GROUPS)
    exact = totals[0] - totals[1] * np.exp(x) - x
    sd = np.array([0.02, 0.5])
    noise = [np.sqrt(np.mean(((one.scores - exact) * sd) ** 2)) for one in draws]
    assert noise[0] < 0.1 * noise[1]


def effects_of():
    return numpyro.sample("effects", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def scaled_by_hand(groups, counts):
    rates = jnp.exp(effects_of()[groups])
    with handlers.scale(scale=200.0):
        numpyro.sample("y", dist.Poisson(rates).to_event(1), obs=counts)


def of_one_size(groups, counts):
    rates = jnp.exp(effects_of()[groups] + jnp.zeros(20))
    with numpyro.plate("rows", 4_000, subsample_size=20):
        numpyro.sample("y", dist.Poisson(rates), obs=counts)


def with_a_latent_of_each_row(groups, counts):
    effects = effects_of()
    with numpyro.plate("rows", 4_000, subsample_size=len(counts)):
        fn = dist.Categorical(jnp.full(2, 0.5))
        shift = numpyro.sample("shift", fn, infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Poisson(jnp.exp(effects[groups] + shift)), obs=counts)


@pytest.mark.parametrize("other", [scaled_by_hand, of_one_size, with_a_latent_of_each_row])
@pytest.mark.thorough
def test_models_whose_rows_cannot_be_more_keep_none(other):
    _, state, expander = expanded(other)
    assert expander.expand(state).kept is None
    assert expander.like(state).kept is None
