"""A line that says what long work is doing."""

from __future__ import annotations

from typing import Any


class Line:
    """A line of tqdm that says what long work is doing, from its first second.

    It shows nothing where tqdm is not installed or nothing is to be shown, and goes away when the
    work is done.
    """

    def __init__(self, name: str, is_shown: bool = True) -> None:
        self._bar: Any = None
        if not is_shown:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=None, bar_format=name + ": {desc} ({elapsed})", leave=False)
        self.tell("compiling")

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def tell(self, text: str) -> None:
        """Show what comes next."""
        if self._bar is not None:
            self._bar.set_description_str(text)

    def weights(self, share: float) -> None:
        """Show which share of the draws has been weighed."""
        self.tell(f"weighing draws, {share:.0%}")
