"""The example of functional networks: its parts, its exact posteriors, and a whole run."""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from scipy.stats import norm
from sklearn.model_selection import train_test_split

from examples.common import tables
from examples.functions import (
    bnn,
    data,
    decisions,
    fit,
    gp,
    metrics,
    networks,
    programs,
    samplers,
    simulated,
    tasks,
    toys,
)
from support.compiling import quick_jit
from support.linear_functions import NOISE, POOL, X, Y, features

mpl.use("Agg")


@pytest.mark.parametrize("kind", networks.KINDS)
@pytest.mark.thorough
def test_networks_are_random_functions(kind):
    """A draw is one function at all points, it depends on the key, and on every parameter."""
    function = networks.RandomFunction(kind, hidden=(8,), activation=jnp.tanh)
    points = jnp.concatenate([POOL[:5], POOL[:5]])

    def draw(params, key):
        return handlers.substitute(handlers.seed(function, key), params)(points)

    def sum_of_squares(params, keys):
        values = jax.vmap(draw, (None, 0))(params, keys)
        return jnp.sum(values**2), values

    @quick_jit
    def run(keys):
        trace = handlers.trace(handlers.seed(function, keys[0])).get_trace(points)
        params = {name: s["value"] for name, s in trace.items() if s["type"] == "param"}
        return jax.grad(sum_of_squares, has_aux=True)(params, keys)

    gradients, values = jax.tree.map(np.asarray, run(random.split(random.key(0), 40)))
    # A matrix product may sum equal rows in different orders.
    np.testing.assert_allclose(values[:, :5], values[:, 5:], atol=1e-5)
    assert np.all(np.std(values, axis=0) > 1e-3)
    assert all(np.any(g != 0) for g in gradients.values())


def some_process(length_scale, y=None):
    log_scales = jnp.log(jnp.full((1, 1), length_scale))
    found = gp.Hyperparameters(jnp.zeros(1), log_scales, jnp.log(jnp.asarray(0.25)))
    return gp.condition(found, X, Y if y is None else y)


def test_information_ratio_of_all_data_is_one():
    """Two formulas for one divergence: with the prior's covariance inverted, and without."""
    ratio = partial(gp.information_ratio, pool=POOL, jitter=0.0)
    # At a third of the inputs' distance and beyond the covariance is far from singular.
    for scale in (0.1, 0.4):
        all_data = ratio(some_process(scale), batch_size=6, num_points=0, num_sets=1)
        # The covariance is float32's, and its condition is 15 at most.
        np.testing.assert_allclose(all_data, 1.0, rtol=1e-5)
    # Independent values: with equal targets, any set of three has half the information of all six.
    alone = gp.information_ratio(some_process(0.01, jnp.ones(6)), POOL, 3, 0, jitter=0.0)
    np.testing.assert_allclose(alone, 2.0, rtol=1e-5)


@pytest.mark.thorough
def test_the_ratio_divides_what_data_count(monkeypatch):
    """The scale of the likelihood is N/B divided by the ratio."""

    class Stop(Exception):
        pass

    def stop(model, guide, loss, settings, key, *args):
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*args)
        raise Stop(float(trace["y"]["scale"]))

    monkeypatch.setattr(fit, "run", stop)
    settings = fit.Settings(batch_size=2, num_points=3)
    independent = lambda _, points: dist.Normal(jnp.zeros(len(points)), 1.0).to_event(1)  # noqa: E731
    given = (X, Y, independent, None, NOISE, settings, random.key(0))
    function = lambda _, points: features(points)  # noqa: E731
    with pytest.raises(Stop, match=r"^2\.0$"):
        fit.functional(*given, pool=POOL, function=function, ratio=1.5)


