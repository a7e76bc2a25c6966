"""The networks of the automatic guides, as NumPyro parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import random

from numpyro_kscore._transports.network import GAIN, Perceptron


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
    # Weights are drawn as one vector: random matrices take five times as long to compile.
    weights = random.normal(key, (sum(sizes),)) / GAIN
    parts = []
    for size, fan_out in zip(sizes, widths[1:-1], strict=True):
        parts += [weights[:size], jnp.zeros(fan_out)]
        weights = weights[size:]
    return jnp.concatenate([*parts, jnp.zeros((widths[-2] + 1) * widths[-1])])


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
