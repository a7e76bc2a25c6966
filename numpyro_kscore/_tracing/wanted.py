"""Whether who runs a guide wants local log densities, which cost more than the draws do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["are_local_densities_wanted", "with_local_densities"]

_wanted: ContextVar[bool] = ContextVar("local densities", default=False)


@contextmanager
def with_local_densities(wanted: bool = True) -> Iterator[None]:
    """Guides that are run inside give local log densities, if they know them.

    A step traces its guide many times and needs them once. Unused, they would be dropped by the
    compiler, but first be traced, differentiated and lowered.
    """
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def are_local_densities_wanted() -> bool:
    """Whether a guide shall give local log densities now."""
    return _wanted.get()
