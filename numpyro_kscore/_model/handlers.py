"""The package's own effect handlers, and the messages that its guides send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.primitives import Messenger, apply_stack


class Hidden(Messenger):
    """A handler that hides a run of a model inside a guide's call from the handlers around it.

    It stops all messages, and also requests for random keys, which NumPyro's ``block`` lets pass: a
    part of a model that is blocked asks for a key. If that reached the handler that seeds the
    guide, a traced run would leave a tracer there.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        msg["stop"] = True


class FactorsInScans(Messenger):
    """A handler, outside of NumPyro's ``enum``, that lets steps of a scan have factors.

    NumPyro's ``numpyro.factor``, the log-Jacobians of supports among them, does not show the axis
    of time, by which an enumerated scan names it. A point with that log density does.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "control_flow" and msg["kwargs"].get("enum"):
            step, *rest = msg["args"]
            msg["args"] = (_PointsForFactors(step), *rest)


class _PointsForFactors(Messenger):
    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and isinstance(msg["fn"], dist.Unit):
            log_factor = jnp.asarray(msg["fn"].log_factor)
            msg["value"] = jnp.zeros_like(log_factor)
            msg["fn"] = dist.Delta(msg["value"], log_density=log_factor)


# The purpose of local log densities: none; a step, which takes them where they help; or weights,
# which take them wherever they are known.
Purpose = Literal["", "step", "weights"]


class LocalDensities(Messenger):
    """A handler that asks guides inside for local log densities, if they know them.

    A step traces its guide many times and needs them once. Unused, they would be dropped by the
    compiler, but first be traced, differentiated and lowered. The innermost handler decides.
    """

    def __init__(self, fn: Callable[..., Any] | None = None, asked: Purpose = "step") -> None:
        self.asked = asked
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "local_densities":
            msg["value"] = self.asked
            msg["stop"] = True


def purpose_of_local_densities() -> Purpose:
    """The purpose that the guide that runs should give local log densities for."""
    purpose: Purpose = apply_stack(message("local_densities", lambda: ""))["value"]
    return purpose


def announce(kind: str, name: str, value: Any) -> None:
    """Leave a value in the trace of a guide, as a site of a type that NumPyro's handlers ignore."""
    # NumPyro's scan asks for the shapes of all values of a guide, so that this one is a number.
    apply_stack(message(kind, lambda *_: 0.0) | {"name": name, "args": (name, value)})


def announced(kind: str, trace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that were left in a trace, each after the prefix that a scope gave all names."""
    for seen, site in trace.items():
        if site["type"] == kind:
            name, value = site["args"]
            yield seen.removesuffix(name), value


def message(kind: str, fn: Callable[..., Any]) -> dict[str, Any]:
    """A message of some type to the handlers around, to be answered by its value."""
    return {"type": kind, "fn": fn, "args": (), "kwargs": {}, "value": None}
