"""Whatever the data: finite or said not to be, the same in all units, from any thread and key."""

import copy
import os
import pickle
import resource
import threading

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import example, given, settings
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import (
    AutoImplicit,
    Implicit,
    ImplicitELBO,
    KernelExponentialFamily,
    ScoreEstimator,
)
from numpyro_kscore._fit.checkpoint import load_checkpoint, save_checkpoint
from numpyro_kscore.estimators import Subset, kef_cg, nu_method, ssge, stein
from numpyro_kscore.regularizers import NuMethod
from support.compiling import default_jit, package_jit, quick_jit

# Few shapes, so that few programs are compiled: what varies freely are the numbers.
MANY, FEW = (16, 3), (2, 1)
ESTIMATORS = {
    "default": ScoreEstimator(),
    "nu_method": nu_method(),
    "kef_cg": kef_cg(),
    "ssge": ssge(),
    "stein": stein(),
    "subset": ScoreEstimator(regularizer=NuMethod(20), subset=Subset(fraction=0.5)),
    "chosen for a subset": ScoreEstimator(subset=Subset(fraction=0.5)),
}
# What is chosen for a subset is chosen as for all samples; both ways are in the list above.
IN_UNITS = [
    pytest.param(name, shape, marks=pytest.mark.slow if "chosen" in name else pytest.mark.thorough)
    for name, shape in [
        *((name, MANY) for name in ESTIMATORS if name != "ssge"),
        ("default", FEW),
        ("default", (3, 5)),
    ]
]
searched = settings(deadline=None, max_examples=40, derandomize=True, database=None)


@st.composite
def samples(draw, shape):
    """Points on a lattice, many of them equal or in line, and how their coordinates stand apart.

    Whole numbers, scaled by powers of two: multiplying them by another power is exact.
    """
    n, dim = shape
    rows = st.lists(st.integers(-8, 8), min_size=dim, max_size=dim)
    lattice = np.asarray(draw(st.lists(rows, min_size=n, max_size=n)), float)
    exponents = draw(st.lists(st.integers(-4, 4), min_size=dim, max_size=dim))
    offset = draw(st.integers(-200, 200))
    return (lattice + offset) * 2.0 ** np.asarray(exponents)


def everything(estimator, x, points):
    score = estimator.fit(x)
    return score.at_samples, score(points), score.divergence(points), score.info, score


# As it compiles fastest, for what no optimization of the compiler changes; and optimized, by the
# package and by users.
evaluate_quickly = quick_jit(everything)
OPTIMIZED = {"package": package_jit(everything), "user": default_jit(everything)}
# In single precision: with a choice of the strength, and with what the paper prescribes.
IN_SINGLE_PRECISION = [
    pytest.param("default", "package", marks=pytest.mark.slow),
    ("nu_method", "user"),
    *(
        pytest.param(name, "user", marks=pytest.mark.slow)
        for name in ESTIMATORS
        if name != "nu_method"
    ),
]


def same(a, b):
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(np.array_equal(x, y) for x, y in zip(leaves, others, strict=True))


def between(x):
    """Two points that lie where the samples lie, whatever the dimension of that."""
    return np.stack([0.75 * x[0] + 0.25 * x[1], 0.5 * x[0] + 0.5 * x.mean(axis=0)])


