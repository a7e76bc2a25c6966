"""Importance weights of a guide, and what ``diagnose`` and ``fit`` make of them."""

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

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit, log_evidence, to_arviz
from numpyro_kscore._fit.progress import Look, Progress, Rule
from numpyro_kscore._fit.stopping import conclude
from numpyro_kscore._model.draws import WeightedDraws
from numpyro_kscore._model.layout import Site
from numpyro_kscore._model.tall_density import ModelDensity
from numpyro_kscore._util.pareto import are_reliable, weight_ess, weight_variation
from numpyro_kscore.diagnostics import Movement
from numpyro_kscore.diagnostics._budget import NUM_CHAINS, Clock
from numpyro_kscore.diagnostics._examine import examine, is_open, merged
from numpyro_kscore.diagnostics._weighing import weigh, weigh_closely

KEY = random.key(0)
SITES = (Site("z", (2,), 0, ()),)
DATA = jnp.array([0.3, -0.2, 0.9, 1.4])


@jax.value_and_grad
def standard(x):
    return -0.5 * jnp.sum(x**2)


def weighted(scale, shift=0.0, n=10_000, tail=0.0):
    """Draws of a Gaussian guide, in two dimensions, of a standard normal model.

    The model's second coordinate has a Student t's tail instead if ``tail`` is its degrees.
    """
    z = np.random.default_rng(0).normal(size=(n, 2))
    x = z * scale
    x[:, 0] += shift
    log_q = -0.5 * np.sum(z**2, axis=1) - 2 * np.log(scale) - np.log(2 * np.pi)
    log_p = -0.5 * np.sum(x**2, axis=1) - np.log(2 * np.pi)
    if tail:
        log_p += 0.5 * x[:, 1] ** 2 - 0.5 * (tail + 1) * np.log1p(x[:, 1] ** 2 / tail)
    return WeightedDraws(x, log_p, log_q, 0, 0.0)


def test_moments_of_weighted_draws_are_those_of_the_model():
    """Errors are within four standard errors, which weights themselves give."""
    found = weigh(weighted(1.2, shift=0.3))
    assert np.all(found.is_known)
    exact = np.array([0.3, 0.0])
    np.testing.assert_array_less(np.abs(found.shift - exact), 4 * found.shift_error)
    np.testing.assert_array_less(np.abs(np.log(found.ratio / 1.2)), 4 * found.ratio_error)
    assert abs(found.evidence.value) < 4 * found.evidence.error
    # KL(q || p) = d(s² - 1)/2 + m²/2 - d log s, with an error of about sd/100.
    divergence = (1.2**2 - 1) + 0.3**2 / 2 - 2 * np.log(1.2)
    assert abs(found.divergence - divergence) < 0.02
    assert "effective draws of 10000" in str(found)


@pytest.mark.parametrize("offset", [0.0, -1e8])
def test_a_wild_draw_has_little_say_in_the_divergence(offset):
    """It counts as 100 nats, which 10 000 draws share; a constant of all draws changes nothing."""
    draws = weighted(1.2)
    log_p = draws.log_density + offset
    log_p[7] -= 1e12
    single = draws._replace(samples=draws.samples.astype(np.float32), log_density=log_p)
    assert weigh(single).divergence == pytest.approx(weigh(draws).divergence + 0.01, abs=1e-3)


def test_errors_of_moments_are_those_of_repetitions():
    """The spread of 200 repetitions has an error of 5 %: within five of these it is the error."""
    draws = weighted(1.2, n=200_000)
    parts = [
        weigh(WeightedDraws(*(a[k::200] for a in draws[:3]), 0, 0.0)) for k in range(200)
    ]  # fmt: skip
    for name in ("shift", "ratio"):
        values = np.array([getattr(part, name) for part in parts])
        values = np.log(values) if name == "ratio" else values
        errors = np.array([getattr(part, f"{name}_error") for part in parts]).mean(0)
        np.testing.assert_allclose(values.std(0) / errors, 1.0, atol=0.25)


def test_a_tail_without_draws_is_seen_where_it_is():
    found = weigh(weighted(1.0, tail=3.0))
    assert found.shapes[0] < 0.7 <= found.shapes[1]
    assert found.lacks_draws


