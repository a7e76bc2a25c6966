"""An estimator that is trained along with the guide, its network kept in a mutable site.

A kernel estimate starts anew at every step of a fit; a network by sliced score matching can follow
the guide instead, one gradient step for each set of particles. NumPyro carries such state in
*mutable* sites, which only a model or a guide can declare, so the guide is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpyro
from numpyro import handlers
from numpyro.primitives import mutable

from numpyro_kscore._tracing.layout import Layout, Part
from numpyro_kscore._tracing.program import Program, inspect_program
from numpyro_kscore.estimators._fitting import AtSamples
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared, squared_distances
from numpyro_kscore.sliced._estimator import SlicedScoreMatching, SlicedState

__all__ = ["STATE", "Following", "stateful_guide"]

# The mutable site that holds one network for each block, by the block's first latent.
STATE = "_numpyro_kscore_networks"


class Following:
    """A network in the place of a :class:`~numpyro_kscore.ScoreEstimator`, for one step of a fit.

    Attributes:
        state: the network, after :meth:`at_samples` the one of the next step.
    """

    def __init__(self, estimator: SlicedScoreMatching, state: SlicedState, key: jax.Array) -> None:
        self.estimator = estimator
        self.state = state
        self.key = key
        self.standardize = estimator.standardize

    def at_samples(
        self,
        samples: jax.Array,
        base_scores: jax.Array | None = None,
        *,
        debias: str | None = None,
        context: jax.Array | None = None,
    ) -> AtSamples:
        """Train on the samples, then as a kernel estimator; there is no jackknife of this."""
        self.state = self.estimator.update(self.state, self.key, samples, base_scores)
        residual = self.estimator.residual(self.state, samples)
        if base_scores is None:
            scores = self.estimator.score(self.state, samples)
        else:
            scores = base_scores + residual
        z = self.state.coordinates.to_kernel(samples)
        nearest = nearest_squared(squared_distances(z, z, cancels(z)))
        return AtSamples(residual, scores, None, self.state.coordinates, nearest)  # type: ignore[arg-type]


def stateful_guide(
    estimator: SlicedScoreMatching,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    pool: Callable[[Layout], tuple[Layout, frozenset[str]]],
) -> Callable[..., Any]:
    """The guide, with a network for each of its blocks in a mutable site."""

    def stateful(*args: Any, **kwargs: Any) -> Any:
        drawn = guide(*args, **kwargs)
        key = numpyro.prng_key()
        if key is None:
            return drawn
        with handlers.block():
            layout = inspect_program(key, Program({}, model, guide, args, kwargs, {}))
        layout, pooled = pool(layout)
        parts = [part for part in layout.parts if part.is_implicit]
        networks = {}
        for part, one_key in zip(parts, jax.random.split(key, len(parts) or 1), strict=False):
            _check_part(part, part.sites[0] in pooled)
            networks[part.sites[0]] = estimator.init(one_key, part.rows.shape[1])
        # Once there is a value it is kept, and these networks are dead code.
        mutable(STATE, networks)
        return drawn

    return stateful


def _check_part(part: Part, is_aggregated: bool) -> None:
    """Raise unless one network serves the block."""
    if part.context is not None or (part.rows.shape[0] > 1 and not is_aggregated):
        raise ValueError(
            f"estimator: expected a ScoreEstimator for {list(part.sites)}, which depend on other "
            "latents or are estimated row by row in a plate; got SlicedScoreMatching(), which "
            "serves blocks of one row, and aggregated ones"
        )
