"""The density of all data near a guide, which takes the noise out of minibatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_kscore._fit.svi import Given, program_of
from numpyro_kscore._tracing.anchor import Anchor, Expansion
from numpyro_kscore._tracing.joint import expand_at, mean_draw
from numpyro_kscore._tracing.layout import Layout
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart

__all__ = ["Expander", "has_local_latents", "make_expander", "make_loader_expander"]


class Expander(NamedTuple):
    """How a fit expands the density of all data, see :meth:`ImplicitELBO.expand`.

    Attributes:
        expand: the expansion at the mean of the guide of a state; None if there is none.
        like: one of the same structure and shapes.
    """

    expand: Callable[[SVIState], Anchor | None]
    like: Callable[[SVIState], Anchor | None]


def _never(state: SVIState) -> None:
    return None


def has_local_latents(layout: Layout) -> bool:
    """Whether the guide draws rows of a subsampled plate, or latents inside."""
    return bool(layout.shared_plates) or any(
        frame.size != frame.full_size for site in layout.sites for frame in site.frames
    )


def make_expander(svi: SVI, layout: Layout | None, given: Given, num_steps: int) -> Expander:
    """Expansions of subsampled plates whose rows are all in memory.

    Args:
        svi: model, guide, optimizer and loss.
        layout: the layout of a particle, if it is known.
        given: arguments and keyword arguments of model and guide.
        num_steps: how many steps an expansion serves, at least.
    """
    # Other objectives have none.
    expand = getattr(svi.loss, "expand", None)
    if layout is None or not layout.row_counts or expand is None:
        return Expander(_never, _never)

    def expansion(state: SVIState) -> Anchor | None:
        key, program = key_apart(state.rng_key, 1), program_of(svi, state, given)
        return expand(
            key,
            program.params,
            svi.model,
            svi.guide,
            *program.args,
            num_steps=num_steps,
            **program.kwargs,
        )

    compiled = quick_jit(expansion)
    return Expander(compiled, compiled)


def make_loader_expander(svi: SVI, layout: Layout | None, batches: Batches) -> Expander:
    """Expansions of the mean density of the batches, each by a pass over all of them.

    The mean over the batches of an epoch of the densities that the model scales to all data is the
    density of all data. Where no pass can be taken, an expansion is NaN, which changes nothing.

    Args:
        svi: model, guide, optimizer and loss.
        layout: the layout of a particle, if it is known.
        batches: those of the loader.

    Cost: a pass over all batches, and two more for each latent dimension up to 128.
    """
    loss = svi.loss
    if layout is None or layout.model_params or has_local_latents(layout):
        return Expander(_never, _never)
    if not hasattr(loss, "expanded") or loss.vectorize_particles is not True:
        return Expander(_never, _never)
    if loss.forward_mode_differentiation:
        return Expander(_never, _never)

    def draw(state: SVIState) -> Any:
        program = program_of(svi, state, batches.arguments(batches.first))
        return mean_draw(key_apart(state.rng_key, 1), program, layout)

    def of_batch(state: SVIState, draw: Any, batch: Any) -> Expansion:
        program = program_of(svi, state, batches.arguments(batch))
        return expand_at(key_apart(state.rng_key, 1), program, layout, draw)

    def of_each(state: SVIState, draw: Any, stack: Any) -> Expansion:
        return jax.lax.map(lambda batch: of_batch(state, draw, batch), stack)

    compiled_draw, compiled = quick_jit(draw), quick_jit(of_each)

    def like(state: SVIState) -> Anchor:
        at = jax.eval_shape(draw, state)
        shapes = jax.eval_shape(of_batch, state, at, batches.first)
        unknown = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), shapes)
        return Anchor(jnp.full(at.flat.shape, jnp.nan, at.flat.dtype), unknown)

    def expand(state: SVIState) -> Anchor:
        if batches.count is None:
            return like(state)
        at, kind = compiled_draw(state), like(state)

        seen = 0

        def of_stack(stack: Any) -> Expansion:
            nonlocal seen
            found = compiled(state, at, stack)
            _check_stack(stack, found, seen)
            seen += len(found.values)
            return found

        mean = batches.mean(of_stack)
        found = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), mean, kind.of_all)
        return Anchor(at.flat, found)

    return Expander(expand, like)


def _check_stack(stack: Any, found: Expansion, seen: int) -> None:
    """Raise where a density or its gradient is not finite, if the batch has such numbers itself.

    Numbers that the model masks do no harm, and a density may be zero at a guide that is far off.

    Args:
        stack: arguments and keyword arguments of batches, with a leading axis.
        found: the log densities and gradients, with a leading axis.
        seen: number of batches before.
    """
    # Some densities of NumPyro are finite where their parameters are not.
    numbers = np.column_stack([np.asarray(found.values), np.asarray(found.scores)])
    for k in np.flatnonzero(~np.all(np.isfinite(numbers), axis=1)):
        args, kwargs = jax.tree.map(lambda leaf, k=k: leaf[k], stack)
        for place, tree in [*enumerate(args), *kwargs.items()]:
            leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype.kind == "f"]
            if not all(np.all(np.isfinite(leaf)) for leaf in leaves):
                name = f"'{place}'" if isinstance(place, str) else str(place)
                raise ValueError(
                    "loader: expected batches at which the density of the model is finite; got "
                    f"numbers that are not in argument {name} of batch {seen + k} (the first is "
                    "0). Leave such rows out, or mask them in the model"
                )