@pytest.mark.parametrize(
    ("scale", "seconds", "counts"),
    [(0.97, np.inf, [10_000]), (0.8, np.inf, [10_000, 40_000]), (0.8, 0.5, [10_000]),
     (0.5, np.inf, [10_000])],
)  # fmt: skip
def test_a_tail_in_doubt_is_looked_at_again(scale, seconds, counts):
    """Shapes near the limit take more draws, others do not, and there must be time for them."""
    asked = []

    def draw(count):
        asked.append(count)
        return weighted(scale, n=count)._replace(seconds=2e-5)

    draws, weights = weigh_closely(draw, lambda draws: draws, 10_000, seconds)
    assert asked == counts
    assert len(draws.samples) == weights.evidence.num_draws == counts[-1]


@pytest.mark.parametrize(("seconds", "most"), [(np.inf, 160_000), (1.0, 40_000)])
def test_an_open_question_takes_up_to_sixteen_times_the_draws(seconds, most):
    asked = []

    def draw(count):
        asked.append(count)
        return weighted(0.97, n=count)._replace(seconds=2e-5)

    weigh_closely(draw, lambda draws: draws, 10_000, seconds, lambda weights: True)
    assert asked[-1] == most
    asked.clear()
    few = lambda weights: weights.evidence.num_draws < 40_000  # noqa: E731
    weigh_closely(draw, lambda draws: draws, 10_000, seconds, few)
    assert asked == [10_000, 40_000]


def test_the_more_precise_of_weights_and_chains_tells_a_moment():
    zeros, errors = np.zeros(2), np.full(2, 0.01)
    chains = Movement(zeros, errors, np.full(2, 0.9), errors, zeros, zeros, 240, 0.8)
    found = weigh(weighted(1.0))._replace(
        ratio_error=np.array([0.001, 0.05]), shift_error=np.full(2, 0.001)
    )
    ones = found.ratio
    np.testing.assert_array_equal(merged(chains, found).ratio, [ones[0], 0.9])
    # Chains that remember where they started are no better, nor are weights where a tail is thin.
    slow = chains._replace(memory=np.full(2, 0.8))
    np.testing.assert_array_equal(merged(slow, found).ratio, ones)
    thin = found._replace(shapes=np.array([0.9, 0.0]))
    np.testing.assert_array_equal(merged(chains, thin).ratio, [0.9, 0.9])


def test_a_question_is_open_where_weights_tell_a_moment_with_too_large_an_error():
    names = ("a", "b")
    found = weigh(weighted(1.0))
    assert not is_open(found, names)
    unsure = found._replace(ratio_error=np.array([0.05, 0.0]))
    assert is_open(unsure, names)
    # More draws tell no more of a coordinate whose tail has too few.
    assert not is_open(unsure._replace(shapes=np.array([0.9, 0.0])), names)


def test_densities_without_weight_have_no_rounding():
    """One draw a million nats down rounds to a tenth of a nat, and counts for nothing."""
    draws = weighted(1.0)
    far = draws.log_density.copy()
    far[0] -= 1e6
    found = draws._replace(log_density=far, samples=draws.samples.astype(np.float32))
    assert found.rounding < 1e-5
    everywhere = found._replace(log_density=draws.log_density + 1e6)
    assert everywhere.rounding > 0.1


def test_weights_that_hardly_vary_are_reliable():
    assert are_reliable(1.5, 0.1)
    assert not are_reliable(1.5, 0.3)
    assert are_reliable(0.6, 30.0)


def test_weights_vary_beyond_those_of_a_guide_that_is_the_model():
    z = np.random.default_rng(0).normal(size=1_000)
    assert weight_variation(z) == pytest.approx((1_000 / weight_ess(z) - 1) ** 0.5)
    # The weights of such a guide are its shares in a defensive mixture.
    log_shares = -np.log(0.75 + 0.25 * np.exp(0.375 * z**2))
    assert weight_variation(5.0 + log_shares, log_shares) == pytest.approx(0.0, abs=1e-12)
    assert weight_variation(log_shares) > 0.1


def test_weights_decide_without_chains():
    draws = weighted(1.0)
    weights = weigh(draws)
    density = ModelDensity(standard)
    samples = draws.samples.astype(np.float32)
    good = examine(samples, density, SITES, KEY, weights=weights)
    assert (good.verdict, good.movement.num_transitions) == ("good", 0)
    assert good.modes.num_paths > 0
    wide = weigh(weighted(1.3))
    bad = examine(samples, density, SITES, KEY, weights=wide)
    assert (bad.verdict, bad.codes) == ("bad", ("too wide",))
    assert "log evidence" in str(bad)
    assert "transitions" not in str(bad)


