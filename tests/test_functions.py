"""Functions as latents: measurement sets, entropies of nearly Gaussian values, sampled priors."""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from compiling import quick_jit
from jax import random
from jax.scipy.stats import multivariate_normal
from numpyro import handlers
from numpyro.infer import SVI
from scipy.stats import norm

from examples import (
    functional_bnn,
    functional_data,
    functional_fit,
    functional_gp,
    functional_metrics,
    functional_networks,
    functional_samplers,
    functional_toys,
)
from numpyro_kscore import Implicit, ImplicitELBO, Median, NuMethod, ScoreEstimator
from numpyro_kscore.functions import measure, sampled_prior
from numpyro_kscore.gaussian import moment_scores
from numpyro_kscore.learned_prior import learn_prior
from numpyro_kscore.particles import draw_particle, draw_plates
from numpyro_kscore.program import Program, inspect_program

mpl.use("Agg")
AUXILIARY = {"is_auxiliary": True}
X = jnp.linspace(-1.0, 1.0, 6)[:, None]
Y = jnp.sin(3 * X[:, 0])
POOL = jnp.linspace(-2.0, 2.0, 200)[:, None]
NOISE, JITTER = 0.3, 0.05
# The least that an estimate of a score costs, where it is not what is tested.
CHEAP = ScoreEstimator(regularizer=NuMethod(1), bandwidth=Median(1e3))


# -------------------------------------------------------------------------------- measurement sets


def features(points):
    """Four functions whose random combinations are the functions of a prior, (m, 4)."""
    return jnp.stack([jnp.cos(k * points[:, 0] + k**2) for k in range(1, 5)], axis=1)


def prior(points):
    f = features(points)
    return dist.MultivariateNormal(0.0, f @ f.T + JITTER**2 * jnp.eye(len(points)))


def model(x, y, pool, batch_size=None, num_points=3):
    at = measure(x, batch_size, pool, num_points)
    f = numpyro.sample("f", prior(at.points))
    with at.data:
        numpyro.sample("y", dist.Normal(at.of_data(f), NOISE), obs=y[at.rows])


def linear_function(points):
    """Random weights of the prior's own features, with a covariance of any shape."""
    loc = numpyro.param("loc", jnp.array([0.3, -0.2, 0.1, 0.4]))
    root = numpyro.param("root", jnp.eye(4) + 0.2 * jnp.tri(4, k=-1))
    unit = numpyro.sample("unit", dist.Normal(jnp.zeros(4), 1.0).to_event(1), infer=AUXILIARY)
    return features(points) @ (loc + jnp.tril(root) @ unit)


def guide(x, y, pool, batch_size=None, num_points=3):
    at = measure(x, batch_size, pool, num_points)
    numpyro.sample("f", dist.Normal(linear_function(at.points), JITTER).to_event(1))


def sets(seeds, batch_size, num_points):
    """The measurement sets that guide and model see at each step, for each of five particles."""
    seen = {"guide": [], "model": []}

    def recorded(who):
        def run(x, y, pool):
            at = measure(x, batch_size, pool, num_points)
            jax.debug.callback(lambda points: seen[who].append(np.asarray(points)), at.points)
            if who == "guide":
                shift = numpyro.sample("shift", dist.Normal(), infer=AUXILIARY)
                numpyro.sample("f", dist.Normal(shift + at.points[:, 0], 0.1).to_event(1))
            else:
                f = numpyro.sample("f", dist.Normal(jnp.zeros(len(at.points)), 1.0).to_event(1))
                with at.data:
                    numpyro.sample("y", dist.Normal(at.of_data(f), 1.0), obs=y[at.rows])

        return run

    elbo = ImplicitELBO(5, debias=None, estimator=CHEAP)
    run = quick_jit(
        lambda key: elbo.loss(key, {}, recorded("model"), recorded("guide"), X, Y, POOL)
    )
    for seed in seeds:
        jax.block_until_ready(run(random.key(seed)))
        jax.effects_barrier()
        yield {who: np.stack(points) for who, points in seen.items()}
        for points in seen.values():
            points.clear()


