"""Distributions that wrap others."""

from __future__ import annotations

from numpyro.distributions import Distribution

__all__ = ["layers"]


def layers(fn: Distribution) -> list[Distribution]:
    """A distribution and the distributions it wraps, from the outermost to the innermost."""
    wrapped = [fn]
    while hasattr(wrapped[-1], "base_dist"):
        wrapped.append(wrapped[-1].base_dist)
    return wrapped
