"""Base scores: an estimate is shrunk to one, and returns to it far from the samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import random
from jax.scipy.special import gammaln

from numpyro_kscore._util.checks import as_points
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.estimators._base.standardization import Coordinates

UNKNOWN = (
    "{what}: expected a base score that is known away from the samples; got base_scores as "
    "values at the samples. Use score.{alternative}(x) for the difference from the base, or fit "
    "with base=a callable or a distribution"
)


@pytree
class Base:
    """A base score s0; subclasses differ in where it is known.

    Attributes:
        at_samples: s0 at the samples, (n, d); None stands for zero.
        held_out: factors (n,) that turn s0 at each sample into what it would be without this
            sample; None where s0 does not depend on the samples.
    """

    at_samples: jax.Array | None = dataclasses.field(default=None, kw_only=True)
    held_out: jax.Array | None = dataclasses.field(default=None, kw_only=True)

    def score(self, x: jax.Array) -> jax.Array:
        """s0 at ``x``: (m, d) -> (m, d)."""
        return jnp.zeros_like(x)

    def log_density(self, x: jax.Array) -> jax.Array:
        """A function with gradient s0: (m, d) -> (m,)."""
        return jnp.zeros_like(x[:, 0])

    def divergence(self, x: jax.Array) -> jax.Array:
        """div s0: (m, d) -> (m,)."""
        dim = x.shape[1]

        def trace(point: jax.Array) -> jax.Array:
            return jnp.trace(jax.jacfwd(lambda p: self.score(p[None])[0])(point).reshape(dim, dim))

        return jax.vmap(trace)(x)

    def whitening(self) -> Coordinates | None:
        """The map that makes the samples' scatter the identity, if the base was fitted to them."""
        return None


@pytree
class ZeroBase(Base):
    """Zero, the base of the estimators in the paper."""

    def divergence(self, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x[:, 0])


@pytree
class ValuesBase(Base):
    """A base score known at the samples only."""

    def score(self, x: jax.Array) -> jax.Array:
        raise ValueError(UNKNOWN.format(what="score(x)", alternative="residual"))

    def log_density(self, x: jax.Array) -> jax.Array:
        raise ValueError(UNKNOWN.format(what="log_density", alternative="residual_potential"))

    def divergence(self, x: jax.Array) -> jax.Array:
        raise ValueError(UNKNOWN.format(what="divergence", alternative="residual_divergence"))


@pytree
class FunctionBase(Base):
    """A score function, (m, d) -> (m, d): a pytree, such as another score, or wrapped in one."""

    function: Any

    def score(self, x: jax.Array) -> jax.Array:
        return as_points("base(x)", self.function(x), dim=x.shape[1])

    def log_density(self, x: jax.Array) -> jax.Array:
        raise ValueError(
            "log_density: expected a base with a density; got a score function. Use base=a "
            "NumPyro distribution, base='gaussian', or score.residual_potential(x)"
        )


@pytree
class DistributionBase(Base):
    """A NumPyro distribution with event shape (d,)."""

    distribution: Any

    def score(self, x: jax.Array) -> jax.Array:
        return jax.vmap(jax.grad(self.distribution.log_prob))(x)

    def log_density(self, x: jax.Array) -> jax.Array:
        return self.distribution.log_prob(x)


# The multivariate Student t distribution by squared distances; 1/ν = 0 is a Gaussian.


def tail_weights(inverse_degrees: Any, squared: jax.Array, dim: int) -> jax.Array:
    """``(ν + d)/(ν + q)`` at squared distances q: the score over that of a Gaussian."""
    # Where the square overflows, infinity times zero would be NaN.
    squared = jnp.minimum(squared, jnp.finfo(squared.dtype).max)
    return (1.0 + dim * inverse_degrees) / (1.0 + squared * inverse_degrees)


def log_normalizer(inverse_degrees: Any, dim: int) -> jax.Array:
    """log of the density at the center, for unit scatter."""
    inverse = jnp.maximum(inverse_degrees, 1e-4)
    degrees = 1.0 / inverse
    student = gammaln(0.5 * (degrees + dim)) - gammaln(0.5 * degrees)
    student = student - 0.5 * dim * jnp.log(degrees * jnp.pi)
    return jnp.where(inverse_degrees > 0, student, -0.5 * dim * jnp.log(2 * jnp.pi))


def log_tail(inverse_degrees: Any, squared: jax.Array, dim: int) -> jax.Array:
    """The log density at squared distances q less that at the center."""
    inverse = jnp.maximum(inverse_degrees, 1e-4)
    student = -0.5 * (1.0 / inverse + dim) * jnp.log1p(squared * inverse)
    return jnp.where(inverse_degrees > 0, student, -0.5 * squared)


@pytree
class EllipticalBase(Base):
    """A Gaussian or Student t distribution, its scatter shrunk by held-out score matching.

    Attributes:
        coordinates: the map that makes its scatter the identity.
        inverse_degrees: 1/ν of the t distribution; 0 is the Gaussian.
    """

    coordinates: Coordinates
    inverse_degrees: jax.Array

    def score(self, x: jax.Array) -> jax.Array:
        z, weights = self._weighted(x)
        return -self.coordinates.scores_from_kernel(weights[:, None] * z)

    def log_density(self, x: jax.Array) -> jax.Array:
        dim = x.shape[1]
        squared = jnp.sum(jnp.square(self.coordinates.to_kernel(x)), axis=1)
        center = log_normalizer(self.inverse_degrees, dim) - self.coordinates.log_det()
        return center + log_tail(self.inverse_degrees, squared, dim)

    @full_precision
    def divergence(self, x: jax.Array) -> jax.Array:
        z, weights = self._weighted(x)
        dim, factor = x.shape[1], self.coordinates.factor()
        # The derivative of the weight along the score.
        slope = 2.0 * self.inverse_degrees * weights**2 / (1.0 + dim * self.inverse_degrees)
        along = jnp.sum(jnp.square(z @ factor), axis=1)
        # Far out `along` may be infinite, where a Gaussian has no such term.
        bend = jnp.where(self.inverse_degrees > 0, slope * along, 0.0)
        return bend - weights * jnp.sum(factor * factor)

    @full_precision
    def draw(self, key: jax.Array, count: int) -> jax.Array:
        """Draws, (count, d)."""
        first, second = random.split(key)
        mean = self.coordinates.mean
        z = random.normal(first, (count, mean.shape[0]), mean.dtype)
        degrees = 1.0 / jnp.maximum(self.inverse_degrees, 1e-4)
        mixing = 2.0 * random.gamma(second, 0.5 * degrees, (count, 1), z.dtype) / degrees
        mixing = jnp.where(self.inverse_degrees > 0, mixing, 1.0)
        return mean + (z / jnp.sqrt(mixing)) @ self.coordinates.root().T

    def _weighted(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Points in coordinates of unit scatter, (m, d), and weights of the score there, (m,)."""
        z = self.coordinates.to_kernel(x)
        squared = jnp.sum(z * z, axis=1)
        return z, tail_weights(self.inverse_degrees, squared, x.shape[1])

    def whitening(self) -> Coordinates:
        return self.coordinates