@pytest.mark.thorough
def test_metrics_of_a_gaussian_prediction():
    """Quantiles represent a Gaussian, whose figures are known."""
    levels = norm.ppf((np.arange(500) + 0.5) / 500)
    rng = np.random.default_rng(0)
    mean, y = rng.normal(size=200), rng.normal(size=200)
    draws = jnp.asarray(mean + 0.6 * levels[:, None], jnp.float32)
    noise = dist.Normal(0.0, 0.8)
    found = metrics.log_likelihood(draws, noise, jnp.asarray(y, jnp.float32))
    # Quantiles end at 3.1 standard deviations, so likelihoods far out are too small.
    near = np.abs(y - mean) < 2
    np.testing.assert_allclose(found[near], norm.logpdf(y, mean, 1.0)[near], atol=2e-3)
    entropy = metrics.entropy(draws, noise)
    np.testing.assert_allclose(entropy, 0.5 * np.log(2 * np.pi * np.e), atol=4e-3)
    # Gneiting and Raftery (2007), equation 21. The samples' error is .6/√500 a target.
    score = y - mean
    exact = score * (2 * norm.cdf(score) - 1) + 2 * norm.pdf(score) - 1 / np.sqrt(np.pi)
    assert (
        abs(metrics.crps(draws, noise, jnp.asarray(y)) - exact.mean())
        < 4 * 0.6 / 500**0.5 / 200**0.5
    )
    # Targets at the predicted quantiles are calibrated. All at the median: the share below is 0 up
    # to the level .5, and 1 from there.
    even = jnp.asarray(mean + norm.ppf((np.arange(200) + 0.5) / 200), jnp.float32)
    assert metrics.calibration_error(draws, noise, even) < 0.01
    flat = metrics.calibration_error(draws, noise, jnp.asarray(mean, jnp.float32))
    levels = metrics.LEVELS
    assert abs(flat - np.mean(np.minimum(levels, 1 - levels))) < 0.03


def test_jump_fraction():
    steps = np.repeat([0.0, 1.0, -1.0, 2.0], 30)[None]
    assert samplers.jump_fraction(steps) == 1.0
    gaussian = np.cumsum(np.random.default_rng(0).normal(size=(200, 1001)), axis=1)
    # φ(1.645)/φ(0), with 1.645 the level that a tenth of absolute values exceeds.
    assert abs(samplers.jump_fraction(gaussian) - 0.2585) < 0.005


def test_noise_shared_between_function_and_data():
    """The posterior of noisy values follows from that of clean ones, at data and elsewhere."""
    rng = np.random.default_rng(0)
    places = rng.uniform(-1, 1, 7)
    clean_prior, noise, count = np.exp(-2 * (places[:, None] - places) ** 2), 0.4, 4
    y = rng.normal(size=count)

    def posterior(prior, variance):
        gain = np.linalg.solve(prior[:count, :count] + variance * np.eye(count), prior[:count]).T
        return gain @ y, prior - gain @ prior[:count]

    share = toys.SHARE
    mean, covariance = posterior(clean_prior, noise**2)
    noisy = clean_prior + share * noise**2 * np.eye(7)
    noisy_mean, noisy_covariance = posterior(noisy, (1 - share) * noise**2)
    found, sd = toys.noise_given_data(jnp.asarray(mean), jnp.asarray(y), noise)
    # The mean is linear in the clean values, so its slope carries the covariance over.
    slope = np.diag(np.where(np.arange(7) < count, 1 - share, 1.0))
    # Rounding of float32.
    np.testing.assert_allclose(found, noisy_mean, atol=1e-5)
    np.testing.assert_allclose(
        slope @ covariance @ slope + np.diag(sd**2), noisy_covariance, atol=1e-5
    )


@pytest.mark.thorough
def test_exact_piecewise_posterior():
    """Two values far apart: either side's level is a normal mean, wherever the jump is."""
    task = tasks.make_task("piecewise")
    draws = samplers.exact_piecewise(task.x, task.y, task.noise, task.grid, 300, 4000)
    assert samplers.jump_fraction(draws) > 0.99
    near = np.argmin(np.abs(np.asarray(task.grid) - np.asarray(task.x)[:, 0]), axis=0)
    # Every datum is within its noise of the level it is on.
    assert np.max(np.abs(draws.mean(0)[near] - np.asarray(task.y))) < 4 * task.noise


