"""Fits in which numbers are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_kscore import fit
from numpyro_kscore._fit import fit as fit_module
from support.fits import DATA, KEY, MEAN, QUICK, SD, make_svi, quiet_fit


def test_bad_steps_are_skipped_and_counted():
    def fragile(data):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=data)
        numpyro.factor("hole", jnp.where(z[0] > 1.9, jnp.nan, 0.0))

    svi = make_svi(model=fragile)
    result = quiet_fit(svi, KEY, DATA, criterion="loss", **QUICK)
    assert result.info.skipped == np.sum(np.isnan(result.losses)) > 0
    assert result.info.recoveries == 0
    assert np.all(np.isfinite(result.params["loc"]))


class Broken:
    """A compiled chunk of which some calls report numbers that are not finite."""

    def __init__(self, monkeypatch, bad):
        self.sizes, self.keys = [], []
        make = fit_module.make_chunk

        def wrapped(*args):
            chunk = make(*args)

            def call(state, given, settles):
                self.sizes.append(float(given[0][0]))
                self.keys.append(np.asarray(random.key_data(state.rng_key)))
                found = chunk(state, given, settles)
                is_bad = len(self.sizes) - 1 in bad
                # A step that is not undone would be seen in the result.
                spoilt = jax.tree.map(lambda a: a * jnp.nan, found.losses)
                found = found._replace(losses=spoilt) if is_bad else found
                return found._replace(finite=found.finite & (not is_bad))

            return call

        monkeypatch.setattr(fit_module, "make_chunk", wrapped)


def test_a_bad_chunk_is_undone(monkeypatch):
    calls = Broken(monkeypatch, bad={2, 3})
    with pytest.warns(UserWarning, match=r"not finite 2 time\(s\)"):
        result = fit(make_svi(), KEY, DATA, **QUICK)
    assert calls.sizes[:6] == [1, 1, 1, 0.5, 0.25, 0.25]
    assert len({key.tobytes() for key in calls.keys[2:5]}) == 3
    assert result.info.recoveries == 2
    assert np.all(np.isfinite(result.losses))
    np.testing.assert_allclose(result.params["loc"], MEAN, atol=0.1 * SD)


def test_giving_up_returns_the_best_state(monkeypatch):
    Broken(monkeypatch, bad=range(3, 100))
    with pytest.warns(UserWarning, match="after 60 steps numbers were not finite"):
        result = fit(make_svi(), KEY, DATA, **QUICK)
    assert (result.info.steps, result.info.converged, result.info.best_step) == (60, False, 60)


def test_a_model_that_is_never_finite_raises():
    def hopeless(data):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.factor("nan", jnp.nan * z.sum())

    with pytest.raises(FloatingPointError, match="expected finite losses.*init_params"):
        fit(make_svi(model=hopeless), KEY, DATA, criterion="loss", **QUICK)
