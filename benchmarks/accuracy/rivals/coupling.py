"""Affine coupling layers (Dinh, Sohl-Dickstein and Bengio 2017), with or without a context."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from benchmarks.accuracy.rivals.family import apply, perceptron

# Logarithms of scales stay within these limits in each layer.
MOST_LOG_SCALE = 2.0


def start(key: Array, dim: int, context: int, layers: int, width: int) -> dict[str, Any]:
    """Parameters of a flow that is the identity."""
    nets = []
    for k in random.split(key, layers):
        net = perceptron(k, (dim + context, width, width, 2 * dim))
        nets.append([*net[:-1], {name: 0.0 * value for name, value in net[-1].items()}])
    return {"nets": nets, "loc": jnp.zeros(dim), "log_scale": jnp.zeros(dim)}


def _passed(dim: int, number: int) -> np.ndarray:
    """One where a layer passes a coordinate on as it is."""
    return ((np.arange(dim) + number) % 2).astype(np.float32)


def _affine(net: Any, kept: Array, moved: np.ndarray, context: Array) -> tuple[Array, Array]:
    out = apply(net, jnp.concatenate([kept, context], axis=-1))
    shift, raw = jnp.split(out, 2, axis=-1)
    return moved * shift, moved * MOST_LOG_SCALE * jnp.tanh(raw / MOST_LOG_SCALE)


def push(params: dict[str, Any], u: Array, context: Array) -> Array:
    """Images of u (..., dim) given contexts (..., c)."""
    for number, net in enumerate(params["nets"]):
        passed = _passed(u.shape[-1], number)
        shift, log_scale = _affine(net, u * passed, 1 - passed, context)
        u = u * jnp.exp(log_scale) + shift
    return params["loc"] + jnp.exp(params["log_scale"]) * u


def log_density(params: dict[str, Any], x: Array, context: Array) -> Array:
    """Log densities of images of standard normal numbers, (..., dim) -> (...)."""
    u = (x - params["loc"]) * jnp.exp(-params["log_scale"])
    volume = params["log_scale"].sum()
    for number, net in reversed([*enumerate(params["nets"])]):
        passed = _passed(u.shape[-1], number)
        shift, log_scale = _affine(net, u * passed, 1 - passed, context)
        u = (u - shift) * jnp.exp(-log_scale)
        volume = volume + log_scale.sum(-1)
    return -0.5 * (u**2 + jnp.log(2 * jnp.pi)).sum(-1) - volume