def exact_periodic(task, num_periods=401):
    """Mean and standard deviation on the grid, with the weights integrated out."""
    periods = np.linspace(1.0, 2.0, num_periods)

    def harmonics(points):
        angle = 2 * np.pi * np.asarray(points, float)[:, :1] * np.arange(1, 4)
        angle = angle[None] / periods[:, None, None]
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=2) / np.tile([1, 2, 3], 2)

    at_data, at_grid = harmonics(task.x), harmonics(task.grid)
    precision = np.eye(6) + np.einsum("kim,kin->kmn", at_data, at_data) / task.noise**2
    along = np.einsum("kim,i->km", at_data, np.asarray(task.y, float)) / task.noise**2
    weights = np.linalg.solve(precision, along[..., None])[..., 0]
    log_evidence = 0.5 * np.sum(along * weights, axis=1) - 0.5 * np.linalg.slogdet(precision)[1]
    share = np.exp(log_evidence - log_evidence.max())
    share /= share.sum()
    values = np.einsum("kim,km->ki", at_grid, weights)
    within = np.einsum("kim,kmn,kin->ki", at_grid, np.linalg.inv(precision), at_grid)
    mean = share @ values
    return mean, np.sqrt(share @ (values**2 + within) - mean**2)


@pytest.mark.thorough
def test_importance_sampling_of_a_program():
    """The posterior of the periodic program is known: a mixture of Gaussians over periods."""
    task = tasks.make_task("periodic")
    found = programs.importance_posterior(
        programs.periodic, task.x, task.y, task.noise, task.grid, 2000, 4000, 8
    )
    mean, sd = exact_periodic(task)
    assert found.efficiency > 0.3
    # 4000 proposals of which 30 % count, and 2000 draws of them: a standard error of .036
    # deviations of a mean, and of .026 of a deviation; five of them.
    assert np.max(np.abs(found.draws.mean(0) - mean) / sd) < 0.18
    assert np.max(np.abs(found.draws.std(0) / sd - 1)) < 0.13


@pytest.mark.thorough
def test_importance_sampling_that_fails():
    task = tasks.make_task("periodic")
    with pytest.raises(RuntimeError, match="expected 5 % of the proposals to count"):
        programs.importance_posterior(
            programs.periodic, task.x, task.y, 0.01, task.grid, 10, 100, 1
        )


@pytest.mark.parametrize("name", programs.PROGRAMS)
@pytest.mark.thorough
def test_programs_by_numbers_are_the_programs(name):
    """Moments of the values by inverse CDFs are those of the sampled sites."""
    program, points = programs.PROGRAMS[name], tasks.make_task(name).grid[::40]
    dim = programs.count_numbers(program, points)
    assert dim == {"periodic": 7, "monotone": 7, "lotka-volterra": 6}[name]
    numbers = random.normal(random.key(0), (2000, dim))
    by_numbers = quick_jit(jax.vmap(lambda z: programs.from_numbers(program, z, points)))(numbers)
    keys = random.split(random.key(1), 2000)
    draw = programs.sampler(program)
    sampled = np.asarray(quick_jit(jax.vmap(lambda key: draw(key, points)))(keys))
    sd = sampled.std(0)
    # The difference of two means of 2000 has a standard error of .032 deviations; five of them.
    assert np.max(np.abs(by_numbers.mean(0) - sampled.mean(0)) / sd) < 0.16
    if name == "monotone":
        assert np.all(np.diff(sampled, axis=1) > 0)


@pytest.mark.thorough
def test_predators_and_prey_conserve_what_they_should():
    """``δu - γ log u + βv - α log v`` is constant along a solution."""
    times = tasks.make_task("lotka-volterra").grid
    seeded = handlers.seed(programs.lotka_volterra, random.key(3))
    trace = quick_jit(lambda: _values(handlers.trace(seeded), times))()
    prey, predator = np.split(np.asarray(trace["f"], float), 2)
    alpha, beta, gamma, delta = np.asarray(trace["rates"], float)
    energy = delta * np.exp(prey) - gamma * prey + beta * np.exp(predator) - alpha * predator
    # Values at multiples of a quarter between steps of a tenth are interpolated, with an error of
    # h² f''/8, .001 here; the energy is flat in neither.
    np.testing.assert_allclose(energy, energy[0], atol=5e-3)
    assert np.ptp(prey) > 0.3


def _values(traced, times):
    trace = traced.get_trace(times)
    f = programs.from_numbers(programs.lotka_volterra, jnp.zeros(6), times)
    assert f.shape == (130,)
    values = {name: site["value"] for name, site in trace.items()}
    return values | {"f": handlers.substitute(programs.lotka_volterra, values)(times)}


