"""The search for a start on models whose posterior is known, and what guides make of it."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_kscore import AutoImplicit, AutoSemiImplicit, ImplicitELBO, fit, initial_gaussian
from numpyro_kscore._fit.svi import initial_state
from numpyro_kscore._model.coordinates import unravel
from numpyro_kscore._starts.candidates import in_form, preferred
from numpyro_kscore._starts.climb import climb_in_forms
from numpyro_kscore._starts.gaussian_search import find_gaussian
from numpyro_kscore._starts.search import AtPoints, CountedDensity, Latents, Search
from numpyro_kscore._transports.affine import Affine, antithetic
from numpyro_kscore._transports.centering import is_same, of_degrees
from numpyro_kscore._transports.conditional import Conditional
from support.autoguides import first_state
from support.doubles import GaussianScore
from support.searches import without_structure

KEY = random.key(0)
CHEAP = ImplicitELBO(16, estimator=GaussianScore(), debias=None)
# A year, and a response to it: in raw units the two weights have a correlation of -1 + 4e-6.
YEARS = np.arange(1990.0, 2020.0)
RESPONSE = 0.3 * (YEARS - 2000.0) + 5.0 + np.sin(YEARS)
PRIOR_SD, NOISE_SD = 1e4, 1.5


def regression(years, response):
    slope = numpyro.sample("slope", dist.Normal(0.0, PRIOR_SD))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, PRIOR_SD))
    numpyro.sample("y", dist.Normal(intercept + slope * years, NOISE_SD), obs=response)


def exact_posterior():
    """Mean and covariance of (slope, intercept)."""
    design = np.stack([YEARS, np.ones(len(YEARS))], axis=1)
    precision = design.T @ design / NOISE_SD**2 + np.eye(2) / PRIOR_SD**2
    covariance = np.linalg.inv(precision)
    return covariance @ design.T @ RESPONSE / NOISE_SD**2, covariance


def by_name(start, values):
    return np.array([values[name] for name in ("slope", "intercept")])


@pytest.fixture(scope="module")
def found():
    return initial_gaussian(KEY, regression, YEARS, RESPONSE)


def test_a_stiff_regression_is_found(found):
    mean, covariance = exact_posterior()
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((by_name(found, found.locs) - mean) / sd, 0.0, atol=0.02)
    np.testing.assert_allclose(by_name(found, found.scales) / sd, 1.0, atol=0.02)
    # The log evidence: joint density less posterior density, at the posterior's mean.
    residual = (RESPONSE - mean[1] - mean[0] * YEARS) / NOISE_SD
    joint = -0.5 * (residual @ residual + mean @ mean / PRIOR_SD**2)
    joint -= len(YEARS) * np.log(NOISE_SD) + 2 * np.log(PRIOR_SD)
    joint -= 0.5 * (len(YEARS) + 2) * np.log(2 * np.pi)
    evidence = joint + 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
    assert found.elbo == pytest.approx(evidence, abs=1e-3)
    assert found.num_gradients <= 3000
    assert len(found.modes) <= 1


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal])
def test_gaussian_guides_start_there(found, kind):
    guide = kind(regression)
    svi = SVI(regression, guide, optax.adam(1e-3), Trace_ELBO())
    state = svi.init(KEY, YEARS, RESPONSE, init_params=found.init_params(guide))
    draws = guide.sample_posterior(KEY, svi.get_params(state), sample_shape=(4000,))
    for name in ("slope", "intercept"):
        # Errors of 4000 draws: .016 in the mean and .011 in the standard deviation.
        assert abs(np.mean(draws[name]) - found.locs[name]) < 0.08 * found.scales[name]
        assert np.std(draws[name]) == pytest.approx(float(found.scales[name]), rel=0.06)


def test_other_guides_start_from_the_mean(found):
    with pytest.raises(ValueError, match=r"Gaussian guides.*got AutoBNAFNormal.*init_loc_fn"):
        found.init_params(AutoBNAFNormal(regression))
    seeded = handlers.seed(regression, KEY)
    at_mean = handlers.substitute(seeded, substitute_fn=found.init_loc_fn)
    trace = handlers.trace(at_mean).get_trace(YEARS, RESPONSE)
    assert trace["slope"]["value"] == found.locs["slope"]


@pytest.mark.parametrize("kind", [AutoImplicit, AutoSemiImplicit])
@pytest.mark.thorough
def test_automatic_guides_start_as_the_gaussian(kind):
    guide = kind(regression, hidden_dims=(4,))
    svi = SVI(regression, guide, optax.adam(1e-2), CHEAP)
    params = svi.get_params(first_state(svi, YEARS, RESPONSE))
    mean, covariance = exact_posterior()
    sd = np.sqrt(np.diag(covariance))
    draws = guide.sample_posterior(KEY, params, sample_shape=(4000,))
    x = np.stack([draws[name] for name in ("slope", "intercept")], axis=1)
    np.testing.assert_allclose((x.mean(0) - mean) / sd, 0.0, atol=0.08)
    np.testing.assert_allclose(x.std(0) / sd, 1.0, atol=0.06)
    # A result needs no guide that remembers the search.
    other = kind(regression, hidden_dims=(4,))
    other.set_up(random.key(5), YEARS, RESPONSE)
    again = pickle.loads(pickle.dumps(other)).sample_posterior(KEY, params, sample_shape=(4000,))
    np.testing.assert_allclose(again["slope"], draws["slope"], rtol=1e-4)


SIGMA = np.array([15.0, 10.0, 16.0, 11.0])
EFFECTS = np.array([28.0, 8.0, -3.0, 7.0])


def schools():
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = numpyro.sample("spread", dist.HalfNormal(5.0))
    with numpyro.plate("schools", 4):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
        numpyro.deterministic("twice", 2 * effect)
        numpyro.sample("y", dist.Normal(effect, SIGMA), obs=EFFECTS)


@pytest.mark.thorough
def test_hierarchical_models_are_partially_centered():
    """Draws follow the coordinates: effects are means plus spreads times what the guide draws."""
    guide = AutoImplicit(schools, hidden_dims=(4,))
    svi = SVI(schools, guide, optax.adam(1e-2), CHEAP)
    state = first_state(svi)
    params = svi.get_params(state)
    degrees = unravel(params["auto_centering_degrees"], guide._shapes)
    assert degrees["mean"] == 1
    assert degrees["spread"] == 1
    # Standard errors are two or three times the spread: the data have a fifth to a tenth of the
    # precision, or less by as much as 256 draws are off.
    assert np.all(degrees["effect"] < 0.2)
    draws = guide.sample_posterior(KEY, params, sample_shape=(1000,))
    np.testing.assert_allclose(draws["twice"], 2 * draws["effect"], rtol=1e-6)
    # As in the posterior, small spreads go with effects near the mean.
    draws = {name: np.asarray(values) for name, values in draws.items()}
    gap = np.std(draws["effect"] - draws["mean"][:, None], axis=1)
    small = draws["spread"] < np.median(draws["spread"])
    assert np.median(gap[small]) < 0.6 * np.median(gap[~small])
    seeded = handlers.substitute(handlers.seed(guide, KEY), params)
    drawn = jax.eval_shape(lambda: handlers.trace(seeded).get_trace()["effect"]["value"])
    assert drawn.shape == (4,)
    assert jax.eval_shape(guide.median, params)["effect"].shape == (4,)


@pytest.mark.thorough
def test_a_step_leaves_the_start_as_it_is(monkeypatch):
    without_structure(monkeypatch)
    guide = AutoImplicit(schools, hidden_dims=(4,))
    svi = SVI(schools, guide, optax.adam(1e-2), CHEAP)
    state = first_state(svi)
    before = svi.get_params(state)
    state, loss = jax.jit(svi.update)(state)
    assert np.isfinite(loss)
    after = svi.get_params(state)
    for name in ("auto_start_mean", "auto_start_factor", "auto_centering_degrees"):
        np.testing.assert_array_equal(after[name], before[name])
    assert np.any(after["auto_loc"] != before["auto_loc"])


TRUTH, SIGMAS = np.array([1.0, -1.2, 0.8, 0.5, -0.3, 0.2]), np.repeat([0.05, 3.0], 3)


def effects(points, centering, other):
    """Six effects of one spread, half of them known well and half hardly."""
    w, v = points[:, :1], points[:, 1:]
    degrees, log_scales, locs = (a[1:] for a in centering)

    def given(w, degrees, log_scales, locs):
        """Mean and size of effects, and the derivatives of both in the log spread."""
        odds = degrees * np.exp(2 * (w - log_scales))
        share = odds / (odds + 1 - degrees)
        size = np.exp(w - log_scales) / np.sqrt(odds + 1 - degrees)
        return share * locs, size, 2 * share * (1 - share) * locs, 1 - share

    mean, size, slope_of_mean, slope_of_size = given(w, degrees, log_scales, locs)
    u = mean + size * v
    slope = u * np.exp(-2 * w) + (u - TRUTH) / SIGMAS**2
    energies = (
        0.5 * w[:, 0] ** 2
        + np.sum(0.5 * u**2 * np.exp(-2 * w) + w - np.log(size), axis=1)
        + np.sum(0.5 * ((u - TRUTH) / SIGMAS) ** 2, axis=1)
    )
    through = slope * (slope_of_mean + size * v * slope_of_size)
    through += 1 - slope_of_size - u**2 * np.exp(-2 * w)
    gradients = np.concatenate([w + np.sum(through, 1, keepdims=True), slope * size], axis=1)
    mean, size, *_ = given(w, *(a[1:] for a in other))
    moved, values = (np.concatenate([w, a], axis=1) for a in ((u - mean) / size, u))
    log_scales = np.where(IS_EFFECT, w, 0.0)
    return AtPoints(energies, gradients, moved, values, np.zeros_like(values), log_scales)


IS_EFFECT = np.arange(7) > 0
NON_CENTERED = of_degrees(np.where(IS_EFFECT, 0.0, 1.0))


def test_non_centered_coordinates_have_rounds_of_their_own():
    """They have them even where partial degrees have the higher bound, so would be all."""
    noise = antithetic(np.random.default_rng(2), 64, 7)
    rng, none = np.random.default_rng(0), np.zeros(7, bool)
    latents = Latents(np.zeros(7), np.empty((0, 7)), IS_EFFECT, none, none, (1,) * 7)
    search = Search(CountedDensity(effects), latents, rng, noise)
    cold = Affine(np.full(7, 0.1), 0.1 * np.eye(7))
    colds = [in_form(search, cold, form) for form in (of_degrees(np.ones(7)), NON_CENTERED)]
    best, apart = climb_in_forms(search, colds)
    # The variance of a non-centered effect is near 0 where data are good, and near 1 where not.
    assert np.all(best.centering.degrees[1:4] > 0.8)
    assert np.all(best.centering.degrees[4:] < 0.4)
    assert is_same(apart.centering, NON_CENTERED)
    assert best.bound.lower > apart.bound.lower > colds[1].bound.lower
    assert preferred([best, apart]) is best
    # In the last choice larger differences are none.
    assert preferred([best, apart], within=1.0) is apart


def test_sizes_that_vary_make_up_for_the_non_centered_form():
    """It is then as near to the evidence as partial degrees, and has the prior's tail."""
    grid = np.linspace(-9.0, 9.0, 20_001)[:, None]
    variance = np.exp(2 * grid) + SIGMAS**2
    given = np.sum(np.log(2 * np.pi * SIGMAS**2 / variance) - TRUTH**2 / variance, axis=1) / 2
    density = np.exp(given - 0.5 * grid[:, 0] ** 2)
    evidence = np.log(np.sum(density) * (grid[1, 0] - grid[0, 0]))
    rng = np.random.default_rng(0)
    latents = without_draws(np.full(7, 0.1))._replace(is_hierarchical=IS_EFFECT)
    start = find_gaussian(effects, latents, rng)
    assert is_same(start.centering, NON_CENTERED)
    # Well-known effects vary with the spread, and the others do not.
    assert np.all(start.sizes.rates[1:4, 0] > 0.8)
    assert np.all(start.sizes.rates[4:] == 0)
    # Antithetic bounds have errors of some .01 here.
    assert evidence - 0.1 < start.elbo < evidence + 0.03


