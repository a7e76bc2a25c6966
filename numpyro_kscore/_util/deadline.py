"""The time by which the parts of a fit should be done."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_due: ContextVar[float] = ContextVar("due", default=math.inf)


@contextmanager
def due_in(seconds: float | None) -> Iterator[None]:
    """Set the time that is left to all inside; None sets no limit."""
    token = _due.set(math.inf if seconds is None else time.perf_counter() + seconds)
    try:
        yield
    finally:
        _due.reset(token)


def seconds_left() -> float:
    """How long what runs here may take; infinite without a limit, negative if it is late."""
    return _due.get() - time.perf_counter()