def test_one_set_for_all_particles_and_another_for_every_step():
    drawn = []
    for seen in sets((0, 1), 4, 3):
        drawn.append(seen["model"][0])
        for points in seen.values():
            np.testing.assert_array_equal(points, np.broadcast_to(drawn[-1], points.shape))
        rows, others = drawn[-1][:4, 0], drawn[-1][4:, 0]
        assert len(set(rows.tolist())) == 4
        assert set(rows.tolist()) <= set(np.asarray(X[:, 0]).tolist())
        assert set(others.tolist()) <= set(np.asarray(POOL[:, 0]).tolist())
    assert not np.array_equal(*drawn)


def test_what_is_observed_counts_for_all_data():
    scales = {}

    @quick_jit
    def run(key):
        with handlers.seed(rng_seed=key):
            at = measure(X, 2, POOL, 3)
        trace = handlers.trace(handlers.seed(model, key)).get_trace(X, Y, POOL, 2)
        scales.update({name: trace[name]["scale"] for name in ("y", "f")})
        return at.points, at.of_data(at.points), X[at.rows]

    points, of_data, rows = run(random.key(0))
    assert scales == {"y": 3.0, "f": None}
    assert points.shape == (5, 1)
    np.testing.assert_array_equal(of_data, rows)


def test_all_points_by_default():
    with handlers.seed(rng_seed=0):
        at = measure(X)
        both = measure(X, pool=POOL, name="other")
    np.testing.assert_array_equal(at.points, X)
    np.testing.assert_array_equal(both.points, jnp.concatenate([X, POOL]))


def test_inputs_of_any_shape():
    @quick_jit
    def points(key):
        with handlers.seed(rng_seed=key):
            return measure(jnp.zeros((5, 4, 3)), 2, jnp.ones((7, 4, 3)), 1).points

    np.testing.assert_array_equal(points(random.key(0))[:, 0, 0], [0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((X, 7), ValueError, "batch_size: expected at most the 6 that there are; got 7"),
        ((X, 2.0), TypeError, "batch_size: expected an integer; got 2.0"),
        ((X, 2, POOL, 201), ValueError, "num_points: expected at most the 200"),
        ((X, 2, None, 3), ValueError, "num_points: expected none without a pool; got 3"),
        ((X, 2, POOL[:, 0], 3), ValueError, r"pool: expected inputs of shape \(1,\)"),
        ((1.0,), ValueError, r"x: expected shape \(N, ...\), one input a row; got \(\)"),
    ],
)
def test_measurement_errors(args, error, message):
    with pytest.raises(error, match=message), handlers.seed(rng_seed=0):
        measure(*args)


