"""Learned priors of the Wasserstein autoencoder: densities, gradients, and what is measured."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm

from benchmarks.wae import validation
from examples.wae import afterwards, metrics, priors
from examples.wae.afterwards import encode_all, fit_prior
from examples.wae.ais import Annealing, annealed_log_likelihood
from examples.wae.data import load_images
from examples.wae.metrics import code_divergences, compare_with_prior
from examples.wae.priors import PRIORS
from examples.wae.rivals import make_autoencoder
from examples.wae.training import Autoencoder, Settings, train
from numpyro_kscore import ImplicitELBO
from numpyro_kscore._fit.checkpoint import load_checkpoint, save_checkpoint
from support.compiling import quick_jit
from support.doubles import GaussianScore

SHAPE, DIM, COUNT = (2, 2, 1), 2, 16
LEARNED = [name for name in PRIORS if name != "normal"]


@pytest.fixture(autouse=True)
def _small_priors(monkeypatch):
    monkeypatch.setattr(priors, "COMPONENTS", 5)
    monkeypatch.setattr(priors, "FLOW_HIDDEN", 16)


def some_images():
    return random.bernoulli(random.key(1), shape=(COUNT, *SHAPE)).astype(jnp.float32)


@cache
def params_of(name):
    """Initial parameters, and others away from there, where a flow is all but the identity."""
    settings = Settings("stein", latent_dim=DIM, batch_size=COUNT, prior=name)
    autoencoder = Autoencoder(settings, SHAPE)
    params = autoencoder.svi.get_params(autoencoder.init())
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(7)
    # Factors, so that what is positive stays so; pseudo-images start below .2.
    moved = [a * np.exp(0.3 * rng.normal(size=a.shape)).astype(np.float32) for a in leaves]
    moved = jax.tree.unflatten(structure, moved)
    # The decoder ignores codes, so that the reconstruction has no gradient in them.
    moved["decoder$params"] = jax.tree.map(jnp.zeros_like, moved["decoder$params"])
    for key in moved:
        if key.startswith("flow"):
            *layers, (weight, bias) = moved[key]
            moved[key] = [*layers, (30 * weight, 30 * bias)]
    return params, moved


# -------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.thorough
def test_density_integrates_to_one_and_has_the_moments_of_draws(name):
    prior = Autoencoder(Settings(latent_dim=DIM, prior=name), SHAPE).prior(params_of(name)[1])
    assert prior.event_shape == (DIM,)
    line = np.linspace(-9, 9, 181)
    grid = np.stack(np.meshgrid(line, line), -1).reshape(-1, 2)
    log_density = quick_jit(prior.log_prob)(grid.astype(np.float32))
    mass = np.exp(np.asarray(log_density, float)) * 0.1**2
    assert abs(mass.sum() - 1) < 1e-3
    draws = np.asarray(quick_jit(lambda key: prior.sample(key, (4000,)))(random.key(0)))
    mean = mass @ grid
    variance = mass @ (grid - mean) ** 2
    error = np.sqrt(variance / 4000)
    assert np.all(np.abs(draws.mean(0) - mean) < 4 * error)
    # Four standard errors of a variance whose draws have at most twice a Gaussian's kurtosis.
    assert np.all(np.abs(draws.var(0) / variance - 1) < 4 * np.sqrt(5 / 4000))


@pytest.mark.thorough
def test_first_flow_is_almost_standard_normal():
    prior = Autoencoder(Settings(latent_dim=DIM, prior="flow"), SHAPE).prior(params_of("flow")[0])
    z = np.random.default_rng(0).normal(size=(100, DIM)).astype(np.float32)
    np.testing.assert_allclose(quick_jit(prior.log_prob)(z), norm.logpdf(z).sum(1), atol=0.3)


@pytest.mark.thorough
def test_pseudo_images_start_at_training_images():
    images = load_images("digits", limit=64)
    autoencoder = Autoencoder(Settings("stein", latent_dim=DIM, prior="vamp"), images.shape)
    params = autoencoder.svi.get_params(autoencoder.init(images))
    found = np.asarray(params["pseudo_images"])
    assert found.shape == (5, *images.shape)
    assert np.all((found > 0) & (found < 1))
    shown = images.train[:: 64 // 5][:5] / 255
    np.testing.assert_allclose(found, 0.1 + 0.8 * (0.9 * shown + 0.05), atol=0.041)
    # Components are the encoder's own codes.
    mean, sd = autoencoder.encode(params, params["pseudo_images"])
    component = autoencoder.prior(params).component_distribution.base_dist
    np.testing.assert_array_equal(component.loc, mean)
    np.testing.assert_array_equal(component.scale, sd)


def test_an_unknown_prior_is_refused():
    with pytest.raises(ValueError, match="prior: expected one of normal, mixture.*got 'none'"):
        Autoencoder(Settings(prior="none"), SHAPE)
    with pytest.raises(ValueError, match="prior: expected normal with the estimator mmd"):
        make_autoencoder(Settings("mmd", prior="flow"), SHAPE)


# ------------------------------------------------------------------------------------- training


class FixedNoise(Autoencoder):
    """An autoencoder whose codes are known: the noise of each image's code is fixed."""

    def guide(self, x):
        noise = random.normal(random.key(5), (len(x), DIM))
        base = self.declare_codes(x).base_dist
        code = dist.Normal(base.loc + base.scale * noise, 1e-12).to_event(1)
        with numpyro.plate("rows", len(x)):
            numpyro.sample("z", code, infer={"implicit": True})


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.thorough
def test_gradients_are_those_of_the_divergence(name):
    """Prior: -E[∂ log p(z)]; encoder: E[(ŝ - ∇ log p)ᵀ ∂z], and with vamp both."""
    objective = ImplicitELBO(1, aggregate="rows", estimator=GaussianScore(), base=None, debias=None)
    settings = Settings(latent_dim=DIM, batch_size=COUNT, prior=name)
    autoencoder = FixedNoise(settings, SHAPE, objective)
    x, params = some_images(), params_of(name)[1]

    def divergence(params):
        mean, sd = autoencoder.encode(params, x)
        z = mean + sd * random.normal(random.key(5), mean.shape)
        fixed = jax.lax.stop_gradient(z)
        score = (fixed.mean(0) - fixed) / fixed.var(0)
        return jnp.sum(score * z) - jnp.sum(autoencoder.prior(params).log_prob(z))

    def loss(params):
        elbo, model, guide = objective, autoencoder.model, autoencoder.guide
        return elbo.loss(random.key(0), params, model, guide, x)

    found, expected = (quick_jit(jax.grad(f))(params) for f in (loss, divergence))
    found, expected = (
        {k: v for k, v in gradient.items() if k != "decoder$params"}
        for gradient in (found, expected)
    )
    assert len(found) == {"mixture": 4, "vamp": 2, "flow": 4}[name]
    for a, b in zip(*(jax.tree.leaves(g) for g in (found, expected)), strict=True):
        scale = np.abs(b).max()
        assert scale > 0
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.thorough
def test_a_vae_with_a_learned_prior_has_the_divergence_of_its_draws(name):
    settings = Settings("vae", latent_dim=DIM, batch_size=COUNT, prior=name)
    autoencoder = make_autoencoder(settings, SHAPE)
    x, params = some_images(), params_of(name)[1]
    loss = jax.vmap(
        lambda key, params: autoencoder.svi.loss.loss(
            key, params, autoencoder.model, autoencoder.guide, x
        ),
        (0, None),
    )
    # Every logit is zero, so every pixel is off by a half: distance 1.
    rest = np.asarray(quick_jit(loss)(random.split(random.key(2), 1000), params)) - COUNT
    mean, sd = map(np.asarray, quick_jit(autoencoder.encode)(params, x))
    z = (mean + sd * np.random.default_rng(3).normal(size=(1000, *mean.shape))).astype(np.float32)
    prior = autoencoder.prior(params)
    expected = (norm.logpdf(z, mean, sd).sum(2) - quick_jit(prior.log_prob)(z)).sum(1)
    error = np.hypot(rest.std(), expected.std()) / np.sqrt(1000)
    assert abs(rest.mean() - expected.mean()) < 4 * error
    # The figure of the tables, with eight draws for each image.
    figure = float(code_divergences(mean, sd, prior).sum())
    assert abs(figure - expected.mean()) < 4 * expected.std() / np.sqrt(8)


