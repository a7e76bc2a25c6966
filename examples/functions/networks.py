"""Random functions: perceptrons with random weights.

The weights have one of four distributions: independent Gaussians, dropout, a hypernetwork that
computes them from low-dimensional noise, or an ensemble of which one member is drawn. With none of
them can the density of the function's values be evaluated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.flatten_util import ravel_pytree

AUXILIARY = {"is_auxiliary": True}
Weights = list[tuple[Array, Array]]


def perceptron(weights: Weights, x: Array, activation: Callable[[Array], Array]) -> Array:
    """Values of the network at inputs (m, d) -> (m,)."""
    for kernel, bias in weights[:-1]:
        x = activation(x @ kernel + bias)
    kernel, bias = weights[-1]
    return (x @ kernel + bias)[:, 0]


def spreads(widths: Sequence[int], frequency: float) -> list[float]:
    """Standard deviations of the initial weights of each layer."""
    return [(frequency if i == 0 else 1.0) / size**0.5 for i, size in enumerate(widths[:-1])]


def initial_weights(key: Array, widths: Sequence[int], frequency: float) -> Weights:
    """Weights with variance 1/inputs; those of the first layer are ``frequency`` times as large.

    Biases of the first layer are uniform, those of the others zero.
    """
    weights = []
    for depth, spread in enumerate(spreads(widths, frequency)):
        size, width = widths[depth : depth + 2]
        kernel_key, bias_key, key = random.split(key, 3)
        kernel = spread * random.normal(kernel_key, (size, width))
        bias = jnp.zeros(width)
        if depth == 0:
            bias = frequency * random.uniform(bias_key, (width,), minval=-1.0, maxval=1.0)
        weights.append((kernel, bias))
    return weights


def noise(name: str, like: Array) -> Array:
    """Standard normal noise with the shape of an array, marked as auxiliary: not a latent."""
    unit = dist.Normal(jnp.zeros(like.shape), 1.0).to_event(like.ndim)
    return numpyro.sample(name, unit, infer=AUXILIARY)


def means(start: Weights, name: str) -> Weights:
    return [
        (numpyro.param(f"{name}_kernel{i}", kernel), numpyro.param(f"{name}_bias{i}", bias))
        for i, (kernel, bias) in enumerate(start)
    ]


def noise_like(start: Weights, name: str) -> Weights:
    """Standard normal noise for all weights from one site, because sites cost compilation time."""
    flat, restore = ravel_pytree(start)
    drawn: Weights = restore(noise(name, flat))
    return drawn


def gaussian(start: Weights, scales: list[float], name: str) -> Weights:
    """Every weight an independent Gaussian."""

    def moved(label: str, mean: Array, scale: float, unit: Array) -> Array:
        log_sd = numpyro.param(f"{label}_log_sd", jnp.full(mean.shape, -2.0))
        return mean + scale * jnp.exp(log_sd) * unit

    layers = zip(means(start, name), scales, noise_like(start, f"{name}_noise"), strict=True)
    return [
        (
            moved(f"{name}_kernel{i}", kernel, scale, kernel_noise),
            moved(f"{name}_bias{i}", bias, scale, bias_noise),
        )
        for i, ((kernel, bias), scale, (kernel_noise, bias_noise)) in enumerate(layers)
    ]


def dropout(start: Weights, scales: list[float], name: str, rate: float = 0.1) -> Weights:
    """Random hidden units are left out, as rows of the next layer's kernel."""
    weights = means(start, name)
    for i in range(1, len(weights)):
        kernel, bias = weights[i]
        kept = random.bernoulli(numpyro.prng_key(), 1 - rate, kernel.shape[:1])
        weights[i] = (kernel * (kept / (1 - rate))[:, None], bias)
    return weights


def hypernetwork(start: Weights, scales: list[float], name: str, noise_dim: int = 32) -> Weights:
    """All weights are linear in the same noise, so they depend on each other."""
    z = noise(f"{name}_noise", jnp.zeros(noise_dim))
    weights = []
    for i, layer in enumerate(means(start, name)):
        keys = random.split(random.key(i))
        moved = []
        for label, mean, key in zip(("kernel", "bias"), layer, keys, strict=True):
            size = 0.15 * scales[i] / noise_dim**0.5
            first = size * random.normal(key, (noise_dim, *mean.shape))
            slopes = numpyro.param(f"{name}_{label}{i}_slopes", first)
            moved.append(mean + jnp.tensordot(z, slopes, 1))
        weights.append((moved[0], moved[1]))
    return weights


def ensemble(start: Weights, scales: list[float], name: str, members: int = 10) -> Weights:
    """A random member of several networks with Gaussian weights."""
    member = random.randint(numpyro.prng_key(), (), 0, members)
    unit = noise_like(start, f"{name}_noise")
    weights = []
    for i, layer in enumerate(start):
        drawn = []
        for label, first, step in zip(("kernel", "bias"), layer, unit[i], strict=True):
            apart = 0.3 * scales[i] * random.normal(random.key(i), (members, *first.shape))
            mean = numpyro.param(f"{name}_{label}{i}", first + apart)[member]
            log_sd = numpyro.param(f"{name}_{label}{i}_log_sd", jnp.full(apart.shape, -3.0))
            drawn.append(mean + scales[i] * jnp.exp(log_sd[member]) * step)
        weights.append((drawn[0], drawn[1]))
    return weights


KINDS: dict[str, Callable[..., Weights]] = {
    "gaussian": gaussian,
    "dropout": dropout,
    "hypernetwork": hypernetwork,
    "ensemble": ensemble,
}


@dataclass(frozen=True)
class RandomFunction:
    """A random function to call inside a guide: inputs (m, d) -> values (m,).

    Attributes:
        kind: distribution of the weights, one of ``KINDS``.
        hidden: widths of the hidden layers.
        activation: activation of the hidden units.
        frequency: factor on the initial weights of the first layer.
        options: keyword arguments of the kind.
    """

    kind: str = "gaussian"
    hidden: tuple[int, ...] = (50,)
    activation: Callable[[Array], Array] = jax.nn.relu
    frequency: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, x: Array, name: str = "net") -> Array:
        widths = (x.shape[1], *self.hidden, 1)
        start = initial_weights(random.key(0), widths, self.frequency)
        weights = KINDS[self.kind](start, spreads(widths, self.frequency), name, **self.options)
        return perceptron(weights, x, self.activation)
