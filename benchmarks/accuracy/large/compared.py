"""A posterior with many latents, of which the scales and some effects are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.infer import init_to_feasible

from benchmarks.accuracy.large.whitening import NEAR, whitened
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws

__all__ = ["LargePosterior"]

NUM_EFFECTS = 50
_SEED = 50


@dataclass(frozen=True, kw_only=True)
class LargePosterior(Posterior):
    """A posterior, its scales and its effects.

    Attributes:
        scales: names of the sites of all hyperparameters: scales, correlations, global means. Their
            unconstrained coordinates are compared.
        effects: maps draws of all sites, leading axis n, to all random effects, (n, m), as they act
            in the likelihood. Fifty of them, chosen with a fixed seed, are compared.
        local: sites that are independent given the others, for NUTS's coordinates.
        others: sites besides that are whitened for NUTS.
        near: values of all other sites of ``nuts_model`` near the posterior, by name. None runs
            NUTS as the model is.
        chain_method: of NUTS; chains of a model with a long loop cost less together.
        rival_warmup: warm-up steps of the short run of NUTS with its defaults.
    """

    scales: tuple[str, ...]
    effects: Callable[[Draws], Array]
    local: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    near: Mapping[str, Any] | None = None
    chain_method: str = "sequential"
    rival_warmup: int = 500
    thinning: int = 1
    accept: float = 0.8
    float64: bool = True

    def summarize(self, draws: Draws) -> Array:
        """Scales, then effects, (n, k)."""
        effects = self.effects(draws)
        return jnp.concatenate([self._scale_draws(draws), effects[:, self._chosen(effects)]], 1)

    @property
    def num_scales(self) -> int:
        """Number of columns of ``summarize`` that are scales."""
        draws = jax.eval_shape(self._prior_draw)
        return jax.eval_shape(self._scale_draws, draws).shape[1]

    def for_nuts(self) -> LargePosterior:
        """The same posterior in whitened coordinates; to be called in double precision."""
        if self.near is None:
            return self
        target = whitened(self.target, self.local, self.others, self.near)
        return replace(self, target=target, dense_mass=[(NEAR,)])

    def _scale_draws(self, draws: Draws) -> Array:
        return self.target.unconstrained(draws, self.scales)

    def _prior_draw(self) -> Draws:
        model = handlers.seed(self.target.model, random.key(0))
        model = handlers.substitute(model, substitute_fn=init_to_feasible())
        trace = handlers.trace(model).get_trace(*self.target.args)
        return {name: trace[name]["value"][None] for name in self.scales}

    @staticmethod
    def _chosen(effects: Array) -> np.ndarray:
        size = effects.shape[1]
        rng = np.random.default_rng(_SEED)
        return np.sort(rng.choice(size, min(NUM_EFFECTS, size), replace=False))
