"""The head to head: rivals against what their papers define, where that is known exactly."""

import argparse
import csv
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from benchmarks.accuracy import head_to_head
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.rivals import (
    aisivi,
    coupling,
    family,
    ksivi,
    networks,
    pvi,
    realnvp,
    sivi,
    svgd,
    two_samples,
    uivi,
)
from benchmarks.accuracy.rivals.problem import Outcome, make_problem
from benchmarks.accuracy.targets import Target
from support.compiling import quick_jit

MIXING = np.array([[1.0, 0.4, -0.3], [0.2, -0.8, 0.5]]).T  # of three noises to two dimensions
LOG_VAR = np.log([0.3, 0.6])


def linear_family():
    """A semi-implicit Gaussian whose marginal is Gaussian, and its covariance."""
    params = {"net": [{"w": jnp.asarray(MIXING), "b": jnp.zeros(2)}]}
    params["log_var"] = jnp.asarray(LOG_VAR)
    return params, MIXING.T @ MIXING + np.diag(np.exp(LOG_VAR))


def gaussian_problem(scale=1.0):
    """A centered Gaussian in two dimensions, as a problem, and its exact draws."""

    def model():
        numpyro.sample("a", dist.Normal(0.0, scale))
        numpyro.sample("b", dist.LogNormal(0.0, scale))

    def exact(key, count):
        return scale * random.normal(key, (count, 2))

    return make_problem(Posterior(Target("gaussian", model, exact=exact)))


def within(found, expected, errors=4.0):
    """Whether means of rows (n, ...) are those expected, within some standard errors."""
    found = np.asarray(found)
    error = found.std(0) / len(found) ** 0.5
    return bool((np.abs(found.mean(0) - expected) <= errors * error + 1e-12).all())


def test_a_problem_is_one_vector(x64):
    problem = gaussian_problem()
    x = jnp.array([0.3, -1.2])
    assert problem.dim == 2
    np.testing.assert_allclose(problem.scores(x[None])[0], -x, rtol=1e-12)
    np.testing.assert_allclose(problem.constrain(x)["b"], np.exp(-1.2))
    # Potentials have the volume of the map: of a log-normal number the density of its logarithm.
    np.testing.assert_allclose(problem.log_density(x), dist.Normal().log_prob(x).sum())


def test_draws_of_the_family_have_its_conditional_density(x64):
    params, _ = linear_family()
    noise, unit, x = family.draw(params, random.key(0), 5)
    exact = dist.Normal(noise @ MIXING, np.exp(LOG_VAR / 2)).log_prob(x).sum(-1)
    np.testing.assert_allclose(family.log_given(params, x, noise), exact, rtol=1e-10)
    expected = -unit / np.exp(LOG_VAR / 2)
    np.testing.assert_allclose(family.score_given(params, x, noise), expected, rtol=1e-9)


def test_the_density_of_sivi_is_a_mean_over_noises(x64):
    params, covariance = linear_family()

    @quick_jit
    def run(key):
        noise, _, x = family.draw(params, key, 3)
        others = random.normal(random.fold_in(key, 1), (20_000, 3))
        few = sivi.surrogate_log_density(params, x, noise, others[:4])
        many = sivi.surrogate_log_density(params, x, noise, others)
        marginal = dist.MultivariateNormal(jnp.zeros(2), covariance).log_prob(x)
        own = family.log_given(params, x, noise)
        return few, many, own, family.log_given(params, x, others[:, None]), marginal

    few, many, own, others, marginal = run(random.key(0))
    every = np.exp(np.concatenate([own[None], others]))
    np.testing.assert_allclose(few, np.log(every[:5].mean(0)), rtol=1e-9)
    # With many noises it is the marginal's; the draw's own noise is one term more.
    terms = every[1:] / np.exp(marginal)
    limit = 4 * terms.std(0) / len(terms) ** 0.5 + 10 / len(terms)
    assert (np.abs(many - marginal) < limit).all()


def test_the_bound_of_sivi_is_below_that_of_the_marginal(x64):
    params, covariance = linear_family()
    problem = gaussian_problem()
    entropy = 0.5 * np.linalg.slogdet(2 * np.pi * np.e * covariance)[1]
    exact = -entropy + 0.5 * np.trace(covariance) + np.log(2 * np.pi)
    bound = jax.jit(lambda key: sivi.loss(params, key, problem, 50, 20))
    found = np.array([bound(key) for key in random.split(random.key(3), 40)])
    assert found.mean() - 3 * found.std() / 40**0.5 > exact


