"""The Wasserstein autoencoder: data, training, and the figures of its quality."""

import gzip
import struct
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.linalg
from jax import random
from jax.scipy.stats import multivariate_normal, norm
from PIL import Image

from benchmarks.wae import samples, table, validation
from examples.wae import run as command
from examples.wae.ais import Annealing, annealed_log_likelihood, sandwich, temperatures
from examples.wae.data import MNIST_FILES, load_images, read_idx, read_pictures, to_batch
from examples.wae.metrics import compare_with_prior, frechet_distance
from examples.wae.networks import make_networks
from examples.wae.objectives import ESTIMATORS, make_objective
from examples.wae.rivals import RIVALS, discrepancy, make_autoencoder
from examples.wae.together import train_together
from examples.wae.training import (
    Autoencoder,
    Settings,
    reconstruction_cost,
    train,
)
from numpyro_kscore import ImplicitELBO
from support.compiling import quick_jit
from support.doubles import GaussianScore

mpl.use("Agg")


# --------------------------------------------------------------------------------------- images


def idx(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder, compress):
    rng = np.random.default_rng(0)
    written = []
    for name, shape in zip(MNIST_FILES, [(7, 28, 28), (7,), (3, 28, 28), (3,)], strict=True):
        written.append(rng.integers(0, 10, shape))
        data = idx(written[-1])
        path = folder / f"{name}-ubyte{'.gz' if compress else ''}"
        path.write_bytes(gzip.compress(data) if compress else data)
    return written


def test_patches_of_test_images_do_not_touch_training_images():
    images = load_images("patches")
    assert images.train.shape == (6000, 16, 16, 3)
    assert images.test.shape == (1000, 16, 16, 3)
    shown = {patch.tobytes() for patch in images.train}
    assert not any(patch.tobytes() in shown for patch in images.test)
    np.testing.assert_array_equal(np.bincount(images.test_labels), [500, 500])


@pytest.mark.parametrize("compress", [True, False])
def test_idx_files(compress, tmp_path):
    written = write_mnist(tmp_path, compress)
    for images in (load_images("mnist", tmp_path), load_images(str(tmp_path))):
        np.testing.assert_array_equal(images.train[..., 0], written[0])
        np.testing.assert_array_equal(images.train_labels, written[1])
        np.testing.assert_array_equal(images.test[..., 0], written[2])
        np.testing.assert_array_equal(images.test_labels, written[3])
        assert images.shape == (28, 28, 1)
    assert len(load_images("mnist", tmp_path, limit=4).train) == 4


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ValueError, match="expected the file train-images-idx3-ubyte or .*got"):
        load_images("mnist", tmp_path)
    with pytest.raises(
        ValueError, match="dataset: expected digits, patches, mnist, celeba or a folder"
    ):
        load_images(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"celeba|CelebA"):
        load_images("celeba")
    with pytest.raises(ValueError, match="expected two pictures at least"):
        load_images(str(tmp_path))
    good = gzip.compress(idx(np.ones((2, 3))))
    for broken, message in (
        (good[:-9], "cannot be read.*Fetch it again"),
        (b"not a gzip file", "cannot be read"),
        (gzip.compress(b"\0\0"), "cannot be read"),
        (gzip.compress(idx(np.ones((2, 3)))[:-1]), r"expected 6 bytes for shape \(2, 3\); got 5"),
        (gzip.compress(b"\0\0\x0d" + idx(np.ones(2))[3:]), "got 00 00 0d"),
    ):
        path = tmp_path / "broken.gz"
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"(?s)broken.gz: .*{message}"):
            read_idx(path)
    write_mnist(tmp_path, compress=False)
    (tmp_path / f"{MNIST_FILES[1]}-ubyte").write_bytes(idx(np.ones(6)))
    with pytest.raises(ValueError, match=r"images .* with labels .*got shapes \(7, 28, 28\)"):
        load_images("mnist", tmp_path)


