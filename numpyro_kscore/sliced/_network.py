"""A network as a score: its layers, the fitted score they make, and careful training by Adam."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_kscore._util.checks import as_points, check_count
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._base.standardization import Coordinates

Layers = list[tuple[jax.Array, jax.Array]]


def as_widths(name: str, widths: Any) -> tuple[int, ...]:
    """Widths of hidden layers as a tuple, checked."""
    if not isinstance(widths, list | tuple) or not widths:
        raise TypeError(f"{name}: expected a tuple of one or more integers; got {widths!r}")
    for width in widths:
        check_count(name, width)
    return tuple(widths)


def init_layers(key: jax.Array, widths: tuple[int, ...], dtype: Any) -> Layers:
    """Unit gain in hidden layers; the last layer at zero, so that the network starts at zero."""
    layers = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        key, layer_key = random.split(key)
        weight = random.normal(layer_key, (fan_in, fan_out), dtype) * (2.0 / fan_in) ** 0.5
        layers.append((weight, jnp.zeros(fan_out, dtype)))
    layers[-1] = jax.tree.map(jnp.zeros_like, layers[-1])
    return layers


def points_in(coordinates: Coordinates, x: Any) -> jax.Array:
    """Points (m, d), checked, in the precision of the coordinates."""
    mean = coordinates.mean
    return jnp.asarray(as_points("x", x, dim=mean.shape[0]), mean.dtype)


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
        return score_at(self.base, self.layers, self.coordinates, points_in(self.coordinates, x))

    def residual(self, x: Any) -> jax.Array:
        """The estimate less its base, ``ŝ - s0``, at ``x``: (m, d) -> (m, d)."""
        return residual_at(self.layers, self.coordinates, points_in(self.coordinates, x))

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
        z = self.coordinates.to_kernel(points_in(self.coordinates, x))

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


Field = Callable[[jax.Array], jax.Array]


def sliced_loss(
    field: Field, x: jax.Array, directions: jax.Array, base_scores: jax.Array | None = None
) -> jax.Array:
    """Score-matching loss by random projections: ``E[½|f|² + f·s0 + vᵀ(∇f)v]``.

    This is the variance-reduced objective of Song, Garg, Shi and Ermon (2019), eq. 8, for a score
    ``s0 + f``, without terms that do not depend on f. Directions with ``E[v vᵀ] = I`` make it
    unbiased.

    Args:
        field: f, (m, d) -> (m, d), each row a function of the same row of its argument.
        x: draws, (m, d).
        directions: v, (p, m, d): p projections for each draw.
        base_scores: s0 at the draws, (m, d); zero if None.

    Returns:
        The mean over draws and projections, a scalar.

    Cost: p derivatives of the field along a direction, forward mode.

    Example::

        from numpyro_kscore.sliced import sliced_loss

        directions = random.rademacher(random.key(1), (4, 200, 2), samples.dtype)
        sliced_loss(lambda x: -x, samples, directions)  # -1.06: -1 on average over samples
    """
    values, along = jax.vmap(lambda v: jax.jvp(field, (x,), (v,)), out_axes=(None, 0))(directions)
    curvature = jnp.mean(jnp.sum(directions * along, axis=2), axis=0)
    energy = 0.5 * values if base_scores is None else 0.5 * values + base_scores
    return jnp.mean(jnp.sum(values * energy, axis=1) + curvature)


def make_adam(asker: str) -> Any:
    """Adam without its step size, which may be traced; ``asker`` is named in the error."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            f"{asker}: expected optax, which trains the network; got none. Install it by "
            "pip install 'numpyro-kscore[examples]'"
        ) from error
    return optax.scale_by_adam()


def train(
    key: jax.Array,
    layers: Layers,
    moments: Any,
    x: jax.Array,
    base_scores: jax.Array | None,
    rates: jax.Array,
    num_projections: int,
    batch_size: int | None,
) -> tuple[Layers, Any, jax.Array]:
    """Steps of Adam on :func:`sliced_loss`; one whose gradient is not finite is skipped.

    Draws, (n, d), and base scores are in the network's coordinates, ``moments`` the state of
    :func:`make_adam`, ``rates`` the learning rates of the k steps. A batch is drawn with
    replacement; without a size it is all draws.

    Returns:
        Weights and biases, moments, and the loss at every step, (k,): NaN where it was skipped.
    """
    adam = make_adam("SlicedScoreMatching")

    def step(carry: Any, inputs: Any) -> tuple[Any, jax.Array]:
        layers, moments = carry
        step_key, rate = inputs
        row_key, direction_key = random.split(step_key)
        batch, base = x, base_scores
        if batch_size is not None:
            rows = random.randint(row_key, (batch_size,), 0, x.shape[0])
            batch = x[rows]
            base = None if base_scores is None else base_scores[rows]
        shape = (num_projections, *batch.shape)
        directions = random.rademacher(direction_key, shape, x.dtype)

        def loss_of(layers: Layers) -> jax.Array:
            return sliced_loss(partial(network, layers), batch, directions, base)

        return take_step(adam, loss_of, layers, moments, rate)

    keys = random.split(key, rates.shape[0])
    (layers, moments), losses = lax.scan(step, (layers, moments), (keys, rates))
    return layers, moments, losses


def take_step(
    adam: Any,
    loss_of: Callable[[Layers], jax.Array],
    layers: Layers,
    moments: Any,
    rate: jax.Array,
) -> tuple[tuple[Layers, Any], jax.Array]:
    """One step of Adam, and the loss before it; no step, and NaN, if a gradient is not finite."""
    loss, gradient = jax.value_and_grad(loss_of)(layers)
    change, new_moments = adam.update(gradient, moments)
    moved = jax.tree.map(lambda w, c: w - rate * c, layers, change)
    sound = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradient)]))
    new = select(sound, (moved, new_moments), (layers, moments))
    return new, jnp.where(sound, loss, jnp.nan)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """The tree ``new`` where the condition holds, ``old`` elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
