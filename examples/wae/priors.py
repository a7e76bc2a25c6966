"""Priors of a code whose parameters are trained along with the autoencoder.

* ``normal``: a standard normal distribution; it has no parameters.
* ``mixture``: normal distributions with free weights, means and standard deviations.
* ``vamp``: the VampPrior of Tomczak and Welling (2018), an equal mixture of the encoder's own codes
  of images that are learned. It follows the encoder, and is a small copy of the aggregate
  posterior, which is the best prior there is for one encoder.
* ``flow``: a masked autoregressive flow (Papamakarios, Pavlakou and Murray 2017). The density of a
  code takes one pass of each network, a draw one pass for each dimension.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions import constraints
from numpyro.distributions.flows import InverseAutoregressiveTransform
from numpyro.distributions.transforms import PermuteTransform
from numpyro.nn.auto_reg_nn import AutoregressiveNN

# A distribution of one code for each image, from the encoder: (n, height, width, channels) -> (n,).
Codes = Callable[[Array], dist.Distribution]
COMPONENTS = 200  # of a mixture; the paper has 500 pseudo-images, which take longer
NUM_FLOWS = 3  # networks of a flow
FLOW_HIDDEN = 128  # least width of their two hidden layers
SPREAD = 0.5  # of the means of a mixture at the start
NEAR_IDENTITY = 0.01  # factor of a flow's last layers at the start
# Pixels of pseudo-images start between these, where a sigmoid is not flat.
DARKEST, BRIGHTEST = 0.1, 0.9


def normal(latent_dim: int, codes: Codes, examples: Array) -> dist.Distribution:
    """N(0, I)."""
    return dist.Normal(jnp.zeros(latent_dim), 1.0).to_event(1)


def mixture(latent_dim: int, codes: Codes, examples: Array) -> dist.Distribution:
    """Normal distributions with diagonal covariances, N(0, I) in mean and variance at the start."""
    shape = (COMPONENTS, latent_dim)
    mean = numpyro.param("prior_mean", lambda key: SPREAD * random.normal(key, shape))
    sd = jnp.full(shape, (1 - SPREAD**2) ** 0.5)
    sd = numpyro.param("prior_sd", sd, constraint=constraints.positive)
    logits = numpyro.param("prior_logits", jnp.zeros(COMPONENTS))
    component = dist.Normal(mean, sd).to_event(1)
    return dist.MixtureSameFamily(dist.Categorical(logits=logits), component)


def vamp(latent_dim: int, codes: Codes, examples: Array) -> dist.Distribution:
    """The encoder's codes of learned images, which start at examples with noise."""

    def start(key: Array) -> Array:
        rows = examples[jnp.arange(COMPONENTS) % len(examples)]
        # The noise tells copies of one example apart.
        noise = random.uniform(key, rows.shape)
        return DARKEST + (BRIGHTEST - DARKEST) * (0.9 * rows + 0.1 * noise)

    images = numpyro.param("pseudo_images", start, constraint=constraints.unit_interval)
    return dist.MixtureSameFamily(dist.Categorical(logits=jnp.zeros(COMPONENTS)), codes(images))


def flow(latent_dim: int, codes: Codes, examples: Array) -> dist.Distribution:
    """A masked autoregressive flow from N(0, I), the order of coordinates reversed in between."""
    hidden = max(FLOW_HIDDEN, latent_dim)
    transforms: list[Any] = []
    for number in range(NUM_FLOWS):
        if number:
            transforms.append(PermuteTransform(jnp.arange(latent_dim)[::-1]))
        network = _near_identity(*AutoregressiveNN(latent_dim, [hidden, hidden]))
        apply = numpyro.module(f"flow_{number}", network, (latent_dim,))
        # Inverted, so that the network sees the code and not the noise behind it.
        transforms.append(InverseAutoregressiveTransform(apply).inv)
    return dist.TransformedDistribution(normal(latent_dim, codes, examples), transforms)


def _near_identity(init: Callable[..., Any], apply: Callable[..., Any]) -> tuple[Any, Any]:
    """The network with a last layer near zero: a shift near 0 and a scale near 1."""

    def start(key: Array, input_shape: tuple[int, ...]) -> tuple[Any, Any]:
        output_shape, (*layers, (weight, bias)) = init(key, input_shape)
        return output_shape, [*layers, (NEAR_IDENTITY * weight, NEAR_IDENTITY * bias)]

    return start, apply


PRIORS: dict[str, Callable[[int, Codes, Array], dist.Distribution]] = {
    "normal": normal,
    "mixture": mixture,
    "vamp": vamp,
    "flow": flow,
}


def spread_examples(pixels: np.ndarray) -> Array:
    """Evenly spread images of (n, ...), one for each component of a mixture, in [0, 1]."""
    few = pixels[:: max(1, len(pixels) // COMPONENTS)][:COMPONENTS]
    return jnp.asarray(few / np.float32(255))


def make_prior(name: str, latent_dim: int, codes: Codes, examples: Array) -> dist.Distribution:
    """The prior of one code, event shape (latent_dim,), inside a model, which has its parameters.

    Args:
        name: a name in ``PRIORS``.
        latent_dim: dimension of a code.
        codes: the encoder's distribution of a code for each image; called by ``vamp`` only.
        examples: images in [0, 1] that pseudo-images start from, (n, height, width, channels).
    """
    return PRIORS[name](latent_dim, codes, examples)
