"""Draws of a model's prior in unconstrained values: paths start there, and they tell its shape."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_kscore._model.dependencies import seeded
from numpyro_kscore._util.compiling import quick_jit

# Draws of the whole prior: paths start from some of them, and all tell how wide it is. And draws of
# latents that depend on no others, of which tails are to be seen; they are fewer where so many
# numbers would be more, and none where these are few.
PRIOR_DRAWS, MANY_DRAWS, MOST_NUMBERS, LEAST_DRAWS = 64, 16_384, 2_000_000, 4_096


class PriorDraws(NamedTuple):
    """Unconstrained values drawn from a prior.

    Attributes:
        few: of all latents, (m, d); none where it cannot be drawn from.
        many: of some columns of these, (n, c).
        columns: which those are, (c,).
    """

    few: np.ndarray
    many: np.ndarray
    columns: np.ndarray


def draw_prior(
    model: Callable[..., Any],
    args: Any,
    kwargs: Any,
    latents: dict[str, Array],
    independent: Collection[str],
) -> PriorDraws:
    """Draw the prior, and many times those of its latents that depend on no others."""

    def given(site: dict[str, Any]) -> Any:
        # Improper priors have no draws.
        if site["type"] != "sample" or site["name"] not in latents or _has_draws(site["fn"]):
            return None
        # In the precision of the search, as are all that have draws.
        unconstrained = jnp.asarray(latents[site["name"]], jnp.result_type(float))
        return biject_to(site["fn"].support)(unconstrained)

    def draw(key: Array, names: Collection[str]) -> Array:
        placed = handlers.substitute(seeded(model, key, {}), substitute_fn=given)
        trace = handlers.trace(placed).get_trace(*args, **kwargs)
        parts = [biject_to(trace[name]["fn"].support).inv(trace[name]["value"]) for name in names]
        return jnp.concatenate([jnp.ravel(part) for part in parts])

    chosen = [name for name in latents if name in independent]
    columns = np.flatnonzero(are_among(independent, latents))
    count = min(MANY_DRAWS, MOST_NUMBERS // max(1, len(columns)))
    if not chosen or count < LEAST_DRAWS:
        chosen, columns = [], columns[:0]

    # With the keys in the same program, which would take one of its own. The seed is an argument:
    # the draws of a constant would be computed while it compiles. What is not asked for is not
    # drawn: XLA leaves it out. Many draws are another program, since few compile without
    # optimization.
    def few(seed: Array) -> Array:
        keys = random.split(random.key(seed), PRIOR_DRAWS)
        return jax.vmap(lambda key: draw(key, latents))(keys)

    def many(seed: Array) -> Array:
        keys = random.split(random.fold_in(random.key(seed), 1), count)
        return jax.vmap(lambda key: draw(key, chosen))(keys)

    seed = jnp.asarray(np.uint32(1))
    of_all = np.asarray(quick_jit(few, runs_once=True)(seed), float)
    of_some = np.zeros((len(of_all), 0))
    if chosen:
        of_some = np.asarray(quick_jit(many, runs_once=True)(seed), float)
    return PriorDraws(of_all[np.all(np.isfinite(of_all), axis=1)], of_some, columns)


def are_among(names: Collection[str], latents: dict[str, Array]) -> np.ndarray:
    """Which flat coordinates are of latents of these names, (d,)."""
    return np.concatenate([np.full(np.size(a), name in names) for name, a in latents.items()])


def _has_draws(fn: Any) -> bool:
    try:
        fn.sample(random.key(0))
    except Exception:  # no sampler, or one that needs a package that is not installed
        return False
    return True
