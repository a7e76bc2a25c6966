"""A network as a score: its layers, its state in training, and the fitted score it makes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_kscore._util.checks import as_points
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._base.coordinates import Coordinates

__all__ = [
    "Layers",
    "NeuralInfo",
    "NeuralScore",
    "SlicedState",
    "init_layers",
    "network",
    "residual_at",
    "score_at",
]

Layers = list[tuple[jax.Array, jax.Array]]


def init_layers(key: jax.Array, widths: tuple[int, ...], dtype: Any) -> Layers:
    """Unit gain in hidden layers; the last layer at zero, so that the network starts at zero."""
    layers = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        key, layer_key = random.split(key)
        weight = random.normal(layer_key, (fan_in, fan_out), dtype) * (2.0 / fan_in) ** 0.5
        layers.append((weight, jnp.zeros(fan_out, dtype)))
    layers[-1] = jax.tree.map(jnp.zeros_like, layers[-1])
    return layers


def network(layers: Layers, z: jax.Array) -> jax.Array:
    """A perceptron, (m, d) -> (m, d); smooth, because its Jacobian is trained."""
    for weight, bias in layers[:-1]:
        z = jax.nn.silu(z @ weight + bias)
    weight, bias = layers[-1]
    return z @ weight + bias


def residual_at(layers: Layers, coordinates: Coordinates, x: jax.Array) -> jax.Array:
    """The network's score at points (m, d), in the samples' coordinates: (m, d)."""
    return coordinates.scores_from_kernel(network(layers, coordinates.to_kernel(x)))


def score_at(base: str | None, layers: Layers, coordinates: Coordinates, x: jax.Array) -> jax.Array:
    """The score with its base, ``"gaussian"`` or None: (m, d) -> (m, d)."""
    z = coordinates.to_kernel(x)
    values = network(layers, z)
    return coordinates.scores_from_kernel(values if base is None else values - z)


class NeuralInfo(NamedTuple):
    """Report of a fit by sliced score matching.

    Attributes:
        losses: the loss at every step, (num_steps,), in standardized coordinates and up to a
            constant; noisy, because directions and batches are drawn anew.
        finite: whether the score is finite at all samples.

    Example::

        from numpyro_kscore.sliced import SlicedScoreMatching

        score = SlicedScoreMatching(hidden_dims=(32,), num_steps=200).fit(random.key(0), samples)
        score.info.raise_if_failed()
        score.info.losses  # (200,)
    """

    losses: jax.Array
    finite: jax.Array

    def raise_if_failed(self) -> None:
        """Raise ``FloatingPointError`` if the fit failed. Call it outside ``jit``."""
        if not bool(self.finite):
            raise FloatingPointError(
                "sliced score matching: expected finite values; got NaN or infinity. Look for "
                "samples or base scores that are not finite"
            )


@pytree
class SlicedState:
    """A network in training; it holds arrays only, so it can be a carry or a mutable site.

    Attributes:
        layers: weights and biases.
        optimizer: the moments of Adam.
        coordinates: coordinates of the last samples, in which the network is evaluated.
        loss: loss at the last step, NaN if that step was skipped.

    Example::

        from numpyro_kscore.sliced import SlicedScoreMatching

        estimator = SlicedScoreMatching(hidden_dims=(32,))
        state = estimator.init(random.key(0), dim=2)
        state = estimator.update(state, random.key(1), samples, num_steps=10)
        state.loss  # ()
        estimator.score(state, samples)  # (200, 2)
    """

    layers: Layers
    optimizer: Any
    coordinates: Coordinates
    loss: jax.Array


@pytree
class NeuralScore:
    """A score given by a network; it can be called at any points.

    Attributes:
        at_samples: the estimate at the samples, (n, d), in 1/units of the samples.
        info: how the fit went.
        layers: weights and biases.
        coordinates: the map to the network's coordinates.
        base: the score that the network is added to: ``"gaussian"``, None, or ``"values"`` if it
            is known at the samples only.

    Example::

        from numpyro_kscore.sliced import SlicedScoreMatching

        score = SlicedScoreMatching(hidden_dims=(32,), num_steps=200).fit(random.key(0), samples)
        score(samples[:5])  # (5, 2)
        score.divergence(samples[:5])  # (5,)
    """

    layers: Layers
    coordinates: Coordinates
    at_samples: jax.Array
    info: NeuralInfo
    base: str | None = static(default="gaussian")

    def __call__(self, x: Any) -> jax.Array:
        """The estimate at ``x``: (m, d) -> (m, d).

        Raises:
            ValueError: if the base score is known at the samples only, or for a wrong shape.
        """
        self._check_base("score(x)", "residual")
        return score_at(self.base, self.layers, self.coordinates, self._points(x))

    def residual(self, x: Any) -> jax.Array:
        """The estimate less its base, ``ŝ - s0``, at ``x``: (m, d) -> (m, d)."""
        return residual_at(self.layers, self.coordinates, self._points(x))

    def divergence(self, x: Any) -> jax.Array:
        """``div ŝ`` at ``x``, exactly: (m, d) -> (m,). Cost: d derivatives along a direction."""
        self._check_base("divergence", "residual_divergence")
        divergence = self.residual_divergence(x)
        if self.base is None:
            return divergence
        factor = self.coordinates.factor()
        return divergence - jnp.sum(factor * factor)

    def residual_divergence(self, x: Any) -> jax.Array:
        """``div (ŝ - s0)`` at ``x``, exactly: (m, d) -> (m,)."""
        z = self.coordinates.to_kernel(self._points(x))

        # div_x f = tr(F Fᵀ ∇f), one derivative for each column of F.
        def along(column: jax.Array) -> jax.Array:
            direction = jnp.broadcast_to(column, z.shape)
            change = jax.jvp(partial(network, self.layers), (z,), (direction,))[1]
            return change @ column

        return jnp.sum(lax.map(along, self.coordinates.factor().T), axis=0)

    def _check_base(self, what: str, alternative: str) -> None:
        if self.base == "values":
            raise ValueError(
                f"{what}: expected a base score that is known away from the samples; got "
                f"base_scores as values at the samples. Use score.{alternative}(x)"
            )

    def _points(self, x: Any) -> jax.Array:
        points = as_points("x", x, dim=self.coordinates.mean.shape[0])
        return jnp.asarray(points, self.coordinates.mean.dtype)
