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

from examples.functions import bnn, data, decisions, fit, gp, metrics, networks, samplers, toys
from support.compiling import quick_jit
from support.linear_functions import NOISE, POOL, X, Y, features

mpl.use("Agg")


@pytest.mark.parametrize("kind", networks.KINDS)
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


def some_process(length_scale):
    log_scales = jnp.log(jnp.full(1, length_scale))
    return gp.Hyperparameters(jnp.zeros(()), log_scales, jnp.log(jnp.asarray(0.25)))


def test_information_ratio_of_all_data_is_one():
    """Two formulas for one divergence: with the prior's covariance inverted, and without."""
    ratio = partial(gp.information_ratio, x=X, y=Y, pool=POOL, jitter=0.0)
    # At a third of the inputs' distance and beyond the covariance is far from singular.
    for scale in (0.1, 0.4):
        all_data = ratio(some_process(scale), batch_size=6, num_points=0, num_sets=1)
        # The covariance is float32's, and its condition is 15 at most.
        np.testing.assert_allclose(all_data, 1.0, rtol=1e-5)
    # Independent values: with equal targets, any set of three has half the information of all six.
    alone = gp.information_ratio(some_process(0.01), X, jnp.ones(6), POOL, 3, 0, jitter=0.0)
    np.testing.assert_allclose(alone, 2.0, rtol=1e-5)


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
    with pytest.raises(Stop, match=r"^2\.0$"):
        fit.functional(*given, pool=POOL, function=features, ratio=1.5)


def test_metrics_of_a_gaussian_prediction():
    """Quantiles represent a Gaussian, whose figures are known."""
    levels = norm.ppf((np.arange(500) + 0.5) / 500)
    rng = np.random.default_rng(0)
    mean, y = rng.normal(size=200), rng.normal(size=200)
    draws = jnp.asarray(mean + 0.6 * levels[:, None], jnp.float32)
    likelihood = quick_jit(metrics.log_likelihood)
    found = likelihood(draws, 0.8, jnp.asarray(y, jnp.float32))
    # Quantiles end at 3.1 standard deviations, so likelihoods far out are too small.
    near = np.abs(y - mean) < 2
    np.testing.assert_allclose(found[near], norm.logpdf(y, mean, 1.0)[near], atol=2e-3)
    entropy = metrics.entropy(draws, 0.8)
    np.testing.assert_allclose(entropy, 0.5 * np.log(2 * np.pi * np.e), atol=4e-3)
    # Targets at the predicted quantiles are calibrated. All at the median: the share below is 0 up
    # to the level .5, and 1 from there.
    even = jnp.asarray(mean + norm.ppf((np.arange(200) + 0.5) / 200), jnp.float32)
    assert metrics.calibration_error(draws, 0.8, even) < 0.01
    flat = metrics.calibration_error(draws, 0.8, jnp.asarray(mean, jnp.float32))
    levels = metrics.LEVELS
    assert abs(flat - np.mean(np.minimum(levels, 1 - levels))) < 0.03


def test_jump_fraction():
    steps = np.repeat([0.0, 1.0, -1.0, 2.0], 30)[None]
    assert samplers.jump_fraction(steps) == 1.0
    gaussian = np.cumsum(np.random.default_rng(0).normal(size=(200, 1001)), axis=1)
    # φ(1.645)/φ(0), with 1.645 the level that a tenth of absolute values exceeds.
    assert abs(samplers.jump_fraction(gaussian) - 0.2585) < 0.005


def exact_draws(name, count, proposals):
    toy = toys.make_toy(name)
    exact = samplers.EXACT[name]
    return toy, exact(toy.x, toy.y, toy.noise, toy.grid, count, proposals)


def test_exact_piecewise_posterior():
    """Two values far apart: either side's level is a normal mean, wherever the jump is."""
    toy, draws = exact_draws("piecewise", 300, 4000)
    assert samplers.jump_fraction(draws) > 0.99
    near = np.argmin(np.abs(np.asarray(toy.grid) - np.asarray(toy.x)[:, 0]), axis=0)
    # Every datum is within its noise of the level it is on.
    assert np.max(np.abs(draws.mean(0)[near] - np.asarray(toy.y))) < 4 * toy.noise


def test_exact_periodic_posterior():
    """The period is identified, so the mean is right where there are no data."""
    toy, draws = exact_draws("periodic", 300, 201)
    grid = np.asarray(toy.grid[:, 0])
    sd = draws.std(0)
    # One plausible function in 16 000 leaves four standard deviations; .05 allows for 300 draws.
    assert np.all(np.abs(draws.mean(0) - np.sin(2 * np.pi * grid / 1.5)) < 4 * sd + 0.05)
    assert sd[grid > 0.5].max() < np.sqrt(0.5)


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
