"""Local log densities: their share of the gradient, the loss they give, and those of guides."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI
from scipy import stats

from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO
from numpyro_kscore._guides import autoguide
from numpyro_kscore._model.handlers import LocalDensities
from numpyro_kscore._transports.network import Perceptron, ResidualNetwork, push_network, volume_of
from support.compiling import quick_jit
from support.doubles import GaussianScore

KEY = random.key(0)
DIM, N = 2, 4096
CHEAP = {"estimator": GaussianScore(), "debias": None}


def normal_model():
    numpyro.sample("z", dist.Normal(jnp.zeros(DIM), 1.0).to_event(1))


def affine_guide(with_score=False):
    loc, log_sd = numpyro.param("loc", jnp.zeros(DIM)), numpyro.param("log_sd", jnp.zeros(DIM))
    normal = dist.Normal(jnp.zeros(DIM), 1.0).to_event(1)
    noise = numpyro.sample("noise", normal, infer={"is_auxiliary": True})
    density = normal.log_prob(noise) - jnp.sum(log_sd)
    z = loc + jnp.exp(log_sd) * noise
    score = -noise * jnp.exp(-log_sd) if with_score else None
    fn = Implicit(z, 1, unconstrained=z, local_log_density=density, local_score=score)
    numpyro.sample("z", fn)


def loss_and_gradient(params, share, guide, num_particles=N):
    # An estimate that asks for no update, wherever the guide is.
    estimator = GaussianScore(mean=0.0, sd=1.0)
    options = {"clip": None, "local_share": share, "estimator": estimator, "debias": None}
    elbo = ImplicitELBO(num_particles, **options)
    return jax.value_and_grad(lambda p: elbo.loss(KEY, p, normal_model, guide))(params)


@quick_jit
def losses_and_gradients(loc, log_sd):
    params = {"loc": loc, "log_sd": log_sd}
    return [loss_and_gradient(params, share, affine_guide) for share in (0.0, 0.25, 1.0)]


@quick_jit
def gradients_along_paths(loc, log_sd):
    params, guide = {"loc": loc, "log_sd": log_sd}, partial(affine_guide, with_score=True)
    return [loss_and_gradient(params, share, guide)[1] for share in (0.25, 1.0)]


def test_gradients_along_paths_are_those_of_the_divergence():
    """KL(N(m, s²) || N(0, 1)) has the gradients m, and s² - 1 in log s; here from 640 draws."""
    quarter, whole = gradients_along_paths(np.full(DIM, 0.3), np.full(DIM, 0.2))
    for name in whole:
        np.testing.assert_allclose(quarter[name], 0.25 * whole[name], rtol=1e-4)
    # A draw m + s ε asks for m + (s - 1/s) ε, and for that times s ε, with variances of
    # (s - 1/s)², and m² s² + 2 (s² - 1)².
    sd, count = np.exp(0.2), 640
    np.testing.assert_allclose(whole["loc"], 0.3, atol=4 * (sd - 1 / sd) / count**0.5)
    error = (0.09 * sd**2 + 2 * (sd**2 - 1) ** 2) ** 0.5 / count**0.5
    np.testing.assert_allclose(whole["log_sd"], sd**2 - 1, atol=4 * error)


def test_a_covering_gradient_is_that_of_hellingers_distance():
    """The distance is -4 log of the integral of √(pq), here from 640 draws."""

    def distance(params):
        loc, variance = params["loc"], jnp.exp(2 * params["log_sd"])
        overlap = jnp.log(2 * variance**0.5 / (1 + variance)) - loc**2 / (2 * (1 + variance))
        return -2 * jnp.sum(overlap)

    params = {"loc": jnp.full(DIM, 0.3), "log_sd": jnp.full(DIM, 0.2)}
    guide = partial(affine_guide, with_score=True)

    @quick_jit
    def gradient(params):
        options = {"clip": None, "local_share": 1.0, "debias": None}
        elbo = ImplicitELBO(N, estimator=GaussianScore(mean=0.0, sd=1.0), **options).covering()
        return jax.grad(lambda p: elbo.loss(KEY, p, normal_model, guide))(params)

    found, expected = gradient(params), jax.grad(distance)(params)
    # As many draws as have local densities, with the errors of the test above, weighted.
    sd, count = np.exp(0.2), 640
    np.testing.assert_allclose(found["loc"], expected["loc"], atol=4 * (sd - 1 / sd) / count**0.5)
    error = (0.09 * sd**2 + 2 * (sd**2 - 1) ** 2) ** 0.5 / count**0.5
    np.testing.assert_allclose(found["log_sd"], expected["log_sd"], atol=4 * error)
    # It differs from that of the divergence by more than that, so that weights are seen.
    assert np.all(np.abs(expected["log_sd"] - (sd**2 - 1)) > 0.1)


def test_gradients_along_paths_have_no_noise_at_the_posterior():
    with_noise = losses_and_gradients(np.zeros(DIM), np.zeros(DIM))[2][1]
    without = gradients_along_paths(np.zeros(DIM), np.zeros(DIM))[1]
    assert max(np.max(np.abs(g)) for g in with_noise.values()) > 1e-3
    for gradient in without.values():
        np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


def normal_guide(score_of_some, some):
    """Standard normal around a location; the local score of some draws is another."""
    loc = numpyro.param("loc", jnp.zeros(DIM))
    normal = dist.Normal(jnp.zeros(DIM), 1.0).to_event(1)
    noise = numpyro.sample("noise", normal, infer={"is_auxiliary": True})
    z = loc + noise
    own = jnp.where(some(noise), score_of_some, 1.0) * -noise
    fn = Implicit(z, 1, unconstrained=z, local_log_density=normal.log_prob(noise), local_score=own)
    numpyro.sample("z", fn)


@pytest.mark.parametrize("score", [np.nan, 1e20])
def test_scores_at_folds_are_bounded(score):
    """Some draws are at a fold, or where noise is mapped to a point."""
    guide = partial(normal_guide, score, lambda noise: noise[0] > 0.9)
    run = quick_jit(lambda: loss_and_gradient({"loc": jnp.zeros(DIM)}, 1.0, guide, 16)[1]["loc"])
    # Three times the model's score and one deviation, of no draw more than 3.
    assert np.max(np.abs(run())) < 3 * (1 + 3)


@pytest.mark.parametrize(("behind", "trust"), [(0.0, 1.0), (0.03, 0.52), (0.1, 0.0)])
@pytest.mark.thorough
def test_local_densities_count_less_the_more_draws_are_behind_folds(behind, trust):
    guide = partial(normal_guide, np.nan, lambda noise: noise[0] > stats.norm.isf(behind))
    loc = np.full(DIM, 0.3)
    run = quick_jit(lambda: loss_and_gradient({"loc": loc}, 0.25, guide)[1]["loc"][1])
    # Every draw asks for the same in the second coordinate. Of 640 .03 ± .0067 are behind.
    np.testing.assert_allclose(run(), 0.25 * trust * 0.3, atol=0.25 * 0.3 * 4 * 16 * 0.0067)


def slopes_of(push):
    """The derivative of a map, a row for each number of the noise."""
    return lambda noise: jax.jacfwd(push)(noise).T


def test_behind_a_fold_there_is_no_score():
    def push(noise):
        return jnp.stack([noise[0] + noise[1], jnp.square(noise[1]), noise[2]])

    points = [jnp.array([0.3, y, -0.2]) for y in (1.0, -1.0)]
    before, behind = (volume_of(slopes_of(push), point) for point in points)
    # The log density is that of the noise less log 2 y. In the second coordinate y moves by 1 / 2 y
    # and the first noise back by as much.
    score = before.push_score(-points[0])
    np.testing.assert_allclose(score, [-0.3, (-2 + 0.3) / 2, 0.2], rtol=1e-6)
    assert np.all(np.isnan(behind.push_score(-points[1])))
    np.testing.assert_allclose(behind.log_volume, before.log_volume, rtol=1e-6)


@pytest.mark.parametrize(
    ("dim", "num_labels", "flipped", "width"),
    [
        (4, 0, False, 3),
        (9, 2, True, 3),
        (20, 1, False, 3),
        (4, 0, False, 4),
        (9, 2, True, 12),
        (40, 1, False, 40),
    ],
)
@pytest.mark.thorough
def test_a_guide_gives_the_density_of_its_derivative(dim, num_labels, flipped, width):
    """Layers are narrow or wide, scales or mixing flipped, and some draws lie behind folds."""
    generator = np.random.default_rng(dim)
    widths = (dim + num_labels, 6, width, 2 * dim)
    size = sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths))
    loc, log_scale = generator.normal(size=(2, dim))
    mixing = np.eye(dim) + 0.5 * generator.normal(size=(dim, dim)) / dim**0.5
    scale = np.exp(0.3 * log_scale)
    if flipped:
        scale[1], mixing = -scale[1], mixing[[1, 0, *range(2, dim)]]
    labels = tuple(generator.normal(size=(num_labels, 1)))

    with jax.enable_x64(True):
        layers = Perceptron(jnp.asarray(0.6 * generator.normal(size=size)), widths)
        network = ResidualNetwork(layers, *map(jnp.asarray, (loc, scale, mixing)), labels)

        @quick_jit
        @jax.vmap
        def both(noise):
            given = push_network(network, noise, True)[1]
            volume = volume_of(slopes_of(network.push), noise)
            log_density = jnp.sum(dist.Normal().log_prob(noise)) - volume.log_volume
            return given, log_density, volume.push_score(-noise)

        given, log_density, score = both(generator.normal(size=(200, dim)))
    np.testing.assert_allclose(given.log_density, log_density, rtol=1e-10)
    np.testing.assert_allclose(given.score, score, rtol=1e-7, atol=1e-9)
    behind = np.isnan(score).all(axis=1)
    assert 10 < behind.sum() < 190


@pytest.mark.slow
def test_a_guide_that_starts_far_away_is_not_folded():
    """Thirty deviations. By local densities of folded draws the loss rose to 100 and more."""

    def model(mean):
        covariance = 0.5 * (jnp.ones((6, 6)) + jnp.eye(6))
        numpyro.sample("z", dist.MultivariateNormal(jnp.broadcast_to(mean, (6,)), covariance))

    svi = SVI(model, AutoImplicit(model), optax.adam(1e-2), ImplicitELBO(64))
    state = svi.init(KEY, 0.0)

    @quick_jit
    def run(state):
        return jax.lax.scan(lambda s, _: svi.update(s, 30.0), state, length=400)[1]

    # The divergence that remains, whose noise at 64 draws is some .3 nats; 100 losses are averaged.
    assert -0.5 < np.mean(run(state)[-100:]) < 2.0


def test_scores_of_another_shape_are_refused():
    with pytest.raises(
        ValueError, match=r"local_score: expected the shape of unconst.*\(3,\); got"
    ):
        Implicit(jnp.zeros(3), unconstrained=jnp.zeros(3), local_score=jnp.zeros(2))


def test_the_gradient_is_divided_by_share():
    (_, none), (_, quarter), (_, whole) = losses_and_gradients(np.full(DIM, 0.3), np.full(DIM, 0.2))
    for name in none:
        np.testing.assert_allclose(none[name], 0.0, atol=1e-6)
        np.testing.assert_allclose(quarter[name], 0.25 * whole[name], rtol=1e-4)
    # Of KL(N(m, s²) || N(0, 1)): m, and s² - 1 in log s. The sds of the means over 4096 draws are
    # s/64, and no more than 2 s²/64 + m s/64.
    sd = np.exp(0.2)
    np.testing.assert_allclose(whole["loc"], 0.3, atol=4 * sd / 64)
    np.testing.assert_allclose(whole["log_sd"], sd**2 - 1, atol=4 * (2 * sd**2 + 0.3 * sd) / 64)


def test_the_loss_has_no_noise_at_the_posterior():
    """It is minus the log evidence there, here 0, whatever the draws."""
    for loss, _ in losses_and_gradients(np.zeros(DIM), np.zeros(DIM)):
        np.testing.assert_allclose(loss, 0.0, atol=1e-5)


def test_a_guide_may_have_it_for_all_latents_at_one_site():
    def model():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("b", dist.Normal(a, 1.0))

    def guide():
        noise = numpyro.sample(
            "noise", dist.Normal(jnp.zeros(2), 1.0).to_event(1), infer={"is_auxiliary": True}
        )
        density = dist.Normal().log_prob(noise).sum()
        numpyro.sample("a", Implicit(noise[0], local_log_density=density))
        numpyro.sample("b", Implicit(noise[0] + noise[1]))

    loss = quick_jit(lambda: ImplicitELBO(16, **CHEAP).loss(KEY, {}, model, guide))()
    np.testing.assert_allclose(loss, 0.0, atol=1e-5)


@pytest.mark.parametrize("share", [-0.1, 1.5, np.nan])
def test_shares_out_of_range_are_refused(share):
    with pytest.raises(ValueError, match=r"local_share: expected .* from 0 .* to 1 .*got"):
        ImplicitELBO(local_share=share)


def test_densities_of_single_draws_are_refused():
    with pytest.raises(ValueError, match=r"local_log_density: expected a scalar.*got shape \(3,\)"):
        Implicit(jnp.zeros(3), local_log_density=jnp.zeros(3))


@pytest.mark.parametrize("batch", [None, 2])
def test_densities_of_rows_given_others_count_as_they_are(batch):
    """A guide that is the model gives every draw the model's density: the loss is zero."""

    def model():
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 6, subsample_size=batch):
            numpyro.sample("z", dist.Normal(level, 2.0))

    def guide():
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 6, subsample_size=batch):
            noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
            density = jnp.sum(dist.Normal().log_prob(noise) - jnp.log(2.0))
            numpyro.sample("z", Implicit(level + 2 * noise, local_log_density=density))

    loss = jax.jit(lambda: ImplicitELBO(16).loss(KEY, {}, model, guide))()
    np.testing.assert_allclose(loss, 0, atol=1e-4)


