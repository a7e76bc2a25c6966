"""A compiled chunk of optimizer steps, and a look at the guide after them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_kscore._fit.options import LOSS_BLOCKS
from numpyro_kscore._fit.progress import Chunk, Seen
from numpyro_kscore._fit.svi import Arguments, with_parameters
from numpyro_kscore._model.control_variate import ControlVariate
from numpyro_kscore._util.compiling import quick_jit

__all__ = ["make_chunk"]


def make_chunk(
    svi: SVI,
    slots: tuple[int, ...],
    arguments: Arguments,
    forward_mode: bool,
    look: Callable[[SVIState, jax.Array, ControlVariate | None, Any], Seen] | None,
) -> Callable[[SVIState, np.ndarray, ControlVariate | None, Any], Chunk]:
    """Compile ``(state, step sizes, expansion of all rows, batches) -> Chunk``.

    Each step has a batch of its own, and those that follow are for the look; without a loader
    batches are None. ``slots`` come from :func:`parameter_slots` and ``look`` from
    :func:`~numpyro_kscore._fit.looks.make_look`; without it nothing but losses is seen.
    """

    def step(
        here: SVI, start: list[jax.Array], carry: Any, given: tuple[jax.Array, Any]
    ) -> tuple[Any, jax.Array]:
        (state, moved), (size, batch) = carry, given
        args, kwargs = arguments(batch)
        old = jax.tree.leaves(svi.optim.get_params(state.optim_state))
        state, loss = here.stable_update(
            state, *args, forward_mode_differentiation=forward_mode, **kwargs
        )
        new = jax.tree.leaves(svi.optim.get_params(state.optim_state))
        # At factor 1 keep the optimizer's own step, bit for bit.
        new = [jnp.where(size == 1, b, a + (size * (b - a)).astype(b.dtype))
               for a, b in zip(old, new, strict=True)]  # fmt: skip
        state = state._replace(optim_state=with_parameters(state.optim_state, slots, new))
        return (state, [m + (b - a) for m, a, b in zip(moved, start, new, strict=True)]), loss

    def steps(
        state: SVIState, sizes: jax.Array, control_variate: ControlVariate | None, batches: Any
    ) -> Chunk:
        count = sizes.shape[0]
        of_steps = jax.tree.map(itemgetter(slice(count)), batches)
        start = jax.tree.leaves(svi.optim.get_params(state.optim_state))
        carry = (state, [jnp.zeros_like(a) for a in start])
        here = copy.copy(svi)
        if control_variate is not None:
            here.loss = svi.loss.expanded(control_variate)
        (state, moved), losses = lax.scan(partial(step, here, start), carry, (sizes, of_steps))
        # Means of changes, so that parameters that do not change stay as they are.
        mean = [(a + m / count).astype(a.dtype) for a, m in zip(start, moved, strict=True)]
        averaged = state._replace(
            optim_state=with_parameters(state.optim_state, slots, mean),
        )
        numbers = _look_at_losses(losses)
        carried = [*mean, *jax.tree.leaves(state.mutable_state)]
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in carried]))
        finite = finite & (2 * numbers["skipped"] <= count)
        return Chunk(state, averaged, losses, numbers, finite)

    compiled = quick_jit(steps)

    def chunk(
        state: SVIState, sizes: Any, control_variate: ControlVariate | None, batches: Any
    ) -> Chunk:
        taken: Chunk = compiled(state, sizes, control_variate, batches)
        if look is None:
            return taken
        seen = look(taken.averaged, taken.finite, control_variate, batches)
        numbers = {**taken.look, **seen.numbers}
        return taken._replace(look=numbers, finite=seen.finite, gaps=seen.gaps)

    return chunk


def _look_at_losses(losses: jax.Array) -> dict[str, jax.Array]:
    whole = losses[: LOSS_BLOCKS * (losses.shape[0] // LOSS_BLOCKS)]
    blocks = jnp.nanmean(whole.reshape(LOSS_BLOCKS, -1), axis=1)
    loss = jnp.nanmean(losses)
    # Losses of many rows are in the millions, and coarse in single precision.
    rounding = jnp.finfo(losses.dtype).eps * jnp.abs(loss)
    return {
        "loss": loss,
        "loss_error": jnp.maximum(jnp.nanstd(blocks, ddof=1) / LOSS_BLOCKS**0.5, rounding),
        "skipped": jnp.sum(~jnp.isfinite(losses)),
    }
