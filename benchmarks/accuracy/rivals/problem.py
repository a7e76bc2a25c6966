"""A posterior as a log density of one vector, and what a method returns for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.distributions import biject_to
from numpyro.infer.util import potential_energy

from benchmarks.accuracy.posterior import Posterior

Gradient = Callable[[Any, Any, Array, Array], tuple[Any, Any]]


class Outcome(NamedTuple):
    """The result of a method.

    Attributes:
        draw: ``(key, count) -> (count, dim)`` unconstrained draws.
        steps: number of steps.
        gradients: evaluations of the model's gradient.
        said: what the method says of its own result.
    """

    draw: Callable[[Array, int], Array]
    steps: int
    gradients: float
    said: str = ""


@dataclass(frozen=True)
class Problem:
    """A posterior whose latents are one vector, in the order in which the model samples them.

    Attributes:
        posterior: the model, its data, and the source of exact draws.
        shapes: unconstrained shapes of the latents.
    """

    posterior: Posterior
    shapes: dict[str, tuple[int, ...]]

    @property
    def dim(self) -> int:
        """The number of unconstrained coordinates."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def unpack(self, x: Array) -> dict[str, Array]:
        """Unconstrained latents by name, from a vector (dim,)."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        parts = jnp.split(x, ends[:-1])
        return {n: p.reshape(s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}

    def constrain(self, x: Array) -> dict[str, Array]:
        """Latents by name, from a vector (dim,)."""
        supports = self.posterior.target.supports()
        return {name: biject_to(supports[name])(part) for name, part in self.unpack(x).items()}

    def log_density(self, x: Array) -> Array:
        """The log density of the posterior at x (dim,), up to a constant."""
        target = self.posterior.target
        return -potential_energy(target.model, target.args, {}, self.unpack(x))

    def log_densities(self, x: Array) -> Array:
        """Log densities of many points, (n, dim) -> (n,)."""
        return jax.vmap(self.log_density)(x)

    def scores(self, x: Array) -> Array:
        """Gradients of the log density, (n, dim) -> (n, dim)."""
        return jax.vmap(jax.grad(self.log_density))(x)


def make_problem(posterior: Posterior) -> Problem:
    """The posterior as a problem of one vector."""
    target = posterior.target
    supports = target.supports()
    shapes = {
        name: jnp.shape(biject_to(supports[name]).inv(value))
        for name, value in target.example().items()
    }
    return Problem(posterior, shapes)


def train(
    gradient: Gradient, params: Any, extra: Any, optimizer: Any, key: Array, steps: int
) -> tuple[Any, Any]:
    """Parameters after so many steps of an optimizer, compiled as one loop, and the extra state.

    ``gradient`` maps parameters, extra state, key and number of the step to the gradient of a loss
    and the next extra state.
    """

    def step(carry: Any, number: Array) -> tuple[Any, None]:
        params, extra, state = carry
        change, extra = gradient(params, extra, random.fold_in(key, number), number)
        updates, state = optimizer.update(change, state, params)
        params = jax.tree.map(lambda a, b: a + b, params, updates)
        return (params, extra, state), None

    @partial(jax.jit, static_argnums=1)
    def run(carry: Any, count: int) -> Any:
        return lax.scan(step, carry, jnp.arange(count))[0]

    params, extra, _ = run((params, extra, optimizer.init(params)), steps)
    # So that clocks that stop next have seen all of it.
    return jax.block_until_ready((params, extra))
