"""A prior that is fitted to the codes of a trained autoencoder.

A prior that is trained along with the codes leaves their scale free, and training with it is not
stable (docs/wae_report). The codes of an autoencoder that was trained with N(0, I) have one. Their
prior is then a density estimate, by maximum likelihood: the second stage of Dai and Wipf (2019),
"Diagnosing and enhancing VAE models".
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax import Array, lax, random
from numpyro.infer import SVI, Trace_ELBO

from examples.wae.data import Images, to_batch
from examples.wae.training import Autoencoder

BATCH = 500  # codes of a step, and images encoded at once
LEARNING_RATE = 1e-3  # at the first step; it falls to zero along a cosine


def fit_prior(
    autoencoder: Autoencoder, params: dict[str, Any], images: Images, name: str, epochs: int = 50
) -> tuple[Autoencoder, dict[str, Any]]:
    """The autoencoder with another prior, and its parameters with those of the prior.

    Args:
        autoencoder: one that is trained.
        params: its parameters, which stay as they are.
        images: training images.
        name: a name in ``PRIORS``; not ``vamp``, whose density takes an encoder at every step.
        epochs: passes over the codes, with new noise in each.
    """
    settings = autoencoder.settings._replace(prior=name)
    other = Autoencoder(settings, images.shape)
    mean, sd = encode_all(autoencoder, params, images)
    batch_size = min(BATCH, len(mean))
    steps = len(mean) // batch_size
    example = jnp.zeros((1, *images.shape))

    def model(codes: Array) -> None:
        prior = other.declare_prior(example)
        with numpyro.plate("codes", len(codes)):
            numpyro.sample("z", prior, obs=codes)

    rate = optax.cosine_decay_schedule(LEARNING_RATE, epochs * steps)
    svi = SVI(model, lambda codes: None, optax.adam(rate), Trace_ELBO())
    state = svi.init(random.key(settings.seed), mean[:batch_size])

    @jax.jit
    def epoch(state: Any, key: Array, mean: Array, sd: Array) -> Any:
        order_key, key = random.split(key)
        order = random.permutation(order_key, len(mean))[: steps * batch_size]

        def step(state: Any, given: tuple[Array, Array]) -> tuple[Any, Array]:
            rows, key = given
            codes = mean[rows] + sd[rows] * random.normal(key, mean[rows].shape)
            return svi.update(state, codes)

        rows = order.reshape(steps, batch_size)
        return lax.scan(step, state, (rows, random.split(key, steps)))[0]

    for key in random.split(random.fold_in(random.key(settings.seed), 2), epochs):
        state = epoch(state, key, mean, sd)
    return other, {**params, **svi.get_params(state)}


def encode_all(
    autoencoder: Autoencoder, params: dict[str, Any], images: Images
) -> tuple[Array, Array]:
    """Means and standard deviations of the codes of all training images, (n, d)."""
    encode = jax.jit(
        lambda key, pixels: autoencoder.encode(params, to_batch(key, pixels, images.is_binary))
    )
    parts = np.array_split(images.train, max(1, len(images.train) // BATCH))
    keys = random.split(random.key(0), len(parts))
    found = [encode(key, jnp.asarray(part)) for key, part in zip(keys, parts, strict=True)]
    mean, sd = (jnp.concatenate(column) for column in zip(*found, strict=True))
    return mean, sd
