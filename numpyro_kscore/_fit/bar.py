"""The progress bar of a fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_kscore._fit.options import FitOptions
from numpyro_kscore._fit.progress import Progress, Rule

__all__ = ["Bar"]


class Bar:
    """A bar of tqdm that says what a fit is doing, from its first second.

    It shows nothing where tqdm is not installed or no bar is asked for.
    """

    def __init__(self, settings: FitOptions) -> None:
        self._bar: Any = None
        if not settings.progress_bar:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=settings.max_steps)
        self._bar.set_postfix_str("finding a start")

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, progress: Progress, rule: Rule) -> None:
        """Show what is left of the steps, which may go on from a checkpoint."""
        if self._bar is None:
            return
        done = len(progress.looks) * rule.chunk_size
        # Steps of an earlier run do not count in the time of a step.
        self._bar.initial = self._bar.n = self._bar.last_print_n = done
        self._bar.total = rule.num_chunks * rule.chunk_size
        self._bar.set_postfix_str("compiling")

    def show(self, progress: Progress, rule: Rule) -> None:
        """Show how far the fit is, and what was seen last."""
        look = progress.looks[-1] if progress.looks else progress.start
        if self._bar is None or look is None:
            return
        phase: str = progress.phase
        if progress.start is not None and phase != "done":
            phase = f"round {len(progress.rounds) + 1}"
        text = f"{phase}, loss {look.loss:.4f}"
        if np.isfinite(look.discrepancy):
            text += f", discrepancy² {look.discrepancy:.2g} ± {look.discrepancy_error:.1g}"
        steps = len(progress.looks) * rule.chunk_size
        # The bar of a fit that is done is full.
        if progress.phase == "done":
            self._bar.total = steps
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(steps - self._bar.n)