@pytest.mark.thorough
def test_a_blocked_part_of_a_model_asks_nobody_around_for_keys():
    """NumPyro's block lets such requests pass; traced, they left a tracer in the guide's seed."""

    def whole():
        numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.sample("rate", dist.Gamma(2.0, 1.0))

    guide = AutoGuideList(whole)
    guide.append(AutoImplicit(handlers.block(whole, hide=["rate"]), hidden_dims=(4,)))
    guide.append(AutoNormal(handlers.block(whole, hide=["x"]), prefix="rate"))
    draws = handlers.trace(handlers.seed(guide, KEY)).get_trace()
    assert np.isfinite(draws["x"]["value"])
    assert np.isfinite(draws["rate"]["value"])


@pytest.mark.thorough
def test_raw_units_do_not_send_paths_into_another_valley():
    """Effects far from 0 in units of their spread fit the data as well as a mean there would.

    A path for which all coordinates are alike widens the spread, a logarithm, before it has moved
    the mean by hundreds.
    """
    rng = np.random.default_rng(5)
    group, days = np.repeat(np.arange(8), 6), np.tile(np.arange(6), 8)
    lines = np.array([250.0, 10.0]) + np.array([24.0, 6.0]) * rng.normal(size=(8, 2))
    times = lines[group, 0] + lines[group, 1] * days + 25 * rng.normal(size=48)

    def model():
        mean = numpyro.sample("mean", dist.Normal(0.0, 1_000.0).expand([2]).to_event(1))
        spread = numpyro.sample("spread", dist.HalfCauchy(50.0).expand([2]).to_event(1))
        noise = numpyro.sample("noise", dist.HalfCauchy(50.0))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([8, 2]).to_event(2))
        line = mean + spread * z[group]
        numpyro.sample("times", dist.Normal(line[:, 0] + line[:, 1] * days, noise), obs=times)

    start = initial_gaussian(KEY, model)
    # The mean of eight lines, whose spreads are 24 and 6, within three of its sds.
    np.testing.assert_allclose(start.locs["mean"], lines.mean(0), atol=3 * 24 / 8**0.5)
    assert np.all(np.exp(start.locs["spread"]) < 60)