def write_pictures(folder, per_class, size=(178, 218)):
    """Two classes: a red and a blue square on gray, in the middle."""
    for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        (folder / name).mkdir()
        for k in range(per_class):
            picture = Image.new("RGB", size, (100, 100, 100 + k))
            picture.paste(
                Image.new("RGB", (140, 140), color), (size[0] // 2 - 70, size[1] // 2 - 70)
            )
            picture.save(folder / name / f"{k}.png")


def test_pictures_are_cropped_and_labeled(tmp_path):
    write_pictures(tmp_path, 5)
    images = load_images("celeba", tmp_path)
    assert images.train.shape == (9, 64, 64, 3)
    assert images.test.shape == (1, 64, 64, 3)
    # The square of 140 pixels is what is left of a picture, and it is of one color.
    for part, labels in ((images.train, images.train_labels), (images.test, images.test_labels)):
        blue_first = np.where(labels[:, None] == 0, (0, 0, 255), (255, 0, 0))
        np.testing.assert_array_equal(part.reshape(len(part), -1, 3).mean(1), blue_first)
    whole = read_pictures(tmp_path).train
    assert abs(float(whole[0, 0, 0, 0]) - 100) < 2
    (tmp_path / "red" / "0.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"0\.png: expected a picture"):
        load_images(str(tmp_path))


def test_binary_pixels_have_the_probability_of_their_grey():
    gray = np.array([0, 1, 100, 254, 255], np.uint8)
    drawn = to_batch(random.key(0), jnp.broadcast_to(jnp.asarray(gray), (20_000, 5)), True)
    p = gray / 255
    # Four standard errors; 2⁻¹⁶ is the resolution.
    assert np.all(np.abs(drawn.mean(0) - p) <= 4 * np.sqrt(p * (1 - p) / 20_000) + 2**-14)
    assert not drawn[:, 0].any()
    colors = to_batch(random.key(0), jnp.asarray(gray), False)
    np.testing.assert_allclose(colors, p, rtol=1e-6)


# ------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("kef", "nkef-20")])
@pytest.mark.thorough
def test_every_estimator_takes_a_step(name):
    """A step keeps structure, shapes and dtypes of the state; it is traced, not run."""
    autoencoder = Autoencoder(Settings(name, latent_dim=2, batch_size=16), (2, 2, 1))
    state = jax.eval_shape(autoencoder.init)
    x = jax.ShapeDtypeStruct((16, 2, 2, 1), jnp.float32)
    updated, loss = jax.eval_shape(autoencoder.svi.update, state, x)
    types = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (state, updated)]
    assert types[0] == types[1]
    assert loss.shape == ()


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.thorough
def test_rivals_compare_codes_as_they_say(name):
    """A decoder that ignores codes has a known reconstruction cost, and the rest is left."""
    settings = Settings(name, latent_dim=3, batch_size=16, weight=0.5)
    autoencoder = make_autoencoder(settings, (2, 2, 1))
    x = random.bernoulli(random.key(1), shape=(16, 2, 2, 1)).astype(jnp.float32)
    params = autoencoder.svi.get_params(autoencoder.init())
    params["decoder$params"] = jax.tree.map(jnp.zeros_like, params["decoder$params"])
    model, guide, elbo = autoencoder.model, autoencoder.guide, autoencoder.svi.loss
    keys = random.split(random.key(2), 400)
    # Parameters are an argument: compiled on a CPU, products with a constant of zeros are garbage.
    loss = jax.vmap(lambda key, params: elbo.loss(key, params, model, guide, x), (0, None))
    losses = jax.jit(loss)(keys, params)
    # Every logit is zero, so every pixel is off by a half: distance 1, over the weight of .5.
    rest = np.asarray(losses) - 16 * 2.0
    mean, sd = autoencoder.encode(params, x)
    if name == "vae":
        divergence = dist.kl_divergence(dist.Normal(mean, sd), dist.Normal(0.0, 1.0)).sum()
        np.testing.assert_allclose(rest, divergence, rtol=1e-4)
        return
    codes, draws = random.normal(random.key(3), (2, 400, 16, 3))
    expected = 10 * 16 * np.asarray(jax.vmap(discrepancy)(mean + sd * codes, draws))
    error = np.hypot(rest.std(), expected.std()) / np.sqrt(400)
    assert abs(rest.mean() - expected.mean()) < 4 * error
    assert error < 0.1 * 10 * 16 * 0.1


@pytest.mark.thorough
def test_discrepancy_is_unbiased():
    """The discrepancy of one distribution's draws is 0 on average; against a shifted one not."""
    x, y = random.normal(random.key(0), (2, 500, 8, 3))
    values = np.asarray(jax.vmap(discrepancy)(x, y))
    assert abs(values.mean()) < 4 * values.std() / np.sqrt(500)
    # The kernel is 6 / (6 + |x - y|²): by pairs, in float64.
    first, second = np.asarray(x[0], float), np.asarray(y[0], float) + 2.0
    kernel = lambda a, b: 6 / (6 + np.sum((a[:, None] - b) ** 2, axis=-1))  # noqa: E731
    within = [(kernel(a, a).sum() - 8) / 56 for a in (first, second)]
    exact = sum(within) - 2 * kernel(first, second).mean()
    assert abs(float(discrepancy(x[0], y[0] + 2.0)) - exact) < 1e-5


@pytest.mark.thorough
def test_convolutions_take_a_step():
    settings = Settings("stein", latent_dim=2, cost="squared", width=8)
    autoencoder = Autoencoder(settings, (64, 64, 3))
    state = jax.eval_shape(autoencoder.init)
    pictures = jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.float32)
    updated, loss = jax.eval_shape(autoencoder.svi.update, state, pictures)
    assert jax.tree.structure(updated) == jax.tree.structure(state)
    assert loss.shape == ()
    encoder, decoder = make_networks((64, 64, 3), 2, 8)
    (mean, sd), params = jax.eval_shape(encoder.init_with_output, random.key(0), pictures)
    assert mean.shape == sd.shape == (8, 2)
    decoded, _ = jax.eval_shape(decoder.init_with_output, random.key(0), mean)
    assert decoded.shape == (8, 64, 64, 3)
    # Four halvings of 64 pixels: 64 channels of 4 x 4 are left, for means and log variances.
    assert params["params"]["Dense_0"]["kernel"].shape == (4 * 4 * 64, 4)