@pytest.mark.parametrize(("name", "shape"), [("ssge", MANY), *IN_UNITS])
def test_any_samples_in_any_units(name, shape, x64):
    """Finite, and the same when all units change by a power of two, 2^±27 = 1e±8.

    A constant of ours that has units would be off by a factor, rounding by some 1e-16 times what
    an inverse with λ = 1e-3 makes of it.
    """
    estimator = ESTIMATORS[name]

    @searched
    @given(samples(shape), st.integers(-27, 27))
    @example(np.zeros(shape), 0)
    @example(np.ones(shape) * 3, 27)
    def holds(x, exponent):
        unit = 2.0**exponent
        plain = evaluate_quickly(estimator, x, between(x))
        scaled = evaluate_quickly(estimator, unit * x, between(unit * x))
        assert bool(plain[3].finite)
        for value, other, power in zip(plain[:3], scaled[:3], (1, 1, 2), strict=True):
            assert np.isfinite(value).all()
            assert np.isfinite(other).all()
            # The scale of the paper, 1 over a length squared, has units; and a coordinate that is
            # always the same does not say what its own are.
            has_units = not (estimator.normalize or estimator.kernel.is_scalar)
            if has_units or (x == x[0]).all(axis=0).any():
                continue
            restored = np.asarray(other) * unit**power
            assert np.abs(restored - value).max() <= 1e-6 * np.abs(value).max()

    holds()


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "compiled_by"), IN_SINGLE_PRECISION)
def test_any_samples_in_single_precision(name, compiled_by):
    estimator, evaluate = ESTIMATORS[name], OPTIMIZED[compiled_by]

    @searched
    @given(samples(MANY), st.integers(-27, 27))
    def holds(x, exponent):
        x = (2.0**exponent * x).astype(np.float32)
        *values, info, _ = evaluate(estimator, x, between(x))
        assert all(np.isfinite(value).all() for value in values)
        assert bool(info.finite)

    holds()


@pytest.mark.parametrize(("name", "compiled_by"), IN_SINGLE_PRECISION)
@pytest.mark.thorough
def test_values_that_are_not_finite_are_never_hidden(name, compiled_by):
    estimator, shape, evaluate = ESTIMATORS[name], MANY, OPTIMIZED[compiled_by]

    @searched
    @given(
        samples(shape),
        st.sampled_from([np.nan, np.inf, -np.inf]),
        st.integers(0, shape[0] - 1),
        st.integers(0, shape[1] - 1),
    )
    def holds(x, value, row, column):
        x = x.astype(np.float32)
        x[row, column] = value
        info = evaluate(estimator, x, np.zeros((2, shape[1]), np.float32))[3]
        assert not bool(info.finite)
        with pytest.raises(FloatingPointError, match="not finite"):
            info.raise_if_failed()
        with pytest.raises(ValueError, match=r"expected.*finite.*got"):
            estimator.fit(x)

    holds()


# ---------------------------------------------------------------------------------- inference


def model(scale):
    x = numpyro.sample("x", dist.Normal(jnp.zeros(2), scale).to_event(1))
    numpyro.factor("bend", -0.5 * (x[1] / scale - (x[0] / scale) ** 2) ** 2)


def guide(scale):
    matrix = numpyro.param("matrix", jnp.asarray([[1.0, 0.0], [0.3, 0.5]]))
    unit = dist.Normal(jnp.zeros(2), 1.0).to_event(1)
    noise = numpyro.sample("noise", unit, infer={"is_auxiliary": True})
    numpyro.sample("x", Implicit(scale * jnp.tanh(matrix @ noise), 1))


@pytest.mark.thorough
def test_the_objective_does_not_know_units():
    """Latents of size 1e-8 to 1e8: the same gradient, and a loss that differs by their logarithm.

    Scales cancel between the model's density and the guide's entropy.
    """
    elbo = ImplicitELBO(32)
    params = {"matrix": jnp.asarray([[1.0, 0.0], [0.3, 0.5]])}
    run = quick_jit(
        lambda scale: jax.value_and_grad(
            lambda p: elbo.loss(random.key(0), p, model, guide, scale)
        )(params)
    )
    loss, gradient = run(1.0)

    @searched
    @given(st.integers(-27, 27))
    def holds(exponent):
        value, other = run(2.0**exponent)
        np.testing.assert_allclose(value, loss, rtol=1e-4)
        error = np.abs(other["matrix"] - gradient["matrix"]).max()
        assert error < 1e-4 * np.abs(gradient["matrix"]).max()

    holds()


def make_svi():
    return SVI(model, AutoImplicit(model, hidden_dims=(8,)), optax.adam(1e-2), ImplicitELBO(16))