def test_rows_behind_latents_are_shared_and_others_are_not():
    """A plate of the data alone is drawn anew for every particle, as without this module."""

    def shared(at_rows):
        def some_guide():
            with numpyro.plate("data", 6, subsample_size=2) as rows:
                start = X[rows, 0] if at_rows else jnp.zeros(2)
            unit = numpyro.sample("unit", dist.Normal(), infer=AUXILIARY)
            numpyro.sample("f", dist.Normal(start + unit, 1.0).to_event(1))

        def some_model():
            f = numpyro.sample("f", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
            with numpyro.plate("data", 6, subsample_size=2):
                numpyro.sample("y", dist.Normal(f, 1.0), obs=jnp.zeros(2))

        names = []

        @quick_jit
        def run(keys):
            program = Program({}, some_model, some_guide, (), {}, {})
            structure = inspect_program(keys[0], program)
            names.extend(structure.shared_plates)
            program = program._replace(plates=draw_plates(keys[1], program, structure))
            draws = jax.vmap(lambda key: draw_particle(key, program, structure))(keys[2:])
            return program.plates, draws.plates

        of_step, of_particles = run(random.split(random.key(0), 8))
        return tuple(names), of_step, of_particles

    names, of_step, of_particles = shared(at_rows=True)
    assert names == ("data",)
    assert of_step["data"].shape == (2,)
    # No copy for every particle, from which a model would compute all as many times.
    assert of_particles == {}
    names, of_step, of_particles = shared(at_rows=False)
    assert names == ()
    assert of_step == {}
    assert np.ptp(of_particles["data"], axis=0).max() > 0


# --------------------------------------------------------------------------- entropy by moments


quick_scores = quick_jit(moment_scores)


def test_moment_scores_are_those_of_the_gaussian(x64):
    rng = np.random.default_rng(0)
    x = 3 + rng.normal(size=(12, 4)) @ rng.normal(size=(4, 4))
    expected = -np.linalg.solve(np.cov(x.T, bias=True), (x - x.mean(0)).T).T
    np.testing.assert_allclose(quick_scores(jnp.asarray(x)), expected, rtol=1e-9)


def test_moment_scores_given_a_context(x64):
    """The block of the joint precision matrix that belongs to the samples."""
    rng = np.random.default_rng(1)
    joint = rng.normal(size=(15, 5)) @ rng.normal(size=(5, 5)) + 2
    centred = joint - joint.mean(0)
    expected = -np.linalg.solve(np.cov(joint.T, bias=True), centred.T).T[:, :3]
    found = quick_scores(jnp.asarray(joint[:, :3]), jnp.asarray(joint[:, 3:]))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("samples", [np.ones((9, 3)), np.tile(np.arange(9.0), (3, 1)).T])
def test_moment_scores_of_degenerate_samples_are_finite(samples):
    assert np.all(np.isfinite(quick_scores(jnp.asarray(samples, jnp.float32))))


def test_moment_scores_of_ill_conditioned_samples_in_float32():
    """Correlations as of function values: condition 1e8 of the covariance, 1e4 of its root."""
    rng = np.random.default_rng(2)
    basis = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    x = rng.normal(size=(60, 20)) @ (basis * np.logspace(0, -4, 20)).T
    x = x.astype(np.float32).astype(float)
    expected = -np.linalg.solve(np.cov(x.T, bias=True), (x - x.mean(0)).T).T
    found = np.asarray(quick_scores(jnp.asarray(x, jnp.float32)))
    # Rounding of 6e-8, times the condition of the root, which a factor of the covariance squares.
    assert np.linalg.norm(found - expected) < 6e-8 * 1e4 * 10 * np.linalg.norm(expected)


def test_entropy_gradient_of_a_linear_guide_is_exact(x64):
    """Of f = A ε it is A⁻ᵀ for any noise of full rank, Gaussian or not, and any number of draws."""
    rng = np.random.default_rng(3)
    root, noise = rng.normal(size=(4, 4)), rng.exponential(size=(9, 4))
    scores = np.asarray(quick_scores(jnp.asarray(noise @ root.T)))
    np.testing.assert_allclose(-scores.T @ noise / 9, np.linalg.inv(root).T, rtol=1e-8)


def closed_form_loss(params):
    """Negative ELBO at all of X and three points of the pool, in closed form, in float64."""
    points = jnp.concatenate([X, POOL[::80]])
    phi, m = features(points), len(points)
    root = jnp.tril(params["root"])
    q_loc, q = phi @ params["loc"], phi @ root @ root.T @ phi.T + JITTER**2 * jnp.eye(m)
    p = phi @ phi.T + JITTER**2 * jnp.eye(m)
    kl = 0.5 * (
        jnp.trace(jnp.linalg.solve(p, q))
        + q_loc @ jnp.linalg.solve(p, q_loc)
        - m
        + jnp.linalg.slogdet(p)[1]
        - jnp.linalg.slogdet(q)[1]
    )
    n = len(X)
    misfit = jnp.sum((Y - q_loc[:n]) ** 2) + jnp.trace(q[:n, :n])
    return kl + 0.5 * misfit / NOISE**2 + 0.5 * n * jnp.log(2 * jnp.pi * NOISE**2)


def test_gradient_is_that_of_the_closed_form(x64):
    """Mean over keys; Gaussian guides have no bias at all, with hardly more draws than values."""
    x, y, pool = (a.astype(jnp.float64) for a in (X, Y, POOL[::80]))
    # No kernel, so that the moments stand alone: one step of tiny weight.
    elbo = ImplicitELBO(12, estimator=CHEAP, base="moments", debias=None)
    params = {
        "loc": jnp.array([0.3, -0.2, 0.1, 0.4]),
        "root": jnp.eye(4) + 0.2 * jnp.tri(4, k=-1),
    }
    keys = random.split(random.key(0), 600)

    @quick_jit
    def gradients(keys):
        one = jax.grad(lambda p, key: elbo.loss(key, p, model, guide, x, y, pool))
        return jax.lax.map(lambda key: one(params, key), keys)

    found = gradients(keys)
    expected = quick_jit(jax.grad(closed_form_loss))(params)
    for name, values in found.items():
        error = np.std(values, axis=0) / np.sqrt(len(keys))
        # A Monte-Carlo error for each of 14 numbers that differ from zero: 4.5 of them is one
        # chance in ten thousand.
        assert np.all(np.abs(np.mean(values, axis=0) - expected[name]) <= 4.5 * error + 1e-6), name


def test_too_few_draws_for_the_moments():
    loss = ImplicitELBO(10, base="moments").loss
    with pytest.raises(ValueError, match="at least 11 beside base='moments'.* got 10"):
        jax.eval_shape(lambda key: loss(key, {}, model, guide, X, Y, POOL), random.key(0))


def test_fit_is_the_exact_posterior():
    """A guide that can be exact, at other points than it was measured at too."""
    settings = {"num_particles": 64, "base": "moments"}
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, 1200))
    svi = SVI(model, guide, optimizer, ImplicitELBO(**settings))

    @quick_jit
    def fit(key):
        state = svi.init(key, X, Y, POOL)
        step = lambda state, _: (svi.update(state, X, Y, POOL)[0], None)  # noqa: E731
        return svi.get_params(jax.lax.scan(step, state, None, length=1200)[0])

    params = fit(random.key(0))
    points = jnp.linspace(-2, 2, 9)[:, None]
    # Weights of the features have a standard normal prior, and the noise the jitter in it.
    phi = np.asarray(features(X), float)
    covariance = np.linalg.inv(np.eye(4) + phi.T @ phi / (NOISE**2 + JITTER**2))
    loc = covariance @ phi.T @ np.asarray(Y) / (NOISE**2 + JITTER**2)
    at = np.asarray(features(points), float)
    sd = np.sqrt(np.einsum("ij,jk,ik->i", at, covariance, at))
    found = np.linalg.norm(at @ np.tril(params["root"]), axis=1)
    # What is left is the noise of the last steps.
    assert np.all(np.abs(at @ (params["loc"] - loc)) < 0.08 * sd)
    assert np.all(np.abs(found / sd - 1) < 0.08)


