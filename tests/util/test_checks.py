"""Input of estimators that is refused before anything is compiled, and what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_kscore import (
    AutoImplicit,
    ImplicitELBO,
    KernelExponentialFamily,
    ScoreEstimator,
    evaluate_guide,
)
from numpyro_kscore.diagnostics import importance_resample, ksd, sliced_wasserstein
from numpyro_kscore.estimators import (
    Landmarks,
    Median,
    RandomFeatures,
    Subset,
    entropy,
    kl_divergence,
    nu_method,
)
from numpyro_kscore.functions import learn_prior
from numpyro_kscore.kernels import IMQ, CurlFree, Matern, RationalQuadratic
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.sliced import SlicedScoreMatching
from numpyro_kscore.solvers import Dense
from support.fits import make_svi

QUICK = ScoreEstimator(regularizer=Tikhonov(0.1))
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


def no_model():
    pass


def fit_options(**options):
    return ScoreEstimator(**options).fit(SAMPLES)


LEADS = "rng_key: .*. The key comes before "
SLICED = SlicedScoreMatching()
KEYED = {
    "ksd": (lambda key: ksd(SAMPLES, -SAMPLES, rng_key=key), "rng_key: .*got 7$"),
    "distance": (lambda key: sliced_wasserstein(SAMPLES, SAMPLES, key), "key: .*got 7$"),
    "resample": (lambda key: importance_resample(key, SAMPLES, np.zeros(20)), LEADS + "the values"),
    "evaluate": (
        lambda key: evaluate_guide(make_svi(), None, rng_key=key),
        "rng_key: .*got 7$",
    ),
    "set up": (lambda key: AutoImplicit(no_model).set_up(key), LEADS + "the data"),
    "posterior": (
        lambda key: AutoImplicit(no_model).sample_posterior(key, {}),
        LEADS + "the parameters",
    ),
    "loss": (
        lambda key: ImplicitELBO().loss(key, {}, no_model, no_model),
        LEADS + "the parameters",
    ),
    "entropy": (lambda key: entropy(SAMPLES, key=key), "key: .*got 7$"),
    "divergence": (lambda key: kl_divergence(SAMPLES, SAMPLES, key=key), "key: .*got 7$"),
    "normalize": (
        lambda key: KernelExponentialFamily(SAMPLES, QUICK).normalize(key),
        "key: .*got 7. The key comes before num_draws",
    ),
    "draws": (
        lambda key: KernelExponentialFamily(SAMPLES, QUICK).sample(key),
        "key: .*got 7. The key comes before sample_shape",
    ),
    "landmarks": (
        lambda key: fit_options(landmarks=Landmarks(5, key=key)),
        r"landmarks\.key: .*got 7$",
    ),
    "subset": (lambda key: fit_options(subset=Subset(5, key=key)), r"subset\.key: .*got 7$"),
    "features": (
        lambda key: fit_options(features=RandomFeatures(4, key=key)),
        r"features\.key: .*got 7$",
    ),
    "network": (lambda key: SLICED.fit(key, SAMPLES), "key: .*got 7. .* before the samples"),
    "network's start": (lambda key: SLICED.init(key, 2), "key: .*got 7. .* before the dimension"),
    "prior": (
        lambda key: learn_prior(key, None, np.zeros(3), jitter=0.1),
        "key: .*got 7. The key comes before the sampler",
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.thorough) if n == "normalize" else n for n in KEYED],
)
def test_a_seed_is_no_key(name):
    """An error of JAX's own would not name the parameter."""
    call, message = KEYED[name]
    with pytest.raises(TypeError, match=message) as raised:
        call(7)
    assert "expected one random key such as jax.random.key(0)" in str(raised.value)


@pytest.mark.parametrize("make", [random.key, random.PRNGKey])
def test_keys_may_be_mapped_over(make):
    def distance(key):
        return sliced_wasserstein(SAMPLES, SAMPLES + 1.0, key, 4)

    found = jax.jit(jax.vmap(distance))(random.split(make(0), 2))
    np.testing.assert_allclose(found[0], distance(random.split(make(0), 2)[0]), rtol=1e-6)