def density_at(guide, params):
    """Coordinates of a draw at given noise, its local log density, and the score of that."""

    def run(noise, where=0.5):
        data = {**params, "_auto_noise": noise, "_auto_mode": where}
        seeded = handlers.seed(handlers.substitute(guide, data=data), KEY)
        with LocalDensities():
            trace = handlers.trace(seeded).get_trace()
        sites = [site["fn"] for site in trace.values()]
        sites = [fn for fn in sites if isinstance(fn, Implicit)]
        flat = jnp.concatenate([jnp.ravel(fn.unconstrained) for fn in sites])
        score = jnp.concatenate([jnp.ravel(fn.local_score) for fn in sites])
        given = [fn.local_log_density for fn in sites if fn.local_log_density is not None]
        return flat, given[0], score

    return run


def four_latents():
    numpyro.sample("a", dist.Normal(0.0, 2.0))
    numpyro.sample("b", dist.LogNormal(0.0, 0.5))
    numpyro.sample("c", dist.Normal(jnp.zeros(2), 1.0).to_event(1))


@pytest.mark.thorough
def test_automatic_guides_have_theirs(x64):
    """Against the determinant of differences."""
    guide = AutoImplicit(four_latents, hidden_dims=(4,))
    svi = SVI(four_latents, guide, optax.adam(1e-2), ImplicitELBO(16, **CHEAP))
    guide.set_up(KEY)
    params = dict(svi.get_params(quick_jit(svi.init)(KEY)))
    layers = params["auto_layers"]
    params["auto_layers"] = layers + 0.3 * random.normal(KEY, layers.shape)
    run = jax.jit(density_at(guide, params))
    noise, step = np.array([0.4, -1.1, 0.2, 0.7]), 1e-5
    columns = [
        (run(noise + step * e)[0] - run(noise - step * e)[0]) / (2 * step) for e in np.eye(4)
    ]
    expected = -0.5 * noise @ noise - 2 * np.log(2 * np.pi) - np.linalg.slogdet(columns)[1]
    _, density, score = run(noise)
    np.testing.assert_allclose(density, expected, rtol=1e-7)
    # Along a coordinate of the noise the density changes by the score times what the draw moves.
    slopes = [(run(noise + step * e)[1] - run(noise - step * e)[1]) / (2 * step) for e in np.eye(4)]
    np.testing.assert_allclose(np.array(columns) @ score, slopes, rtol=1e-6)