# ------------------------------------------------------------------------------ sampled priors


def sample_function(key, points):
    return features(points) @ random.normal(key, (4,))


def test_score_of_a_sampled_prior_is_near_the_exact_one():
    """Functions of a Gaussian process, which nobody is told, by the gradient of a whole model."""
    points = X[:5]
    covariance = np.asarray(features(points) @ features(points).T, float) + JITTER**2 * np.eye(5)
    test = np.random.default_rng(0).multivariate_normal(np.zeros(5), covariance, 200)
    exact = -np.linalg.solve(covariance, test.T).T
    estimator = ScoreEstimator(regularizer=NuMethod(5))

    def some_model():
        at = measure(points)
        p = sampled_prior(sample_function, at.points, 400, jitter=JITTER, estimator=estimator)
        f = numpyro.sample("f", p)
        numpyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=Y[:5])

    def some_guide():
        measure(points)
        unit = numpyro.sample("unit", dist.Normal(jnp.zeros(5), 1.0).to_event(1), infer=AUXILIARY)
        # All particles at one place, a hundredth of the jitter wide.
        numpyro.sample("f", Implicit(numpyro.param("loc", jnp.zeros(5)) + JITTER / 100 * unit, 1))

    elbo = ImplicitELBO(8, estimator=CHEAP, base="moments", debias=None)
    gradient = jax.grad(lambda p: elbo.loss(random.key(1), p, some_model, some_guide))
    found = quick_jit(lambda x: jax.lax.map(gradient, {"loc": x}))(jnp.asarray(test, jnp.float32))
    # Moment scores have mean zero, so the gradient is that of the model alone.
    found = -found["loc"] - (np.asarray(Y[:5]) - test) / NOISE**2
    # An inverse covariance of n draws in d dimensions is off by about (d + 1)/n = .015, and scores
    # a hundredth of the jitter away by 1e-4.
    assert np.sum((found - exact) ** 2) < 3 * 0.015 * np.sum(exact**2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_draws": 1}, "num_draws: expected an integer of at least 2; got 1"),
        ({"jitter": 0.0}, "jitter: expected a positive finite number; got 0.0"),
        ({"sampler": lambda key, x: x}, r"sampler: expected values of shape \(6,\).*got \(6, 1\)"),
    ],
)
def test_sampled_prior_errors(arguments, message):
    given = {"sampler": sample_function, "points": X, "jitter": 0.1} | arguments
    with pytest.raises(ValueError, match=message), handlers.seed(rng_seed=0):
        sampled_prior(**given)


