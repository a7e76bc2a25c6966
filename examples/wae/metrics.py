"""Quality of an autoencoder: likelihood, samples, and the distance of its codes from the prior."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from jax.tree_util import Partial

from examples.wae.ais import Annealed, Annealing, annealed_log_likelihood
from examples.wae.data import Images, binarize_once
from examples.wae.training import Autoencoder, reconstruction_cost
from numpyro_kscore.diagnostics import mmd_squared, sliced_wasserstein

Features = Callable[[Array], Array]
CODES = 2048  # largest number of codes behind the figures of an aggregate posterior
FEATURES = 64  # units of the classifier before its last layer
AT_ONCE = 500  # images per batch
DRAWS = 8  # of a code, behind a divergence without a closed form


class Aggregate(NamedTuple):
    """The aggregate posterior compared with the prior, from one code per test image.

    Attributes:
        mean: root mean square over coordinates of the codes' mean.
        sd: mean over coordinates of their standard deviation.
        prior_mean: as ``mean``, of as many draws from the prior.
        prior_sd: as ``sd``, of the same draws.
        distance: sliced Wasserstein distance between codes and draws from the prior.
        distance_floor: the same distance between two sets of draws from the prior.
        mmd: unbiased squared maximum mean discrepancy, Gaussian kernel at the median distance.
        cost: mean reconstruction cost, as in training.
    """

    mean: float
    sd: float
    prior_mean: float
    prior_sd: float
    distance: float
    distance_floor: float
    mmd: float
    cost: float


def held_out_batch(images: Images, count: int | None = None) -> Array:
    """The first test images as network inputs, the same in every run."""
    pixels = images.test[:count]
    if images.is_binary:
        return jnp.asarray(binarize_once(pixels))
    return jnp.asarray(pixels / np.float32(255))


def draw_codes(key: Array, autoencoder: Autoencoder, params: dict[str, Any], x: Array) -> Array:
    """One draw of the code of each image, (n, latent_dim)."""
    mean, sd = jax.jit(autoencoder.encode)(params, x)
    return mean + sd * random.normal(key, mean.shape)


def code_divergences(mean: Array, sd: Array, prior: dist.Distribution) -> Array:
    """KL divergence of the Gaussian code of each image from the prior, in nats: (n, d) -> (n,).

    Where NumPyro knows no closed form it is an average of ``log q(z|x) - log p(z)`` over draws.
    """
    codes = dist.Normal(mean, sd).to_event(1)
    try:
        return dist.kl_divergence(codes, prior)
    except NotImplementedError:
        pass

    def of_one(inputs: tuple[Array, Array, Array]) -> Array:
        mean, sd, key = inputs
        code = dist.Normal(mean, sd).to_event(1)
        z = code.sample(key, (DRAWS,))
        return jnp.mean(code.log_prob(z) - prior.log_prob(z))

    # Some images at once: a mixture needs the distance of every draw from every component.
    keys = random.split(random.key(8), len(mean))
    return jax.jit(lambda *inputs: lax.map(of_one, inputs, batch_size=50))(mean, sd, keys)


def compare_with_prior(codes: Array, prior: dist.Distribution) -> dict[str, float]:
    """Moments and distances of codes (n, d) and as many draws of a prior, event shape (d,)."""
    first, second = prior.sample(random.key(1), (2, len(codes)))
    key = random.key(0)
    found = {}
    for name, values in (("", codes), ("prior_", first)):
        found[f"{name}mean"] = float(jnp.sqrt(jnp.mean(jnp.mean(values, axis=0) ** 2)))
        found[f"{name}sd"] = float(jnp.mean(jnp.std(values, axis=0)))
    return found | {
        "distance": float(sliced_wasserstein(codes, first, key)),
        "distance_floor": float(sliced_wasserstein(second, first, key)),
        "mmd": float(mmd_squared(codes, first)),
    }


def measure_aggregate(
    autoencoder: Autoencoder, params: dict[str, Any], images: Images
) -> Aggregate:
    """Figures of a trained autoencoder on at most 2048 test images."""
    x = held_out_batch(images, CODES)
    codes = draw_codes(random.key(2), autoencoder, params, x)
    logits = jax.jit(autoencoder.decode)(params, codes)
    cost = jnp.mean(reconstruction_cost(autoencoder.settings.cost, x, logits))
    return Aggregate(**compare_with_prior(codes, autoencoder.prior(params)), cost=float(cost))


def log_likelihood_of(
    autoencoder: Autoencoder, params: dict[str, Any]
) -> Callable[[Array, Array], Array]:
    """The log likelihood of one image given one code under the Bernoulli decoder, in nats."""
    return Partial(_bernoulli(autoencoder.decoder), params["decoder$params"])


@cache
def _bernoulli(decoder: nn.Module) -> Callable[[Any, Array, Array], Array]:
    """One function for one kind of decoder, so that its programs serve all parameters."""

    def log_likelihood(params: Any, z: Array, x: Array) -> Array:
        logits = decoder.apply({"params": params}, z[None])[0]
        return -jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x))

    return log_likelihood


def measure_likelihood(
    autoencoder: Autoencoder,
    params: dict[str, Any],
    images: Images,
    num_images: int,
    annealing: Annealing,
    progress: bool = False,
) -> Annealed:
    """Log likelihood of the first test images, binarized once.

    Raises:
        ValueError: for color images, which have no likelihood under a Bernoulli decoder.
    """
    if not images.is_binary:
        raise ValueError(
            f"likelihood: expected gray images, whose values are probabilities; got "
            f"{images.shape[2]} channels. Use --ais-images 0, and the Fréchet distance"
        )
    return annealed_log_likelihood(
        random.key(3),
        log_likelihood_of(autoencoder, params),
        held_out_batch(images, num_images),
        autoencoder.prior(params),
        annealing,
        progress=progress,
    )


class Classifier(nn.Module):
    """A small convolutional classifier: images -> features (inputs of the last layer), logits."""

    num_classes: int

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        for width in (16, 32):
            x = nn.relu(nn.Conv(width, (3, 3), strides=(2, 2))(x))
        features = nn.relu(nn.Dense(FEATURES)(x.reshape(x.shape[0], -1)))
        return features, nn.Dense(self.num_classes)(features)


def train_features(images: Images, num_steps: int = 1500, seed: int = 0) -> tuple[Features, float]:
    """Features of a classifier trained on the data set, and its accuracy on test images.

    Raises:
        ValueError: if the images have no labels.
    """
    if images.train_labels is None or images.test_labels is None:
        raise ValueError(
            "features: expected labels to train a classifier on; got images without. Put the "
            "pictures of each class in a separate folder"
        )
    network = Classifier(int(images.train_labels.max()) + 1)
    pixels, labels = jnp.asarray(images.train), jnp.asarray(images.train_labels)
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, num_steps))
    params = network.init(random.key(seed), jnp.zeros((1, *images.shape)))

    def loss(params: Any, rows: Array) -> Array:
        logits = network.apply(params, pixels[rows] / jnp.float32(255))[1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        params, state = carry
        rows = random.randint(key, (64,), 0, pixels.shape[0])
        updates, state = optimizer.update(jax.grad(loss)(params, rows), state)
        return (optax.apply_updates(params, updates), state), None

    keys = random.split(random.key(seed + 1), num_steps)
    run = jax.jit(lambda carry: lax.scan(step, carry, keys)[0])
    params, _ = run((params, optimizer.init(params)))
    apply = jax.jit(lambda x: network.apply(params, x))
    predicted = [
        np.argmax(apply(jnp.asarray(images.test[k : k + AT_ONCE]) / jnp.float32(255))[1], axis=1)
        for k in range(0, len(images.test), AT_ONCE)
    ]
    accuracy = float(np.mean(np.concatenate(predicted) == images.test_labels))
    return lambda x: apply(x)[0], accuracy


def frechet_distance(x: np.ndarray | Array, y: np.ndarray | Array) -> float:
    """Squared Fréchet distance of the Gaussians with the moments of two sets of features.

    ``|m_x - m_y|² + tr(C_x + C_y - 2 (C_x C_y)^½)``, which is the FID of Heusel et al. (2017) if
    the features are those of an Inception network. Its bias is positive, about 1/n; compare sets of
    equal sizes.

    Args:
        x: features of one set, (n, k).
        y: features of the other set, (m, k).

    Raises:
        ValueError: if the shapes do not match, or a set has fewer than two rows.
    """
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(
            "features: expected shapes (n, k) and (m, k) with two rows at least; got "
            f"{x.shape} and {y.shape}"
        )
    first, second = (np.atleast_2d(np.cov(a.T)) for a in (x, y))
    # tr (C_x C_y)^½ from the symmetric C_x^½ C_y C_x^½, whose eigenvalues are real and nonnegative.
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ second @ root), 0)).sum()
    shift = x.mean(0) - y.mean(0)
    return float(shift @ shift + np.trace(first) + np.trace(second) - 2 * cross)


def measure_samples(
    autoencoder: Autoencoder,
    params: dict[str, Any],
    images: Images,
    features: Features,
    num_samples: int | None = None,
) -> float:
    """Fréchet distance between the features of decoded draws of the prior and of test images."""
    count = min(num_samples or len(images.test), len(images.test))
    z = autoencoder.prior(params).sample(random.key(4), (count,))
    decode = jax.jit(lambda p, z: jax.nn.sigmoid(autoencoder.decode(p, z)))
    found: tuple[list[Array], list[Array]] = ([], [])
    for k in range(0, count, AT_ONCE):
        found[0].append(features(decode(params, z[k : k + AT_ONCE])))
        real = images.test[k : min(k + AT_ONCE, count)] / np.float32(255)
        found[1].append(features(jnp.asarray(real)))
    return frechet_distance(*(np.concatenate(part) for part in found))
