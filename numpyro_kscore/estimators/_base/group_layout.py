"""Samples of separate groups, each whitened by its own covariance, laid out far apart.

A kernel should see the spread within a group, not the one between groups, and should not connect
groups: the potential of one would then depend on where others lie. Here every group has an affine
map of its own, into places so far apart, in bandwidths, that a kernel is zero between them but for
rounding. One fit in these coordinates is a fit of each group, with a strength and a bandwidth in
common.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.estimators._base.coordinates import Coordinates
from numpyro_kscore.estimators._base.local_shape import local_shape

__all__ = ["GroupLayout", "lay_out"]

# Distance of neighboring groups over the root mean square radius of a group. The usual bandwidth is
# 1.4 radii, the widest that is tried six. Much farther apart, squared distances need differences
# of coordinates (``kernels._pairwise.cancels``), and evaluating takes twice as long.
SPACING = 60.0


@pytree
class GroupLayout:
    """Coordinates of samples by their groups.

    Attributes:
        each: the groups' coordinates, stacked, (K, ...).
        own: the group of each sample, (n,).
        number: of groups.
    """

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