# ------------------------------------------------------------------------------ learned priors


EVEN = np.linspace(-0.8, 0.8, 5)[:, None]
STEP_JITTER = 0.2


def one_step(key, points):
    """One jump anywhere between -1 and 1, standard normal levels."""
    place_key, level_key = random.split(key)
    place = random.uniform(place_key, minval=-1.0, maxval=1.0)
    return jnp.where(points[:, 0] < place, *random.normal(level_key, (2,)))


def covariances_of_one_step():
    """Of the values given the gap that the jump is in, those at the ends among them, and shares."""
    left = np.arange(5) < np.arange(6)[:, None]
    same = (left[:, :, None] == left[:, None]).astype(float)
    gaps = np.diff(np.concatenate([[-1.0], EVEN[:, 0], [1.0]])) / 2
    return same + STEP_JITTER**2 * np.eye(5), gaps


def log_density_of_one_step(f):
    covariances, gaps = covariances_of_one_step()
    each = jax.vmap(lambda c: multivariate_normal.logpdf(f, jnp.zeros(5), c))(covariances)
    return jax.nn.logsumexp(each + jnp.log(gaps))


def test_learned_prior_of_steps():
    """Far better than the Gaussian of the same covariance, which knows no jumps."""
    small = {"hidden_dims": (32, 32), "num_steps": 600, "batch_size": 128}
    learn = partial(learn_prior, sampler=one_step, points=EVEN, jitter=STEP_JITTER, **small)
    prior = quick_jit(learn)(random.key(0))
    draws = prior.sample(random.key(1), (2, 500))
    assert draws.shape == (2, 500, 5)
    with jax.enable_x64(True):
        wide = jax.eval_shape(learn, random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(wide.layers)} == {jnp.dtype("float64")}
    test = draws.reshape(-1, 5)

    # The exact covariance, by the formula and in the prior.
    covariances, gaps = covariances_of_one_step()
    covariance = np.tensordot(gaps, covariances, 1)
    # Six Monte-Carlo errors of a variance; every value by itself is Gaussian.
    most = 6 * (2 / 1000) ** 0.5 * covariance.diagonal().max()
    np.testing.assert_allclose(np.cov(test.T), covariance, atol=most)
    np.testing.assert_allclose(prior.variance, np.diag(covariance), atol=most / 10**0.5)

    exact = quick_jit(jax.vmap(jax.grad(log_density_of_one_step)))(test)

    # As an argument: a prior is a pytree.
    @quick_jit
    def together(prior, f):
        return prior.log_prob(f), jax.vmap(jax.grad(prior.log_prob))(f.reshape(-1, 5))

    densities, scores = together(prior, draws)
    assert densities.shape == (2, 500)
    np.testing.assert_allclose(densities[1, 2], prior.log_prob(draws[1, 2]), rtol=1e-5)
    # Rounding of 6e-8, a few times over, times the condition of the covariance, 23.
    gaussian = -(test - prior.mean) @ np.linalg.inv(prior.root @ prior.root)
    np.testing.assert_allclose(prior.inverse_root @ prior.root, np.eye(5), atol=1e-5)
    off = float(jnp.sum((gaussian - exact) ** 2) / jnp.sum(exact**2))
    learned = float(jnp.sum((scores - exact) ** 2) / jnp.sum(exact**2))
    assert learned < 0.2 * off

    # The held-out loss is that of the exact score plus the error, both of it in units of 1/σ²; of
    # 4000 × 5 squares the mean is known to 1 %, four times over.
    least = 1 - STEP_JITTER**2 * float(jnp.mean(exact**2))
    error = STEP_JITTER**2 * float(jnp.mean(exact**2))
    assert abs(prior.info.gaussian - (least + error * off)) < 0.04
    assert abs(prior.info.held_out - (least + error * learned)) < 0.04
    assert prior.info.losses.shape == (600,)
    prior.info.raise_if_failed()
    with pytest.raises(FloatingPointError, match="learn_prior: expected finite losses"):
        prior.info._replace(held_out=jnp.nan).raise_if_failed()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"jitter": 0.0}, ValueError, "jitter: expected a positive finite number; got 0.0"),
        ({"points": 1.0}, ValueError, r"points: expected shape \(m, ...\).*got \(\)"),
        ({"hidden_dims": ()}, TypeError, r"hidden_dims: expected a tuple.*got \(\)"),
        ({"num_steps": 0}, ValueError, "num_steps: expected an integer of at least 1; got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size: expected an integer; got 2.0"),
        (
            {"sampler": lambda key, x: x},
            ValueError,
            r"sampler: expected values of shape \(6,\).*got \(6, 1\)",
        ),
    ],
)
def test_learned_prior_errors(arguments, error, message):
    given = {"key": random.key(0), "sampler": sample_function, "points": X, "jitter": 0.1}
    with pytest.raises(error, match=message):
        learn_prior(**given | arguments)