@pytest.mark.thorough
def test_figures_of_a_forecast():
    """Functions with normal values, whose noisy predictions are normal too."""
    levels = norm.ppf((np.arange(2000) + 0.5) / 2000)
    rng = np.random.default_rng(1)
    # Each target has its own order of draws: the noise must not depend on the value.
    draws = np.stack([0.6 * rng.permutation(levels) for _ in range(100)], axis=1)
    y = rng.normal(size=100)
    found = simulated.forecast(draws.astype(np.float32), 0.8, y)
    crps = y * (2 * norm.cdf(y) - 1) + 2 * norm.pdf(y) - np.pi**-0.5
    # 2000 draws of 100 targets: 1/sqrt(2000) of a deviation for each.
    assert abs(found["crps"] - crps.mean()) < 0.01
    assert abs(found["nll"] + norm.logpdf(y).mean()) < 0.02
    assert abs(found["rmse"] - np.sqrt(np.mean(y**2))) < 0.01
    # Targets within the error of a quantile may count or not.
    assert abs(found["coverage"] - np.mean(np.abs(y) < norm.ppf(0.95))) < 0.03


def test_spreads_in_units_of_the_exact_posterior():
    rng = np.random.default_rng(2)
    exact = rng.normal(size=(4000, 6))
    inside = np.arange(6) < 3
    found = simulated.describe(2 * exact + 1, exact, inside)
    for place in ("inside", "beyond"):
        assert abs(found[f"sd_{place}"] - 2) < 1e-6
        assert abs(found[f"error_{place}"] - 1) < 0.1
    assert "error_beyond" not in simulated.describe(exact, exact, np.full(6, True))


