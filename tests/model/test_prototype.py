"""A model seen once: as by NumPyro's own start, in one compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer.initialization import init_to_uniform, init_to_value
from numpyro.infer.util import initialize_model

from numpyro_kscore._model.prototype import find_prototype


def _model(y):
    z = numpyro.sample("z", dist.Gamma(2.0, 1.0))
    a = numpyro.sample("a", dist.Uniform(0.0, 1.0 + z))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("b", dist.Normal(a, z))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)
    numpyro.deterministic("twice", 2 * a)


def _seen(model, *args, key=3):
    return find_prototype(random.key(key), model, args, {}, init_to_uniform, False)


@pytest.mark.thorough
def test_values_and_sites_are_those_of_numpyro():
    y = jnp.arange(3.0)
    ours = _seen(_model, y)
    theirs = initialize_model(random.key(3), _model, model_args=(y,))
    # In the order of the model, which is not that of the alphabet.
    assert list(ours.latents) == ["z", "a", "b"]
    for name, value in ours.latents.items():
        np.testing.assert_allclose(value, theirs.param_info.z[name], rtol=1e-5)
    assert list(ours.trace) == list(theirs.model_trace)
    for name, site in theirs.model_trace.items():
        np.testing.assert_allclose(ours.trace[name]["value"], site["value"], rtol=1e-5)
        assert type(ours.trace[name].get("fn")) is type(site.get("fn"))
    np.testing.assert_allclose(ours.trace["a"]["fn"].high, theirs.model_trace["a"]["fn"].high)
    assert ours.trace["b"]["cond_indep_stack"] == theirs.model_trace["b"]["cond_indep_stack"]


def test_nothing_traced_stays_behind():
    found = _seen(_model, jnp.arange(3.0))
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(found))


def test_one_program_is_compiled(caplog):
    y = jnp.arange(7.0)
    with jax.log_compiles():
        _seen(_model, y)
    finished = [r.getMessage() for r in caplog.records if "Finished XLA" in r.getMessage()]
    # The others split and make keys, and are the same for all models.
    assert sum("jit(run)" in message for message in finished) == 1
    assert len(finished) <= 5, finished


@pytest.mark.thorough
def test_values_without_a_finite_density_are_refused_with_what_numpyro_found():
    def model():
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.factor("never", jnp.where(x < 100.0, -jnp.inf, 0.0))

    with pytest.raises(RuntimeError, match=r"Cannot find valid.*init_to_value\(values=") as caught:
        _seen(model)
    assert "by init_to_uniform, init_to_sample, init_to_median and init_to_feasible" in str(
        caught.value
    )


def _far_from_zero(volume):
    # In raw units: a likelihood that needs at least 500, under a prior that has it.
    size = numpyro.sample("size", dist.HalfCauchy(1000.0))
    numpyro.sample("volume", dist.Normal(jnp.sqrt(size - 500.0), 1.0), obs=volume)


def test_draws_of_the_prior_are_tried_where_nothing_near_zero_is_valid():
    found = _seen(_far_from_zero, 20.0)
    assert found.latents["size"] > np.log(500.0)


def test_a_strategy_of_the_users_is_the_only_one_tried():
    strategy = init_to_value(values={"size": 100.0})
    with pytest.raises(RuntimeError, match=r"by init_loc_fn \(Normal.*invalid loc"):
        find_prototype(random.key(0), _far_from_zero, (20.0,), {}, strategy, False)


@pytest.mark.thorough
def test_a_model_that_is_valid_nowhere_has_the_same_message():
    def model(y):
        x = numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(jnp.log(x - 50.0), 1.0), obs=y)

    with pytest.raises(RuntimeError, match=r"in 100 attempts.*invalid loc.*init_to_value\(values="):
        _seen(model, 1.0)


class _Forgetful(dist.Distribution):
    """A distribution of a user who does not say what it holds."""

    def __init__(self, low):
        self.low = low
        super().__init__((), ())

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self):
        return constraints.greater_than(self.low)

    def sample(self, key, sample_shape=()):
        return self.low + random.exponential(key, sample_shape)

    def log_prob(self, value):
        return -(value - self.low)


@pytest.mark.thorough
def test_distributions_that_forget_what_they_hold():
    def model():
        low = numpyro.sample("low", dist.Normal(0.0, 1.0))
        numpyro.sample("x", _Forgetful(low))

    site = _seen(model).trace["x"]
    assert site["value"] > site["fn"].low