def without_draws(first):
    none = np.zeros(len(first), bool)
    return Latents(first, np.zeros((0, len(first))), none, none, none, (1,) * len(first))


def at_points(energies, gradients, points):
    nothing = np.zeros_like(points)
    return AtPoints(energies, gradients, points, points, nothing, nothing)


def test_two_modes_are_spanned():
    """Half of N(±m, 1) each, in two dimensions: mean zero, variance 1 + m²."""
    mode = np.array([6.0, 0.0])

    def density(points, centering, other):
        energies = [0.5 * np.sum((points - m) ** 2, axis=1) for m in (mode, -mode)]
        weight = 1 / (1 + np.exp(np.clip(energies[0] - energies[1], -500, 500)))
        gradient = points - mode * (2 * weight - 1)[:, None]
        return at_points(-np.logaddexp(*[-e for e in energies]), gradient, points)

    rng = np.random.default_rng(3)
    start = find_gaussian(density, without_draws(np.array([0.5, 1.0])), rng)
    assert start.modes.shape == (2, 2)
    np.testing.assert_allclose(start.weights, 0.5, atol=0.05)
    covariance = start.gaussian.factor @ start.gaussian.factor.T
    np.testing.assert_allclose(start.gaussian.mean, 0.0, atol=0.7)
    np.testing.assert_allclose(np.diag(covariance), [37.0, 1.0], rtol=0.1)