@pytest.mark.thorough
def test_an_old_checkpoint_has_the_normal_prior(tmp_path):
    """Records of earlier versions do not name the prior."""
    images = load_images("digits", limit=64)
    settings = Settings("stein", latent_dim=2)
    path = tmp_path / "run.npz"
    autoencoder = Autoencoder(settings, images.shape)
    record = {k: v for k, v in settings._asdict().items() if k != "prior"}
    series = np.ones((2, 3))
    save_checkpoint(path, autoencoder.init(), record | {"images": "digits"}, series)
    trained = train(autoencoder, images, 3, path, progress=False)
    np.testing.assert_array_equal(trained.losses, series[0])
    state, *_ = load_checkpoint(path, autoencoder.init())
    save_checkpoint(path, state, record | {"images": "digits", "prior": "flow"}, series)
    with pytest.raises(ValueError, match="another prior, 'flow' there and 'normal' here"):
        train(autoencoder, images, 3, path, progress=False)


# -------------------------------------------------------------------------------------- figures


def two_components(sd):
    mean = jnp.array([[-1.0, 0.5], [1.0, -0.5]])
    component = dist.Normal(mean, jnp.full((2, 2), sd)).to_event(1)
    return dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.3, 0.7])), component)


@pytest.mark.parametrize("sd", [0.5, 1e-3])
@pytest.mark.thorough
def test_annealed_likelihood_under_a_mixture(sd):
    """A linear Gaussian decoder: log Σ_k w_k N(x; W m_k, s² W Wᵀ + σ² I), known exactly."""
    prior, noise, size, count = two_components(sd), 1.5, 4, 100
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(size, 2)).astype(np.float32)
    codes = np.asarray(quick_jit(lambda key: prior.sample(key, (count,)))(random.key(1)))
    images = (codes @ weight.T + noise * rng.normal(size=(count, size))).astype(np.float32)

    def log_likelihood(z, x):
        return jnp.sum(dist.Normal(weight @ z, noise).log_prob(x))

    mean = np.asarray(prior.component_distribution.base_dist.loc)
    covariance = sd**2 * weight @ weight.T + noise**2 * np.eye(size)
    by_component = [multivariate_normal.logpdf(images, weight @ m, covariance) for m in mean]
    exact = logsumexp(np.stack(by_component) + np.log([[0.3], [0.7]]), axis=0)
    annealing = Annealing(100, num_chains=20, batch_size=count)
    key = random.key(0)
    found = annealed_log_likelihood(key, log_likelihood, images, prior, annealing).log_likelihood
    error = np.asarray(found) - exact
    # Chains do not leave a narrow component: 20 of them tell the share of each.
    assert abs(error.mean()) < 0.1
    assert np.abs(error).max() < 1.5