def test_the_chain_of_uivi_gives_the_score_of_the_marginal(x64):
    params, covariance = linear_family()
    noise, _, x = family.draw(params, random.key(4), 4)
    score = jax.jit(uivi.marginal_score, static_argnums=5)
    runs = [score(params, x, noise, key, 0.4, 40) for key in random.split(random.key(5), 25)]
    # Chains start where they should be: noise was drawn with x, so that none is forgotten.
    assert within([found for found, _ in runs], -x @ np.linalg.inv(covariance))
    assert 0.8 < np.mean([chance for _, chance in runs]) <= 1


def test_the_proposals_of_aisivi_give_the_score_of_the_marginal(x64):
    params, covariance = linear_family()
    x = jnp.array([[0.5, 1.0], [-1.0, 0.2]])
    flow = coupling.start(random.key(0), 3, 2, 2, 4)
    score = jax.jit(aisivi.marginal_score, static_argnums=4)
    for number in range(2):
        # A flow that starts is the prior, and another one has to be corrected for.
        found = score(params, flow, x, random.key(6 + number), 50_000)
        np.testing.assert_allclose(found, -x @ np.linalg.inv(covariance), atol=0.04)
        flow |= {"loc": jnp.array([0.2, -0.1, 0.3]), "log_scale": jnp.full(3, 0.3)}


def test_paths_give_the_gradient_of_a_divergence(x64):
    """Both are Gaussian, and the estimate is by their scores."""
    params, covariance = linear_family()

    def divergence(params):
        mixing, noise = params["net"][0]["w"], jnp.diag(jnp.exp(params["log_var"]))
        spread = mixing.T @ mixing + noise
        return 0.5 * (jnp.trace(spread) - jnp.linalg.slogdet(spread)[1])

    def estimate(key):
        x = family.draw(params, key, 500)[2]
        return uivi.path_gradient(params, key, 500, x - x @ np.linalg.inv(covariance))

    exact = jax.grad(divergence)(params)
    found = jax.lax.map(jax.jit(estimate), random.split(random.key(8), 40))
    assert within(found["log_var"], exact["log_var"])
    assert within(found["net"][0]["w"], exact["net"][0]["w"])


def test_the_discrepancy_of_ksivi_is_that_of_the_marginals(x64):
    """N(0, a²) and N(0, 1) have it in closed form, as an integral over both points of a kernel.

    Scores differ by c x, c = 1/a² - 1, and E x x' k(x, x') = a⁴ h / (h² + 2 a²)^(3/2).
    """
    square, width = 1.7, 0.9
    params = {"net": [{"w": jnp.full((1, 1), (square - 0.5) ** 0.5), "b": jnp.zeros(1)}]}
    params["log_var"] = jnp.log(jnp.array([0.5]))

    def estimate(key):
        def side(key):
            _, unit, x = family.draw(params, key, 100)
            return x, -x + unit / 0.5**0.5

        (x, f), (y, g) = map(side, random.split(key))
        return ksivi.discrepancy(x, f, y, g, width**2)

    exact = (1 / square - 1) ** 2 * square**2 * width / (width**2 + 2 * square) ** 1.5
    assert within(jax.lax.map(jax.jit(estimate), random.split(random.key(9), 400)), exact)


def test_the_bandwidth_of_ksivi_is_that_of_the_median():
    x, y = jnp.zeros((40, 1)), jnp.full((40, 1), 3.0)
    np.testing.assert_allclose(ksivi.squared_bandwidth(x, y), 9 / (2 * np.log(41)), rtol=1e-5)


