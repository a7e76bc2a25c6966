"""The density of all data near a guide, which takes the noise out of minibatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_kscore._fit.row_collector import RowCollector, no_rows
from numpyro_kscore._fit.svi import Given, program_of
from numpyro_kscore._model.all_rows import expand_at, kept_plate, mean_draw, row_sizes
from numpyro_kscore._model.control_variate import ControlVariate, KeptRows, Taylor
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.program import Program
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import FitKey, key_apart

__all__ = ["Expander", "has_local_latents", "make_expander", "make_loader_expander"]

# Rows that every step keeps, as a part of those of a batch.
PART_KEPT = 0.25


class Expander(NamedTuple):
    """How a fit expands the density of all data, see :meth:`ImplicitELBO.expand`.

    Attributes:
        expand: the expansion at the mean of the guide of a state; None if there is none.
        like: one of the same structure and shapes.
    """

    expand: Callable[[SVIState], ControlVariate | None]
    like: Callable[[SVIState], ControlVariate | None]


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

    def expansion(state: SVIState) -> ControlVariate | None:
        key, program = key_apart(state.rng_key, FitKey.EXPANSION), program_of(svi, state, given)
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

    def program_at(state: SVIState, batch: Any) -> Program:
        return program_of(svi, state, batches.arguments(batch))

    def draw(state: SVIState) -> Any:
        return mean_draw(
            key_apart(state.rng_key, FitKey.EXPANSION), program_at(state, batches.first), layout
        )

    def of_batch(state: SVIState, draws: Any, batch: Any) -> Taylor:
        key = key_apart(state.rng_key, FitKey.EXPANSION)
        return expand_at(key, program_at(state, batch), layout, draws[0])

    def of_each(state: SVIState, draws: Any, stack: Any) -> Taylor:
        return jax.lax.map(lambda batch: of_batch(state, draws, batch), stack)

    compiled_draw, compiled = quick_jit(draw), quick_jit(of_each)

    def like(state: SVIState) -> ControlVariate:
        at = jax.eval_shape(draw, state)
        shapes = jax.eval_shape(of_batch, state, at, batches.first)
        unknown = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), shapes)
        point = at[0].flat
        return ControlVariate(
            jnp.full(point.shape, jnp.nan, point.dtype), unknown, kept=keeper.none(state)
        )

    def expand(state: SVIState) -> ControlVariate:
        kind = like(state)
        if batches.count is None:
            return kind
        at, seen, collector = compiled_draw(state), 0, keeper.collector(state)

        def see(stack: Any, found: Taylor, count: int) -> None:
            nonlocal seen
            _check_stack(stack, found, seen)
            seen += count
            if collector is not None:
                sizes = keeper.sizes(state, at, stack)
                collector.add(*jax.tree.map(lambda a: np.asarray(a)[:count], (stack, sizes)))

        mean = batches.mean(lambda stack: compiled(state, at, stack), see)
        found = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), mean, kind.of_all)
        kept = None if collector is None else collector.kept()
        return ControlVariate(at[0].flat, found, kept=kept)

    keeper = _Keeper(program_at, batches.first, layout, draw)
    return Expander(expand, like)


class _Keeper:
    """Finds the rows that every step keeps, if a model takes more rows than a batch has.

    Args:
        program_at: from a state and a batch to guide and model.
        first: a batch.
        layout: the layout of a particle.
        draw: from a state to where its density is expanded, and draws nearby.
    """

    def __init__(
        self,
        program_at: Callable[[SVIState, Any], Program],
        first: Any,
        layout: Layout,
        draw: Callable[[SVIState], Any],
    ) -> None:
        self._program_at, self._layout, self._draw, self._first = program_at, layout, draw, first
        lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(first)}
        # Other leaves than those of rows would say nothing about the rows that are kept.
        self._count = int(lengths.pop() * PART_KEPT) if len(lengths) == 1 else 0
        self._found: list[str | None] = []
        # How much every row of some batches matters, (batches, rows), at a state and draws.
        self.sizes = quick_jit(self._sizes)

    def none(self, state: SVIState) -> KeptRows | None:
        """No rows, in the place of some; None where there never are any."""
        if not self._count:
            return None
        rows = no_rows(self._first, self._count)

        def find(state: SVIState) -> None:
            key, (draw, _) = key_apart(state.rng_key, FitKey.EXPANSION), self._draw(state)
            program = self._program_at(state, self._first)
            self._found = [kept_plate(key, program, self._layout, draw, rows)]

        if not self._found:
            jax.eval_shape(find, state)
        return None if self._found[0] is None else rows

    def collector(self, state: SVIState) -> RowCollector | None:
        """What collects rows in a pass."""
        none = self.none(state)
        return None if none is None else RowCollector(self._first, self._count)

    def _sizes(self, state: SVIState, draws: Any, stack: Any) -> jax.Array:
        key, name = key_apart(state.rng_key, FitKey.EXPANSION), self._found[0]

        def of_batch(batch: Any) -> jax.Array:
            return row_sizes(
                key, self._program_at(state, batch), self._layout, draws[0], draws[1], str(name)
            )

        return jax.lax.map(of_batch, stack)


def _check_stack(stack: Any, found: Taylor, seen: int) -> None:
    """Raise where a density or its gradient is not finite, if the batch has such numbers itself.

    Numbers that the model masks do no harm, and a density may be zero at a guide that is far off.

    Args:
        stack: arguments and keyword arguments of batches, with a leading axis.
        found: the log densities and gradients, with a leading axis.
        seen: number of batches before.
    """
    # Some densities of NumPyro are finite where their parameters are not.
    numbers = np.column_stack([np.asarray(found.value), np.asarray(found.slope)])
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
