"""The posteriors that the defaults were not tuned on are what they say they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform
from numpyro.infer.util import initialize_model, log_density

from benchmarks.accuracy import posterior_accuracy as accuracy
from benchmarks.accuracy.fits import Fit
from benchmarks.accuracy.guides import METHODS
from benchmarks.accuracy.harder import HARDER, exact, modes
from benchmarks.accuracy.pathfinder import pathfinder
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.posteriors import make_posterior
from benchmarks.accuracy.references import QUICK, Reference, load_reference
from benchmarks.accuracy.targets import make_target


@pytest.mark.parametrize("prior_sd", [None, np.array([5.0, 0.3])])
def test_exact_draws_of_a_regression(prior_sd):
    """Stein's identities E s = 0 and E u sᵀ = -I, for s the gradient written out by hand."""
    rng = np.random.default_rng(1)
    x = np.column_stack([np.ones(30), rng.normal(170, 8, 30)])
    y = x @ [-100, 1.0] + 7 * rng.normal(size=30)
    sample = exact.linear_regression(
        jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), prior_sd, dist.HalfNormal(5)
    )
    u = np.asarray(sample(jax.random.key(2), 50_000), np.float64)
    x, y = x.astype(np.float32).astype(float), y.astype(np.float32).astype(float)
    weights, variance = u[:, :2], np.exp(2 * u[:, 2:])
    residuals = y - weights @ x.T
    of_weights = residuals @ x / variance
    if prior_sd is not None:
        of_weights = of_weights - weights / prior_sd**2
    of_scale = 1 - len(y) + (residuals**2).sum(1) / variance[:, 0] - variance[:, 0] / 25
    s = np.column_stack([of_weights, of_scale])
    u = u - u.mean(0)
    for i in range(3):
        products = np.column_stack([s[:, i], s[:, [i]] * u])
        expected = np.concatenate([[0.0], -np.eye(3)[i]])
        error = products.std(0) / len(u) ** 0.5
        assert np.all(np.abs(products.mean(0) - expected) < 4.5 * error)


def check_parametrizations(target):
    """p(u) = p(g(u)) |det g'(u)| for the map g from NUTS's coordinates to the model's."""
    data = tuple(
        a.astype(float) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in target.args
    )
    target = dataclasses.replace(target, args=data)
    own, other = (
        initialize_model(
            jax.random.key(0), model, init_strategy=init_to_uniform(radius=0.5), model_args=data
        )
        for model in (target.model, target.nuts_model)
    )
    start, unflatten = ravel_pytree(other.param_info.z)
    sites = {site: own.param_info.z[site] for site in target.supports()}

    def move(u):
        draws = {k: v[None] for k, v in other.postprocess_fn(unflatten(u)).items()}
        return target.unconstrained(target.from_nuts(draws))[0]

    def energy(x):
        parts, first = {}, 0
        for site, value in sites.items():
            parts[site] = x[first : first + value.size].reshape(value.shape)
            first += value.size
        return own.potential_fn(parts)

    @jax.jit
    def energies(u):
        jacobian = jnp.linalg.slogdet(jax.jacfwd(move)(u))[1]
        return other.potential_fn(unflatten(u)), energy(move(u)) - jacobian

    shifts = np.random.default_rng(3).normal(0, 0.3, (3, len(start)))
    values = np.array([energies(start + shift) for shift in shifts])
    assert np.all(np.isfinite(values))
    difference = values[:, 0] - values[:, 1]
    # A flat prior in other units adds a constant.
    np.testing.assert_allclose(difference, difference[0], atol=1e-6 * np.abs(values).max())


@pytest.mark.slow  # each model is compiled in both forms
@pytest.mark.parametrize(
    "name",
    [
        *("poisson_trend", "poisson_trend_noncentered"),
        *("reaction_times", "reaction_times_noncentered"),
        *("twelve_lines", "twelve_lines_noncentered"),
        *("item_response", "binomial_groups", "nested_effects", "sparse_regression"),
        *("volatility", "local_level", "survival", "smooth_counts", "smooth_map"),
        "moving_line",
    ],
)
def test_both_parametrizations_are_one_posterior(name):
    with jax.enable_x64(True):
        check_parametrizations(HARDER[name]().target)


@pytest.mark.slow
def test_fixed_steps_solve_the_equations():
    from benchmarks.accuracy.harder import series

    start, rates = jnp.array([33.0, 6.0]), jnp.array([0.55, 0.028, 0.8, 0.024])
    fixed, adaptive = series._runge_kutta(start, rates), series._adaptive(start, rates)
    np.testing.assert_allclose(fixed, adaptive, rtol=2e-4)