@pytest.mark.parametrize("energy", [np.nan, np.inf])
def test_densities_that_are_nowhere_finite(energy):
    def density(points, centering, other):
        return at_points(np.full(len(points), energy), np.full_like(points, np.nan), points)

    with pytest.raises(FloatingPointError, match="expected a finite density"):
        find_gaussian(density, without_draws(np.zeros(2)), np.random.default_rng(0))


def test_a_density_without_bound_has_a_start_all_the_same():
    """A centered hierarchical model without data: infinite where the spread is zero."""

    def density(points, centering, other):
        log_spread, rest = points[:, 0], points[:, 1:]
        precision = np.exp(-2 * log_spread)[:, None]
        squares = np.sum(rest**2 * precision, axis=1)
        energies = 0.5 * squares + rest.shape[1] * log_spread + 0.5 * log_spread**2 / 9
        slope = rest.shape[1] + log_spread / 9 - squares
        return at_points(energies, np.concatenate([slope[:, None], rest * precision], 1), points)

    rng = np.random.default_rng(0)
    start = find_gaussian(density, without_draws(np.zeros(5)), rng)
    assert np.isfinite(start.elbo)
    # The narrow Gaussian at the origin is worse.
    narrow = 5 * np.log(0.1) + 2.5 - 0.5 * 5 * 0.01
    assert start.elbo > narrow


