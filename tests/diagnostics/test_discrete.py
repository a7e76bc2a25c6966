"""Discrete latents in ``to_arviz``: their posterior, and likelihoods, against the formulas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult
from scipy import special, stats

from numpyro_kscore import Implicit, ImplicitELBO, evaluate_guide, to_arviz
from numpyro_kscore._model.program import Program
from numpyro_kscore.diagnostics._predictive import draw_discrete, log_likelihoods
from support.enumerated import TRANSITIONS, WORDS, Y, hmm, mixture, topics

KEY = random.key(0)
NUM = 3_000


def repeated(values, count):
    """The same values of all latents, ``count`` times."""
    return {name: np.repeat(np.float32(v)[None], count, axis=0) for name, v in values.items()}


def of_program(model):
    return Program({}, model, None, (), {}, {})


MEANS = np.array([-2.0, 0.5, 2.0])
WEIGHTS = np.array([0.2, 0.5, 0.3])
MIXTURE = {"weights": WEIGHTS, "spread": np.array(2.0), "means": MEANS}


def test_assignments_are_drawn_from_their_conditional_distribution():
    drawn = draw_discrete(KEY, of_program(mixture), repeated(MIXTURE, NUM))
    joint = WEIGHTS * stats.norm.pdf(np.asarray(Y)[:, None], MEANS, 1.0)
    expected = joint / joint.sum(1, keepdims=True)
    found = np.stack([np.mean(drawn["kind"] == k, axis=0) for k in range(3)], axis=1)
    # A frequency of 3000 independent draws has a standard error of at most .0091; 4.5 of them.
    assert np.max(np.abs(found - expected)) < 0.041
    np.testing.assert_array_equal(drawn["mean"], MEANS.astype(np.float32)[drawn["kind"]])


@pytest.mark.thorough
def test_states_in_time_are_drawn_from_their_joint_distribution():
    model = partial(hmm, as_loop=True)
    samples = repeated({"means": MEANS, "sd": 1.5}, NUM)
    drawn = draw_discrete(KEY, of_program(model), samples)
    y = np.asarray(Y)
    of_each = stats.norm.logpdf(np.stack([y, y[::-1]], 1)[:, :, None], MEANS, 1.5).sum(1)
    log_steps = np.log(np.asarray(TRANSITIONS))
    forward, backward = [log_steps[0] + of_each[0]], [np.zeros(3)]
    for now in of_each[1:]:
        forward.append(special.logsumexp(forward[-1][:, None] + log_steps, axis=0) + now)
    for now in of_each[:0:-1]:
        backward.append(special.logsumexp(log_steps + now + backward[-1], axis=1))
    forward, backward = np.stack(forward), np.stack(backward[::-1])
    expected = special.softmax(forward + backward, axis=1)
    # Pairs of neighbors, of which single states would say nothing.
    pairs = forward[:-1, :, None] + log_steps + (of_each + backward)[1:, None, :]
    expected_pairs = special.softmax(pairs, axis=(1, 2))
    states = np.stack([drawn[f"state_{t}"] for t in range(len(y))], axis=1)
    assert states.shape == (NUM, len(y))
    one_hot = states[..., None] == np.arange(3)
    found_pairs = np.einsum("nti,ntj->tij", one_hot[:, :-1], one_hot[:, 1:].astype(float)) / NUM
    # As above, for 21 and 54 frequencies.
    assert np.max(np.abs(one_hot.mean(0) - expected)) < 0.041
    assert np.max(np.abs(found_pairs - expected_pairs)) < 0.041


def test_states_in_a_scan_are_refused():
    with pytest.raises(ValueError, match=r"outside of scan; got \['state'\].*markov"):
        draw_discrete(KEY, of_program(hmm), repeated({"means": MEANS, "sd": 1.5}, 1))


def test_likelihood_of_one_observation_is_summed_over_its_own_values():
    found = log_likelihoods(of_program(mixture), repeated(MIXTURE, 2))
    expected = special.logsumexp(
        np.log(WEIGHTS) + stats.norm.logpdf(np.asarray(Y)[:, None], MEANS, 1.0), axis=1
    )
    assert set(found) == {"y"}
    np.testing.assert_allclose(found["y"], np.stack([expected, expected]), rtol=2e-6)


def test_likelihood_of_one_word_in_plates_in_plates():
    rng = np.random.default_rng(0)
    topic, share = rng.dirichlet(np.ones(5), size=3), rng.dirichlet(np.ones(3), size=4)
    found = log_likelihoods(of_program(topics), repeated({"topic": topic, "share": share}, 1))
    words = np.asarray(WORDS)
    expected = np.log(np.einsum("dk,kwd->wd", share, topic[:, words]))
    np.testing.assert_allclose(found["w"][0], expected, rtol=2e-6)


def local_and_common():
    """A continuous latent and an observation for each discrete one; and data that need none."""
    level = numpyro.sample("level", dist.Normal())
    numpyro.sample("other", dist.Normal(level, 1.0), obs=0.5)
    with numpyro.plate("rows", 2):
        kind = numpyro.sample("kind", dist.Bernoulli(0.3))
        x = numpyro.sample("x", dist.Normal(1.0 * kind, 1.0))
        numpyro.sample("y", dist.Normal(x + kind, 2.0), obs=jnp.array([0.0, 3.0]))


def test_likelihood_given_latents_that_depend_on_the_same_values():
    x, y = np.array([0.4, 1.2]), np.array([0.0, 3.0])
    samples = repeated({"level": np.array(0.2), "x": x}, 1)
    found = log_likelihoods(of_program(local_and_common), samples)
    prior = np.array([0.7, 0.3]) * stats.norm.pdf(x[:, None], [0.0, 1.0], 1.0)
    given = stats.norm.pdf(y[:, None], x[:, None] + [0.0, 1.0], 2.0)
    expected = np.log((prior * given).sum(1) / prior.sum(1))
    np.testing.assert_allclose(found["y"][0], expected, rtol=2e-6)
    np.testing.assert_allclose(found["other"], [stats.norm.logpdf(0.5, 0.2)], rtol=2e-6)


def of_one_value():
    x = numpyro.sample("x", dist.Normal())
    kind = numpyro.sample("kind", dist.Bernoulli(0.5))
    with numpyro.plate("rows", 2):
        numpyro.sample("y", dist.Normal(x + kind, 1.0), obs=jnp.ones(2))


def of_two_sites():
    x = numpyro.sample("x", dist.Normal())
    with numpyro.plate("rows", 2):
        kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(x + kind, 1.0), obs=jnp.ones(2))
        numpyro.sample("w", dist.Normal(x - kind, 1.0), obs=jnp.ones(2))


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (hmm, {"means": MEANS, "sd": 1.5}, "'y', which is in a scan"),
        (of_one_value, {"x": 0.1}, r"'y', which shares \['kind'\] with others by 'kind'"),
        (of_two_sites, {"x": 0.1}, r"'y', which shares \['kind'\] with others by 'w'"),
    ],
)
def test_observations_that_share_values_have_no_likelihood_of_their_own(model, values, message):
    with pytest.raises(ValueError, match=f"(?s)of their own; got {message}.*leave"):
        log_likelihoods(of_program(model), repeated(values, 1))


def pair(y=None):
    """Two components at known places, with an unknown share."""
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    with numpyro.plate("rows", 5):
        kind = numpyro.sample("kind", dist.Bernoulli(share))
        numpyro.deterministic("place", 4.0 * kind)
        numpyro.sample("y", dist.Normal(4.0 * kind, 1.0), obs=y)


def guide(y=None):
    noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
    numpyro.sample("share", Implicit(jax.nn.sigmoid(numpyro.param("loc", 0.3) + 0.5 * noise)))


DATA = jnp.array([-0.3, 0.4, 4.1, 3.2, 1.9])


@pytest.fixture(scope="module")
def fitted():
    svi = SVI(pair, guide, optax.adam(1e-2), ImplicitELBO())
    state = svi.init(KEY, DATA)
    return svi, SVIRunResult(svi.get_params(state), state, np.zeros(0))


@pytest.mark.thorough
def test_to_arviz_has_discrete_latents_and_likelihoods_on_request(fitted):
    options = {"infer_discrete": True, "log_likelihood": True, "khat": False}
    tree = to_arviz(*fitted, DATA, num_samples=20, **options)
    posterior = tree["posterior"]
    assert posterior["kind"].dims == posterior["place"].dims == ("chain", "draw", "rows")
    np.testing.assert_array_equal(posterior["place"], 4.0 * posterior["kind"])
    found = tree["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "rows")
    share = np.asarray(posterior["share"])
    y, of_one = np.asarray(DATA), share[..., None]
    expected = np.log((1 - of_one) * stats.norm.pdf(y) + of_one * stats.norm.pdf(y, 4.0))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # The density of the draws is the marginal one, too.
    prior = stats.beta.logpdf(share, 2, 2) + np.log(share * (1 - share))
    np.testing.assert_allclose(tree["sample_stats"]["lp"], prior + expected.sum(-1), rtol=1e-5)


@pytest.mark.thorough
def test_only_models_with_discrete_latents_have_a_posterior_of_them():
    def model(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("share", dist.Beta(2.0, 2.0))), obs=y)

    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    state = svi.init(KEY, 0.5)
    result = SVIRunResult(svi.get_params(state), state, np.zeros(0))
    with pytest.raises(ValueError, match="infer_discrete: expected a model with discrete latents"):
        to_arviz(svi, result, 0.5, infer_discrete=True, khat=False, num_samples=4)


def test_without_data_there_is_nothing_to_sum_out():
    def model(y=None):
        numpyro.sample("y", dist.Bernoulli(numpyro.sample("share", dist.Beta(2.0, 2.0))), obs=y)

    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    state = svi.init(KEY, 1)
    result = SVIRunResult(svi.get_params(state), state, np.zeros(0))
    with pytest.raises(ValueError, match=r"model: expected data at \['y'\]"):
        evaluate_guide(svi, result, None)
