"""A fit lowers the step size by itself, and says so to optimizers that do, too."""

import warnings

import jax.numpy as jnp
import numpyro
import optax
import pytest
from numpyro.infer import SVI

from numpyro_kscore import ImplicitELBO, fit
from numpyro_kscore._fit.step_size import warn_of_schedule
from support.fits import DATA, KEY, QUICK, guide, make_svi, model

PARAMS = {"a": jnp.zeros(()), "b": jnp.zeros((3, 2))}
DECAY = optax.exponential_decay(1e-2, 100, 0.5)
FALLING = {
    "adam": optax.adam(DECAY),
    "to zero": optax.sgd(optax.linear_schedule(1e-2, 0.0, 50)),
    "warm-up": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, 2_000)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=DECAY),
    "numpyro": numpyro.optim.Adam(lambda count: 1e-2 / (1 + count)),
    "one of two": optax.multi_transform(
        {"falls": optax.adam(DECAY), "stays": optax.adam(1e-2)}, {"a": "falls", "b": "stays"}
    ),
}
CONSTANT = {
    "adam": optax.adam(1e-2),
    "long memory": optax.adam(1e-2, b1=0.99, b2=0.9),
    "adagrad": optax.adagrad(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
    "lamb": optax.lamb(1e-2),
    "still": optax.adam(0.0),
    "rises": optax.adam(optax.linear_schedule(0.0, 1e-2, 100)),
    "numpyro": numpyro.optim.ClippedAdam(1e-2),
    "by the loss": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
}


def said_of(optimizer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_schedule(SVI(model, guide, optimizer, ImplicitELBO()), PARAMS, 5_000)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", FALLING)
def test_schedules_that_fall(name):
    (said,) = said_of(FALLING[name])
    assert said.startswith("fit: expected an optimizer with a constant step size")


@pytest.mark.parametrize("name", CONSTANT)
def test_no_word_on_other_optimizers(name):
    assert said_of(CONSTANT[name]) == []


@pytest.mark.thorough
def test_a_fit_says_so():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(make_svi(step_size=DECAY), KEY, DATA, **QUICK)
    assert any("got one with a schedule" in str(warning.message) for warning in caught)