def test_a_first_call_in_a_compiled_program_says_that_it_starts_cold():
    guide = AutoImplicit(regression, hidden_dims=(4,))
    svi = SVI(regression, guide, optax.adam(1e-2), CHEAP)
    with pytest.warns(UserWarning, match="expected a first call outside of jit and vmap"):
        params = jax.eval_shape(lambda: svi.get_params(svi.init(KEY, YEARS, RESPONSE)))
    assert "auto_start_mean" not in params


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.thorough
def test_predictions_that_overflow_almost_everywhere_have_a_start(seed):
    """Incomes and years as they are: away from tiny effects counts are infinite, or all zero."""
    rng = np.random.default_rng(4)
    income, year = rng.normal(50_000, 9_000, 100), rng.uniform(1990, 2020, 100)
    counts = rng.poisson(np.exp(-2 + 5e-5 * income + 0.01 * (year - 2000)))

    def model():
        level = numpyro.sample("level", dist.Normal(0.0, 50.0))
        of_income = numpyro.sample("of_income", dist.Normal(0.0, 1.0))
        of_year = numpyro.sample("of_year", dist.Normal(0.0, 1.0))
        rate = jnp.exp(level + of_income * income + of_year * year)
        numpyro.sample("counts", dist.Poisson(rate), obs=counts)

    found = initial_gaussian(random.key(seed), model).locs
    at = np.array([found[name] for name in ("level", "of_income", "of_year")])
    design = np.stack([np.ones(100), income, year], axis=1)
    rest = counts - np.exp(design @ at)
    # The equations of maximum likelihood, 0 at the mode. The mean is off it by the skewness: of
    # a log rate by half of its variance, which is half a count in all.
    assert abs(np.sum(rest)) < 2
    assert abs(np.corrcoef(rest, income)[0, 1]) < 0.05


def test_words_and_flags_among_the_arguments_are_no_reason_to_start_cold():
    def model(y, name, is_robust, link=None, options=None):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1e4))
        assert name == "normal"
        assert is_robust is False
        numpyro.sample("y", dist.Normal(link(mean), options["scale"]), obs=y)

    guide = AutoImplicit(model, hidden_dims=(4,))
    options = {"scale": 2.0, "name": "normal"}
    guide.set_up(KEY, np.full(16, 500.0), "normal", False, link=jnp.negative, options=options)
    np.testing.assert_allclose(guide.start.gaussian.mean, -500.0, atol=0.1)