@pytest.mark.thorough
def test_a_step_computes_them_once(monkeypatch):
    """It traces the guide five times: unused densities were half of its program."""
    asked = []

    def push(*args):
        asked.append(args[-1])
        return push_network(*args)

    monkeypatch.setattr(autoguide, "push_network", push)
    guide = AutoImplicit(four_latents, hidden_dims=(4,), warm_start=False)
    objective = ImplicitELBO(16, **CHEAP)
    svi = SVI(four_latents, guide, optax.adam(1e-2), objective)
    params = svi.get_params(quick_jit(svi.init)(KEY))
    asked.clear()
    jax.make_jaxpr(lambda key: objective.loss(key, params, four_latents, guide))(KEY)
    # Once more for the layout, of which only shapes are wanted.
    assert sum(asked) == 2
    assert len(asked) > 3


def test_few_dimensions_are_left_to_the_kernel():
    """A map that never folds would have to tear a ring open."""

    def model():
        numpyro.sample("x", dist.Normal(jnp.zeros(3), 1.0).to_event(1))

    guide = AutoImplicit(model, hidden_dims=(4,), warm_start=False)
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(16, **CHEAP))
    params = svi.get_params(quick_jit(svi.init)(KEY))
    found = []

    @jax.jit
    def run(noise):
        seeded = handlers.seed(
            handlers.substitute(guide, data={**params, "_auto_noise": noise}), KEY
        )
        with LocalDensities():
            fn = handlers.trace(seeded).get_trace()["x"]["fn"]
        found.append(fn.local_log_density)
        return fn.value

    run(np.zeros(3, np.float32))
    assert found == [None]