def test_the_flow_of_pvi_descends_the_free_energy(x64):
    """The gradient along paths is that of an integral over a grid in one dimension."""
    params = quick_jit(lambda key: pvi.start(key, 1, width=4, particles=3))(random.key(0))
    log_p = lambda x: -0.5 * (x**4).sum(-1)  # noqa: E731
    grid = jnp.linspace(-9, 9, 2_001)[:, None]

    def free_energy(params):
        own = pvi.log_density(params, grid)
        return (jnp.exp(own) * (own - log_p(grid))).sum() * (grid[1, 0] - grid[0, 0])

    def estimate(key):
        unit = random.normal(key, (50, 3, 1))
        return pvi.free_energy_gradient(params, unit, log_p)

    exact = quick_jit(jax.grad(free_energy))(params)
    found = jax.lax.map(jax.jit(estimate), random.split(random.key(1), 100))
    assert within(found["z"], 3 * exact["z"])
    assert within(found["theta"]["sd"], exact["theta"]["sd"])
    assert within(found["skip"], exact["skip"])


def test_the_direction_of_svgd_is_its_definition(x64):
    x = random.normal(random.key(0), (4, 2))
    scores, square = jnp.sin(x), 1.3

    def kernel(a, b):
        return jnp.exp(-((a - b) ** 2).sum() / square)

    expected = [
        np.mean(
            [kernel(a, b) * s + jax.grad(kernel)(a, b) for a, s in zip(x, scores, strict=True)], 0
        )
        for b in x
    ]
    np.testing.assert_allclose(svgd.direction(x, scores, square), expected, rtol=1e-9)


def moved_flow(dim, context):
    """A flow that is not the identity."""
    flow = coupling.start(random.key(0), dim, context, 3, 8)
    return jax.tree.map(lambda a: a + 0.3 * jnp.cos(jnp.arange(a.size)).reshape(a.shape), flow)


def test_a_flow_has_the_density_of_its_draws(x64):
    context = jnp.array([0.7])

    @quick_jit
    def run(u):
        flow = moved_flow(3, 1)
        push = lambda u: coupling.push(flow, u, context)  # noqa: E731
        return coupling.log_density(flow, push(u), context), jax.jacfwd(push)(u)

    u = np.array([0.3, -1.0, 0.6])
    found, jacobian = run(u)
    expected = -0.5 * (u**2 + np.log(2 * np.pi)).sum() - np.linalg.slogdet(jacobian)[1]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_gradient_of_a_flow_has_no_noise_at_the_posterior(x64):
    """Gradients along paths have none: a flow that starts is standard normal, as the model."""
    problem = gaussian_problem()

    @quick_jit
    def run(key):
        flow = coupling.start(key, 2, 0, 2, 4)
        return jax.grad(realnvp.loss)(flow, key, problem, 20)

    gradient = run(random.key(1))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) < 1e-12


def test_the_test_of_two_samples_sees_a_shift_and_keeps_its_level():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 60, 2))
    assert two_samples.p_value(x, y + 2, rng) == 1 / 200
    found = [two_samples.p_value(*rng.normal(size=(2, 30, 2)), rng) for _ in range(200)]
    assert abs(np.mean(np.array(found) <= 0.05) - 0.05) < 4 * (0.05 * 0.95 / 200) ** 0.5


def write_rows(path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3))
    np.savetxt(path / "yacht.txt", np.column_stack([x, x[:, 0] + 0.1 * rng.normal(size=40)]))