@pytest.mark.thorough
def test_a_fit_to_other_data_than_the_guide_has_seen_says_so():
    data = np.where(np.arange(len(RESPONSE)) == 2, np.nan, RESPONSE)

    def model(years, response, name="normal"):
        regression(years, jnp.where(jnp.isnan(response), 0.0, response))

    guide = AutoImplicit(model, hidden_dims=(4,))
    svi = SVI(model, guide, optax.adam(1e-2), CHEAP)

    def state_of(*args):
        return svi.get_params(initial_state(svi, KEY, (args, {}))[0])

    guide.set_up(KEY, YEARS, data, "normal")
    # Equal numbers in other arrays, what is missing included: warnings are errors here.
    params = state_of(jnp.asarray(YEARS), data.astype(np.float32), "normal")
    with pytest.warns(UserWarning, match="expected the data that the guide was set up on"):
        state_of(YEARS, data + 1, "normal")
    with pytest.warns(UserWarning, match="expected the data that the guide was set up on"):
        state_of(YEARS[1:], data[1:], "normal")
    with pytest.warns(UserWarning, match="expected the data that the guide was set up on"):
        state_of(YEARS, data, "other")
    # Whoever goes on from a state, or gives the parameters, knows where the fit starts.
    state = svi.init(KEY, YEARS, data, "normal")
    options = {"max_steps": 5, "chunk_size": 5, "progress_bar": False, "criterion": "loss"}
    with pytest.warns(UserWarning, match="not converged") as caught:
        fit(svi, KEY, YEARS, data + 1, "normal", init_state=state, **options)
    assert len(caught) == 1
    initial_state(svi, KEY, ((YEARS, data + 1, "normal"), {}), init_params=params)


def test_models_in_single_precision_are_searched_in_it():
    """A carry of a loop in float32 cannot take double precision."""

    def model():
        x = numpyro.sample("x", dist.Normal(1000.0, 10.0))
        total = jax.lax.fori_loop(0, 2, lambda k, c: c + 0.5 * x, jnp.zeros((), jnp.float32))
        numpyro.sample("y", dist.Normal(total, 10.0), obs=1010.0)

    start = initial_gaussian(KEY, model)
    # N(1000, 10²) and an observation 1010 with the same error.
    assert start.locs["x"] == pytest.approx(1005.0, abs=0.5)
    assert start.scales["x"] == pytest.approx(10 / np.sqrt(2), rel=0.02)


@pytest.mark.slow
def test_arrays_that_another_program_saw_in_single_precision():
    """A model that closes over NumPy arrays, after a program that does so too, such as NUTS's.

    JAX takes its version of an array in the other precision: products then have two types.
    """
    years, group = YEARS.copy(), np.arange(len(YEARS)) % 2

    def model(response):
        slope = numpyro.sample("slope", dist.Normal(0.0, PRIOR_SD))
        shift = numpyro.sample("shift", dist.Normal(0.0, PRIOR_SD).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(slope * years + shift[group], NOISE_SD), obs=response)

    alone = initial_gaussian(KEY, model, RESPONSE)
    single = jax.jit(lambda slope: (slope * years)[group])
    single(1.0)
    after = initial_gaussian(KEY, model, RESPONSE)
    np.testing.assert_array_equal(after.factor, alone.factor)
    assert single(1.0).dtype == jnp.float32


def insistent(years):
    def model(response):
        slope = numpyro.sample("slope", dist.Normal(0.0, PRIOR_SD))
        carry, _ = jax.lax.scan(lambda c, x: (c + x, None), jnp.float32(0), slope * years)
        intercept = numpyro.sample("intercept", dist.Normal(0.0, PRIOR_SD))
        numpyro.factor("carry", -0.0 * carry)
        numpyro.sample("y", dist.Normal(intercept + slope * years, NOISE_SD), obs=response)

    return model


