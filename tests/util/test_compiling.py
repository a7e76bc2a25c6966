"""Programs that serve all data of equal shapes: they must never serve the wrong data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.experimental.compilation_cache import compilation_cache

from numpyro_kscore._util import compiling
from numpyro_kscore._util.compiling import quick_jit


def _closure(data, key=0, factor=2.0, inner=None):
    """A function that closes over arrays and a key, at its own level and in programs inside."""
    inner = np.zeros(3) if inner is None else inner
    key = random.key(key)

    @jax.jit
    def nested(x):
        return x * inner + random.uniform(key)

    def closure(x, count):
        y = nested(x) + data
        y, _ = lax.scan(lambda c, _: (c + inner, None), y, None, length=3)
        return {"y": factor * y, "key": random.split(key)}, count

    return closure


CASES = {
    "data": {"data": np.arange(3.0)},
    "other data": {"data": np.ones(3)},
    "JAX data": {"data": jnp.full(3, 7.0)},
    "another key": {"data": np.ones(3), "key": 1},
    "another number": {"data": np.ones(3), "factor": 3.0},
    "inner data": {"data": np.ones(3), "inner": np.arange(3.0)},
    "other inner data": {"data": np.ones(3), "inner": np.full(3, 2.0)},
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_jit(case):
    fn, x = _closure(**CASES[case]), np.arange(3.0)
    ours, count = quick_jit(fn)(x, 5)
    theirs, _ = jax.jit(fn)(x, 5)
    np.testing.assert_allclose(ours["y"], theirs["y"], rtol=1e-6)
    assert jnp.all(ours["key"] == theirs["key"])
    assert count == 5


def _count_compiled(caplog, name):
    messages = [r.getMessage() for r in caplog.records]
    return sum("Finished XLA" in m and f"jit({name})" in m for m in messages)


def test_equal_programs_over_other_data_compile_once(caplog):
    def over(data):
        def summed(x):
            return jnp.sum(x * data)

        return quick_jit(summed)

    with jax.log_compiles():
        totals = [float(over(np.full(11, value))(np.ones(11))) for value in (1.0, 2.0, 3.0)]
    assert totals == [11.0, 22.0, 33.0]
    assert _count_compiled(caplog, "summed") == 1


def test_data_that_are_not_used_change_nothing():
    def over(first, second, used):
        def chosen(x):
            parts = jnp.asarray(first) * 2, jnp.asarray(second) * 2
            return x + parts[used]

        return quick_jit(chosen)

    one, two = np.ones(5), np.full(5, 10.0)
    found = [float(over(one, two, used)(np.zeros(5))[0]) for used in (0, 1, 0)]
    assert found == [2.0, 20.0, 2.0]

    def alone(first):
        def chosen(x):
            return x + jnp.asarray(first) * 2

        return quick_jit(chosen)

    assert float(alone(two)(np.zeros(5))[0]) == 20.0


def test_other_shapes_and_types_are_other_programs():
    double = quick_jit(lambda x: 2 * x)
    assert double(np.ones(2)).shape == (2,)
    assert double(np.ones(3)).shape == (3,)
    assert double(np.arange(3)).dtype == jnp.arange(3).dtype


def test_precisions_are_other_programs():
    def third(x):
        return x / np.float64(3.0)

    with jax.enable_x64(True):
        assert quick_jit(third)(np.float64(1.0)) == 1 / 3
    assert quick_jit(third)(np.float32(1.0)).dtype == jnp.float32
    draw = quick_jit(lambda key: random.normal(key, (2,), float))
    key = random.key(0)
    assert draw(key).dtype == jnp.float32
    with jax.enable_x64(True):
        assert draw(key).dtype == jnp.float64


def test_inside_transformations_it_is_jit():
    square = quick_jit(lambda x: x**2)
    assert jax.jit(square)(3.0) == 9.0
    assert jax.grad(square)(3.0) == 6.0
    np.testing.assert_array_equal(jax.vmap(square)(jnp.arange(3.0)), [0.0, 1.0, 4.0])


def test_it_steps_through_a_function_where_compiling_is_disabled():
    seen = []

    @quick_jit
    def square(x):
        seen.append(float(x))
        return x**2

    with jax.disable_jit():
        assert square(3.0) == 9.0
    assert seen == [3.0]


def test_keywords_are_static():
    calls = []

    @quick_jit
    def power(x, *, exponent):
        calls.append(exponent)
        return x**exponent if exponent > 1 else x

    assert [float(power(2.0, exponent=k)) for k in (1, 3, 1, 3)] == [2.0, 8.0, 2.0, 8.0]
    assert float(jax.jit(lambda x: power(x, exponent=2))(3.0)) == 9.0
    assert sorted(set(calls)) == [1, 2, 3]
    # Each of the first two was traced once.
    assert len(calls) == 3


def test_only_so_many_programs_are_kept(monkeypatch):
    monkeypatch.setattr(compiling, "MOST_KEPT", 2)
    monkeypatch.setattr(compiling, "_kept", type(compiling._kept)())
    for size in range(1, 5):
        quick_jit(lambda x: x + 1)(np.zeros(size))
    assert len(compiling._kept) == 2


@pytest.mark.thorough
def test_programs_are_traced_again_once_they_are_forgotten():
    traced = []

    @quick_jit
    def double(x):
        traced.append(x)
        return 2 * x

    x = np.arange(3.0)
    for _ in range(2):
        np.testing.assert_array_equal(double(x), 2 * x)
    compiling.forget_programs()
    np.testing.assert_array_equal(double(x), 2 * x)
    assert len(traced) == 2


@pytest.mark.parametrize("kept", [0, 100], ids=["empty", "cut short"])
def test_half_a_kept_program_is_compiled_again(kept, tmp_path):
    """A process finds half a program while another one is still writing it."""
    x = jnp.arange(7.0)
    before = jax.config.jax_compilation_cache_dir
    try:
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.jit(lambda x: x**3 + 5)(x)
        entries = list(tmp_path.glob("*-cache"))
        assert entries
        for entry in entries:
            entry.write_bytes(entry.read_bytes()[:kept])
        cubes = jax.jit(lambda x: x**3 + 5)(x)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    np.testing.assert_array_equal(cubes, np.arange(7.0) ** 3 + 5)


def test_long_sums_keep_their_trees():
    def over(count, dtype=jnp.float32):
        return jax.make_jaxpr(jax.jit(lambda x: jnp.sum(x[:, 0]) + 1))(jnp.ones((count, 2), dtype))

    lengths = {n: max(compiling._sum_lengths(over(n).jaxpr)) for n in (5, 3_000)}
    assert lengths == {5: 5, 3_000: 3_000}
    assert not list(compiling._sum_lengths(over(3_000, jnp.int32).jaxpr))
    known = compiling._known_options(False)
    assert compiling._options(over(5).jaxpr, False) == (known or None)
    found = compiling._options(over(3_000).jaxpr, False)
    assert compiling.SHORT_SUMS.keys().isdisjoint(found or {})


@pytest.mark.parametrize("batch", [3, 16, 64])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_sums_of_sums_are_those_of_numpy(batch, width):
    rng = np.random.default_rng(width)
    rows, points = rng.normal(size=(3000, width)), rng.normal(size=(batch, 300, width))
    group = np.repeat(np.arange(300), 10)

    def squares(point):
        means = jnp.sum(jnp.asarray(rows, jnp.float32) * point[group], axis=-1)
        return jnp.sum((means - 1) ** 2)

    found = compiling.quick_jit(jax.vmap(squares))(jnp.asarray(points, jnp.float32))
    expected = np.sum((np.sum(rows * points[:, group], axis=-1) - 1) ** 2, axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.optimized
@pytest.mark.parametrize(("count", "level"), [(5, 0), (100_000, 1)])
def test_only_small_programs_that_run_once_stay_as_they_are(count, level):
    program = jax.make_jaxpr(lambda x: 2 * x)(jnp.ones(count))
    options = compiling._options(program.jaxpr, True) or {}
    assert options.get("xla_backend_optimization_level", level) == level
    kept = compiling._options(program.jaxpr, False) or {}
    assert kept.get("xla_backend_optimization_level", 1) == 1


def test_a_program_that_ran_once_is_not_that_of_many_runs(monkeypatch):
    """Both have the same results, and each its own options."""

    def cube(x):
        return x**3

    monkeypatch.setattr(compiling, "_kept", type(compiling._kept)())
    once, many = quick_jit(cube, runs_once=True), quick_jit(cube)
    np.testing.assert_allclose(once(np.arange(5.0)), many(np.arange(5.0)), rtol=1e-6)
    assert len(compiling._kept) == 2


def test_an_option_that_a_compiler_does_not_know_is_left_out():
    assert compiling._is_known({"xla_backend_optimization_level": 1})
    assert not compiling._is_known({"xla_no_such_option": 1})


def test_sums_are_as_accurate_as_they_were():
    # Of 2 million numbers one after another the sum would stop growing at 2^24 / 10.
    values = np.full(2_000_000, 10.0, np.float32)
    total = quick_jit(lambda x: jnp.sum(x))(values)
    np.testing.assert_allclose(total, 2e7, rtol=1e-6)
    short = np.random.default_rng(0).normal(size=(50, 1_000)).astype(np.float32)
    found = quick_jit(lambda x: jnp.sum(x, axis=1))(short)
    # Rounding of a thousand terms: sqrt(1000) half units in the last place of partial sums near 30.
    error = np.sqrt(1_000) * np.finfo(np.float32).eps / 2 * 60
    np.testing.assert_allclose(found, short.astype(float).sum(1), atol=5 * error)