def test_a_network_predicts_the_mixture_of_its_draws(tmp_path):
    write_rows(tmp_path)
    posterior, parts = networks.make_network(tmp_path / "yacht.txt", 0)
    problem = make_problem(posterior)
    assert problem.dim == 5 * 50 + 1 + 2
    x = jnp.stack([jnp.zeros(problem.dim), jnp.zeros(problem.dim).at[problem.dim - 2].set(1.0)])
    # The guide of a network of noise has a site of that name.
    assert "noise" not in problem.shapes

    def draw(key, count):
        return jnp.tile(x, (count // 2, 1))

    found = networks.predict(problem, Outcome(draw, 0, 0), random.key(0), parts)
    y = parts.y_test.astype(float)
    np.testing.assert_allclose(found["rmse"], np.mean((y - 0.5) ** 2) ** 0.5, rtol=1e-5)
    densities = np.exp(-0.5 * (y - np.array([[0.0], [1.0]])) ** 2) / (2 * np.pi) ** 0.5
    np.testing.assert_allclose(found["nll"], -np.log(densities.mean(0)).mean(), rtol=1e-5)


def test_settings_become_shorter_with_the_same_fall():
    settings = family.settings_of(2).shorter(0.1)
    assert (settings.steps, settings.fall_every) == (5_000, 100)
    assert [family.settings_of(dim).noise_dim for dim in (2, 22, 100, 500)] == [3, 10, 100, 3]


def row(method, seed, value, error=0.1, share=1.0):
    given = {"method": method, "target": "banana", "seed": seed, "share": share}
    return dict.fromkeys(head_to_head.COLUMNS, "") | given | {"W": value, "error": error}


def test_the_report_orders_and_marks():
    rows = [row("sivi", 0, 3.0), row("fit", 0, 1.05), row("auto", 0, 1.0), row("pvi", 0, "")]
    rows.append(row("sivi", 0, 2.0, share=0.25))
    lines = [line[:11].rstrip() for line in head_to_head.report(rows)]
    assert lines[1:] == ["* auto", "* fit", "  sivi 0.25", "  sivi", "  pvi"]
    # With seeds the error is that over these.
    rows = [row(m, s, w + 0.001 * s) for m, w in (("a", 1.0), ("b", 1.05)) for s in range(3)]
    assert [line[0] for line in list(head_to_head.report(rows))[1:]] == ["*", " "]


def test_figures_of_exact_draws_and_of_others(monkeypatch):
    few = partial(two_samples.rejection_rate, num_tests=3)
    monkeypatch.setattr(head_to_head, "rejection_rate", few)
    problem = gaussian_problem()
    sets = np.split(np.random.default_rng(0).normal(size=(500, 2)), 5)
    case = head_to_head.Case(problem, tuple(sets), 0.05)
    same = head_to_head.compare(case, np.concatenate(sets))
    assert (same["sliced"], same["mean"], same["low"], same["high"]) == (0, 0, 1, 1)
    other = head_to_head.compare(case, 2 * np.concatenate(sets) + 1)
    assert other["reject"] == 1
    assert other["low"] == pytest.approx(2)
    missing = head_to_head.compare(case, np.full((500, 2), np.nan))
    assert math.isnan(missing["W"])
    assert "not finite" in missing["said"]


def test_a_method_that_fails_says_why(monkeypatch):
    def fail(problem, key, share):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(head_to_head.METHODS, "sivi", fail)
    case = head_to_head.Case(gaussian_problem())
    monkeypatch.setattr(head_to_head, "make_case", lambda *_: case)
    options = argparse.Namespace(data=None, cache=None, quick=True)
    found = head_to_head.compute(options, "sivi", "banana", 0, 0.1)
    assert found["said"] == "RuntimeError: out of luck"
    assert found["W"] == ""


@pytest.mark.thorough
@pytest.mark.parametrize("method", sorted(head_to_head.METHODS))
def test_every_method_draws(method):
    problem = gaussian_problem()
    outcome = head_to_head.METHODS[method](problem, random.key(0), 0.0005)
    draws = outcome.draw(random.key(1), 700)
    assert draws.shape == (700, 2)
    assert np.isfinite(draws).all()
    assert outcome.gradients >= 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sivi", "uivi", "aisivi", "ksivi", "pvi", "realnvp"])
def test_rivals_find_a_gaussian(method):
    """With a twentieth of their steps; the small ones of PVI need half of them."""
    problem, share = gaussian_problem(0.5), 0.5 if method == "pvi" else 0.05
    outcome = head_to_head.METHODS[method](problem, random.key(0), share)
    draws = np.asarray(outcome.draw(random.key(1), 20_000))
    np.testing.assert_allclose(draws.mean(0), 0, atol=0.1)
    np.testing.assert_allclose(draws.std(0), 0.5, atol=0.1)


@pytest.mark.thorough
def test_the_table_is_written(tmp_path, capsys):
    table = tmp_path / "table.csv"
    arguments = ["--quick", "--csv", str(table), "--targets", "banana", "yacht"]
    head_to_head.main([*arguments, "--methods", "svgd"])
    (found,) = csv.DictReader(table.read_text().splitlines())
    assert all(np.isfinite(float(found[name])) for name in ("W", "reject", "cpu", "gradients"))
    assert "yacht is left out" in capsys.readouterr().out
    write_rows(tmp_path)
    head_to_head.main([*arguments, "--methods", "svgd", "--data", str(tmp_path)])
    _, found = csv.DictReader(table.read_text().splitlines())
    assert np.isfinite(float(found["rmse"]))
    assert found["W"] == ""
