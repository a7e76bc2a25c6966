"""The base score of separate groups of samples, and coordinates in which they are far apart.

Score matching does not see the weights of distant modes (Wenliang and Kanagawa 2020). A base with
one component a group has them, and the covariance of each group where that of all samples would be
wrong for every one of them.

A kernel should see the spread within a group, not the one between groups, and should not connect
groups: the potential of one would then depend on where others lie. Every group has an affine map of
its own, into places so far apart, in bandwidths, that a kernel is zero between them but for
rounding. One fit in these coordinates is a fit of each group, with a strength and a bandwidth in
common.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import random

from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.estimators._base.base_scores import Base, EllipticalBase
from numpyro_kscore.estimators._base.standardization import Coordinates, local_shape

# Distance of neighboring groups over the root mean square radius of a group. The usual bandwidth is
# 1.4 radii, the widest that is tried six. Much farther apart, squared distances need differences
# of coordinates (``kernels._pairwise.cancels``), and evaluating takes twice as long.
SPACING = 60.0


@pytree
class GroupLayout:
    """Coordinates of each group, stacked, (K, ...), the group of each sample, and their number."""

    each: Coordinates
    own: jax.Array
    number: jax.Array

    def to_kernel(self, samples: jax.Array) -> jax.Array:
        """The samples in the coordinates of their groups, (n, d)."""
        return self._of_own(jax.vmap(lambda map_: map_.to_kernel(samples))(self.each))

    def scores_to_kernel(self, s: jax.Array) -> jax.Array:
        """Scores at the samples, (n, d), in those coordinates."""
        return self._of_own(jax.vmap(lambda map_: map_.scores_to_kernel(s))(self.each))

    def scores_from_kernel(self, s: jax.Array) -> jax.Array:
        """Scores at the samples, (n, d), in the original coordinates."""
        return self._of_own(jax.vmap(lambda map_: map_.scores_from_kernel(s))(self.each))

    def with_bandwidth(self, bandwidth: jax.Array) -> GroupLayout:
        """The same in units of a bandwidth."""
        shared = jnp.broadcast_to(bandwidth, self.each.bandwidth.shape)
        return dataclasses.replace(self, each=dataclasses.replace(self.each, bandwidth=shared))

    def restricted(self, rows: jax.Array) -> GroupLayout:
        """The layout of some of the samples."""
        return dataclasses.replace(self, own=self.own[rows])

    def _of_own(self, values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, self.own[None, :, None], axis=0)[0]

    @full_precision
    def _apart(self, samples: jax.Array) -> GroupLayout:
        """The groups along the first axis; with one group nothing moves."""
        z = self.to_kernel(samples)
        spacing = SPACING * jnp.sqrt(jnp.mean(jnp.sum(z * z, axis=1)))
        numbers = jnp.arange(self.each.mean.shape[0], dtype=z.dtype)
        places = spacing * (numbers - 0.5 * (self.number - 1).astype(z.dtype))
        roots = jax.vmap(lambda map_: map_.root()[:, 0])(self.each)
        mean = self.each.mean - jnp.where(self.number > 1, places, 0.0)[:, None] * roots
        return dataclasses.replace(self, each=dataclasses.replace(self.each, mean=mean))


def lay_out(samples: jax.Array, groups: GroupLayout, local: bool) -> tuple[GroupLayout, jax.Array]:
    """Groups far apart, and the samples (n, d) in their coordinates with all groups at one place.

    The maps given, at bandwidth 1, whiten each group and take it to the origin. With ``local``
    neighbors, not all samples of a group, lie in all directions alike.
    """
    if local:
        root = local_shape(groups._apart(samples).to_kernel(samples))
        each = jax.vmap(lambda map_: map_.turned(root))(groups.each)
        groups = dataclasses.replace(groups, each=each)
    return groups._apart(samples), groups.to_kernel(samples)


@pytree
class MixtureBase(Base):
    """A mixture of Gaussian or Student t distributions, fitted to separate groups of samples.

    Attributes:
        whole: the distribution of all samples.
        components: those of the groups, stacked, (K, ...).
        log_weights: (K,), -inf for components that are not in use.
        labels: the component of each sample, (n,).
    """

    whole: EllipticalBase
    components: EllipticalBase
    log_weights: jax.Array
    labels: jax.Array

    @property
    def used(self) -> jax.Array:
        """Which components are in use, (K,)."""
        return jnp.isfinite(self.log_weights)

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
        return jnp.maximum(self.each("log_density", x).T, floor) + self.log_weights

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
        keys = random.split(first, self.log_weights.shape[0])
        each = jax.vmap(lambda component, key: component.draw(key, count))(self.components, keys)
        which = random.categorical(second, self.log_weights, shape=(count,))
        return each[which, jnp.arange(count)]

    def whitening(self) -> Coordinates:
        return self.whole.coordinates

    def own_scores(self, samples: jax.Array) -> jax.Array:
        """The score of each sample's own component at it, (n, d)."""
        scores = self.each("score", samples)
        return jnp.take_along_axis(scores, self.labels[None, :, None], axis=0)[0]

    def layout(self) -> GroupLayout:
        """The maps of the components to their own coordinates, with the samples' components."""
        return GroupLayout(self.components.coordinates, self.labels, self.number)


@full_precision
def mixed_score(shares: jax.Array, scores: jax.Array) -> jax.Array:
    """The score of a mixture, (m, d), from probabilities (m, K) and components' scores."""
    return jnp.einsum("mk,kmd->md", shares, scores)


@full_precision
def mixed_divergence(shares: jax.Array, scores: jax.Array, divergences: jax.Array) -> jax.Array:
    """The divergence of a mixture's score, (m,), from those of its components, (K, m)."""
    apart = scores - mixed_score(shares, scores)
    return jnp.einsum("mk,km->m", shares, divergences + jnp.sum(apart * apart, axis=2))
