"""Functions as latents: the points at which a step measures them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers

from numpyro_kscore import ImplicitELBO
from numpyro_kscore._model.particles import draw_particle, with_shared
from numpyro_kscore._model.program import Program, inspect_program
from numpyro_kscore.functions import measure
from support.compiling import quick_jit
from support.doubles import GaussianScore
from support.linear_functions import AUXILIARY, POOL, X, Y, model


def sets(seeds, batch_size, num_points):
    """The measurement sets that guide and model see at each step, for each of five particles."""
    seen = {"guide": [], "model": []}

    def recorded(who):
        def run(x, y, pool):
            at = measure(x, batch_size, pool, num_points)
            jax.debug.callback(lambda points: seen[who].append(np.asarray(points)), at.points)
            if who == "guide":
                shift = numpyro.sample("shift", dist.Normal(), infer=AUXILIARY)
                numpyro.sample("f", dist.Normal(shift + at.points[:, 0], 0.1).to_event(1))
            else:
                f = numpyro.sample("f", dist.Normal(jnp.zeros(len(at.points)), 1.0).to_event(1))
                with at.data:
                    numpyro.sample("y", dist.Normal(at.of_data(f), 1.0), obs=y[at.rows])

        return run

    elbo = ImplicitELBO(5, debias=None, estimator=GaussianScore())
    run = quick_jit(
        lambda key: elbo.loss(key, {}, recorded("model"), recorded("guide"), X, Y, POOL)
    )
    for seed in seeds:
        jax.block_until_ready(run(random.key(seed)))
        jax.effects_barrier()
        yield {who: np.stack(points) for who, points in seen.items()}
        for points in seen.values():
            points.clear()


@pytest.mark.thorough
def test_one_set_for_all_particles_and_another_for_every_step():
    drawn = []
    for seen in sets((0, 1), 4, 3):
        drawn.append(seen["model"][0])
        for points in seen.values():
            np.testing.assert_array_equal(points, np.broadcast_to(drawn[-1], points.shape))
        rows, others = drawn[-1][:4, 0], drawn[-1][4:, 0]
        assert len(set(rows.tolist())) == 4
        assert set(rows.tolist()) <= set(np.asarray(X[:, 0]).tolist())
        assert set(others.tolist()) <= set(np.asarray(POOL[:, 0]).tolist())
    assert not np.array_equal(*drawn)


def test_what_is_observed_counts_for_all_data():
    scales = {}

    @quick_jit
    def run(key):
        with handlers.seed(rng_seed=key):
            at = measure(X, 2, POOL, 3)
        trace = handlers.trace(handlers.seed(model, key)).get_trace(X, Y, POOL, 2)
        scales.update({name: trace[name]["scale"] for name in ("y", "f")})
        return at.points, at.of_data(at.points), X[at.rows]

    points, of_data, rows = run(random.key(0))
    assert scales == {"y": 3.0, "f": None}
    assert points.shape == (5, 1)
    np.testing.assert_array_equal(of_data, rows)


def test_all_points_by_default():
    with handlers.seed(rng_seed=0):
        at = measure(X)
        both = measure(X, pool=POOL, name="other")
    np.testing.assert_array_equal(at.points, X)
    np.testing.assert_array_equal(both.points, jnp.concatenate([X, POOL]))


def test_inputs_of_any_shape():
    @quick_jit
    def points(key):
        with handlers.seed(rng_seed=key):
            return measure(jnp.zeros((5, 4, 3)), 2, jnp.ones((7, 4, 3)), 1).points

    np.testing.assert_array_equal(points(random.key(0))[:, 0, 0], [0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((X, 7), ValueError, "batch_size: expected at most the number of inputs, 6; got 7"),
        ((X, 2.0), TypeError, "batch_size: expected an integer; got 2.0"),
        ((X, 2, POOL, 201), ValueError, "num_points: expected at most the number of inputs, 200"),
        ((X, 2, None, 3), ValueError, "num_points: expected none without a pool; got 3"),
        ((X, 2, POOL[:, 0], 3), ValueError, r"pool: expected inputs of shape \(1,\)"),
        ((1.0,), ValueError, r"x: expected shape \(m, ...\), one input a row; got \(\)"),
    ],
)
def test_measurement_errors(args, error, message):
    with pytest.raises(error, match=message), handlers.seed(rng_seed=0):
        measure(*args)


def test_rows_behind_latents_are_shared_and_others_are_not():
    """A plate of the data alone is drawn anew for every particle, as in plain NumPyro."""

    def shared(at_rows):
        def some_guide():
            with numpyro.plate("data", 6, subsample_size=2) as rows:
                start = X[rows, 0] if at_rows else jnp.zeros(2)
            unit = numpyro.sample("unit", dist.Normal(), infer=AUXILIARY)
            numpyro.sample("f", dist.Normal(start + unit, 1.0).to_event(1))

        def some_model():
            f = numpyro.sample("f", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
            with numpyro.plate("data", 6, subsample_size=2):
                numpyro.sample("y", dist.Normal(f, 1.0), obs=jnp.zeros(2))

        names = []

        @quick_jit
        def run(keys):
            program = Program({}, some_model, some_guide, (), {}, {})
            structure = inspect_program(keys[0], program)
            names.extend(structure.shared_plates)
            program = with_shared(keys[1], program, structure)
            draws = jax.vmap(lambda key: draw_particle(key, program, structure))(keys[2:])
            return program.plates, draws.plates

        of_step, of_particles = run(random.split(random.key(0), 8))
        return tuple(names), of_step, of_particles

    names, of_step, of_particles = shared(at_rows=True)
    assert names == ("data",)
    assert of_step["data"].shape == (2,)
    # Not copied for every particle; from copies a model would compute everything as often.
    assert of_particles == {}
    names, of_step, of_particles = shared(at_rows=False)
    assert names == ()
    assert of_step == {}
    assert np.ptp(of_particles["data"], axis=0).max() > 0
