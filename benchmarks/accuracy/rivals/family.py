"""Semi-implicit Gaussians: their means are networks of noise, their variances the same for all.

Settings are those of the configurations that Cheng et al. (2024) published with "Kernel
semi-implicit variational inference", where the other semi-implicit methods have the same family:
two hidden layers of rectifiers, Adam with β = (.9, .99), and a step size that falls by a tenth
after every so many steps. Layers start as in their library, uniform within ±1/√inputs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, random

Params = Any


class Settings(NamedTuple):
    """Sizes and rates.

    Attributes:
        noise_dim: number of noises.
        width: of the hidden layers.
        log_var: at the start.
        batch: draws in a step.
        steps: number of steps.
        rate: step size at the start.
        fall_every: steps after which it falls by a tenth.
    """

    noise_dim: int
    width: int
    log_var: float
    batch: int
    steps: int
    rate: float
    fall_every: int

    def shorter(self, share: float) -> Settings:
        """Settings of a run that takes a share of the steps, with the same fall of step sizes."""
        steps, fall = (max(int(round(share * n)), 1) for n in (self.steps, self.fall_every))
        return self._replace(steps=steps, fall_every=fall)

    def optimizer(self) -> Any:
        """Adam with its falling step size."""
        falling = optax.exponential_decay(self.rate, self.fall_every, 0.9, staircase=True)
        return optax.adam(falling, b1=0.9, b2=0.99)


def settings_of(dim: int) -> Settings:
    """The authors' settings for their problem that is most like one of this dimension."""
    if dim <= 10:  # the toys
        return Settings(3, 50, math.log(0.25), 500, 50_000, 1e-3, 1_000)
    if dim <= 50:  # the logistic regression of waveforms
        return Settings(10, 100, -5.0, 100, 20_000, 1e-3, 3_000)
    if dim <= 100:  # the conditioned diffusion
        return Settings(100, 128, -2.0, 128, 100_000, 2e-4, 10_000)
    return Settings(3, 10, -8.0, 100, 20_000, 1e-3, 3_000)  # Bayesian networks


def perceptron(key: Array, widths: tuple[int, ...]) -> list[dict[str, Array]]:
    """Layers of a network, with the numbers of its units."""
    layers = []
    for k, n, m in zip(random.split(key, len(widths) - 1), widths[:-1], widths[1:], strict=True):
        w_key, b_key = random.split(k)
        bound = n**-0.5
        w = random.uniform(w_key, (n, m), minval=-bound, maxval=bound)
        layers.append({"w": w, "b": random.uniform(b_key, (m,), minval=-bound, maxval=bound)})
    return layers


def apply(layers: list[dict[str, Array]], x: Array) -> Array:
    """Outputs of a network of rectifiers, (..., n) -> (..., m)."""
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def start(key: Array, dim: int, settings: Settings) -> Params:
    """Parameters of a semi-implicit Gaussian of this dimension."""
    widths = (settings.noise_dim, settings.width, settings.width, dim)
    return {"net": perceptron(key, widths), "log_var": jnp.full(dim, settings.log_var)}


def log_var(params: Params) -> Array:
    """Log variances, (dim,), not below the authors' limit."""
    return jnp.maximum(params["log_var"], -20.0)


def draw(params: Params, key: Array, count: int) -> tuple[Array, Array, Array]:
    """Noises (count, r), standard normal residuals and draws (count, dim)."""
    noise_key, unit_key = random.split(key)
    noise = random.normal(noise_key, (count, params["net"][0]["w"].shape[0]))
    unit = random.normal(unit_key, (count, params["log_var"].shape[0]))
    return noise, unit, apply(params["net"], noise) + jnp.exp(log_var(params) / 2) * unit


def log_given(params: Params, x: Array, noise: Array) -> Array:
    """Log densities of x (..., dim) given noises (..., r)."""
    spread = log_var(params)
    squares = (x - apply(params["net"], noise)) ** 2 * jnp.exp(-spread)
    return -0.5 * (squares + spread + jnp.log(2 * jnp.pi)).sum(-1)


def score_given(params: Params, x: Array, noise: Array) -> Array:
    """Gradients of the above in x."""
    return (apply(params["net"], noise) - x) * jnp.exp(-log_var(params))