def test_data_from_a_file(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("1, 2 3\n4\t5 6\n" * 10)
    name, x, y = data.load(str(path))
    assert (name, x.shape, y.tolist()) == ("some", (20, 2), [3.0, 6.0] * 10)
    parts = data.split(x, y, 0)
    assert (parts.x.shape, parts.x_test.shape) == ((18, 2), (2, 2))
    np.testing.assert_allclose(parts.y.std(), 1.0, rtol=1e-5)
    rows = np.arange(43.0)
    first, second = train_test_split(rows, test_size=0.1, random_state=3)
    parts = data.split(rows[:, None], rows, 3)
    expected = (np.concatenate([first, second]) - first.mean()) / first.std()
    np.testing.assert_allclose(np.concatenate([parts.y, parts.y_test]), expected, rtol=1e-6)
    path.write_text("1 a\n")
    with pytest.raises(ValueError, match=r"some.txt: expected a table of numbers; got"):
        data.load(str(path))


@pytest.mark.thorough
def test_beliefs_are_exact_posteriors():
    """The Gaussian process against its formula, and weighted draws against their own average."""
    density, root = decisions.smooth_prior()
    counts = jnp.zeros(25).at[jnp.array([3, 15])].set(jnp.array([2.0, 1.0]))
    means = jnp.zeros(25).at[jnp.array([3, 15])].set(jnp.array([1.0, -0.5]))
    prior = np.asarray(density.covariance_matrix, float)
    seen = [3, 15]
    noisy = prior[np.ix_(seen, seen)] + decisions.NOISE**2 * np.diag([1 / 2, 1.0])
    gain = np.linalg.solve(noisy, prior[seen]).T
    mean = gain @ np.array([1.0, -0.5])
    sd = np.sqrt(np.diag(prior - gain @ prior[seen]))
    belief = decisions.gaussian((density, root))[1]
    keys = random.split(random.key(0), 100)
    draws = quick_jit(jax.vmap(lambda key: belief(None, means, counts, key)[1]))(keys)
    draws = np.asarray(draws).reshape(-1, 25)
    # 2000 draws: a mean is off by .022 sd, a standard deviation by .016 of itself; 25 of each.
    np.testing.assert_allclose((draws.mean(0) - mean) / sd, 0.0, atol=0.09)
    np.testing.assert_allclose(draws.std(0) / sd, 1.0, atol=0.065)

    functions = jnp.stack([means, means + 1.0])
    belief = decisions.exact(functions)[1]
    weighed = jax.vmap(lambda key: belief(None, means, counts / 100, key)[1])(keys)
    # The second is off by 1 at .03 observations: its weight against 1 is exp(-.03 / (2 NOISE²)).
    weight = 1 / (1 + np.exp(0.03 / (2 * decisions.NOISE**2)))
    # 2000 draws: a standard error of .0106.
    np.testing.assert_allclose(np.mean(weighed[..., 0]), weight, atol=0.043)


def test_a_campaign_counts_what_it_gave():
    """A belief that knows the truth has no regret, and means of observations are near it."""
    truth = jnp.linspace(1.0, 0.0, 25)
    seen = []

    def belief(state, means, counts, key):
        jax.debug.callback(lambda *given: seen.append(given), means[0], counts[0])
        return state, truth[None]

    found = decisions.play(belief, None, truth, random.key(0), 40)
    np.testing.assert_array_equal(found.regret, 0.0)
    jax.effects_barrier()
    mean, count = seen[-1]
    assert count == 39
    np.testing.assert_allclose(mean, np.mean(found.effect[:39]), rtol=1e-5)
    assert abs(mean - 1) < 4 * decisions.NOISE / 39**0.5


@pytest.mark.slow
def test_decisions_run(tmp_path, capsys):
    figure = tmp_path / "figure.png"
    decisions.main(["--quick", "--figure", str(figure)])
    out = capsys.readouterr().out
    assert out.count("functional guide") == 2
    assert "nan" not in out
    assert figure.stat().st_size > 10_000


# tinygp's distribution, not ours, calls a deprecated name of NumPyro when it draws.
@pytest.mark.filterwarnings("ignore:Please use numpyro.util.is_prng_key:DeprecationWarning")
@pytest.mark.slow
def test_functional_network_matches_the_exact_posterior():
    """Means are within .1 posterior sd, and sd within 10 % inside the data and 20 % beyond."""
    found = toys.compare(toys.solve("sine"))
    assert found["mean_inside"] < 0.1
    assert found["sd_inside_least"] > 0.9
    assert found["sd_inside_most"] < 1.1
    assert found["sd_outside_least"] > 0.8
    assert found["sd_outside_most"] < 1.2


@pytest.mark.slow
def test_fit_of_a_program_matches_the_exact_posterior():
    """A spread within 10 % of the exact one, in and beyond the data."""
    task = tasks.make_task("periodic")
    draws = np.asarray(simulated.fit_program(task, 1000, 0)(task.grid))
    mean, sd = exact_periodic(task)
    for where in (task.inside, ~task.inside):
        unit = sd[where].mean()
        assert np.sqrt(np.mean((draws.mean(0) - mean)[where] ** 2)) < 0.15 * unit
        assert abs(draws.std(0)[where].mean() / unit - 1) < 0.1


@pytest.mark.slow
def test_table_of_simulators_is_kept(tmp_path):
    """Every kind of prior runs, and a second call keeps the rows of the first."""
    table, figure = tmp_path / "table.csv", tmp_path / "figure.png"
    arguments = ["--quick", "--csv", str(table), "--figure", str(figure), "--toys"]
    bnn.main([*arguments, "piecewise", "--priors", *simulated.METHODS])
    bnn.main([*arguments, "monotone"])
    rows = tables.read(table, [*simulated.SETTINGS, *simulated.COLUMNS])
    assert [(row["toy"], row["method"]) for row in rows] == [
        ("piecewise", "exact"), ("piecewise", "learned"), ("piecewise", "Gaussian"),
        ("monotone", "exact"), ("monotone", "program"),
    ]  # fmt: skip
    assert figure.stat().st_size > 10_000


@pytest.mark.slow
def test_example_runs_and_resumes(tmp_path, capsys, monkeypatch):
    table, figure = tmp_path / "table.csv", tmp_path / "figure.png"
    arguments = ["--steps", "20", "--batch", "20", "--points", "5", "--particles", "40",
                 "--csv", str(table), "--figure", str(figure)]  # fmt: skip
    bnn.main(arguments)
    first = capsys.readouterr().out
    assert figure.stat().st_size > 10_000
    monkeypatch.setattr(bnn, "fit", None)
    bnn.main(arguments)
    assert capsys.readouterr().out == first