@pytest.mark.slow
def test_no_step_makes_a_nan_on_its_way():
    """JAX finds no NaN in the results of a step and of a fit, forwards and backwards."""
    svi = make_svi()
    state = svi.init(random.key(0), 1.0)
    with jax.debug_nans(True), jax.debug_infs(True):
        for _ in range(2):
            state, loss = jax.jit(svi.update)(state, 1.0)
        score = ScoreEstimator().fit(random.normal(random.key(1), (20, 3)))
        values = (loss, score(jnp.ones((2, 3))), score.log_density(jnp.ones((2, 3))))
        assert all(np.isfinite(value).all() for value in values)
        with pytest.raises(FloatingPointError):  # so JAX does look
            jnp.log(jnp.zeros(()))


@pytest.mark.thorough
def test_threads_do_not_see_each_other():
    """Four fits at once, each of other data, are the four one after another.

    Inference is for one thread: NumPyro's handlers are on a stack that all threads share.
    """
    # Neither this estimator nor these shapes are anywhere else, so all four trace and compile.
    estimator = ScoreEstimator(regularizer=NuMethod(7))
    generator = np.random.default_rng(0)
    sets = [generator.normal(size=(11, 2)).astype(np.float32) * (k + 1) for k in range(4)]

    def run(k):
        return evaluate_quickly(estimator, sets[k], sets[k][:2])

    found = [None] * 4
    barrier = threading.Barrier(4)

    def in_thread(k):
        barrier.wait()
        found[k] = run(k)

    threads = [threading.Thread(target=in_thread, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        assert same(found[k], run(k))


# ------------------------------------------------------------------------------ objects, files


@pytest.mark.thorough
def test_results_can_be_pickled_and_copied():
    x = np.random.default_rng(0).normal(size=MANY).astype(np.float32)
    # A program of tests above.
    score = OPTIMIZED["package"](ESTIMATORS["default"], x, between(x))[-1]
    for made in (score, *ESTIMATORS.values()):
        assert same(pickle.loads(pickle.dumps(made)), made)
        assert same(copy.deepcopy(made), made)
    restored = pickle.loads(pickle.dumps(score))
    np.testing.assert_array_equal(restored(x), score(x))
    prior = KernelExponentialFamily(x, score)
    restored = pickle.loads(pickle.dumps(prior))
    np.testing.assert_array_equal(restored.log_prob(x), prior.log_prob(x))


def test_a_stop_while_a_checkpoint_is_written_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "fit.npz"
    first = {"a": jnp.arange(3.0), "key": random.key(1)}
    save_checkpoint(path, first, {"steps": 1}, np.zeros(2))
    for broken in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(path, {"a": jnp.ones(3), "key": random.key(2)}, {}, np.zeros(2))
    tree, record, _ = load_checkpoint(path, first)
    np.testing.assert_array_equal(tree["a"], first["a"])
    assert record == {"steps": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["fit.npz"]


@searched
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_checkpoint_is_refused_or_whole(tmp_path_factory, place, change):
    """One byte of a file is another: an error in words, or an archive's byte that means nothing."""
    path = tmp_path_factory.mktemp("damaged") / "fit.npz"
    tree = {"a": jnp.arange(3.0)}
    save_checkpoint(path, tree, {"steps": 1}, np.zeros(2))
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= change
    path.write_bytes(content)
    restored, record = tree, {"steps": 1}
    try:
        restored, record, _ = load_checkpoint(path, tree)
    except ValueError as error:
        # Anything else that is raised is a failure.
        if "checkpoint: expected" not in str(error):
            raise
    np.testing.assert_array_equal(restored["a"], tree["a"])
    assert record == {"steps": 1}


@pytest.mark.slow
def test_memory_is_flat_over_many_steps():
    """A hundred thousand steps by ``svi.update``, after the first tenth of them."""
    svi = make_svi()
    state = svi.init(random.key(0), 1.0)
    update = jax.jit(svi.update)
    for step in range(100_000):
        state, loss = update(state, 1.0)
        if step == 10_000:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert np.isfinite(loss)
    # Kilobytes; what an allocator may take for itself.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
