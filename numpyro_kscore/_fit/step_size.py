"""The step size of an optimizer, which a fit lowers by itself."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.infer import SVI

from numpyro_kscore._util.compiling import quick_jit

# Steps along a constant gradient until moving averages of it are full.
BURN_IN = 500
# Shares of a fit after which a step is looked at.
SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)
# Steps at later counts are as long but for moving averages that are not full.
LEAST_SHARE = 0.9


def warn_of_schedule(svi: SVI, params: dict[str, Any], max_steps: int) -> None:
    """Warn of an optimizer whose steps get shorter by themselves in so many steps.

    What a fit takes for a guide that improves no more would be an optimizer that no longer moves.
    The optimizer is run on one number for each parameter, along a constant gradient, and its count
    of steps is moved then. Without a schedule the next step is as long as before, or longer where a
    moving average is still young.
    """
    scalars = jax.tree.map(lambda leaf: jnp.zeros((), jnp.result_type(leaf)), params)
    counts = jnp.asarray([BURN_IN + int(share * max_steps) for share in SHARES])
    try:
        lengths = np.asarray(quick_jit(_lengths(svi.optim), runs_once=True)(scalars, counts))
    except Exception:  # of an optimizer that needs the shapes of parameters, or values of the loss
        return
    later = lengths[1:, lengths[0] > 0]
    longest = later.max(axis=0)
    left = np.min(later[-1] / np.where(longest > 0, longest, np.inf), initial=1.0)
    if left < LEAST_SHARE:
        warnings.warn(
            "fit: expected an optimizer with a constant step size, which fit itself lowers at the "
            "end; got one with a schedule, whose steps get shorter before. The fit may end where "
            "the optimizer no longer moves. Give a number, as in optax.adam(1e-2), or run the "
            "schedule by svi.run",
            UserWarning,
            stacklevel=3,
        )


def _lengths(optim: Any) -> Any:
    """``(parameters, counts) -> lengths`` of the longest first step, and of those at counts."""

    def lengths(params: Any, counts: Array) -> Array:
        ones = jax.tree.map(jnp.ones_like, params)

        def step(state: Any, loss: Array) -> tuple[Any, Array]:
            after = optim.update(ones, state, value=loss)
            pairs = (jax.tree.leaves(optim.get_params(s)) for s in (state, after))
            return after, jnp.stack([jnp.abs(b - a) for a, b in zip(*pairs, strict=True)])

        # Some optimizers take shorter steps where the loss does not fall.
        losses = -jnp.arange(BURN_IN + 1.0)
        state, taken = lax.scan(step, optim.init(params), losses[:-1])

        def at(count: Array) -> Array:
            leaves, structure = jax.tree_util.tree_flatten_with_path(state)
            # NumPyro's count of steps is the first leaf; optax calls its own counts.
            moved = [
                count.astype(leaf.dtype)
                if k == 0 or getattr(path[-1], "name", "") == "count"
                else leaf
                for k, (path, leaf) in enumerate(leaves)
            ]
            return step(jax.tree.unflatten(structure, moved), losses[-1])[1]

        return jnp.concatenate([taken.max(axis=0)[None], jax.vmap(at)(counts)])

    return lengths
