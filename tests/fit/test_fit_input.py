"""Wrong input of ``fit``."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

from numpyro_kscore import ImplicitELBO, fit
from support.fits import DATA, KEY, MEAN, QUICK, guide, make_svi, model


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_steps": 0}, ValueError, "max_steps: expected an integer of at least 5; got 0"),
        ({"chunk_size": 2.5}, TypeError, "chunk_size: expected an integer"),
        ({"tol": 0.0}, ValueError, "tol: expected a positive finite number"),
        ({"patience": 0}, ValueError, "patience: expected an integer of at least 1"),
        ({"criterion": "elbo"}, ValueError, "criterion: expected one of 'stein', 'loss'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        fit(make_svi(), KEY, DATA, **settings)


def test_a_point_needs_the_loss_as_its_criterion():
    def point(data):
        numpyro.sample("z", dist.Delta(numpyro.param("loc", jnp.zeros(2)), event_dim=1))

    svi = make_svi(guide=point)
    with pytest.raises(ValueError, match="got a point without any") as caught:
        fit(svi, KEY, DATA, **QUICK)
    assert any("criterion='loss'" in note for note in caught.value.__notes__)
    result = fit(svi, KEY, DATA, criterion="loss", **QUICK)
    assert result.info.converged
    assert np.all(np.isnan(result.info.discrepancy))
    np.testing.assert_allclose(result.params["loc"], MEAN, atol=1e-2)


def test_an_aggregate_needs_the_loss_as_its_criterion():
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(aggregate="rows"))
    with pytest.raises(ValueError, match="criterion: expected 'loss' for an objective with aggreg"):
        fit(svi, KEY, DATA)


def test_wrong_objects_are_refused():
    with pytest.raises(TypeError, match="svi: expected an SVI of numpyro.infer; got 'svi'"):
        fit("svi", KEY, DATA)
    with pytest.raises(TypeError, match=r"rng_key: expected a random key such as .*; got 0"):
        fit(make_svi(), 0, DATA)
    svi = SVI(model, guide, numpyro.optim.Minimize(), Trace_ELBO())
    with pytest.raises(TypeError, match="state holds the parameters.*got Minimize"):
        fit(svi, KEY, DATA)
    with pytest.raises(TypeError, match="outside of jit and vmap.*Use svi.run there"):
        jax.vmap(lambda key: fit(make_svi(), key, DATA).losses)(jax.random.split(KEY, 2))
