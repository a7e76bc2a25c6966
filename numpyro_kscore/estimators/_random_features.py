"""The option that replaces a kernel by random features, and what they are as functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._pairwise import split_rows
from numpyro_kscore.kernels._spectral import draw_frequencies

__all__ = ["FeatureExpansion", "Features", "RandomFeatures", "in_tiles"]

# Rows whose features are formed at once.
TILE_ROWS = 2048


@pytree
class RandomFeatures:
    """Random Fourier features in place of a curl-free kernel: for samples without number.

    The estimate is the gradient of a combination of cosines and sines at random frequencies, whose
    kernel is the given one on average (docs/theory). One pass over the samples gives all a fit
    needs, so they may also come in batches: :meth:`ScoreEstimator.init_stream`.

    Args:
        num_features: m, even: a cosine and a sine for each of m/2 frequencies.
        key: random key of the frequencies; None is ``jax.random.key(0)``. A leaf.
        operator_samples: how many samples the m by m second-moment matrix is averaged over: evenly
            spaced, the first ones of a stream, or all if None. The divergence term, which carries
            most of the noise, is always that of all samples.

    Example::

        ScoreEstimator(features=RandomFeatures(2048, key=jax.random.key(0))).fit(draws)
    """

    num_features: int = static(default=2048)
    key: Any = None
    operator_samples: int | None = static(default=2**16)

    def __post_init__(self) -> None:
        check_count("num_features", self.num_features, 2)
        if self.num_features % 2:
            raise ValueError(
                f"num_features: expected an even number, a cosine and a sine for each frequency; "
                f"got {self.num_features}"
            )
        if self.operator_samples is not None:
            check_count("operator_samples", self.operator_samples, 2)

    def draw(self, kernel: Kernel, scale: jax.Array, dim: int) -> Features:
        """Features of ``scale`` times a curl-free kernel in d dimensions."""
        key = random.key(0) if self.key is None else self.key
        count = self.num_features // 2
        profile = kernel.profile
        directions, lengths = draw_frequencies(profile, key, count, dim, scale.dtype)
        amplitude = jnp.sqrt(scale * kernel.trace(dim).astype(scale.dtype) / count)
        return Features(directions, lengths, amplitude)


@pytree
class Features:
    """Fields ``a u sin(ω·z)`` and ``a u cos(ω·z)`` with u = ω/|ω|.

    They are the gradients of ``a (1 - cos(ω·z))/|ω|`` and ``a sin(ω·z)/|ω|``. Combinations have
    coefficients (2, k): first those of the sines.

    Attributes:
        directions: the unit vectors u, (k, d).
        lengths: |ω|, (k,), in 1/bandwidth.
        amplitude: a, with ``k a²`` the trace of the kernel.
    """

    directions: jax.Array
    lengths: jax.Array
    amplitude: jax.Array

    def waves(self, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``sin(ω·z)`` and ``cos(ω·z)`` at points (m, d) in units of the bandwidth: (m, k)."""
        phases = z @ (self.lengths[:, None] * self.directions).T
        return jnp.sin(phases), jnp.cos(phases)

    def field(self, w: jax.Array, z: jax.Array) -> jax.Array:
        """The combination at z: coefficients (2, k), (m, d) -> (m, d)."""
        sines, cosines = self.waves(z)
        return self.amplitude * ((sines * w[0] + cosines * w[1]) @ self.directions)

    def potential(self, w: jax.Array, z: jax.Array) -> jax.Array:
        """A function with that gradient, (m, d) -> (m,)."""
        phases = z @ (self.lengths[:, None] * self.directions).T
        # 1 - cos as the square of a sine: at low frequencies the difference would cancel.
        half = jnp.sin(0.5 * phases)
        scaled = self.amplitude / self.lengths
        return (2.0 * half * half) @ (scaled * w[0]) + jnp.sin(phases) @ (scaled * w[1])

    def divergence(self, w: jax.Array, z: jax.Array, factor: jax.Array) -> jax.Array:
        """``tr(F Fᵀ ∇f)`` of the combination f, (m, d) -> (m,); F is (d, d)."""
        sines, cosines = self.waves(z)
        scaled = self.amplitude * self.lengths * jnp.sum((self.directions @ factor) ** 2, axis=1)
        return cosines @ (scaled * w[0]) - sines @ (scaled * w[1])


@pytree
class FeatureExpansion:
    """A combination of features as a function, in the coordinates of the kernel.

    Attributes:
        features: what is combined.
        coefficients: (2, k).
    """

    features: Features
    coefficients: jax.Array

    def field(self, kernel: Kernel, y: jax.Array) -> jax.Array:
        """The combination at ``y``: (m, d) -> (m, d)."""
        return in_tiles(lambda rows: self.features.field(self.coefficients, rows), y)

    def potential(self, kernel: Kernel, y: jax.Array) -> jax.Array:
        """A function whose gradient is :meth:`field`: (m, d) -> (m,)."""
        return in_tiles(lambda rows: self.features.potential(self.coefficients, rows), y)

    def divergence(self, kernel: Kernel, y: jax.Array, factor: jax.Array) -> jax.Array:
        """``tr(F Fᵀ ∇f)``: (m, d) -> (m,)."""
        return in_tiles(lambda rows: self.features.divergence(self.coefficients, rows, factor), y)


def in_tiles(fn: Any, y: jax.Array) -> jax.Array:
    """A function of rows applied to some rows after the others."""
    if y.shape[0] <= TILE_ROWS:
        return fn(y)
    blocks = lax.map(fn, split_rows(y, TILE_ROWS))
    return blocks.reshape(-1, *blocks.shape[2:])[: y.shape[0]]