# ------------------------------------------------------------------------------------- the example


@pytest.mark.parametrize("kind", functional_networks.KINDS)
def test_networks_are_random_functions(kind):
    """One function at all points, another for another key, and every parameter matters."""
    function = functional_networks.RandomFunction(kind, hidden=(8,), activation=jnp.tanh)
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
    return functional_gp.Hyperparameters(jnp.zeros(()), log_scales, jnp.log(jnp.asarray(0.25)))


def test_information_ratio_of_all_data_is_one():
    """Two formulas for one divergence: with the prior's covariance inverted, and without."""
    ratio = partial(functional_gp.information_ratio, x=X, y=Y, pool=POOL, jitter=0.0)
    # At a third of the inputs' distance and beyond the covariance is far from singular.
    for scale in (0.1, 0.4):
        all_data = ratio(some_process(scale), batch_size=6, num_points=0, num_sets=1)
        # The covariance is float32's, and its condition is 15 at most.
        np.testing.assert_allclose(all_data, 1.0, rtol=1e-5)
    # Values that know nothing of each other: every set of three tells half of what six do, whatever
    # three they are, but for the targets.
    alone = functional_gp.information_ratio(
        some_process(0.01), X, jnp.ones(6), POOL, 3, 0, jitter=0.0
    )
    np.testing.assert_allclose(alone, 2.0, rtol=1e-5)


def test_the_ratio_divides_what_data_count(monkeypatch):
    """N/B of them, over the ratio."""

    class Stop(Exception):
        pass

    def stop(model, guide, loss, settings, key, *args):
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*args)
        raise Stop(float(trace["y"]["scale"]))

    monkeypatch.setattr(functional_fit, "run", stop)
    settings = functional_fit.Settings(batch_size=2, num_points=3)
    independent = lambda _, points: dist.Normal(jnp.zeros(len(points)), 1.0).to_event(1)  # noqa: E731
    given = (X, Y, independent, None, NOISE, settings, random.key(0))
    with pytest.raises(Stop, match=r"^2\.0$"):
        functional_fit.functional(*given, pool=POOL, function=features, ratio=1.5)


