"""A guide with a place for estimators that are trained along with it.

A kernel estimate starts anew at every step of a fit; a network can follow the guide instead, one
gradient step for each set of particles. NumPyro carries such state in *mutable* sites, which only a
model or a guide can declare, so the guide is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpyro
from numpyro.primitives import mutable

from numpyro_kscore._model.handlers import Hidden
from numpyro_kscore._model.program import Program, inspect_program
from numpyro_kscore._objective.objective_options import ObjectiveOptions, pool
from numpyro_kscore.estimators._fit.guide_estimator import GuideEstimator

# The mutable site that holds one estimator's state for each block, by the block's first latent.
STATE = "_numpyro_kscore_networks"


def stateful_guide(
    settings: ObjectiveOptions, model: Callable[..., Any], guide: Callable[..., Any]
) -> Callable[..., Any]:
    """The guide, with a state of the estimator for each of its blocks in a mutable site."""

    def stateful(*args: Any, **kwargs: Any) -> Any:
        drawn = guide(*args, **kwargs)
        key = numpyro.prng_key()
        if key is None:
            return drawn
        with Hidden():
            layout = inspect_program(key, Program({}, model, guide, args, kwargs, {}))
        layout = pool(layout, settings.aggregate)
        parts = layout.implicit_parts
        states = {}
        for part, one_key in zip(parts, jax.random.split(key, len(parts) or 1), strict=False):
            if part.context is not None or (part.columns.shape[0] > 1 and not part.is_pooled):
                raise ValueError(
                    f"estimator: expected a ScoreEstimator for {list(part.sites)}, which depend on "
                    "other latents or are estimated row by row in a plate; got "
                    f"{type(settings.estimator).__name__}(), which serves blocks of one row, and "
                    "aggregated ones"
                )
            states[part.sites[0]] = settings.estimator.init(one_key, part.columns.shape[1])
        # Once the site has a value it keeps it, and these states are dead code.
        mutable(STATE, states)
        return drawn

    return stateful


def check_place(estimator: GuideEstimator, params: dict[str, Any]) -> None:
    """Raise unless parameters and mutable sites have the state of an estimator that needs one."""
    if estimator.is_stateful and STATE not in params:
        raise ValueError(
            f"guide: expected a place for the network of {type(estimator).__name__}(); got a guide "
            "without one. Use SVI(model, elbo.stateful(model, guide), optimizer, elbo)"
        )