@pytest.mark.parametrize("name", ["ring_in_ten", "banana_in_six"])
@pytest.mark.thorough
def test_exact_draws_have_the_score_of_the_model(name):
    """Stein's identity, E[x ∇ log p(x)ᵀ] = -I; the error of its mean over 40 000 draws is known."""
    target = HARDER[name]().target
    x = target.exact(jax.random.key(0), 40_000)
    score = jax.jit(jax.vmap(jax.grad(lambda x: log_density(target.model, (), {}, {"x": x})[0])))(x)
    products = np.asarray(x[:, :, None] * score[:, None, :])
    error = products.std(axis=0) / 200
    assert np.max(np.abs(products.mean(axis=0) + np.eye(x.shape[1])) / error) < 5


def test_labels_do_not_matter():
    rng = np.random.default_rng(4)
    draws = {
        "means": jnp.asarray(rng.normal(size=(3, 2))),
        "scales": jnp.asarray(rng.uniform(1, 2, (3, 2))),
        "weights": jnp.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]),
    }
    found = modes._without_labels(draws)
    exchanged = modes._without_labels({name: x[:, ::-1] for name, x in draws.items()})
    np.testing.assert_allclose(found, exchanged, rtol=1e-5)
    first = np.argmin(draws["means"], axis=1)
    rows = np.arange(3)
    np.testing.assert_allclose(found[:, 0], draws["means"][rows, first])
    np.testing.assert_allclose(found[:, 2], np.log(draws["scales"][rows, first]), rtol=1e-5)
    share = np.asarray(draws["weights"])[rows, first]
    np.testing.assert_allclose(found[:, 4], np.log(share / (1 - share)), rtol=1e-5, atol=1e-6)


def make_bench(monkeypatch, method, diagnose=False):
    draws = jax.random.normal(jax.random.key(5), (2, 200, 2))
    options = accuracy.argparse.Namespace(quick=True, data=None, cache=None, diagnose=diagnose)
    bench = accuracy.Bench(options)
    bench.posterior = lambda name: Posterior(make_target("banana"))
    bench.reference = lambda name: Reference(*draws, rhat=1.0, ess=200.0, seconds=1.0)
    monkeypatch.setitem(METHODS, "AutoNormal", method)
    return bench, draws


@pytest.mark.thorough
def test_a_row_says_how_a_fit_ended(monkeypatch):
    def method(posterior, seed, num_steps, num_draws):
        return Fit(draws[0], 2.0, 1.0, 20, 640, "plateau, far", lambda: "bad")

    bench, draws = make_bench(monkeypatch, method, diagnose=True)
    row = bench.compute("banana", "AutoNormal", 0, 20)
    assert set(row) == {*accuracy.COLUMNS, "diagnosis"}
    ended = {name: row[name] for name in ("steps", "gradients", "ending", "diagnosis")}
    assert ended == {"steps": 20, "gradients": 640, "ending": "plateau, far", "diagnosis": "bad"}
    assert row["mean_error"] < 1e-6


def test_a_fit_that_fails_is_a_row(monkeypatch, capsys):
    def method(posterior, seed, num_steps, num_draws):
        raise FloatingPointError("fit: expected finite losses; got none")

    bench, _ = make_bench(monkeypatch, method)
    row = bench.compute("banana", "AutoNormal", 0, 20)
    assert set(row) == set(accuracy.COLUMNS)
    assert (row["finite"], row["ending"]) == (0, "failed")
    assert np.isnan(row["distance"])
    assert "banana, AutoNormal: fit: expected finite losses" in capsys.readouterr().out


@pytest.mark.slow
def test_nuts_counts_its_gradients_and_knows_its_precision():
    posterior = Posterior(make_target("eight_schools"), float64=True, dense_mass=True)
    reference = load_reference(posterior, QUICK, None)
    # At least one for every step of the eight chains.
    total = 2 * QUICK.num_draws * posterior.thinning
    assert reference.gradients >= 8 * QUICK.num_warmup + total
    assert reference.truth.dtype == jnp.float32
    assert len(reference.truth) == len(reference.other) == QUICK.num_draws


@pytest.mark.slow
def test_pathfinder_finds_a_skewed_posterior():
    posterior = make_posterior("dirichlet")
    fit = pathfinder(posterior, 0, 5_000, 10_000)
    truth = posterior.target.exact(jax.random.key(6), 10_000)
    error = (fit.draws.mean(0) - truth.mean(0)) / truth.std(0)
    np.testing.assert_allclose(error, 0, atol=0.15)
    np.testing.assert_allclose(fit.draws.std(0), truth.std(0), rtol=0.15)
    assert fit.gradients > 10_000 + fit.steps > 10_000