def test_published_estimators_are_used_as_published():
    objective = make_objective("ssge", 0.9, 8)
    assert (objective.settings.base, objective.settings.debias) == (None, None)
    assert not objective.estimator.normalize
    assert make_objective("default", None, 8).settings.base == "model"
    with pytest.raises(ValueError, match="expected one of default, whitened-nu.*got .none."):
        make_objective("none", None, 8)
    with pytest.raises(ValueError, match="cost: expected one of norm"):
        Autoencoder(Settings(cost="l1"), (8, 8, 1))
    with pytest.raises(ValueError, match=r"multiples of 16 pixels; got 30 x 64"):
        make_networks((30, 64, 3), 4)


def test_reconstruction_costs():
    x = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], np.float32)
    p = np.array([[0.8, 0.5, 0.9], [0.1, 0.2, 0.7]], np.float32)
    logits = jnp.log(p / (1 - p))
    distance = np.linalg.norm(x - p, axis=1)
    entropy = -np.log(np.where(x == 1, p, 1 - p)).sum(1)
    for kind, expected in (
        ("norm", distance),
        ("squared", distance**2 / 2),
        ("bernoulli", entropy),
    ):
        np.testing.assert_allclose(reconstruction_cost(kind, x, logits), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_were_not(tmp_path):
    images = load_images("digits", limit=64)._replace(name="a few digits")
    settings = Settings("stein", latent_dim=2, learning_rate=1e-3)
    path = tmp_path / "run.npz"
    whole = train(Autoencoder(settings, images.shape), images, 4, progress=False)
    train(Autoencoder(settings, images.shape), images, 2, path, progress=False)
    resumed = train(Autoencoder(settings, images.shape), images, 4, path, progress=False)
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert whole.losses[-1] < whole.losses[0]
    other = Autoencoder(settings._replace(seed=1), images.shape)
    with pytest.raises(ValueError, match=r"another seed, 0 there and 1 here"):
        train(other, images, 4, path, progress=False)
    too_large = Autoencoder(settings._replace(batch_size=256), images.shape)
    with pytest.raises(ValueError, match="batch_size: expected at most the 64 training images"):
        train(too_large, images, 1, progress=False)


@pytest.mark.slow
def test_runs_trained_together_are_those_trained_alone(tmp_path):
    """The same random numbers.

    Adam's first steps have the sign of each gradient, also where it is zero but for rounding: they
    may move such parameters apart, which changes the loss by less than a thousandth.
    """
    images = load_images("digits", limit=64)._replace(name="a few digits")
    settings = Settings("stein", latent_dim=2, learning_rate=1e-3, decay_steps=4)

    def runs():
        for seed, weight in ((0, 1.0), (1, 2.0)):
            each = settings._replace(seed=seed, weight=weight)
            yield Autoencoder(each, images.shape), tmp_path / f"{seed}.npz"

    train_together(list(runs()), images, 1)
    train_together(list(runs()), images, 3)
    for autoencoder, path in runs():
        together = train(autoencoder, images, 3, path, progress=False)
        alone = train(autoencoder, images, 3, progress=False)
        np.testing.assert_allclose(together.losses[0], alone.losses[0], rtol=1e-5)
        np.testing.assert_allclose(together.losses, alone.losses, rtol=1e-3)
    # The last of four steps is nearly none.
    before, after = alone, train(autoencoder, images, 4, progress=False)
    moves = [
        np.abs(a - b).max()
        for a, b in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True)
    ]
    assert 0 < max(moves) < 0.3 * settings.learning_rate
    other = Autoencoder(settings._replace(latent_dim=3), images.shape)
    with pytest.raises(ValueError, match="settings that differ in seed and weight; got 2 kinds"):
        train_together([*runs(), (other, tmp_path / "other.npz")], images, 1)


