"""The trained network of :class:`~numpyro_kscore.AutoImplicit` as a transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax

from numpyro_kscore._transports.transport import LocalDensity
from numpyro_kscore._util.linalg import log_abs_det, slogdet_and_inverse
from numpyro_kscore._util.pytree import pytree, static

# Weights are stored at unit scale and divided by sqrt(fan-in) in use, so that a step of Adam moves
# the function equally little at any width; otherwise the last iterate of a run at a constant step
# size is visibly noisy. GAIN multiplies every layer's rate of learning. The gate learns at a
# quarter of that rate: at the full rate the guide falls into the neck of a funnel before it has
# covered the rest (benchmarks/results/2026-11-21-length-of-a-step.md).
GAIN = 2.0
GATE_RATE = 0.25


@pytree
class Perceptron:
    """A perceptron with its weights: a function of (fan_in,).

    Attributes:
        layers: all weights and biases, one vector.
        widths: widths of input, hidden layers and output.
    """

    layers: jax.Array
    widths: tuple[int, ...] = static()

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output at ``x``, (fan_in,)."""
        return _evaluate(self.layers, x, self.widths)

    def with_slopes(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """The output at ``x``, and its derivative in the first ``count`` inputs, (count, size)."""
        features, slopes = self.features_along(x, jnp.eye(count, dtype=x.dtype))
        weight, bias = self.readout
        return features @ weight + bias, slopes @ weight

    @property
    def bottleneck(self) -> int:
        """The number of units h of the last hidden layer, which bounds the derivative's rank."""
        return self.widths[-2]

    def features(self, x: jax.Array) -> jax.Array:
        """The last hidden layer at ``x``, (h,)."""
        return _features(_weights(self.layers, self.widths)[:-1], x)

    def features_along(self, x: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The same, and its derivatives along rows of the first inputs, (m, count) to (m, h).

        Written out, since it is differentiated again: in a third of the time of nested ``jvp``.
        """
        for weight, bias in _weights(self.layers, self.widths)[:-1]:
            inner = _inner(x, weight, bias)
            x, slope = jax.jvp(jax.nn.gelu, (inner,), (jnp.ones_like(inner),))
            rows = slope * _through(rows, weight)
        return x, rows

    @property
    def readout(self) -> tuple[jax.Array, jax.Array]:
        """The map from features to the output: a matrix (h, size) and a vector (size,)."""
        weight, bias = _weights(self.layers, self.widths)[-1]
        return GAIN * weight * (1.0 / self.bottleneck) ** 0.5, GAIN * bias


@partial(jax.jit, static_argnames="widths")
def _evaluate(layers: jax.Array, x: jax.Array, widths: tuple[int, ...]) -> jax.Array:
    *hidden, (weight, bias) = _weights(layers, widths)
    return GAIN * (_features(hidden, x) @ weight * (1.0 / widths[-2]) ** 0.5 + bias)


def _features(hidden: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    for weight, bias in hidden:
        x = jax.nn.gelu(_inner(x, weight, bias))
    return x


def _inner(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """The inputs of the units of a hidden layer, from the layer before, (fan_in,)."""
    return _through(x, weight) + GAIN * bias


def _through(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Vectors (..., k) times the first k rows of weights, as a layer uses these."""
    return GAIN * (x @ weight[: x.shape[-1]] * (2.0 / len(weight)) ** 0.5)


def _weights(layers: jax.Array, widths: tuple[int, ...]) -> list[tuple[jax.Array, jax.Array]]:
    """Weights (fan_in, fan_out) and biases (fan_out,) of all layers."""
    parts, start = [], 0
    for fan_in, fan_out in itertools.pairwise(widths):
        middle, end = start + fan_in * fan_out, start + (fan_in + 1) * fan_out
        parts.append((layers[start:middle].reshape(fan_in, fan_out), layers[middle:end]))
        start = end
    return parts


class Volume(NamedTuple):
    """The volume of a map at a point.

    Attributes:
        orientation: the sign of the determinant of the derivative J.
        log_volume: ``log |det J|``.
        slope: the gradient of that in the point, (d,).
        pull_back: solves ``Jᵀ y = v``, (d,) to (d,).
    """

    orientation: jax.Array
    log_volume: jax.Array
    slope: jax.Array
    pull_back: Callable[[jax.Array], jax.Array]

    def push_score(self, score: jax.Array) -> jax.Array:
        """The score of the image; NaN where the map is known to be folded.

        A map that starts from positive scales keeps its orientation until it is folded. Behind a
        fold other noise is pushed to the same place, which the local volume does not know.
        """
        return jnp.where(self.orientation > 0, self.pull_back(score - self.slope), jnp.nan)


@pytree
class ResidualNetwork:
    """``x = loc + scale * ((ε * exp(g(ε))) A + f(ε))`` with a perceptron (f, g).

    Attributes:
        perceptron: from the noise and the labels to (f, g), (2 d,).
        loc: shape (d,).
        scale: shape (d,).
        mixing: the matrix A, (d, d); (noise, d) if the noise has another dimension.
        labels: vectors that the perceptron sees too.
    """

    perceptron: Perceptron
    loc: Any
    scale: Any
    mixing: Any
    labels: tuple[Any, ...] = ()

    def push(self, x: jax.Array) -> jax.Array:
        out = self.perceptron(jnp.concatenate([x, *self.labels]))
        shift, log_gate = jnp.split(out, [self.loc.shape[0]])
        gated = (x * jnp.exp(GATE_RATE * log_gate)) @ self.mixing
        return self.loc + self.scale * (gated + shift)

    def log_volume(self, x: jax.Array) -> jax.Array:
        return self.volume(x).log_volume

    def pull(self, x: jax.Array, gradients: jax.Array) -> jax.Array:
        return jax.vjp(self.push, x)[1](gradients)[0] - self.volume(x).slope

    def push_score(self, x: jax.Array, score: jax.Array) -> jax.Array:
        return self.volume(x).push_score(score)

    def volume(self, x: jax.Array) -> Volume:
        """The volume at a point, by a matrix of the last hidden layer's width if that is less."""
        if self.perceptron.bottleneck < x.shape[0]:
            return self._low_rank_volume(x)
        return volume_of(self._slopes, x)

    def _slopes(self, x: jax.Array) -> jax.Array:
        """The derivative, a row for each number of the noise, (d, d)."""
        out, slopes = self.perceptron.with_slopes(jnp.concatenate([x, *self.labels]), x.shape[0])
        of_shift, of_gate = jnp.split(slopes, [self.loc.shape[0]], axis=1)
        gate = jnp.exp(GATE_RATE * out[self.loc.shape[0] :])
        gated = GATE_RATE * of_gate * (x * gate) + jnp.diag(gate)
        return (gated @ self.mixing + of_shift) * self.scale

    def _low_rank_volume(self, x: jax.Array) -> Volume:
        """The volume of a map whose network has fewer units than dimensions.

        With the last hidden layer h(ε), its derivative H (h, d), gates ``e = exp(g(ε))`` and the
        mixing M, the derivative of the map is ``diag(scale) Mᵀ (E + U H)``, with ``E = diag(e)``
        and U (d, h) from the weights of the last layer. Its determinant takes that of
        ``I + H E⁻¹ U`` (h, h) and one of M for all draws: O(h² (d + h)) for a draw in place of
        O(d³). Rows of ``E⁻¹ U`` go through the layers, so that H itself is never made.
        """
        size = self.loc.shape[0]
        weight, bias = self.perceptron.readout
        mixing_sign, mixing_volume, unmix = slogdet_and_inverse(self.mixing)
        of_shift = weight[:, :size] @ unmix
        of_gate, gate_bias = GATE_RATE * weight[:, size:], GATE_RATE * bias[size:]

        def features(x: jax.Array) -> jax.Array:
            return self.perceptron.features(jnp.concatenate([x, *self.labels]))

        def parts(x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            log_gate = features(x) @ of_gate + gate_bias
            across = of_gate * x + of_shift * jnp.exp(-log_gate)
            inputs = jnp.concatenate([x, *self.labels])
            slopes = self.perceptron.features_along(inputs, across)[1]
            return (jnp.eye(len(across), dtype=x.dtype) + slopes, log_gate), across

        (core, log_gate), transpose, across = jax.vjp(parts, x, has_aux=True)
        orientation, log_volume, inverse = slogdet_and_inverse(core)
        (slope,) = transpose((inverse.T, jnp.ones_like(log_gate)))
        scales = jnp.sum(jnp.log(jnp.abs(self.scale)))
        orientation = orientation * mixing_sign * jnp.prod(jnp.sign(self.scale))

        def pull_back(vector: jax.Array) -> jax.Array:
            (moved,) = jax.vjp(features, x)[1](inverse @ (across @ vector))
            return (unmix @ ((vector - moved) * jnp.exp(-log_gate))) / self.scale

        log_volume = log_volume + jnp.sum(log_gate) + mixing_volume + scales
        return Volume(orientation, log_volume, slope, pull_back)


# A fit traces the guide more than ten times, and this once. Most of the time of a first fit goes
# elsewhere, into the compiler.
@partial(jax.jit, static_argnames="with_density")
def push_network(
    network: ResidualNetwork, noise: jax.Array, with_density: bool
) -> tuple[jax.Array, LocalDensity | None]:
    """The image of standard normal noise, and its local density."""
    if not with_density:
        return network.push(noise), None
    fixed, at = lax.stop_gradient((network, noise))
    volume = fixed.volume(at)
    log_density = standard_normal(at.shape[0]).log_prob(at) - volume.log_volume
    return network.push(noise), LocalDensity(log_density, volume.push_score(-at))


def volume_of(slopes: Callable[[jax.Array], jax.Array], x: jax.Array) -> Volume:
    """The volume of a map at a point."""
    matrix, transpose = jax.vjp(slopes, x)
    orientation, log_volume, inverse = slogdet_and_inverse(matrix)
    (slope,) = transpose(inverse.T)
    return Volume(orientation, log_volume, slope, lambda vector: inverse @ vector)


def local_log_density(push: Callable[[jax.Array], jax.Array], noise: jax.Array) -> jax.Array:
    """Log density of what noise (d,) is pushed to, (d,), if no other noise is pushed there."""
    jacobian = jax.jacfwd(push)(noise)
    # Without a loop where there is nothing to eliminate.
    is_single = noise.shape[0] == 1
    log_volume = jnp.log(jnp.abs(jacobian[0, 0])) if is_single else log_abs_det(jacobian)
    return standard_normal(noise.shape[0]).log_prob(noise) - log_volume


def standard_normal(dim: int) -> dist.Distribution:
    """The standard normal distribution of vectors (dim,)."""
    # NumPy makes it, unchecked: operations outside a compiled step are compiled one by one.
    zeros = jnp.asarray(np.zeros(dim))
    return dist.Normal(zeros, 1.0, validate_args=False).to_event(1)
