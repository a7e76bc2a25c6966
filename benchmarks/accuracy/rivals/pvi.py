"""Particle semi-implicit variational inference (Lim and Johansen 2024).

Particles z_m are the mixing distribution, and q(x) = 1/M Σ k(x | z_m) has a density. The free
energy E_q log q/p falls along their Euclidean-Wasserstein gradient flow (their Algorithm 1):
parameters of the kernel take steps of RMSprop, particles steps against
E [∂x(z, u)/∂z]ᵀ (∇ log q - ∇ log p)(x), scaled by a running root mean square, with noise √(2 λ h).

Settings are those of the configurations the authors published for toys: 100 particles of two
dimensions, 15 000 steps, 512 rectifiers, RMSprop with 1e-4, h = 1e-2, λ = 1e-8, the direction of a
particle clipped to norm 1. Above ten dimensions particles have ten and RMSprop takes 1e-3, as for
their logistic regression of waveforms. The kernel is a Gaussian around A z + f(z), where A is fixed
and the identity in the toys, and its standard deviations are parameters that start at 1. Each
particle has 25 draws a step, a tenth of the authors' number; steps of the kernel use all of these.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax, random

from benchmarks.accuracy.rivals.family import apply, perceptron
from benchmarks.accuracy.rivals.ksivi import squared_distances
from benchmarks.accuracy.rivals.problem import Outcome, Problem, train

PARTICLES, WIDTH, STEPS, DRAWS = 100, 512, 15_000, 25
STEP, NOISE, MEMORY = 1e-2, 1e-8, 0.9


def start(key: Array, dim: int, width: int = WIDTH, particles: int = PARTICLES) -> dict[str, Any]:
    """Parameters of the kernel, and particles."""
    net_key, skip_key, z_key = random.split(key, 3)
    inner = min(dim, 2) if dim <= 10 else 10
    skip = jnp.eye(inner, dim) if dim <= 10 else random.orthogonal(skip_key, dim)[:inner]
    theta = {"net": perceptron(net_key, (inner, width, width, dim)), "sd": jnp.ones(dim)}
    return {"theta": theta, "skip": skip, "z": random.normal(z_key, (particles, inner))}


def center(params: dict[str, Any], z: Array) -> Array:
    """Means of the kernel, (m, dim)."""
    return z @ params["skip"] + apply(params["theta"]["net"], z)


def deviation(params: dict[str, Any]) -> Array:
    """Standard deviations of the kernel, (dim,)."""
    return jnp.maximum(params["theta"]["sd"], 1e-6)


def log_density(params: dict[str, Any], x: Array) -> Array:
    """The log density of the mixture at x (n, dim), (n,)."""
    sd, means = deviation(params), center(params, params["z"])
    squares = squared_distances(x / sd, means / sd)
    constant = (jnp.log(sd) + 0.5 * jnp.log(2 * jnp.pi)).sum()
    return jax.nn.logsumexp(-0.5 * squares, axis=1) - jnp.log(len(means)) - constant


def draw(params: dict[str, Any], unit: Array) -> Array:
    """Draws of every particle, (r, m, dim) residuals -> (r, m, dim)."""
    return center(params, params["z"]) + deviation(params) * unit


def free_energy_gradient(params: dict[str, Any], unit: Array, log_densities: Any) -> dict[str, Any]:
    """The gradient of the free energy, along the paths of draws.

    That of particles is the one of the first variation, which is m times the gradient of the mean.
    """
    fixed = lax.stop_gradient(params)

    def energy(params: dict[str, Any]) -> Array:
        x = draw(params, unit).reshape(-1, unit.shape[-1])
        return (log_density(fixed, x) - log_densities(x)).mean()

    change = jax.grad(energy)(params)
    return change | {"z": len(params["z"]) * change["z"]}


def fit(problem: Problem, key: Array, share: float) -> Outcome:
    """Draws of the mixture at the end of the flow."""
    steps = max(int(round(share * STEPS)), 1)
    init_key, run_key = random.split(key)
    params = start(init_key, problem.dim)

    def gradient(params: Any, square: Array, key: Array, number: Array) -> tuple[Any, Array]:
        unit_key, noise_key = random.split(key)
        unit = random.normal(unit_key, (DRAWS, len(params["z"]), problem.dim))
        change = free_energy_gradient(params, unit, problem.log_densities)
        z = change["z"]
        z = z * jnp.minimum(1.0, 1.0 / jnp.linalg.norm(z, axis=1, keepdims=True).clip(1e-12))
        square = MEMORY * square + (1 - MEMORY) * (z**2).mean(0)
        scale = jnp.sqrt(square / (1 - MEMORY ** (number + 1.0))) + 1e-8
        # The optimizer below subtracts h times this.
        noise = (2 * NOISE / STEP) ** 0.5 * random.normal(noise_key, z.shape)
        return change | {"z": z / scale + noise}, square

    rate = 1e-4 if problem.dim <= 10 else 1e-3
    optimizer = optax.multi_transform(
        {"theta": optax.rmsprop(rate), "skip": optax.set_to_zero(), "z": optax.sgd(STEP)},
        {name: name for name in params},
    )
    square = jnp.zeros(params["z"].shape[1])
    params, _ = train(gradient, params, square, optimizer, run_key, steps)
    return Outcome(partial(_sample, params), steps, steps * DRAWS * PARTICLES)


def _sample(params: dict[str, Any], key: Array, count: int) -> Array:
    unit_key, row_key = random.split(key)
    rows = random.randint(row_key, (count,), 0, len(params["z"]))
    means = center(params, params["z"])[rows]
    return means + deviation(params) * random.normal(unit_key, means.shape)
