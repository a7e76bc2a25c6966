"""Encoders and decoders: perceptrons for small gray images, convolutions for color images."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

HIDDEN = 256  # width of the two hidden layers of a perceptron
CONVOLUTIONS = 4  # each halves the side of an image
WIDTH = 64  # channels after the first convolution; each further one doubles them


class Encoder(nn.Module):
    """Images -> mean and standard deviation of each code, two arrays (n, latent_dim)."""

    latent_dim: int

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(HIDDEN)(x))
        return _heads(x, self.latent_dim)


class Decoder(nn.Module):
    """Codes -> logits of each pixel: (n, latent_dim) -> (n, height, width, channels)."""

    shape: tuple[int, int, int]

    @nn.compact
    def __call__(self, z: Array) -> Array:
        for _ in range(2):
            z = nn.relu(nn.Dense(HIDDEN)(z))
        height, width, channels = self.shape
        return nn.Dense(height * width * channels)(z).reshape(-1, height, width, channels)


class ConvolutionalEncoder(nn.Module):
    """An encoder of images whose sides are multiples of 16 pixels."""

    latent_dim: int
    width: int = WIDTH

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        for k in range(CONVOLUTIONS):
            x = nn.Conv(self.width << k, (5, 5), strides=(2, 2))(x)
            x = nn.relu(nn.GroupNorm(num_groups=8)(x))
        return _heads(x.reshape(x.shape[0], -1), self.latent_dim)


class ConvolutionalDecoder(nn.Module):
    """The encoder's mirror image."""

    shape: tuple[int, int, int]
    width: int = WIDTH

    @nn.compact
    def __call__(self, z: Array) -> Array:
        factor = 1 << CONVOLUTIONS
        height, width = (side // factor for side in self.shape[:2])
        channels = self.width << (CONVOLUTIONS - 1)
        x = nn.relu(nn.Dense(height * width * channels)(z))
        x = x.reshape(-1, height, width, channels)
        for k in reversed(range(CONVOLUTIONS - 1)):
            x = nn.ConvTranspose(self.width << k, (5, 5), strides=(2, 2))(x)
            x = nn.relu(nn.GroupNorm(num_groups=8)(x))
        return nn.ConvTranspose(self.shape[2], (5, 5), strides=(2, 2))(x)


def make_networks(
    shape: tuple[int, int, int], latent_dim: int, width: int = WIDTH
) -> tuple[nn.Module, nn.Module]:
    """Encoder and decoder for images of one shape.

    Args:
        shape: height, width and channels of an image.
        latent_dim: dimension of the codes.
        width: channels after the first convolution; a multiple of 8.

    Raises:
        ValueError: if the sides of color images are not multiples of 16.
    """
    if shape[2] == 1:
        return Encoder(latent_dim), Decoder(shape)
    if shape[0] % (1 << CONVOLUTIONS) or shape[1] % (1 << CONVOLUTIONS):
        raise ValueError(
            f"images: expected sides that are multiples of {1 << CONVOLUTIONS} pixels; got "
            f"{shape[0]} x {shape[1]}"
        )
    return ConvolutionalEncoder(latent_dim, width), ConvolutionalDecoder(shape, width)


def _heads(x: Array, latent_dim: int) -> tuple[Array, Array]:
    mean, log_variance = jnp.split(nn.Dense(2 * latent_dim)(x), 2, axis=1)
    return mean, jnp.exp(0.5 * log_variance)