@pytest.mark.slow
def test_figures_are_those_of_draws_of_the_prior(monkeypatch):
    # It takes most of the time, and has tests of its own.
    monkeypatch.setattr(metrics, "mmd_squared", lambda codes, draws: np.nan)
    prior = two_components(0.3)
    found = compare_with_prior(prior.sample(random.key(9), (1000,)), prior)
    far = compare_with_prior(random.normal(random.key(9), (1000, 2)), prior)
    for name in ("mean", "sd"):
        assert abs(found[name] - found[f"prior_{name}"]) < 4 / np.sqrt(1000)
    assert found["distance"] < 2 * found["distance_floor"] < far["distance"]


def test_variants_name_objective_weight_and_prior():
    assert {"default, weight 1", "KEF-CG, base prior, weight 0.5", "VAE, weight 1, vamp"} <= set(
        validation.VARIANTS
    )
    cell = {
        "variant": "KEF-CG, base prior, weight 0.5, flow",
        "latent_dim": 2,
        "epochs": 5,
        "schedule": "constant",
        "learning_rate": 1e-3,
        "seed": 1,
    }
    images = load_images("digits", limit=200)
    settings = validation.make_settings(cell, images)
    assert settings == Settings(latent_dim=2, learning_rate=1e-3, seed=1, weight=0.5, prior="flow")
    # Three batches of 64 in each of five epochs.
    falling = validation.make_settings(cell | {"schedule": "cosine"}, images)
    assert falling == settings._replace(decay_steps=15)


def test_priors_afterwards_share_the_autoencoder_that_is_trained(tmp_path):
    name = "default, weight 1, flow afterwards"
    images = load_images("digits", limit=200)
    cell = {"variant": name, "latent_dim": 2, "epochs": 5, "schedule": "constant", "seed": 0}
    runs = [
        validation.make_run(images, tmp_path, cell | {"learning_rate": 1e-3, "variant": variant})
        for variant in (name, "default, weight 1")
    ]
    assert runs[0][1] == runs[1][1]
    assert runs[0][0].settings == runs[1][0].settings
    assert runs[0][0].settings.prior == "normal"
    assert validation.VARIANTS[name].later == "flow"
    # They are no part of a figure over weights, or of a group that is trained together.
    cells = [cell | {"learning_rate": 1e-3, "variant": v} for v in (name, "default, weight 1")]
    assert len(validation.alike(cells)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture", "flow"])
def test_a_prior_fitted_afterwards_is_a_density_of_the_codes(name, monkeypatch):
    # One step an epoch: fewer and longer ones.
    monkeypatch.setattr(afterwards, "LEARNING_RATE", 5e-3)
    images = load_images("digits", limit=200)
    autoencoder = Autoencoder(Settings("stein", latent_dim=DIM), images.shape)
    params = autoencoder.svi.get_params(autoencoder.init(images))
    mean, sd = encode_all(autoencoder, params, images)
    assert mean.shape == sd.shape == (len(images.train), DIM)
    other, fitted = fit_prior(autoencoder, params, images, name, epochs=400)
    for kept in params:
        jax.tree.map(np.testing.assert_array_equal, params[kept], fitted[kept])
    codes = mean + sd * np.random.default_rng(3).normal(size=mean.shape).astype(np.float32)
    # The mean log density of draws of a Gaussian fitted by maximum likelihood is minus its entropy.
    cov = np.cov(np.asarray(codes).T)
    gaussian = -0.5 * np.linalg.slogdet(2 * np.pi * np.e * cov)[1]
    error = 2 / len(codes) ** 0.5
    log_densities = quick_jit(other.prior(fitted).log_prob)(codes)
    assert np.mean(log_densities) > gaussian - error
