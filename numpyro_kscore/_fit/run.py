"""The state of a fit, and what its compiled programs return."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer.svi import SVIState

from numpyro_kscore._fit.progress import Progress
from numpyro_kscore._model.control_variate import ControlVariate
from numpyro_kscore._util.batches import Position

__all__ = ["EVALUATION_DRAWS", "LOOK_BATCHES", "SMALLEST_BATCH", "Chunk", "Run", "Seen"]

# Fresh draws for a discrepancy: they take a tenth of the time of a hundred steps, or less.
EVALUATION_DRAWS = 1024
# Least number of draws evaluated at once: the few particles of an explicit guide would be slow.
SMALLEST_BATCH = 64
# Batches of a loader that a look takes, one for each group of so many draws.
LOOK_BATCHES = EVALUATION_DRAWS // SMALLEST_BATCH


class Run(NamedTuple):
    """The state that a fit carries from chunk to chunk and writes into its checkpoint.

    Attributes:
        state: the ``SVIState`` after the last chunk.
        best: the best state so far, with mean parameters.
        progress: the state of the stopping rule.
        losses: losses of all steps, in pieces.
        control_variate: an expansion of the density of all rows, for minibatches.
        position: where the next batch of a loader is.
        gaps: log density of the model less the guide's, (n,), at draws of the best guide at the end
            of a round; None where it is not known.
    """

    state: Any
    best: Any
    progress: Progress = Progress()
    losses: tuple[np.ndarray, ...] = ()
    control_variate: ControlVariate | None = None
    position: Position = Position()
    gaps: np.ndarray | None = None

    def all_losses(self) -> np.ndarray:
        """Losses of all steps, (steps,)."""
        return np.concatenate([np.zeros(0, np.float32), *self.losses])


class Chunk(NamedTuple):
    """The result of a chunk of steps.

    Attributes:
        state: the ``SVIState`` after the last step.
        averaged: the same state with the mean of the parameters over the steps.
        losses: one for each step; NaN where it was skipped.
        look: the fields of :class:`~numpyro_kscore._fit.progress.Look`.
        finite: whether parameters and discrepancy are finite, and at least half of the losses.
        gaps: see :class:`~numpyro_kscore._fit.run.Seen`.
    """

    state: SVIState
    averaged: SVIState
    losses: jax.Array
    look: dict[str, jax.Array]
    finite: jax.Array
    gaps: jax.Array | None = None


class Seen(NamedTuple):
    """What a look sees.

    Attributes:
        numbers: fields of :class:`~numpyro_kscore._fit.progress.Look`.
        finite: whether they are finite, and what came before.
        gaps: log density of the model less the guide's at each draw, (n,), where it is known.
    """

    numbers: dict[str, jax.Array]
    finite: jax.Array
    gaps: jax.Array | None