@pytest.mark.thorough
def test_arrays_of_a_model_that_insists_on_single_precision():
    """The search in single precision is not given the arrays that double precision was tried on."""
    with pytest.raises(TypeError), jax.enable_x64(True):
        # An error leaves a trace behind, with its arrays: these are others.
        jax.make_jaxpr(handlers.seed(insistent(YEARS.copy()), KEY))(RESPONSE)
    start = initial_gaussian(KEY, insistent(YEARS.copy()), RESPONSE)
    # Its correlation of -1 + 4e-6 is at the edge of single precision.
    np.testing.assert_allclose(start.locs["slope"], exact_posterior()[0][0], atol=0.1)


@pytest.mark.thorough
def test_a_scan_may_carry_a_latent_with_an_improper_prior():
    """Draws of the prior have one precision in a search in double, which a scan insists on."""

    def model(y):
        first = numpyro.sample("first", dist.ImproperUniform(constraints.real, (), ()))
        growth = numpyro.sample("growth", dist.Normal(0.0, 1.0))
        step = lambda state, _: (state + growth, state)  # noqa: E731
        numpyro.sample("y", dist.Normal(lax.scan(step, first, None, length=4)[1], 1.0), obs=y)

    y = np.array([1.0, 1.5, 3.5, 4.0], np.float32)
    start = initial_gaussian(KEY, model, y)
    features = np.stack([np.ones(4), np.arange(4.0)], axis=1)
    precision = features.T @ features + np.diag([0.0, 1.0])
    found = [start.locs["first"], start.locs["growth"]]
    # The start is a fit by draws: a tenth of the smaller standard deviation, of 0.4.
    np.testing.assert_allclose(found, np.linalg.solve(precision, features.T @ y), atol=0.04)


@pytest.mark.thorough
def test_a_prior_need_not_be_drawn_from():
    """A truncated Student distribution has a density, but asks for a package to draw."""

    class Undrawn(dist.HalfNormal):
        def sample(self, key, sample_shape=()):
            raise ImportError("Please install another package")

    def model(y):
        scale = numpyro.sample("scale", Undrawn(3.0))
        numpyro.sample("y", dist.Normal(0.0, scale), obs=y)

    y = np.linspace(-1, 1.5, 48, dtype=np.float32)
    start = initial_gaussian(KEY, model, y)
    logs = np.linspace(-3, 3, 2001)  # the posterior of the logarithm, by quadrature
    density = logs - np.exp(2 * logs) / 18 - 48 * logs - np.sum(y**2) / 2 * np.exp(-2 * logs)
    weights = np.exp(density - density.max()) / np.sum(np.exp(density - density.max()))
    mean = weights @ logs
    sd = np.sqrt(weights @ (logs - mean) ** 2)
    # The closest Gaussian to a posterior with a skewness of 0.2 is off by less.
    np.testing.assert_allclose(start.locs["scale"], mean, atol=0.15 * sd)


LEVELS = 60


def local_level(flow):
    """A level that wanders, written as a factor: the density is infinite where it does not."""
    drift = numpyro.sample("drift", dist.HalfCauchy(100.0))
    noise = numpyro.sample("noise", dist.HalfCauchy(100.0))
    improper = dist.ImproperUniform(constraints.real_vector, (), (LEVELS,))
    level = numpyro.sample("level", improper)
    numpyro.factor("moves", dist.Normal(level[:-1], drift).log_prob(level[1:]).sum())
    numpyro.sample("flow", dist.Normal(level, noise), obs=flow)