def test_metrics_of_a_gaussian_prediction():
    """Equally likely quantiles stand for a Gaussian, whose figures are known."""
    levels = norm.ppf((np.arange(500) + 0.5) / 500)
    rng = np.random.default_rng(0)
    mean, y = rng.normal(size=200), rng.normal(size=200)
    draws = jnp.asarray(mean + 0.6 * levels[:, None], jnp.float32)
    likelihood = quick_jit(functional_metrics.log_likelihood)
    found = likelihood(draws, 0.8, jnp.asarray(y, jnp.float32))
    # Quantiles end at 3.1 standard deviations, so likelihoods far out are too small.
    near = np.abs(y - mean) < 2
    np.testing.assert_allclose(found[near], norm.logpdf(y, mean, 1.0)[near], atol=2e-3)
    entropy = functional_metrics.entropy(draws, 0.8)
    np.testing.assert_allclose(entropy, 0.5 * np.log(2 * np.pi * np.e), atol=4e-3)
    # Targets at the predicted quantiles are calibrated. All at the median: the share below is 0 up
    # to the level .5, and 1 from there.
    even = jnp.asarray(mean + norm.ppf((np.arange(200) + 0.5) / 200), jnp.float32)
    assert functional_metrics.calibration_error(draws, 0.8, even) < 0.01
    flat = functional_metrics.calibration_error(draws, 0.8, jnp.asarray(mean, jnp.float32))
    levels = functional_metrics.LEVELS
    assert abs(flat - np.mean(np.minimum(levels, 1 - levels))) < 0.03


def test_jump_share():
    steps = np.repeat([0.0, 1.0, -1.0, 2.0], 30)[None]
    assert functional_samplers.jump_share(steps) == 1.0
    gaussian = np.cumsum(np.random.default_rng(0).normal(size=(200, 1001)), axis=1)
    # φ(1.645)/φ(0), with 1.645 the level that a tenth of absolute values exceeds.
    assert abs(functional_samplers.jump_share(gaussian) - 0.2585) < 0.005


def exact_draws(name, count, proposals):
    toy = functional_toys.make_toy(name)
    exact = functional_samplers.EXACT[name]
    return toy, exact(toy.x, toy.y, toy.noise, toy.grid, count, proposals)


def test_exact_piecewise_posterior():
    """Two values far apart: either side's level is a normal mean, wherever the jump is."""
    toy, draws = exact_draws("piecewise", 300, 4000)
    assert functional_samplers.jump_share(draws) > 0.99
    near = np.argmin(np.abs(np.asarray(toy.grid) - np.asarray(toy.x)[:, 0]), axis=0)
    # Every datum is within its noise of the level it is on.
    assert np.max(np.abs(draws.mean(0)[near] - np.asarray(toy.y))) < 4 * toy.noise


def test_exact_periodic_posterior():
    """The data's own period is found, so the mean goes on where there are no data."""
    toy, draws = exact_draws("periodic", 300, 201)
    grid = np.asarray(toy.grid[:, 0])
    sd = draws.std(0)
    # Of functions that are plausible one in 16 000 leaves four standard deviations; .05 allows for
    # the 300 draws.
    assert np.all(np.abs(draws.mean(0) - np.sin(2 * np.pi * grid / 1.5)) < 4 * sd + 0.05)
    assert sd[grid > 0.5].max() < np.sqrt(0.5)


def test_data_from_a_file(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("1, 2 3\n4\t5 6\n" * 10)
    name, x, y = functional_data.load(str(path))
    assert (name, x.shape, y.tolist()) == ("some", (20, 2), [3.0, 6.0] * 10)
    parts = functional_data.split(x, y, 0)
    assert (parts.x.shape, parts.x_test.shape) == ((18, 2), (2, 2))
    np.testing.assert_allclose(parts.y.std(), 1.0, rtol=1e-5)
    path.write_text("1 a\n")
    with pytest.raises(ValueError, match=r"some.txt: expected a table of numbers; got"):
        functional_data.load(str(path))


# tinygp's distribution, not ours, calls a deprecated name of NumPyro when it draws.
@pytest.mark.filterwarnings("ignore:Please use numpyro.util.is_prng_key:DeprecationWarning")
@pytest.mark.slow
def test_functional_network_matches_the_exact_posterior():
    """The wanted figures: means within .1 posterior sd, sd within 10 % inside and 20 % beyond."""
    found = functional_toys.compare(functional_toys.solve("sine"))
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
    functional_bnn.main(arguments)
    first = capsys.readouterr().out
    assert figure.stat().st_size > 10_000
    monkeypatch.setattr(functional_bnn, "fit", None)
    functional_bnn.main(arguments)
    assert capsys.readouterr().out == first