@pytest.mark.thorough
def test_one_particle_that_is_not_finite_moves_nothing():
    """A single particle cannot be replaced by another: gradients are zero, the loss is NaN."""

    def model():
        weight = numpyro.param("weight", 1.0)
        factor = numpyro.param("factor", 1.0)
        with numpyro.plate("rows", 16):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            cost = weight * z**2
            numpyro.factor("cost", -jax.lax.stop_gradient(factor) * cost)

    def guide():
        loc, spread = numpyro.param("loc", 0.5), numpyro.param("spread", 0.8)
        with numpyro.plate("rows", 16):
            numpyro.sample("z", dist.Normal(loc, spread), infer={"implicit": True})

    elbo = ImplicitELBO(1, aggregate="rows", estimator=GaussianScore(), debias=None)
    params = {name: jnp.asarray(v) for name, v in (("weight", 1.0), ("loc", 0.5), ("spread", 0.8))}

    @quick_jit
    def run(factor):
        return jax.value_and_grad(
            lambda p: elbo.loss(random.key(0), p | {"factor": factor}, model, guide)
        )(params)

    for broken in (False, True):
        loss, gradient = run(np.float32(np.nan if broken else 1.0))
        assert bool(np.isnan(loss)) == broken
        for value in gradient.values():
            assert float(value) == 0.0 if broken else float(value) != 0.0
            assert np.isfinite(value)


# -------------------------------------------------------------------------------------- figures


def test_temperatures():
    betas = temperatures(100)
    assert betas[0] == 0
    assert betas[-1] == 1
    assert np.all(np.diff(betas) > 0)


@pytest.mark.slow
def test_annealed_likelihood_of_a_linear_gaussian_decoder():
    """log N(x; b, W Wᵀ + σ² I), known exactly."""
    dim, size, sd = 3, 6, 0.7
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(size, dim)), jnp.float32)
    shift = jnp.asarray(rng.normal(size=size), jnp.float32)
    codes, noise = rng.normal(size=(200, dim)), rng.normal(size=(200, size))
    images = jnp.asarray(codes @ np.asarray(weight).T + shift + sd * noise, jnp.float32)

    def log_likelihood(z, x):
        return jnp.sum(norm.logpdf(x, weight @ z + shift, sd))

    covariance = weight @ weight.T + sd**2 * jnp.eye(size)
    exact = multivariate_normal.logpdf(images, shift, covariance)
    annealing = Annealing(1000, batch_size=200)
    prior = dist.Normal(jnp.zeros(dim), 1.0).to_event(1)
    found = annealed_log_likelihood(random.key(0), log_likelihood, images, prior, annealing)
    error = found.log_likelihood - np.asarray(exact)
    # Four standard errors of the mean are below the .05 nats that are asked for; no value is far.
    assert 4 * error.std() / np.sqrt(200) < 0.05
    assert abs(error.mean()) < 0.05
    assert np.abs(error).max() < 1.0
    assert np.all((found.acceptance > 0.6) & (found.acceptance < 0.95))