def test_what_a_budget_does_not_allow_is_said():
    """Nothing is known without weights, and the time of chains is told instead of spent."""
    draws = weighted(1.0).samples.astype(np.float32)
    found = examine(draws, ModelDensity(standard), SITES, KEY, clock=Clock(1e-9))
    assert (found.verdict, found.codes) == ("cannot tell", ("budget",))
    assert "seconds more than the budget" in found.findings[0]
    assert Clock().affordable_chains(1.0) == NUM_CHAINS[0]
    assert Clock(200_000.0).affordable_chains(1.0) == 128


def a_look(**changes):
    zeros = dict.fromkeys(Look._fields, 0.0)
    return Look(**{**zeros, "skipped": 0, **changes})


@pytest.mark.parametrize(
    ("draws", "cause", "doubt"),
    [
        (weighted(1.0), "tol", ""),
        (weighted(1.13), "plateau", ""),
        (weighted(1.3), "plateau", "moments"),
        (weighted(1.0, shift=0.3), "plateau", "moments"),
        (weighted(1.0, tail=3.0), "plateau", "tail"),
    ],
)
def test_a_fit_ends_on_what_weights_say(draws, cause, doubt):
    rule = Rule(num_chunks=10, chunk_size=10, tol=0.1, patience=3, dim=2)
    progress = Progress(phase="done", cause="tol", looks=(a_look(),), best=0)
    ending = conclude(progress, rule, "", weigh(draws))
    assert (ending.cause, ending.doubt) == (cause, doubt)


def centered(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", 2):
        effect = numpyro.sample("effect", dist.Normal(loc, scale))
    numpyro.sample("y", dist.Normal(effect[:, None], 1.0), obs=y.reshape(2, 2))


@pytest.fixture(scope="module")
def fitted():
    guide = AutoImplicit(centered)
    svi = SVI(centered, guide, optax.adam(1e-2), ImplicitELBO())
    return svi, fit(svi, KEY, DATA, progress_bar=False, max_steps=400)


@pytest.mark.thorough
def test_a_fit_its_evidence_and_its_draws_have_the_same_weights(fitted):
    svi, result = fitted
    weights = result.info.weights
    assert np.all(weights.is_known)
    evidence = log_evidence(svi, result, DATA, num_samples=2_000)
    # Other draws: the errors add up.
    error = np.hypot(evidence.error, weights.evidence.error)
    assert abs(evidence.value - weights.evidence.value) < 4 * error + 1e-3
    latents = svi.guide.sample_posterior(KEY, result.params, sample_shape=(2, 300), resample=True)
    assert latents["effect"].shape == (2, 300, 2)
    tree = to_arviz(svi, result, DATA, num_samples=200, resample=True)
    assert tree["posterior"]["effect"].shape == (1, 200, 2)
    assert 100 < tree["sample_stats"].attrs["effective_draws"] <= 10_000


def normal(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
    numpyro.sample("y", dist.Normal(loc, 1.0), obs=y)


@pytest.mark.thorough
def test_a_guide_in_one_dimension_that_starts_at_the_model_stays_there():
    svi = SVI(normal, AutoImplicit(normal), optax.adam(1e-2), ImplicitELBO())
    result = fit(svi, KEY, DATA, progress_bar=False)
    assert (result.info.steps, result.info.cause) == (0, "tol")
    # Conjugate: exact up to the rounding of log densities in single precision.
    marginal = dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4) + 100.0 * jnp.ones((4, 4)))
    assert abs(result.info.weights.evidence.value - marginal.log_prob(DATA)) < 1e-4


@pytest.mark.thorough
def test_resampling_by_weights_that_cannot_be_trusted_warns():
    """At the user's own line, whatever function draws."""

    def wide(y):
        numpyro.sample("z", dist.Normal(jnp.zeros(6), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y[0])

    guide = AutoImplicit(wide, warm_start=False, hidden_dims=(2,))
    svi = SVI(wide, guide, optax.adam(1e-2), ImplicitELBO(4))
    state = svi.init(KEY, DATA)
    result = SVIRunResult(svi.get_params(state), state, jnp.zeros(1))
    with pytest.warns(UserWarning, match=r"resample: k̂ of the weights") as first:
        guide.sample_posterior(KEY, result.params, sample_shape=(10,), resample=True)
    with pytest.warns(UserWarning, match=r"resample: k̂ of the weights") as second:
        to_arviz(svi, result, DATA, num_samples=50, resample=True, khat=False)
    assert first[0].filename == second[0].filename == __file__
