"""The settings of a fit, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpyro_kscore._fit.progress import Rule
from numpyro_kscore._util.checks import check_choice, check_count, check_positive

# Blocks of steps for the error of a mean loss: losses of successive steps are correlated.
LOSS_BLOCKS = 5


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """The checked settings of :func:`~numpyro_kscore.fit`, whose docstring explains them."""

    max_steps: int
    max_seconds: float | None
    tol: float
    patience: int
    chunk_size: int
    criterion: str
    checkpoint: Path | None
    progress_bar: bool
    callback: Callable[..., Any] | None

    def __post_init__(self) -> None:
        """Check every field."""
        check_count("max_steps", self.max_steps, minimum=LOSS_BLOCKS)
        if self.max_seconds is not None:
            check_positive("max_seconds", self.max_seconds)
        check_count("patience", self.patience)
        check_count("chunk_size", self.chunk_size, minimum=LOSS_BLOCKS)
        check_positive("tol", self.tol)
        check_choice("criterion", self.criterion, ("stein", "loss"))
        if self.callback is not None and not callable(self.callback):
            raise TypeError(
                f"callback: expected a function of (step, state, metrics); got {self.callback!r}"
            )
        if self.checkpoint is not None and not self.checkpoint.parent.is_dir():
            raise ValueError(
                f"checkpoint: expected a file in an existing folder; got {self.checkpoint}"
            )

    def rule(
        self,
        dim: int,
        can_be_exact: bool,
        knows_bound: bool,
        is_final: bool,
        settles_finer: bool,
    ) -> Rule:
        """The stopping rule for a latent space of this dimension, see :class:`Rule`."""
        num_chunks = max(1, self.max_steps // self.chunk_size)
        chunk_size = self.max_steps // num_chunks
        given = float(self.tol), self.patience, dim, can_be_exact, knows_bound, is_final
        return Rule(chunk_size, num_chunks, *given, settles_finer=settles_finer)