@pytest.mark.thorough
def test_bounds_of_a_bernoulli_decoder():
    """The truth is an integral over one coordinate, between the two bounds."""
    weight = jnp.linspace(-3.0, 3.0, 12)

    def log_likelihood(z, x):
        logits = weight * jnp.tanh(2 * z[0]) + 0.5
        return jnp.sum(x * logits - jnp.logaddexp(0, logits))

    def simulate(key, z):
        logits = weight * jnp.tanh(2 * z[0]) + 0.5
        return random.bernoulli(key, jax.nn.sigmoid(logits)).astype(jnp.float32)

    key, annealing = random.key(0), Annealing(100, batch_size=100)
    prior = dist.Normal(jnp.zeros(1), 1.0).to_event(1)
    lower, upper = sandwich(key, log_likelihood, simulate, 100, prior, annealing)
    gap = upper.log_likelihood - lower.log_likelihood
    # The required gap. On average, up to four standard errors, the bounds are in order.
    assert abs(gap.mean()) < 0.5
    assert gap.mean() > -4 * gap.std() / 10
    # The same images again.
    nodes = np.linspace(-8, 8, 2001, dtype=np.float32)

    @quick_jit
    def integrate(key):
        code_key, image_key, *_ = random.split(key, 4)
        codes = random.normal(code_key, (100, 1))
        images = jax.vmap(simulate)(random.split(image_key, 100), codes)
        values = jax.vmap(lambda x: jax.vmap(lambda z: log_likelihood(z[None], x))(nodes))(images)
        return jax.scipy.special.logsumexp(values + norm.logpdf(nodes), axis=1)

    exact = integrate(key) + np.log(16 / 2000)
    for bound, sign in ((lower, 1), (upper, -1)):
        error = bound.log_likelihood - exact
        # A bound on average, and no further from the truth than 0.1 nats.
        assert sign * error.mean() < 4 * error.std() / 10
        assert abs(error.mean()) < 0.1


def test_frechet_distance():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)) @ rng.normal(size=(4, 4))
    y = rng.normal(size=(200, 4)) @ rng.normal(size=(4, 4)) + 1
    first, second = np.cov(x.T), np.cov(y.T)
    cross = scipy.linalg.sqrtm(first @ second).real
    expected = np.sum((x.mean(0) - y.mean(0)) ** 2) + np.trace(first + second - 2 * cross)
    np.testing.assert_allclose(frechet_distance(x, y), expected, rtol=1e-6)
    np.testing.assert_allclose(frechet_distance(x, x + 2), 16, rtol=1e-9)
    # Copies of few points: the covariances are singular.
    assert abs(frechet_distance(np.ones((5, 3)), np.ones((5, 3)))) < 1e-12
    with pytest.raises(ValueError, match=r"expected shapes \(n, k\) and \(m, k\).*got \(300, 4\)"):
        frechet_distance(x, y[:, :2])


@pytest.mark.thorough
def test_codes_that_shrink_are_seen():
    codes = random.normal(random.key(9), (500, 4))
    prior = dist.Normal(jnp.zeros(4), 1.0).to_event(1)
    good, narrow = compare_with_prior(codes, prior), compare_with_prior(0.5 * codes, prior)
    # Standard deviations of 500 draws are good to 1/sqrt(1000), means of four of them to half that.
    assert abs(good["sd"] - 1) < 4 / np.sqrt(1000) / 2
    assert abs(narrow["sd"] - good["sd"] / 2) < 1e-5
    assert good["distance"] < 2 * good["distance_floor"] < narrow["distance"]
    assert good["mmd"] < 0.005 < narrow["mmd"]


# ------------------------------------------------------------------------------------- commands


@pytest.mark.slow
def test_command_on_a_folder_of_pictures(tmp_path, capsys, monkeypatch):
    """Convolutions, labels from folders, table and figure, from end to end."""
    monkeypatch.setattr(command, "train_features", partial(command.train_features, num_steps=5))
    write_pictures(tmp_path, 10, size=(150, 160))
    figure = tmp_path / "figure.png"
    arguments = ["--dataset", str(tmp_path), "--epochs", "2", "--batch-size", "8", "--width", "8",
                 "--latent-dim", "2", "--estimator", "stein", "--figure", str(figure)]  # fmt: skip
    command.main(arguments)
    printed = capsys.readouterr().out
    assert "2 epochs" in printed
    assert "Fréchet distance" in printed
    assert "nan" not in printed.lower().replace("epochs of nan", "")
    assert figure.stat().st_size > 10_000
    with pytest.raises(SystemExit):
        command.main(["--dataset", str(tmp_path / "none")])
    assert "expected digits, patches, mnist, celeba or a folder" in capsys.readouterr().err


