"""The perceptrons of the automatic guides, as NumPyro parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import random

from numpyro_kscore._util.pytree import pytree, static

__all__ = ["GATE_RATE", "Perceptron", "apply_network", "check_network", "perceptron"]

# Weights are stored at unit scale and divided by sqrt(fan-in) in use, so that a step of Adam moves
# the function equally little at any width; otherwise the last iterate of a run at a constant step
# size is visibly noisy. GAIN multiplies every layer's rate of learning. The gate learns at a
# quarter of that rate: at the full rate the guide falls into the neck of a funnel before it has
# covered the rest (docs/accuracy).
GAIN = 2.0
GATE_RATE = 0.25


@pytree
class Perceptron:
    """A perceptron with its weights: a function of (fan_in,).

    Attributes:
        layers: all weights and biases, one vector.
        widths: of input, hidden layers and output.
    """

    layers: jax.Array
    widths: tuple[int, ...] = static()

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output at ``x``, (fan_in,)."""
        return _evaluate(self.layers, x, self.widths)

    def with_slopes(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """The output at ``x``, and its derivative in the first ``count`` inputs, (count, size)."""
        features, slopes = self.features_with_slopes(x, count)
        weight, bias = self.readout
        return features @ weight + bias, slopes @ weight

    @property
    def bottleneck(self) -> int:
        """The number of units h of the last hidden layer, which bounds the derivative's rank."""
        return self.widths[-2]

    def features_with_slopes(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """The last hidden layer at ``x``, (h,), and its derivative in ``count`` inputs, (count, h).

        Written out, since it is differentiated again: in a third of the time of nested ``jvp``.
        """
        slopes = jnp.eye(count, len(x), dtype=x.dtype)
        for weight, bias in _weights(self.layers, self.widths)[:-1]:
            inner = _inner(x, weight, bias)
            x, slope = jax.jvp(jax.nn.gelu, (inner,), (jnp.ones_like(inner),))
            slopes = slope * _inner(slopes, weight, 0.0)
        return x, slopes

    @property
    def readout(self) -> tuple[jax.Array, jax.Array]:
        """What makes the output of the features: a matrix (h, size) and a vector (size,)."""
        weight, bias = _weights(self.layers, self.widths)[-1]
        return GAIN * weight * (1.0 / self.bottleneck) ** 0.5, GAIN * bias


def perceptron(name: str, fan_in: int, hidden_dims: Sequence[int], size: int) -> Perceptron:
    """A perceptron from (fan_in,) to (size,), zero at the start: a function without effects.

    Hidden layers start at unit gain, the last one at zero. All weights and biases are one vector,
    the parameter ``name``, because NumPyro's ``scan`` asks every value of a guide for its shape;
    also, an optimizer then has a single array to update.
    """
    widths = (fan_in, *hidden_dims, size)
    layers = numpyro.param(name, lambda key: _init_layers(key, widths))
    return Perceptron(layers, widths)


# NumPyro first runs a guide operation by operation, with a compilation for each. One compiled
# function takes a tenth of the time; within a compiled step it changes nothing.
@partial(jax.jit, static_argnames="widths")
def _init_layers(key: jax.Array, widths: tuple[int, ...]) -> jax.Array:
    sizes = [a * b for a, b in itertools.pairwise(widths[:-1])]
    # All at once and as one vector: random matrices take five times as long to compile.
    weights = random.normal(key, (sum(sizes),)) / GAIN
    parts = []
    for size, fan_out in zip(sizes, widths[1:-1], strict=True):
        parts += [weights[:size], jnp.zeros(fan_out)]
        weights = weights[size:]
    return jnp.concatenate([*parts, jnp.zeros((widths[-2] + 1) * widths[-1])])


@partial(jax.jit, static_argnames="widths")
def _evaluate(layers: jax.Array, x: jax.Array, widths: tuple[int, ...]) -> jax.Array:
    *hidden, last = _weights(layers, widths)
    x = _features(hidden, x)
    weight, bias = last
    return GAIN * (x @ weight * (1.0 / widths[-2]) ** 0.5 + bias)


def _features(hidden: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """The last hidden layer."""
    for weight, bias in hidden:
        x = jax.nn.gelu(_inner(x, weight, bias))
    return x


def _inner(x: jax.Array, weight: jax.Array, bias: jax.Array | float) -> jax.Array:
    """What the units of a hidden layer see of the layer before, (..., fan_in)."""
    return GAIN * (x @ weight * (2.0 / len(weight)) ** 0.5 + bias)


def _weights(layers: jax.Array, widths: tuple[int, ...]) -> list[tuple[jax.Array, jax.Array]]:
    """Weights (fan_in, fan_out) and biases (fan_out,) of all layers."""
    parts, start = [], 0
    for fan_in, fan_out in itertools.pairwise(widths):
        middle, end = start + fan_in * fan_out, start + (fan_in + 1) * fan_out
        parts.append((layers[start:middle].reshape(fan_in, fan_out), layers[middle:end]))
        start = end
    return parts


def apply_network(
    name: str, network: Callable[..., Any] | Any, noise: jax.Array, size: int
) -> jax.Array:
    """The user's network at ``noise``, (size,); a flax module's parameters are under ``name``."""
    if hasattr(network, "init") and hasattr(network, "apply"):
        from numpyro.contrib.module import flax_module

        out = flax_module(name, network, input_shape=noise.shape)(noise)
    else:
        out = network(noise)
    if jnp.shape(out) != (size,):
        raise ValueError(
            f"network: expected output of shape ({size},), one number for each unconstrained "
            f"coordinate; got {jnp.shape(out)}"
        )
    return out


def check_network(network: Any) -> None:
    """Raise ``TypeError`` unless it is a network whose parameters NumPyro can see."""
    if not callable(network):
        raise TypeError(f"network: expected a callable or a flax module; got {network!r}")
    if any(base.__module__.startswith("flax.nnx") for base in type(network).__mro__):
        raise TypeError(
            "network: expected a callable or a flax linen module; got an nnx module, whose "
            "parameters NumPyro would not see. Wrap it: lambda noise: "
            "numpyro.contrib.module.nnx_module('network', module)(noise)"
        )