@pytest.mark.thorough
def test_separate_modes_have_a_gaussian_each(monkeypatch):
    """The guide starts as the mixture itself, whose density the local one is."""
    # In two dimensions the paths find the Gaussians themselves.
    monkeypatch.setattr(autoguide, "SMALLEST_LOCAL", 2)
    locs, scales = jnp.array([[0.0, 0.0], [9.0, 5.0]]), jnp.array([[1.0, 1.0], [0.5, 2.0]])
    mixture = dist.MixtureSameFamily(
        dist.Categorical(jnp.array([0.7, 0.3])), dist.Normal(locs, scales).to_event(1)
    )

    def model():
        numpyro.sample("x", mixture)

    guide = AutoImplicit(model, hidden_dims=(4,))
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(16, **CHEAP))
    guide.set_up(KEY)
    state = quick_jit(svi.init)(KEY)
    params = svi.get_params(state)
    np.testing.assert_allclose(np.sort(guide.start.weights), [0.3, 0.7], atol=1e-3)
    draws = guide.sample_posterior(KEY, params, sample_shape=(4000,))["x"]
    # The sd of a fraction of 4000 draws is sqrt(.21/4000).
    np.testing.assert_allclose(np.mean(draws[:, 0] > 5), 0.3, atol=4 * (0.21 / 4000) ** 0.5)
    run = jax.jit(density_at(guide, params))
    for where in (0.1, 0.9):
        x, density, _ = run(np.float32([0.3, -0.7]), np.float32(where))
        # Modes eight deviations apart: of the others nothing is left.
        by_part = [
            np.log(weight)
            + stats.multivariate_normal(part.mean, part.factor @ part.factor.T).logpdf(x)
            for weight, part in zip(guide.start.weights, guide.start.parts, strict=True)
        ]
        np.testing.assert_allclose(density, np.logaddexp(*by_part), rtol=1e-5)
        # The inverse Hessian of a path is nearly the covariance.
        np.testing.assert_allclose(density, mixture.log_prob(x), atol=0.1)
    # The loss is that of a fit that has nearly arrived: sds within 2 % move the log density of a
    # draw by about .03, and the mean over 16 draws by no more.
    loss = jax.jit(svi.evaluate)(state)
    np.testing.assert_allclose(loss, 0.0, atol=0.1)
