"""Sliced score matching: a neural network as score estimator, the parametric baseline.

Needs optax, which the extra ``examples`` brings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_kscore._pytree import (
    as_points,
    check_choice,
    check_count,
    check_positive,
    pytree,
    static,
)
from numpyro_kscore.coordinates import STANDARDIZE_CHOICES, Coordinates, standardize_samples

__all__ = ["NeuralInfo", "NeuralScore", "SlicedScoreMatching", "SlicedState", "sliced_loss"]

Layers = list[tuple[jax.Array, jax.Array]]
Field = Callable[[jax.Array], jax.Array]


def sliced_loss(
    field: Field, x: jax.Array, directions: jax.Array, base_scores: jax.Array | None = None
) -> jax.Array:
    """Score-matching loss by random projections: ``E[½|f|² + f·s0 + vᵀ(∇f)v]``.

    The variance-reduced objective of Song, Garg, Shi and Ermon (2019), eq. 8, for a score
    ``s0 + f``, less what does not depend on f. Directions with ``E[v vᵀ] = I`` make it unbiased.

    Args:
        field: f, (m, d) -> (m, d), each row a function of the same row of its argument.
        x: draws, (m, d).
        directions: v, (p, m, d): p projections a draw.
        base_scores: s0 at the draws, (m, d); zero if None.

    Returns:
        The mean over draws and projections, a scalar.

    Cost: p derivatives of the field along a direction, forward mode.
    """
    values, along = jax.vmap(lambda v: jax.jvp(field, (x,), (v,)), out_axes=(None, 0))(directions)
    curvature = jnp.mean(jnp.sum(directions * along, axis=2), axis=0)
    energy = 0.5 * values if base_scores is None else 0.5 * values + base_scores
    return jnp.mean(jnp.sum(values * energy, axis=1) + curvature)


class NeuralInfo(NamedTuple):
    """What happened in a fit by sliced score matching, as data.

    Attributes:
        losses: the loss at every step, (num_steps,), in standardised coordinates and less a
            constant; noisy, since directions and batches are drawn anew.
        finite: whether the score is finite at all samples.
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
class NeuralScore:
    """A score given by a network, callable at any points.

    Attributes:
        at_samples: the estimate at the samples, (n, d), in 1/units of the samples.
        info: how the fit went.
        layers: weights and biases.
        coordinates: the map to the network's coordinates.
        base: what the network is added to: ``"gaussian"``, None, or ``"values"`` where it is
            known at the samples only.
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
        return _score(self.base, self.layers, self.coordinates, self._points(x))

    def residual(self, x: Any) -> jax.Array:
        """The estimate less its base, ``ŝ - s0``, at ``x``: (m, d) -> (m, d)."""
        return _residual(self.layers, self.coordinates, self._points(x))

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
            change = jax.jvp(partial(_network, self.layers), (z,), (direction,))[1]
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


@pytree
class SlicedState:
    """A network that is being trained: all arrays, so it can be a carry or a mutable site.

    Attributes:
        layers: weights and biases.
        optimizer: the moments of Adam.
        coordinates: of the last samples; the network lives in these.
        loss: at the last step, NaN if that step was skipped.
    """

    layers: Layers
    optimizer: Any
    coordinates: Coordinates
    loss: jax.Array


@pytree
class SlicedScoreMatching:
    """A perceptron fitted by sliced score matching (Song, Garg, Shi and Ermon 2019).

    ``ŝ = s0 + f`` in standardised coordinates, with f the network. The output layer starts at
    zero, so training starts from the base score, by default the Gaussian's. Nothing regularises
    f but the number of steps: with few samples the loss falls without end, and the network
    concentrates on them.

    As :meth:`fit` it is a baseline for :class:`~numpyro_kscore.ScoreEstimator`. As :meth:`init`,
    :meth:`update` and :meth:`score` it follows a distribution that changes slowly, such as a
    guide in training, at one gradient step (or a few) for each new set of draws::

        state = estimator.init(key, dim)
        for key, samples in ...:                        # or lax.scan
            state = estimator.update(state, key, samples)
        estimator.score(state, x)

    Those three are pure, and the state keeps its structure, shapes and dtypes.

    Args:
        hidden_dims: widths of the hidden layers, at least one.
        num_steps: training steps of :meth:`fit`.
        learning_rate: of Adam; :meth:`fit` lets it fall to zero along a cosine, :meth:`update`
            keeps it.
        num_projections: random directions a sample and step.
        batch_size: samples a step of :meth:`fit`, drawn anew with replacement; all if None.
        standardize: ``"full"`` whitens the samples, ``"diagonal"`` scales each coordinate,
            ``"none"`` centres them only.
        base: ``"gaussian"`` adds the score ``-z`` of the standard Gaussian in standardised
            coordinates, which makes the tails linear; None adds nothing.

    Example::

        score = SlicedScoreMatching().fit(random.key(0), draws)     # (n, d)
        score(x), score.divergence(x), score.info.losses
    """

    hidden_dims: tuple[int, ...] = static(default=(128, 128))
    num_steps: int = static(default=2_000)
    learning_rate: Any = 1e-3
    num_projections: int = static(default=1)
    batch_size: int | None = static(default=None)
    standardize: str = static(default="full")
    base: str | None = static(default="gaussian")

    def __post_init__(self) -> None:
        if not isinstance(self.hidden_dims, list | tuple) or not self.hidden_dims:
            raise TypeError(
                f"hidden_dims: expected a tuple of one or more integers; got {self.hidden_dims!r}"
            )
        for width in self.hidden_dims:
            check_count("hidden_dims", width)
        object.__setattr__(self, "hidden_dims", tuple(self.hidden_dims))
        check_count("num_steps", self.num_steps)
        check_count("num_projections", self.num_projections)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        check_positive("learning_rate", self.learning_rate)
        check_choice("standardize", self.standardize, STANDARDIZE_CHOICES)
        check_choice("base", self.base, ("gaussian", None))

    def fit(self, key: jax.Array, samples: Any, base_scores: Any = None) -> NeuralScore:
        """Train a network on draws.

        Args:
            key: random key, for weights, directions and batches.
            samples: i.i.d. draws, (n, d), n ≥ 2, in any units.
            base_scores: values of another base score at the samples, (n, d), in 1/units; needs
                ``base=None``. Away from the samples only the residual is then known.

        Returns:
            The fitted score. Numerical trouble is reported in ``score.info``, never raised.

        Raises:
            ImportError: if optax is not installed.
            ValueError: for shapes that do not fit, or samples that are not finite (outside
                ``jit``).
            TypeError: for integer samples.

        Cost: num_steps passes over the network with about six products a layer.
        """
        samples, base_scores = self._checked(samples, base_scores)
        return _fit(self, key, samples, base_scores)

    def init(self, key: jax.Array, dim: int, dtype: Any = None) -> SlicedState:
        """A state for draws of ``dim`` dimensions, before it has seen any.

        Args:
            key: random key, for the weights.
            dim: d.
            dtype: of the draws; JAX's default if None.

        Raises:
            ImportError: if optax is not installed.
        """
        check_count("dim", dim)
        dtype = jnp.zeros(()).dtype if dtype is None else dtype
        layers = _init_layers(key, (dim, *self.hidden_dims, dim), dtype)
        whitened = self.standardize == "full" and dim > 1
        coordinates = Coordinates(
            jnp.zeros(dim, dtype),
            jnp.ones(dim, dtype),
            jnp.eye(dim, dtype=dtype) if whitened else None,
            jnp.ones((), dtype),
        )
        loss = jnp.zeros((), dtype)
        return SlicedState(layers, _adam().init(layers), coordinates, loss)

    def update(
        self,
        state: SlicedState,
        key: jax.Array,
        samples: Any,
        base_scores: Any = None,
        *,
        num_steps: int = 1,
    ) -> SlicedState:
        """Follow the draws: standardise anew, then take gradient steps on all of them.

        A step whose gradient is not finite is skipped, and samples that are not finite leave the
        coordinates as they are: the state stays usable, and ``loss`` is NaN.

        Args:
            state: as :meth:`init` or this method returned it.
            key: random key, for the directions.
            samples: draws, (n, d), n ≥ 2.
            base_scores: as for :meth:`fit`.
            num_steps: gradient steps.

        Raises:
            ValueError: for shapes that do not fit.
            TypeError: for integer samples.
        """
        check_count("num_steps", num_steps)
        dim = state.coordinates.mean.shape[0]
        samples, base_scores = self._checked(samples, base_scores, dim)
        return _update(self, num_steps, state, key, samples, base_scores)

    def score(self, state: SlicedState, x: Any) -> jax.Array:
        """The estimate at ``x``: (m, d) -> (m, d). With ``base_scores`` see :meth:`residual`."""
        return _score(self.base, state.layers, state.coordinates, self._points(state, x))

    def residual(self, state: SlicedState, x: Any) -> jax.Array:
        """The estimate less its base, ``ŝ - s0``: (m, d) -> (m, d)."""
        return _residual(state.layers, state.coordinates, self._points(state, x))

    def _points(self, state: SlicedState, x: Any) -> jax.Array:
        mean = state.coordinates.mean
        return as_points("x", x, dim=mean.shape[0]).astype(mean.dtype)

    def _checked(
        self, samples: Any, base_scores: Any, dim: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        samples = as_points("samples", samples, dim=dim, minimum=2)
        if base_scores is None:
            return samples, None
        if self.base is not None:
            raise ValueError(
                f"base_scores: expected base=None beside given values; got base={self.base!r}. "
                "Drop one of the two"
            )
        values = as_points("base_scores", base_scores, dim=samples.shape[1])
        if values.shape != samples.shape:
            raise ValueError(
                f"base_scores: expected shape {samples.shape}, one row a sample; got {values.shape}"
            )
        return samples, values.astype(samples.dtype)


def _adam() -> Any:
    """Adam without its step size, which is a leaf of the configuration and may be traced."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "SlicedScoreMatching: expected optax, which trains the network; got none. Install it "
            "by pip install 'numpyro-kscore[examples]'"
        ) from error
    return optax.scale_by_adam()