def test_table_says_what_was_run():
    common = {"latent_dim": 128, "epochs": 20, "seed": 0, "images": 3, "temperatures": 10}
    figures = {"nll_error": 1.0, "sd": 0.9, "distance": 0.1, "distance_floor": 0.01}
    rows = [
        {"estimator": "ssge", "value": 0.99, "nll": 110.0, "nll_of_each": "100 110 120"},
        {"estimator": "nu", "value": 90.0, "nll": 95.0, "nll_of_each": "86.0 95.0 104.0"},
    ]
    lines = table.table([row | common | figures for row in rows])
    # 14, 15 and 16: their mean, and their standard deviation over √3.
    assert "| 128 | ssge, share 0.99 | 20 | 3 | 110.0 ± 1.0 | +15.0 ± 0.6 | 114.57 |" in lines[-1]
    assert "| 128 | nu, steps 90 | 20 | 3 | 95.0 ± 1.0 |  | 92.10 |" in lines[-2]


def test_table_of_settings_pairs_seeds_and_images():
    common = {"latent_dim": 2, "epochs": 1, "schedule": "constant", "learning_rate": 0.1,
              "information": 5.0, "mean": 0.0, "sd": 1.0, "distance": 0.1, "cost": 2.0,
              "nll": 0.0}  # fmt: skip
    rows = [
        common | {"variant": f"default, weight {weight}", "seed": seed, "nll_of_each": n}
        for weight, seed, n in ((1, 0, "1 2"), (1, 1, "3 5"), (2, 1, "4 8"), (2, 0, "0 1"))
    ]
    apart = validation.differences(rows[2:], rows[:2])
    np.testing.assert_array_equal(apart, [[1, 3], [-1, -1]])
    # Two seeds: the error is that over images, of 0 and 1.
    line = validation.table(rows)[-1]
    assert "| default, weight 2 | 2 | 0.00 | +0.50 ± 0.50 | 5 | 2.00 |" in line


def test_the_best_weight_is_that_of_one_estimator_and_prior():
    common = {"latent_dim": 2, "epochs": 1, "schedule": "constant", "learning_rate": 0.1}
    rows = [
        common | {"variant": variant, "seed": seed, "nll": nll}
        for variant, seed, nll in (
            ("default, weight 1", 0, 5.0),
            ("default, weight 2", 0, 4.0),
            ("default, weight 1, flow", 0, 1.0),
            ("KEF, weight 1", 0, 3.0),
            ("default, weight 1", 1, 2.0),
            ("default, weight 2", 1, 4.5),
        )
    ]
    found = [validation.best(group) for group in validation.alike(rows)]
    # By the mean over seeds: 3.5 and 4.25 for the default with a normal prior.
    assert found == [[rows[0], rows[4]], [rows[2]], [rows[3]]]


def test_held_out_images_are_not_trained_on():
    images = load_images("digits")
    parts = validation.hold_out(images, 200)
    np.testing.assert_array_equal(parts.test, images.train[-200:])
    np.testing.assert_array_equal(parts.train, images.train[:-200])
    assert len(parts.train_labels) == len(parts.train)


def test_table_of_samples_is_read_by_method():
    settings = samples.make_settings(
        {"method": "vae, weight 0.1", "latent_dim": 4, "seed": 1, "width": 8}
    )
    assert (settings.estimator, settings.weight, settings.cost) == ("vae", 0.1, "squared")
    row = dict.fromkeys(samples.COLUMNS, 1.0) | {"dataset": "patches", "latent_dim": 4}
    rows = [row | {"method": "mmd", "frechet": value} for value in (2.0, 4.0)]
    assert "| patches | 4 | mmd | 2 | 3.00 (2.00–4.00) | 1.00 |" in samples.table(rows)[-1]


@pytest.mark.slow
def test_default_command(tmp_path, capsys):
    command.main(["--figure", str(tmp_path / "wae.png"), "--checkpoint", str(tmp_path / "run.npz")])
    printed = capsys.readouterr().out
    assert "NLL of 50 test images" in printed
