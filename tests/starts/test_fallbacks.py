"""An error in a part of a search does not end a fit: the rest goes on and says what is lost."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, initial_gaussian
from numpyro_kscore._guides.autoguide import COLD
from numpyro_kscore._model.control_variate import taylor
from numpyro_kscore._starts import from_model
from numpyro_kscore._starts.prior_draws import PRIOR_DRAWS, draw_prior

KEY = random.key(0)
Y = np.array([0.3, 0.5, 0.1, 3.9, 4.4, 4.1, 0.2, 0.4], np.float32)


def states(y=Y):
    """States in time by a loop whose carry starts from the emissions, an improper latent's."""
    stay = numpyro.sample("stay", dist.Beta(2.0, 1.0))
    means = numpyro.sample("means", dist.ImproperUniform(constraints.ordered_vector, (), (2,)))
    numpyro.factor("prior", dist.Normal(0.0, 3.0).log_prob(means).sum())
    moves = jnp.log(jnp.stack([jnp.stack([stay, 1 - stay]), jnp.stack([1 - stay, stay])]))
    of_each = dist.Normal(means, 1.0).log_prob(jnp.asarray(y)[:, None])

    def step(state, now):
        return jax.nn.logsumexp(state[:, None] + moves, axis=0) + now, None

    numpyro.factor("y", jax.nn.logsumexp(jax.lax.scan(step, of_each[0], of_each[1:])[0]))


@pytest.mark.thorough
def test_draws_of_improper_latents_have_the_precision_of_the_search():
    latents = {"stay": jnp.zeros(()), "means": jnp.zeros(2)}
    with jax.enable_x64(True):
        draws = draw_prior(states, (), {}, latents, ()).few
    assert draws.shape == (PRIOR_DRAWS, 3)
    # An improper latent stays where it is, and those of others vary.
    assert np.all(draws[:, 1:] == 0)
    assert np.std(draws[:, 0]) > 0.5


@jax.custom_jvp
def square(x):
    """A call of NumPy, which has a derivative and cannot be mapped over."""
    return jax.pure_callback(lambda x: np.square(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@square.defjvp
def _(primals, tangents):
    return square(*primals), 2 * primals[0] * tangents[0]


def unmapped():
    x = numpyro.sample("x", dist.Normal(1.0, 1.0))
    numpyro.sample("y", dist.Normal(square(x), 1.0), obs=2.0)


@pytest.mark.thorough
def test_a_guide_starts_cold_where_no_search_is_possible():
    guide = AutoImplicit(unmapped, hidden_dims=(4,))
    loss = ImplicitELBO(8, vectorize_particles=False)
    svi = SVI(unmapped, guide, numpyro.optim.Adam(1e-2), loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = svi.init(KEY)
    texts = [str(w.message) for w in caught if "numpyro_kscore" in str(w.message)]
    assert all("NotImplementedError (vmap is only supported" in text for text in texts)
    assert texts[-1].endswith(COLD)
    assert guide.start is None
    # Steps can take particles one after another.
    assert jax.eval_shape(svi.update, state)[1].shape == ()


@pytest.mark.parametrize(("plain", "tried"), [(False, 3), (True, 2)])
def test_attempts_follow_an_error_until_one_succeeds(monkeypatch, plain, tried):
    seen = []

    def attempt(*given):
        seen.append((given[5], given[8]))
        if len(seen) < tried:
            raise OverflowError("too large")
        return "found"

    monkeypatch.setattr(from_model, "_find_start", attempt)
    with pytest.warns(UserWarning, match="numpyro_kscore.*OverflowError .too large.") as caught:
        found = from_model.find_start(states, (), {}, {}, False, plain)
    assert found == "found"
    assert seen == [(plain, True), (plain, False), (True, False)][:tried]
    assert "single precision" in str(caught[0].message)
    assert len(caught) == tried - 1


def test_the_error_of_the_last_attempt_is_raised(monkeypatch):
    def attempt(*given):
        raise OverflowError(f"in double: {given[8]}")

    monkeypatch.setattr(from_model, "_find_start", attempt)
    with (
        pytest.warns(UserWarning, match="in double: True"),
        pytest.raises(OverflowError, match="in double: False"),
    ):
        from_model.find_start(states, (), {}, {}, False, True)


@pytest.mark.thorough
def test_a_model_that_checks_for_single_precision():
    """Against the conjugate posterior of one mean: 8 rows of sd 1, and a prior of sd 3."""

    def model(y):
        x = numpyro.sample("x", dist.Normal(0.0, 3.0))
        assert x.dtype == jnp.float32, "single precision"
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    found = initial_gaussian(KEY, model, jnp.asarray(Y))
    precision = len(Y) + 1 / 9
    np.testing.assert_allclose(found.mean[0], Y.sum() / precision, rtol=1e-3)
    np.testing.assert_allclose(found.scales["x"], precision**-0.5, rtol=1e-3)


def test_a_function_without_second_derivatives_is_expanded_to_first_order():
    def slope(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.sum(x**2), jax.pure_callback(lambda x: 2 * x, like, x)

    found = taylor(slope, jnp.array([1.0, 2.0]), with_curvature=True)
    assert found.curvature is None
    np.testing.assert_allclose(found.slope, [2.0, 4.0])
