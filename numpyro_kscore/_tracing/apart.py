"""Runs of a model inside a guide's call, of which the handlers around it must not know."""

from __future__ import annotations

from typing import Any

from numpyro.primitives import Messenger

__all__ = ["Apart"]


class Apart(Messenger):
    """Hides all messages, requests for random keys, too, which NumPyro's ``block`` lets pass.

    A part of a model that is blocked asks for a key. If that reached the handler that seeds the
    guide, a traced run would leave a tracer there.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        """Stop a message."""
        msg["stop"] = True
