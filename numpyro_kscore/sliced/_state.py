"""The state of a network in training."""

from __future__ import annotations

from typing import Any

import jax

from numpyro_kscore._util.pytree import pytree
from numpyro_kscore.estimators._base.coordinates import Coordinates
from numpyro_kscore.sliced._network import Layers

__all__ = ["SlicedState", "in_coordinates"]


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


def in_coordinates(
    base: str | None,
    coordinates: Coordinates,
    samples: jax.Array,
    base_scores: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Samples and base scores in the network's coordinates, (n, d) each or None.

    Args:
        base: ``"gaussian"`` or None; None where values are given.
        coordinates: the network's coordinates.
        samples: draws, (n, d).
        base_scores: values of the base score at the draws, (n, d), or None.
    """
    z = coordinates.to_kernel(samples)
    if base_scores is not None:
        return z, coordinates.scores_to_kernel(base_scores)
    return z, None if base is None else -z
