"""The base score of separate groups of samples: a mixture of Student t distributions, one a group.

Score matching does not see the weights of distant modes (Wenliang and Kanagawa 2020). A base with
one component a group has them, and the covariance of each group where that of all samples would be
wrong for every one of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import random

from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.estimators._base.base_scores import Base, EllipticalBase
from numpyro_kscore.estimators._base.coordinates import Coordinates
from numpyro_kscore.estimators._base.group_layout import GroupLayout

__all__ = ["MixtureBase", "mixed_divergence", "mixed_score"]


@pytree
class MixtureBase(Base):
    """A mixture of Gaussian or Student t distributions, fitted to separate groups of samples.

    Attributes:
        whole: the distribution of all samples.
        components: those of the groups, stacked, (K, ...).
        log_weights: (K,), -inf for components that are not in use.
        labels: the component of each sample, (n,).
    """

    whole: EllipticalBase = EllipticalBase()
    components: EllipticalBase = EllipticalBase()
    log_weights: jax.Array | None = None
    labels: jax.Array | None = None

    @property
    def used(self) -> jax.Array:
        """Which components are in use, (K,)."""
        return jnp.isfinite(self._log_weights())

    @property
    def number(self) -> jax.Array:
        """The number of components in use."""
        return jnp.sum(self.used)

    def shares(self, x: jax.Array) -> jax.Array:
        """Probabilities of the components given points: (m, d) -> (m, K)."""
        return jax.nn.softmax(self.joint(x), axis=1)

    def each(self, what: str, x: jax.Array) -> jax.Array:
        """A method's value for every component, (K, ...)."""
        return jax.vmap(lambda component: getattr(component, what)(x))(self.components)

    def joint(self, x: jax.Array) -> jax.Array:
        """Log density of points and components, (m, K)."""
        # Where squares overflow all are -inf, and shares would be NaN.
        floor = 0.25 * jnp.finfo(x.dtype).min
        return jnp.maximum(self.each("log_density", x).T, floor) + self._log_weights()

    def score(self, x: jax.Array) -> jax.Array:
        return mixed_score(self.shares(x), self.each("score", x))

    def log_density(self, x: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(self.joint(x), axis=1)

    def divergence(self, x: jax.Array) -> jax.Array:
        return mixed_divergence(self.shares(x), self.each("score", x), self.each("divergence", x))

    @full_precision
    def draw(self, key: jax.Array, count: int) -> jax.Array:
        """Draws, (count, d)."""
        first, second = random.split(key)
        keys = random.split(first, self._log_weights().shape[0])
        each = jax.vmap(lambda component, key: component.draw(key, count))(self.components, keys)
        which = random.categorical(second, self._log_weights(), shape=(count,))
        return each[which, jnp.arange(count)]

    def whitening(self) -> Coordinates:
        """The map that makes the scatter of all samples the identity."""
        return self.whole.whitening()

    def own_scores(self, samples: jax.Array) -> jax.Array:
        """The score of each sample's own component at it, (n, d)."""
        scores = self.each("score", samples)
        return jnp.take_along_axis(scores, self._labels()[None, :, None], axis=0)[0]

    def layout(self) -> GroupLayout:
        """The maps of the components to their own coordinates, with the samples' components."""
        each = jax.vmap(lambda component: component.whitening())(self.components)
        return GroupLayout(each, self._labels(), self.number)

    def _labels(self) -> jax.Array:
        if self.labels is None:
            raise ValueError("labels: expected those of a fitted mixture; got None")
        return self.labels

    def _log_weights(self) -> jax.Array:
        if self.log_weights is None:
            raise ValueError("log_weights: expected those of a fitted mixture; got None")
        return self.log_weights


@full_precision
def mixed_score(shares: jax.Array, scores: jax.Array) -> jax.Array:
    """The score of a mixture, (m, d), from probabilities (m, K) and components' scores."""
    return jnp.einsum("mk,kmd->md", shares, scores)


@full_precision
def mixed_divergence(shares: jax.Array, scores: jax.Array, divergences: jax.Array) -> jax.Array:
    """The divergence of a mixture's score, (m,), from those of its components, (K, m)."""
    apart = scores - mixed_score(shares, scores)
    return jnp.einsum("mk,km->m", shares, divergences + jnp.sum(apart * apart, axis=2))
