"""Sliced score matching: a neural network as score estimator, the parametric baseline.

It needs optax, which the extra ``examples`` installs.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import random
from jax.sharding import NamedSharding

from numpyro_kscore._util.checks import (
    as_points,
    as_scores,
    check_choice,
    check_count,
    check_positive,
)
from numpyro_kscore._util.keys import check_key
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._base.standardization import (
    STANDARDIZE_CHOICES,
    WHITENING_CHOICES,
    Coordinates,
    Whitening,
    standardize_samples,
)
from numpyro_kscore.estimators._fit.guide_estimator import AtSamples, GuideEstimator
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared, squared_distances
from numpyro_kscore.sliced._network import (
    NeuralInfo,
    NeuralScore,
    SlicedState,
    as_widths,
    init_layers,
    make_adam,
    points_in,
    residual_at,
    score_at,
    select,
    train,
)


@pytree
class SlicedScoreMatching(GuideEstimator):
    """A perceptron fitted by sliced score matching (Song, Garg, Shi and Ermon 2019).

    ``ŝ = s0 + f`` in standardized coordinates, where f is the network. The output layer starts at
    zero, so training starts from the base score, by default the Gaussian's. Only the number of
    steps regularizes f: with few samples the loss falls without end, and the network concentrates
    on them.

    :meth:`fit` is a baseline for :class:`~numpyro_kscore.ScoreEstimator`. :meth:`init`,
    :meth:`update` and :meth:`score` follow a distribution that changes slowly, such as a guide in
    training, at one gradient step (or a few) for each new set of draws: see :class:`SlicedState`.
    These three are pure, and the state keeps its structure, shapes and dtypes.

    Args:
        hidden_dims: widths of the hidden layers, at least one.
        num_steps: training steps of :meth:`fit`.
        learning_rate: step size of Adam; it falls to zero along a cosine in :meth:`fit`, and is
            constant in :meth:`update`.
        num_projections: random directions for each sample and step.
        batch_size: samples in a step of :meth:`fit`, drawn anew with replacement; all if None.
        standardize: ``"full"`` whitens the samples, ``"diagonal"`` scales each coordinate,
            ``"none"`` centers them only.
        base: ``"gaussian"`` adds the score ``-z`` of the standard Gaussian in standardized
            coordinates, which makes the tails linear; None adds nothing.

    Example::

        from numpyro_kscore.sliced import SlicedScoreMatching

        score = SlicedScoreMatching(hidden_dims=(32,), num_steps=200).fit(random.key(0), samples)
        score.at_samples  # (200, 2)
    """

    hidden_dims: tuple[int, ...] = static(default=(128, 128))
    num_steps: int = static(default=2_000)
    learning_rate: Any = 1e-3
    num_projections: int = static(default=1)
    batch_size: int | None = static(default=None)
    standardize: str = static(default="full")
    base: str | None = static(default="gaussian")

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden_dims", as_widths("hidden_dims", self.hidden_dims))
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
                ``base=None``. Away from the samples only the residual is known then.

        Returns:
            The fitted score. Numerical trouble is reported in ``score.info``, never raised.

        Raises:
            ImportError: if optax is not installed.
            ValueError: for shapes that do not fit, or samples that are not finite (outside
                ``jit``).
            TypeError: for integer samples, or a key that is not a random key.

        Cost: num_steps passes over the network with about six products a layer.
        """
        check_key("key", key, "the samples")
        samples, base_scores = self._checked(samples, base_scores)
        return _fit(self, key, samples, base_scores)

    def init(self, key: jax.Array, dim: int, dtype: Any = None) -> SlicedState:
        """The state before the first draws of ``dim`` dimensions; ``key`` is for the weights.

        Raises:
            ImportError: if optax is not installed.
            TypeError: for a dimension that is not an integer, or a key that is not a random key.
        """
        check_key("key", key, "the dimension")
        check_count("dim", dim)
        dtype = jnp.zeros(()).dtype if dtype is None else dtype
        layers = init_layers(key, (dim, *self.hidden_dims, dim), dtype)
        whitened = self.standardize in WHITENING_CHOICES and dim > 1
        eye = jnp.eye(dim, dtype=dtype)
        coordinates = Coordinates(
            jnp.zeros(dim, dtype),
            jnp.ones(dim, dtype),
            Whitening(eye, eye) if whitened else None,
            jnp.ones((), dtype),
        )
        loss = jnp.zeros((), dtype)
        return SlicedState(layers, make_adam("SlicedScoreMatching").init(layers), coordinates, loss)

    def update(
        self,
        state: SlicedState,
        key: jax.Array,
        samples: Any,
        base_scores: Any = None,
        *,
        num_steps: int = 1,
    ) -> SlicedState:
        """The state after gradient steps on all draws, in coordinates standardized anew.

        A step whose gradient is not finite is skipped, and samples that are not finite leave the
        coordinates as they are: the state stays usable, and ``loss`` is NaN.

        Args:
            state: result of :meth:`init` or of this method.
            key: random key, for the directions.
            samples: draws, (n, d), n ≥ 2.
            base_scores: as for :meth:`fit`, and so are errors.
            num_steps: gradient steps.
        """
        check_key("key", key, "the samples")
        check_count("num_steps", num_steps)
        dim = state.coordinates.mean.shape[0]
        samples, base_scores = self._checked(samples, base_scores, dim)
        return _update(self, num_steps, state, key, samples, base_scores)

    def score(self, state: SlicedState, x: Any) -> jax.Array:
        """The estimate at ``x``: (m, d) -> (m, d). With ``base_scores`` see :meth:`residual`."""
        points = points_in(state.coordinates, x)
        return score_at(self.base, state.layers, state.coordinates, points)

    def residual(self, state: SlicedState, x: Any) -> jax.Array:
        """The estimate less its base, ``ŝ - s0``: (m, d) -> (m, d)."""
        return residual_at(state.layers, state.coordinates, points_in(state.coordinates, x))

    # The contract with an objective: GuideEstimator.

    is_stateful = True

    def resolve_base(self, base: str | None) -> str | None:
        if base in ("model", "moments"):
            raise ValueError(
                "base: expected 'gaussian' or None with SlicedScoreMatching(); got "
                f"{base!r}. A network that lags behind the guide runs away from a base that "
                "does not"
            )
        return self.base if base == "auto" else base

    def resolve_debias(self, debias: str | None) -> None:
        if debias == "jackknife":
            raise ValueError(
                "debias: expected None with SlicedScoreMatching(), whose network is trained on "
                f"from step to step and not fitted anew to halves; got {debias!r}. Leave debias out"
            )

    def in_objective(self, base: str | None, sharding: NamedSharding | None) -> Self:
        return dataclasses.replace(self, base=base)

    def follow(
        self,
        state: SlicedState,
        key: jax.Array,
        samples: Any,
        base_scores: Any = None,
        *,
        debias: str | None = None,
        context: Any = None,
    ) -> tuple[AtSamples, SlicedState]:
        self.resolve_debias(debias)
        if context is not None:
            raise ValueError(
                "context: expected None with SlicedScoreMatching(), which estimates no conditional "
                f"score; got shape {jnp.shape(context)}. Use a ScoreEstimator"
            )
        state = self.update(state, key, samples, base_scores)
        residual = self.residual(state, samples)
        is_own = base_scores is None
        scores = self.score(state, samples) if is_own else base_scores + residual
        z = state.coordinates.to_kernel(samples)
        nearest = nearest_squared(squared_distances(z, z, cancels(z)))
        return AtSamples(residual, scores, None, state.coordinates, nearest), state

    def _checked(
        self, samples: Any, base_scores: Any, dim: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        samples = as_points("samples", samples, dim=dim, minimum=2)
        if base_scores is None:
            return samples, None
        if self.base is not None:
            raise ValueError(
                f"base_scores: expected base=None with given values; got base={self.base!r}. "
                "Drop one of the two"
            )
        return samples, as_scores("base_scores", base_scores, samples)


def _in_coordinates(
    base: str | None,
    coordinates: Coordinates,
    samples: jax.Array,
    base_scores: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Samples and base scores in the network's coordinates, (n, d) each or None."""
    z = coordinates.to_kernel(samples)
    if base_scores is not None:
        return z, coordinates.scores_to_kernel(base_scores)
    return z, None if base is None else -z


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
    layers, _, losses = train(
        train_key,
        start.layers,
        start.optimizer,
        *_in_coordinates(estimator.base, coordinates, samples, base_scores),
        rates.astype(samples.dtype),
        estimator.num_projections,
        estimator.batch_size,
    )
    if base_scores is None:
        base, scores = estimator.base, score_at(estimator.base, layers, coordinates, samples)
    else:
        base, scores = "values", base_scores + residual_at(layers, coordinates, samples)
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
    coordinates = select(sound, coordinates, state.coordinates)
    if base_scores is not None:
        base_scores = base_scores.astype(dtype)
    layers, optimizer, losses = train(
        key,
        state.layers,
        state.optimizer,
        *_in_coordinates(estimator.base, coordinates, samples, base_scores),
        jnp.full(num_steps, estimator.learning_rate, dtype),
        estimator.num_projections,
        None,
    )
    return SlicedState(layers, optimizer, coordinates, losses[-1])