def _init_layers(key: jax.Array, widths: tuple[int, ...], dtype: Any) -> Layers:
    """Unit gain in hidden layers; the last layer at zero, so that the network starts at zero."""
    layers = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        key, layer_key = random.split(key)
        weight = random.normal(layer_key, (fan_in, fan_out), dtype) * (2.0 / fan_in) ** 0.5
        layers.append((weight, jnp.zeros(fan_out, dtype)))
    layers[-1] = jax.tree.map(jnp.zeros_like, layers[-1])
    return layers


def _network(layers: Layers, z: jax.Array) -> jax.Array:
    """A perceptron, (m, d) -> (m, d). Smooth, since its Jacobian is what is trained."""
    for weight, bias in layers[:-1]:
        z = jax.nn.silu(z @ weight + bias)
    weight, bias = layers[-1]
    return z @ weight + bias


def _residual(layers: Layers, coordinates: Coordinates, x: jax.Array) -> jax.Array:
    return coordinates.scores_from_kernel(_network(layers, coordinates.to_kernel(x)))


def _score(base: str | None, layers: Layers, coordinates: Coordinates, x: jax.Array) -> jax.Array:
    z = coordinates.to_kernel(x)
    values = _network(layers, z)
    return coordinates.scores_from_kernel(values if base is None else values - z)


