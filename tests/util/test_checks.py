"""Input of estimators that is refused before anything is compiled, and what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import Median, nu_method
from numpyro_kscore.kernels import IMQ, CurlFree, Matern, RationalQuadratic
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import Dense

SAMPLES = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": IMQ()}, r"kernel: expected a kernel.*got IMQ\(exponent=0.5\)"),
        ({"kernel": CurlFree}, r"kernel: expected a kernel.*got <class"),
        ({"kernel": CurlFree("imq")}, r"profile: expected a radial profile.*got 'imq'"),
        ({"kernel": NuMethod(10)}, r"kernel: expected a kernel.*got NuMethod\(num_steps=10"),
        ({"regularizer": "auto"}, r"regularizer: expected a filter.*got 'auto'"),
        ({"solver": "krylov"}, r"solver: expected a solver.*got 'krylov'"),
    ],
)
def test_parts_of_another_kind_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        ScoreEstimator(**options).fit(SAMPLES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bandwidth": jnp.ones(3)}, r"bandwidth: expected one number; got shape \(3,\)"),
        ({"bandwidth": Median(jnp.ones(2))}, r"bandwidth: expected one number; got shape \(2,\)"),
        ({"regularizer": Tikhonov(jnp.ones(2))}, r"regularizer: expected one number.*jax.vmap"),
    ],
)
def test_arrays_for_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ScoreEstimator(**options).fit(SAMPLES)


def test_several_numbers_are_mapped_over():
    """Several fits are one vmap, as the message says."""

    def scores(bandwidth):
        estimator = ScoreEstimator(
            regularizer=Tikhonov(0.1),
            solver=Dense(),
            bandwidth=bandwidth,
            standardize="none",
            base=None,
        )
        return estimator.fit(SAMPLES).at_samples

    found = jax.vmap(scores)(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(found[0], scores(1.0), rtol=1e-4, atol=1e-5)
    assert not np.allclose(found[0], found[1], rtol=1e-2)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.int32, bool, np.complex64])
def test_samples_of_other_precision_are_refused(dtype):
    with pytest.raises(TypeError, match=r"samples: expected an array of float32 or float64.*got"):
        ScoreEstimator().fit(jnp.asarray(SAMPLES).astype(dtype))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("IMQ.exponent", IMQ),
        ("RationalQuadratic.alpha", RationalQuadratic),
        ("Matern.nu", Matern),
        ("NuMethod.nu", lambda value: NuMethod(10, value)),
    ],
)
@pytest.mark.parametrize("array", [np.array(0.5), jnp.array(0.5)])
def test_arrays_where_programs_depend_on_the_value_are_refused(name, make, array):
    with pytest.raises(TypeError, match=f"{name}: expected no array.*Give a Python number"):
        make(array)


def test_a_traced_exponent_spoils_nothing():
    """JAX would keep the tracer to compare later programs with."""

    def scores(exponent):
        return nu_method(3, profile=IMQ(exponent)).fit(SAMPLES).at_samples

    with pytest.raises(TypeError, match="IMQ.exponent: expected no array.*got a traced one"):
        jax.vmap(scores)(jnp.array([0.5, 0.7]))
    assert np.all(np.isfinite(scores(0.7)))


def test_keys_are_no_arrays_of_floats():
    with pytest.raises(TypeError, match="samples: expected an array of float32 or float64"):
        ScoreEstimator().fit(random.split(random.key(0), 20)[:, None])