@pytest.fixture(scope="module")
def wandering():
    """Sixty years of a river, and the log evidence of both scales on a grid of their logarithms.

    In the eigenvectors of the walk the integral over levels is a product of normal densities.
    """
    rng = np.random.default_rng(308)
    flow = 1000 + np.cumsum(rng.normal(0, 40, LEVELS)) + rng.normal(0, 120, LEVELS)
    moves = np.diff(np.eye(LEVELS), axis=0)
    values, vectors = np.linalg.eigh(moves.T @ moves)
    squares, values = (vectors.T @ flow)[1:] ** 2, values[1:]
    grid = np.meshgrid(np.linspace(-4, 8, 401), np.linspace(2, 7, 201), indexing="ij")
    variances = np.exp(2 * grid[0])[..., None] / values + np.exp(2 * grid[1])[..., None]
    terms = np.log(2 * np.pi * variances * values) + squares / variances
    density = -0.5 * np.sum(terms, axis=-1)
    for scale in grid:
        density += scale + np.log(2 / (100 * np.pi)) - np.log1p(np.exp(2 * scale) / 1e4)
    return flow, grid, density


@pytest.mark.thorough
def test_a_peak_without_probability_is_left_alone(wandering):
    flow, grid, density = wandering
    weights = np.exp(density - density.max())
    start = initial_gaussian(KEY, local_level, flow)
    for name, scale in zip(("drift", "noise"), grid, strict=True):
        mean = np.average(scale, weights=weights)
        sd = np.sqrt(np.average((scale - mean) ** 2, weights=weights))
        assert abs(start.locs[name] - mean) < sd


@pytest.mark.slow
def test_a_gaussian_that_changes_with_both_scales_is_near_the_evidence(wandering):
    """Its mean and covariance are those of a normal posterior at every value of the scales."""
    flow, grid, density = wandering
    cell = np.prod([scale.flat[-1] - scale.flat[0] for scale in grid]) / 400 / 200
    evidence = density.max() + np.log(np.sum(np.exp(density - density.max())) * cell)
    guide = AutoImplicit(local_level)
    guide.set_up(KEY, flow)
    assert isinstance(guide.start.transports.steps[1], Conditional)
    assert abs(guide.start.elbo - evidence) < 0.1


def test_a_guide_of_ones_own_works_in_standard_units(found):
    x = jnp.array([1.0, -0.5])
    with handlers.trace() as trace:
        values = found.sample(x)
    expected = found.mean + found.factor @ x
    np.testing.assert_allclose(by_name(found, values), by_name(found, unravelled(found, expected)))
    assert list(trace) == list(found.locs)
    # Draws of the standard normal are draws of the posterior, which is a Gaussian.
    draws = jax.vmap(found.sample)(random.normal(KEY, (4000, 2)))
    mean, covariance = exact_posterior()
    sd = np.sqrt(np.diag(covariance))
    moments = np.stack([draws["slope"], draws["intercept"]], axis=1)
    np.testing.assert_allclose((moments.mean(0) - mean) / sd, 0.0, atol=0.02 + 4 / 4000**0.5)
    np.testing.assert_allclose(moments.std(0) / sd, 1.0, atol=0.02 + 4 / 8000**0.5)
    with pytest.raises(ValueError, match=r"x: expected 2 numbers, one for each latent .* \(3,\)"):
        found.sample(jnp.zeros(3))


def unravelled(start, flat):
    return unravel(flat, tuple((name, np.shape(value)) for name, value in start.locs.items()))


def test_standard_units_reach_every_support_but_one_that_another_latent_determines():
    def model(y):
        low = numpyro.sample("low", dist.Normal(0.0, 1.0))
        scale = numpyro.sample("scale", dist.HalfNormal(jnp.ones(3)).to_event(1))
        if y.shape == (2,):
            numpyro.sample("high", dist.Uniform(low, 9.0))
        numpyro.sample("y", dist.Normal(low, scale[0]), obs=y.sum())

    start = initial_gaussian(KEY, model, jnp.ones(1))
    with handlers.trace() as trace:
        values = start.sample(jnp.full(4, -5.0))
    assert np.all(values["scale"] > 0)
    assert trace["scale"]["fn"].event_dim == 1
    with pytest.raises(ValueError, match=r"supports that are the same in every draw; got .*'high'"):
        initial_gaussian(KEY, model, jnp.ones(2)).sample(jnp.zeros(5))