def _train(
    estimator: SlicedScoreMatching,
    key: jax.Array,
    layers: Layers,
    optimizer: Any,
    z: jax.Array,
    base_scores: jax.Array | None,
    rates: jax.Array,
    batch_size: int | None,
) -> tuple[Layers, Any, jax.Array]:
    """Steps of Adam at the learning ``rates``, (k,); returns the losses too, (k,)."""
    if base_scores is None and estimator.base is not None:
        base_scores = -z
    adam = _adam()

    def step(carry: Any, inputs: Any) -> tuple[Any, jax.Array]:
        layers, optimizer = carry
        step_key, rate = inputs
        row_key, direction_key = random.split(step_key)
        batch, base = z, base_scores
        if batch_size is not None:
            rows = random.randint(row_key, (batch_size,), 0, z.shape[0])
            batch = z[rows]
            base = None if base_scores is None else base_scores[rows]
        shape = (estimator.num_projections, *batch.shape)
        directions = random.rademacher(direction_key, shape, z.dtype)

        def loss_of(layers: Layers) -> jax.Array:
            return sliced_loss(partial(_network, layers), batch, directions, base)

        loss, gradient = jax.value_and_grad(loss_of)(layers)
        change, moments = adam.update(gradient, optimizer)
        moved = jax.tree.map(lambda w, c: w - rate * c, layers, change)
        sound = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradient)]))
        new = _where(sound, (moved, moments), (layers, optimizer))
        return new, jnp.where(sound, loss, jnp.nan)

    keys = random.split(key, rates.shape[0])
    (layers, optimizer), losses = lax.scan(step, (layers, optimizer), (keys, rates))
    return layers, optimizer, losses


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


@jax.jit
def _fit(
    estimator: SlicedScoreMatching,
    key: jax.Array,
    samples: jax.Array,
    base_scores: jax.Array | None,
) -> NeuralScore:
    init_key, train_key = random.split(key)
    coordinates = standardize_samples(samples, estimator.standardize)
    start = estimator.init(init_key, samples.shape[1], samples.dtype)
    steps = jnp.arange(estimator.num_steps) / estimator.num_steps
    rates = estimator.learning_rate * 0.5 * (1.0 + jnp.cos(jnp.pi * steps))
    layers, _, losses = _train(
        estimator,
        train_key,
        start.layers,
        start.optimizer,
        coordinates.to_kernel(samples),
        None if base_scores is None else coordinates.scores_to_kernel(base_scores),
        rates.astype(samples.dtype),
        estimator.batch_size,
    )
    if base_scores is None:
        base, scores = estimator.base, _score(estimator.base, layers, coordinates, samples)
    else:
        base, scores = "values", base_scores + _residual(layers, coordinates, samples)
    info = NeuralInfo(losses, jnp.all(jnp.isfinite(scores)))
    return NeuralScore(layers, coordinates, scores, info, base)


@partial(jax.jit, static_argnums=1)
def _update(
    estimator: SlicedScoreMatching,
    num_steps: int,
    state: SlicedState,
    key: jax.Array,
    samples: jax.Array,
    base_scores: jax.Array | None,
) -> SlicedState:
    dtype = state.coordinates.mean.dtype
    samples = samples.astype(dtype)
    coordinates = standardize_samples(samples, estimator.standardize)
    sound = jnp.all(jnp.isfinite(samples))
    coordinates = _where(sound, coordinates, state.coordinates)
    layers, optimizer, losses = _train(
        estimator,
        key,
        state.layers,
        state.optimizer,
        coordinates.to_kernel(samples),
        None if base_scores is None else coordinates.scores_to_kernel(base_scores.astype(dtype)),
        jnp.full(num_steps, estimator.learning_rate, dtype),
        None,
    )
    return SlicedState(layers, optimizer, coordinates, losses[-1])
