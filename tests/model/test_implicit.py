"""``Implicit``: a site that can only be sampled, under NumPyro's contract of a distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_kscore import Implicit

KEY = random.key(0)
VALUE = jnp.asarray(np.arange(24.0, dtype=np.float32).reshape(2, 3, 4))


@pytest.mark.parametrize("event_dim", [0, 1, 2, 3])
@pytest.mark.parametrize("sample_shape", [(), (5,), (5, 6)])
def test_shapes(event_dim, sample_shape):
    site = Implicit(VALUE, event_dim)
    assert site.event_dim == event_dim
    assert site.batch_shape + site.event_shape == VALUE.shape
    draw = site.sample(KEY, sample_shape)
    assert draw.shape == sample_shape + VALUE.shape == site.shape(sample_shape)
    np.testing.assert_array_equal(draw, jnp.broadcast_to(VALUE, draw.shape))


def test_scalars():
    assert Implicit(1.5).shape() == ()
    assert Implicit(jnp.float32(1.5)).sample(None) == 1.5


def test_it_is_no_delta():
    """NumPyro treats ``Delta`` sites as points, so an implicit site must not be a ``Delta``."""
    assert not isinstance(Implicit(VALUE), dist.Delta)


def test_density_is_refused():
    with pytest.raises(NotImplementedError, match=r"(?s)expected.*got.*ImplicitELBO.*Trace_ELBO"):
        Implicit(VALUE).log_prob(VALUE)


@pytest.mark.parametrize(
    ("error", "value", "event_dim"),
    [
        (ValueError, VALUE, 4),
        (ValueError, VALUE, -1),
        (ValueError, 1.0, 1),
        (TypeError, VALUE, 1.0),
        (TypeError, VALUE, "1"),
    ],
)
def test_bad_event_dims_are_refused(error, value, event_dim):
    with pytest.raises(error, match=rf"(?s)event_dim: expected.*got.*{event_dim}"):
        Implicit(value, event_dim)


@pytest.mark.parametrize("event_dim", [0, 1, 3])
def test_support_is_real_and_continuous(event_dim):
    support = Implicit(VALUE, event_dim).support
    assert not support.is_discrete
    assert support.event_dim == event_dim
    assert dist.biject_to(support)(VALUE).shape == VALUE.shape
    assert support is constraints.real or support.base_constraint is constraints.real


def test_draws_are_reparametrized():
    assert Implicit(VALUE).has_rsample

    def draw(scale):
        site = Implicit(scale * VALUE, event_dim=1)
        return jnp.sum(site.rsample(KEY, (2,)))

    np.testing.assert_allclose(jax.grad(draw)(3.0), 2 * VALUE.sum())


@pytest.mark.parametrize("unconstrained", [None, jnp.log1p(VALUE)])
def test_pytree_round_trip(unconstrained):
    site = Implicit(VALUE, 2, unconstrained=unconstrained)
    leaves, structure = jax.tree.flatten(site)
    assert len(leaves) == (1 if unconstrained is None else 2)
    again = jax.tree.unflatten(structure, leaves)
    assert (again.batch_shape, again.event_shape) == ((2,), (3, 4))
    np.testing.assert_array_equal(again.value, VALUE)
    # JAX puts placeholders in the place of leaves while it compares structures.
    jax.tree.map(lambda _: object(), site)


def test_through_jit_and_vmap():
    site = jax.jit(lambda value: Implicit(value, 1))(VALUE)
    assert site.event_shape == (4,)
    np.testing.assert_array_equal(site.sample(KEY), VALUE)
    mapped = jax.vmap(lambda value: Implicit(value, 1).sample(KEY))(VALUE)
    np.testing.assert_array_equal(mapped, VALUE)


def test_numpyro_wrappers_keep_the_draw():
    site = Implicit(VALUE)
    np.testing.assert_array_equal(site.to_event(2).sample(KEY), VALUE)
    assert site.to_event(2).event_shape == (3, 4)
    np.testing.assert_array_equal(site.mask(True).sample(KEY), VALUE)
    expanded = Implicit(VALUE[0, 0], 1).expand((3,)).sample(KEY)
    np.testing.assert_array_equal(expanded, jnp.broadcast_to(VALUE[0, 0], (3, 4)))


def test_sites_in_plates_and_traces():
    def guide():
        with numpyro.plate("rows", 2, dim=-2), numpyro.plate("columns", 3, dim=-1):
            return numpyro.sample("z", Implicit(VALUE, event_dim=1))

    trace = handlers.trace(handlers.seed(guide, KEY)).get_trace()
    np.testing.assert_array_equal(trace["z"]["value"], VALUE)
    assert trace["z"]["fn"].batch_shape == (2, 3)


def test_with_numpyro_validation():
    # Not enabled and then disabled: it is on by default, and other tests rely on it.
    with numpyro.validation_enabled(True):
        site = Implicit(VALUE, 1)
        np.testing.assert_array_equal(site(rng_key=KEY), VALUE)
