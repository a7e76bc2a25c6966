"""What a model must be for an automatic guide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import random
from numpyro import handlers

from numpyro_kscore._tracing.dependencies import is_latent
from numpyro_kscore._tracing.enumeration import check_enumerable
from numpyro_kscore._tracing.validation import find_latents

__all__ = ["check_latents", "check_plates", "has_dynamic_support"]


def check_latents(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    init_loc_fn: Callable[..., Any],
    asker: str,
) -> None:
    """Raise for latents no guide can have.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        init_loc_fn: initial values, at which it is looked at: improper priors cannot be drawn from.
        asker: name of the guide's class, for the message.
    """

    def run(key: jax.Array) -> None:
        with handlers.block():
            seeded = handlers.substitute(handlers.seed(model, key), substitute_fn=init_loc_fn)
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
            find_latents(trace)
            check_enumerable(trace, asker)

    jax.eval_shape(run, random.key(0))


def check_plates(trace: dict[str, Any], asker: str) -> None:
    """Raise for continuous latents in a plate of which the model sees a part."""
    sizes = {name: site["args"][0] for name, site in trace.items() if site["type"] == "plate"}
    for name, site in trace.items():
        frames = site["cond_indep_stack"] if is_latent(site) else []
        if any(frame.size != sizes[frame.name] for frame in frames):
            raise ValueError(
                f"{asker}: expected latent sites outside subsampled plates; got '{name}' inside "
                "one. Subsample observed sites only, or write a guide that draws noise inside the "
                "plate (docs/guides)"
            )


def has_dynamic_support(site: dict[str, Any]) -> bool:
    """Whether a site's support has bounds that are values of the model, not plain numbers."""
    support = site["fn"].support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    bounds = (getattr(support, name, 0.0) for name in ("lower_bound", "upper_bound"))
    return not all(isinstance(bound, int | float) for bound in bounds)
