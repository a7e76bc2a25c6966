"""The time that a diagnosis may take, and what it shows of its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from numpyro_kscore._util.line import Line
from numpyro_kscore.diagnostics._codes import Finding

T = TypeVar("T")

# Gradients of a chain until the first look at it: 120 transitions of some ten steps.
GRADIENTS_OF_A_LOOK = 1_200
# Numbers of chains: as many as there is time for.
NUM_CHAINS = (512, 256, 128)


class Clock:
    """The seconds that are left of a budget; compilation does not count.

    ``gradient`` is the time of a gradient of one chain among many, as far as it is known.
    """

    def __init__(self, seconds: float = float("inf")) -> None:
        self.left = seconds
        self.gradient: float | None = None

    def spend(self, seconds: float) -> None:
        """Take some seconds off."""
        self.left -= seconds

    def affordable_chains(self, seconds_of_gradient: float) -> int:
        """The number of chains that there is time for until the first look, or 0."""
        of_chain = GRADIENTS_OF_A_LOOK * seconds_of_gradient
        return next((count for count in NUM_CHAINS if count * of_chain <= self.left), 0)


def seconds_of(run: Callable[[], Any]) -> float:
    """The time of a call that has been compiled."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Stages(Line):
    """The line that says what a diagnosis is doing.

    Attributes:
        failed: parts of the diagnosis that ended with an error.
    """

    def __init__(self, is_shown: bool = False) -> None:
        super().__init__("diagnose", is_shown)
        self.failed: tuple[Finding, ...] = ()

    def __enter__(self) -> Stages:
        return self

    def attempt(self, part: str, run: Callable[[], T], otherwise: T) -> T:
        """The result of a part, or something else if it ends with an error, which is kept.

        ``FloatingPointError`` passes: it is the answer to draws that are not finite.
        """
        try:
            return run()
        except FloatingPointError:
            raise
        except Exception as error:  # whatever a model does: the rest may tell
            first_line = str(error).strip().split("\n")[0]
            text = f"{part}: {type(error).__name__}: {first_line}"
            self.failed += (Finding("failed", 0.0, where=text),)
            return otherwise
