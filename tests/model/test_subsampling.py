"""Models with subsampled plates at all of their rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI
from numpyro.infer.util import log_density

from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore._model import all_rows, joint, particle_model, particles
from numpyro_kscore._model.joint import evaluate_particles
from numpyro_kscore._model.program import Program, inspect_program
from numpyro_kscore._model.subsampling import (
    counted_once,
    few_rows,
    spread_rows,
    whole_plates,
)
from support.autoguides import first_state
from support.compiling import quick_jit

DATA = jnp.asarray(np.random.default_rng(0).normal(3.0, 1.0, 500).astype(np.float32))


def indexed(data, batch):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", len(data), subsample_size=batch) as rows:
        numpyro.sample("data", dist.Normal(mean, 1.0), obs=data[rows])


def handed(batch, size):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", size, subsample_size=len(batch)):
        numpyro.sample("data", dist.Normal(mean, 1.0), obs=batch)


def _density(model, *args):
    seeded = numpyro.handlers.seed(model, random.key(0))
    return quick_jit(lambda: log_density(seeded, args, {}, {"mean": 2.0})[0])()


def test_the_density_is_that_of_all_rows():
    whole = whole_plates(indexed, (DATA, 20), {})
    np.testing.assert_allclose(_density(whole, DATA, 20), _density(indexed, DATA, None), rtol=1e-6)


def test_batches_from_outside_stay_as_they_are():
    batch = DATA[:20]
    model = whole_plates(handed, (batch, 500), {})
    np.testing.assert_allclose(_density(model, batch, 500), _density(handed, batch, 500), rtol=1e-6)


def test_rows_that_are_drawn_can_count_as_often_as_they_are_there():
    """Each row of a plate within another counts once, whichever of the plates is subsampled."""

    def model(rows, columns):
        mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
        with (
            numpyro.plate("columns", 4, subsample_size=columns, dim=-1),
            numpyro.plate("rows", 500, subsample_size=rows, dim=-2),
        ):
            numpyro.sample("data", dist.Normal(mean, 1.0), obs=jnp.ones((rows, columns)))

    prior = dist.Normal(0.0, 10.0).log_prob(2.0)
    per_row = dist.Normal(2.0, 1.0).log_prob(1.0)
    for rows, columns, times in [(20, 4, 1), (20, 4, 3), (20, 2, 3), (500, 2, 3), (500, 4, 1)]:
        expected = prior + times * rows * columns * per_row
        got = _density(counted_once(model, times), rows, columns)
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.thorough
def test_guides_start_at_the_posterior_of_all_data():
    """A batch of 20 rows has a posterior whose mean is off by five standard deviations."""
    guide = AutoImplicit(indexed)
    guide.set_up(random.key(0), DATA, 20)
    precision = len(DATA) + 0.01
    mean, sd = float(jnp.sum(DATA)) / precision, precision**-0.5
    np.testing.assert_allclose(guide.start.gaussian.mean, mean, atol=0.1 * sd)
    np.testing.assert_allclose(guide.start.gaussian.factor, sd, rtol=0.1)


@pytest.mark.parametrize(("size", "count"), [(50, 7), (9, 9), (1000, 1), (2**29, 64)])
def test_rows_are_spread_evenly(size, count):
    rows = jax.jit(jax.vmap(lambda key: spread_rows(key, size, count)))(
        random.split(random.key(3), 4_000)
    )
    rows = np.sort(np.asarray(rows), axis=1)
    assert rows.shape == (4_000, count)
    assert np.all(np.diff(rows, axis=1) > 0)
    assert rows.min() >= 0
    assert rows.max() < size
    # Each bin of rows has its share: four standard errors of a binomial, which is wider than this.
    bins = min(size, 25)
    seen = np.bincount((rows.ravel().astype(np.int64) * bins) // size, minlength=bins)
    edges = -(-np.arange(bins + 1, dtype=np.int64) * size // bins)
    share = np.diff(edges) / size
    error = np.sqrt(rows.size * share * (1 - share))
    np.testing.assert_array_less(np.abs(seen - rows.size * share), 4 * error + 1e-9)


@pytest.mark.thorough
def test_many_rows_are_searched_in_part_and_then_all():
    """The search sees 8192 of 40 000 rows, whose mean is off by two standard deviations."""
    data = jnp.asarray(np.random.default_rng(1).normal(3.0, 1.0, 40_000).astype(np.float32))
    few = few_rows(indexed, (data, 20), {}, 8192)
    assert few.share == 8192 / 40_000
    assert few_rows(indexed, (data[:16_384], 20), {}, 8192) is None
    mean, sd = float(jnp.mean(data)), len(data) ** -0.5
    part = data[spread_rows(random.key(0), len(data), 8192)]
    assert abs(float(jnp.mean(part)) - mean) > sd
    expected = _density(indexed, part, None)
    prior = dist.Normal(0.0, 10.0).log_prob(2.0)
    np.testing.assert_allclose(
        _density(few.model, data, 20) - prior, (expected - prior) / few.share, rtol=1e-5
    )
    np.testing.assert_allclose(_density(counted_once(few.model), data, 20), expected, rtol=1e-5)
    guide = AutoImplicit(indexed)
    guide.set_up(random.key(0), data, 20)
    np.testing.assert_allclose(guide.start.gaussian.mean, mean, atol=0.05 * sd)
    np.testing.assert_allclose(guide.start.gaussian.factor, sd, rtol=0.05)
    # A search on all rows takes 2000.
    assert guide.start.num_gradients < 800


@pytest.mark.thorough
def test_an_expansion_of_all_rows_serves_many_steps(monkeypatch):
    """The loss of a batch of rows of equal curvature is then that of all, wherever the guide."""
    guide = AutoImplicit(indexed)
    guide.set_up(random.key(0), DATA, 20)
    svi = SVI(indexed, guide, optax.adam(1e-2), ImplicitELBO(8))
    params = svi.get_params(first_state(svi, DATA, 20))
    moved = {**params, "auto_loc": params["auto_loc"] + 0.5}
    args = svi.model, guide, DATA
    # Not affordable for 8 particles of 20 rows, but for 80 steps with as many.
    monkeypatch.setattr(particle_model, "MOST_PASSES", 0.5)
    assert svi.loss.expand(random.key(1), params, *args, 20, num_steps=1) is None
    assert svi.loss.expanded(None) is svi.loss

    @jax.jit
    def losses(params, moved):
        control_variate = svi.loss.expand(random.key(1), params, *args, 20, num_steps=80)
        here = svi.loss.expanded(control_variate)
        return [loss.loss(random.key(2), moved, *args, batch)
                for loss, batch in ((here, 20), (svi.loss, None))]  # fmt: skip

    np.testing.assert_allclose(*losses(params, moved), rtol=1e-5)


@pytest.mark.thorough
def test_a_group_that_no_batch_has_keeps_its_width():
    """Expansions of first order would make its likelihood linear where it has no row."""
    rng = np.random.default_rng(5)
    groups = jnp.asarray(np.where(np.arange(4_000) < 25, 1, 0))
    y = jnp.asarray(rng.random(4_000) < 0.4, jnp.int32)

    def model(batch):
        effects = numpyro.sample("effects", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with numpyro.plate("rows", 4_000, subsample_size=batch) as rows:
            logits = effects[groups[rows]]
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[rows])

    def guide(batch):
        numpyro.sample("effects", dist.Normal(jnp.full(2, -0.4), 0.4).to_event(1))

    program = Program({}, model, guide, (20,), {}, {})
    layout = inspect_program(random.key(0), program)

    @jax.jit
    def run(keys):
        control_variate = all_rows.expand(random.key(1), program, layout, 10_000)
        every = program._replace(model=lambda batch: model(None))

        def both(key):
            with_anchor = program._replace(control_variate=control_variate)
            return [evaluate_particles(key, one, layout, 64, 64)[0] for one in (with_anchor, every)]

        return jax.lax.map(both, keys)

    noisy, whole = run(random.split(random.key(2), 20))
    # The same noise; but loc + scale · noise is computed in two places of the program, with a fused
    # multiplication or without: half a unit in the last place of its terms, which are below 2.
    atol = 2 * np.finfo(np.float32).eps
    np.testing.assert_allclose(noisy.samples, whole.samples, rtol=0, atol=atol)
    # The slope of the score of the small group: -25 · .24 of the likelihood, -1/9 of the prior.
    slopes = [
        np.polyfit(np.ravel(found.samples[..., 1]), np.ravel(found.scores[..., 1]), 1)[0]
        for found in (noisy, whole)
    ]
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=0.15)


def slopes(x, y, batch):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=x[rows] @ weight), obs=y[rows])


def _evaluated(model, keys, *args, count=64):
    """The model at draws of a Gaussian guide, for each of several keys."""

    def guide(*args):
        for name, size in (("mean", ()), ("weight", (2,))):
            if name in names:
                fn = dist.Normal(jnp.full(size, 0.4), 0.1)
                numpyro.sample(name, fn.to_event(len(size)))

    names = set()

    def find_names():
        trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(*args)
        names.update(name for name, site in trace.items() if site["type"] == "sample")

    jax.eval_shape(find_names)
    program = Program({}, model, guide, args, {}, {})
    layout = inspect_program(random.key(0), program)

    def run(key):
        return evaluate_particles(key, program, layout, count, count)[0]

    return jax.jit(lambda keys: jax.lax.map(run, keys))(random.split(random.key(7), keys))


@pytest.mark.thorough
def test_rows_of_equal_curvature_make_no_noise():
    """Then the difference of two points is the same for all rows, and nothing of it is left."""
    noisy, whole = (_evaluated(indexed, 2, DATA, batch) for batch in (20, None))
    np.testing.assert_array_equal(noisy.samples, whole.samples)
    np.testing.assert_allclose(noisy.scores, whole.scores, rtol=1e-4)
    np.testing.assert_allclose(noisy.log_density, whole.log_density, rtol=1e-5)


def _logistic(rng, count=400):
    x = jnp.asarray(rng.normal(size=(count, 2)).astype(np.float32))
    return x, jnp.asarray(rng.random(count) < 1 / (1 + np.exp(-x[:, 0])), jnp.int32)


@pytest.mark.thorough
def test_the_expectation_is_that_of_all_rows_with_a_tenth_of_the_noise(monkeypatch):
    data = _logistic(np.random.default_rng(1))
    whole = _evaluated(slopes, 200, *data, None)
    errors = {}
    for passes in (0, particle_model.MOST_PASSES):
        monkeypatch.setattr(particle_model, "MOST_PASSES", passes)
        noisy = _evaluated(slopes, 200, *data, 20)
        np.testing.assert_array_equal(noisy.samples, whole.samples)
        errors[passes] = np.asarray(noisy.scores - whole.scores)  # (keys, particles, d)
    plain, corrected = errors.values()
    assert np.sqrt(np.mean(corrected**2)) < 0.1 * np.sqrt(np.mean(plain**2))
    # Particles share rows, so keys are what is independent: four of their standard errors.
    slope = np.einsum("kni,knj->kij", corrected, np.asarray(noisy.samples) - 0.4)
    for error in (corrected.mean(axis=1), slope.reshape(len(slope), -1)):
        standard_error = error.std(axis=0) / np.sqrt(len(error))
        np.testing.assert_array_less(np.abs(error.mean(axis=0)), 4 * standard_error)


@pytest.mark.thorough
def test_a_pass_over_all_rows_must_be_affordable(monkeypatch):
    data = _logistic(np.random.default_rng(1))
    seen = []
    monkeypatch.setattr(particle_model, "whole_plates", lambda *a: seen.append(a) or a[0])
    _evaluated(slopes, 1, *data, 2, count=32)  # 400 rows, 32 × 2 drawn
    assert not seen
    _evaluated(slopes, 1, *data, 4, count=32)
    assert seen


@pytest.mark.thorough
def test_parameters_of_the_model_are_corrected_too():
    x, y = _logistic(np.random.default_rng(2))

    def model(x, y, batch):
        shift = numpyro.param("shift", 0.3)
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch) as rows:
            numpyro.sample("y", dist.Bernoulli(logits=x[rows] @ weight + shift), obs=y[rows])

    def gradient(batch):
        def guide(*args):
            fn = dist.Normal(jnp.full(2, 0.4), 0.05)
            numpyro.sample("weight", fn.to_event(1))

        program = Program({"shift": jnp.array(0.3)}, model, guide, (x, y, batch), {}, {})
        layout = inspect_program(random.key(0), program)

        def run(key):
            draw = particles.at_source(particles.draw_particle, key, program, layout)
            draws = jax.vmap(draw)(particles.draw_sources(key, program, layout, (64,)))
            return joint.log_joint_and_gradients(draws, program, layout, None, False)

        return float(jax.jit(run)(random.key(3)).param_gradient["shift"])

    # Without the correction a batch of 20 rows is off by about 400 / 20 / 2 / 64**.5 = 1.3.
    np.testing.assert_allclose(gradient(20), gradient(None), atol=0.1)
