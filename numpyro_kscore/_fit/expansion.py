"""Expansions of the density of all data near a guide, which take the noise out of minibatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.svi import SVIState

from numpyro_kscore._fit.svi import Inference
from numpyro_kscore._model.all_rows import expand_at, kept_plate, mean_draw, row_sizes
from numpyro_kscore._model.control_variate import ControlVariate, KeptRows, Taylor
from numpyro_kscore._model.layout import Layout
from numpyro_kscore._model.program import Program
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import FitKey, key_apart

# Fraction of a batch's number of rows that every step keeps.
PART_KEPT = 0.25
# Rows whose sizes differ by less, relatively, may matter the same up to rounding.
ROUNDING = 1e-3


class Expander(NamedTuple):
    """The way a fit expands the density of all data, see :meth:`ImplicitELBO.expand`.

    ``expand`` gives the expansion at the mean of the guide of a state, or None if there is none;
    ``like`` gives one of the same structure and shapes.
    """

    expand: Callable[[SVIState], ControlVariate | None]
    like: Callable[[SVIState], ControlVariate | None]


NO_EXPANSION = Expander(lambda state: None, lambda state: None)


def has_local_latents(layout: Layout) -> bool:
    """Whether the guide draws rows of a subsampled plate, or latents inside."""
    return bool(layout.shared_plates) or any(
        frame.size != frame.full_size for site in layout.sites for frame in site.frames
    )


def make_expander(inference: Inference, num_steps: int) -> Expander:
    """Expand the densities of subsampled plates, or of the batches of a loader.

    An expansion of rows that are all in memory serves at least ``num_steps`` steps.
    """
    if inference.batches is not None:
        return _make_loader_expander(inference, inference.batches)
    svi, layout = inference.svi, inference.layout
    expand = getattr(svi.loss, "expand", None)  # other objectives have none
    if layout is None or not layout.row_counts or expand is None:
        return NO_EXPANSION

    def expansion(state: SVIState) -> ControlVariate | None:
        key, program = key_apart(state.rng_key, FitKey.EXPANSION), inference.program_at(state)
        args, kwargs = program.args, {**program.kwargs, "num_steps": num_steps}
        return expand(key, program.params, svi.model, svi.guide, *args, **kwargs)

    compiled = quick_jit(expansion)
    return Expander(compiled, compiled)


def _make_loader_expander(inference: Inference, batches: Batches) -> Expander:
    """Expand the mean density of the batches, by a pass over all of them for each expansion.

    The mean over the batches of an epoch of the densities that the model scales to all data is the
    density of all data. Where no pass can be taken, an expansion is NaN, which changes nothing.

    Cost: a pass over all batches, and two more for each latent dimension up to 128.
    """
    loss, layout = inference.svi.loss, inference.layout
    is_ours = hasattr(loss, "expanded") and loss.vectorize_particles is True
    if layout is None or layout.model_params or has_local_latents(layout) or not is_ours:
        return NO_EXPANSION
    if loss.forward_mode_differentiation:
        return NO_EXPANSION

    def place(state: SVIState, batch: Any) -> tuple[jax.Array, Program]:
        return key_apart(state.rng_key, FitKey.EXPANSION), inference.program_at(state, batch)

    def draw(state: SVIState) -> Any:
        key, program = place(state, batches.first)
        return mean_draw(key, program, layout)

    def of_batch(state: SVIState, draws: Any, batch: Any) -> Taylor:
        key, program = place(state, batch)
        return expand_at(key, program, layout, draws[0])

    def of_each(state: SVIState, draws: Any, stack: Any) -> Taylor:
        return jax.lax.map(lambda batch: of_batch(state, draws, batch), stack)

    compiled_draw, compiled = quick_jit(draw), quick_jit(of_each)

    def like(state: SVIState) -> ControlVariate:
        at = jax.eval_shape(draw, state)
        shapes = jax.eval_shape(of_batch, state, at, batches.first)
        point, unknown = jax.tree.map(
            lambda a: jnp.full(a.shape, jnp.nan, a.dtype), (at[0].flat, shapes)
        )
        return ControlVariate(point, unknown, kept=keeper.none(state))

    def expand(state: SVIState) -> ControlVariate:
        kind = like(state)
        if batches.count is None:
            return kind
        at, seen = compiled_draw(state), 0
        collector = (
            None if kind.kept is None else RowCollector(batches.first, len(kind.kept.shares))
        )

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

    keeper = _Keeper(place, batches.first, layout, draw)
    return Expander(expand, like)


class _Keeper:
    """A finder of the rows that every step keeps, if a model takes more rows than a batch has.

    ``place`` gives the key of a state, and guide and model there with a batch; ``draw`` gives, at a
    state, the point at which the density is expanded and draws near it.
    """

    def __init__(
        self,
        place: Callable[[SVIState, Any], tuple[jax.Array, Program]],
        first: Any,
        layout: Layout,
        draw: Callable[[SVIState], Any],
    ) -> None:
        self._place, self._layout, self._draw, self._first = place, layout, draw, first
        lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(first)}
        # Leaves of another length than the rows would say nothing about the rows that are kept.
        self._count = int(lengths.pop() * PART_KEPT) if len(lengths) == 1 else 0
        self._found: list[str | None] = []
        # A map from a state, draws and batches to how much each row matters, (batches, rows).
        self.sizes = quick_jit(self._sizes)

    def none(self, state: SVIState) -> KeptRows | None:
        """Return as many rows as are kept, all empty; None where no rows are ever kept."""
        if not self._count:
            return None
        rows = no_rows(self._first, self._count)

        def find(state: SVIState) -> None:
            (draw, _), (key, program) = self._draw(state), self._place(state, self._first)
            self._found = [kept_plate(key, program, self._layout, draw, rows)]

        if not self._found:
            jax.eval_shape(find, state)
        return None if self._found[0] is None else rows

    def _sizes(self, state: SVIState, draws: Any, stack: Any) -> jax.Array:
        name = str(self._found[0])

        def of_batch(batch: Any) -> jax.Array:
            key, program = self._place(state, batch)
            return row_sizes(key, program, self._layout, draws[0], draws[1], name)

        return jax.lax.map(of_batch, stack)


def _check_stack(stack: Any, found: Taylor, seen: int) -> None:
    """Raise where a density or its gradient is not finite, if the batch has such numbers itself.

    Numbers that the model masks do no harm, and a density may be zero at a guide that is far off.
    ``stack`` are batches and ``found`` the expansions at them, with a leading axis; ``seen``
    batches came before them.
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


def no_rows(batch: Any, count: int) -> KeptRows:
    """Return ``count`` rows shaped like those of a batch, of which none is kept."""
    rows = jax.tree.map(lambda a: jnp.zeros((count, *a.shape[1:]), a.dtype), batch)
    return KeptRows(rows, jnp.zeros(count, jnp.result_type(float)))


class RowCollector:
    """A collector of the rows that matter most, each with the number of rows that equal it.

    A row that is drawn in a batch is known to be kept by its numbers alone, since a loader may
    shuffle its rows. All rows with the same numbers matter the same, and are kept together. At most
    ``count`` different rows are kept; none, if the pass does not come upon half of the rows of the
    ``first`` batch, since the rows of such a loader are not the same twice.
    """

    def __init__(self, first: Any, count: int) -> None:
        self._like, self._count = first, count
        self._first = set(_contents([_plain(leaf) for leaf in jax.tree.leaves(first)]))
        self._again: set[bytes] = set()
        self._found: dict[bytes, _Found] = {}
        self._left_out, self._seen = 0.0, 0

    def add(self, batches: Any, sizes: np.ndarray) -> None:
        """Look at more rows; ``sizes``, (batches, rows), say how much each matters."""
        leaves = [_plain(leaf) for leaf in jax.tree.leaves(batches)]
        leaves = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves]
        sizes = np.nan_to_num(np.asarray(sizes, np.float64).ravel(), posinf=0.0)
        contents = _contents(leaves)
        self._seen += len(sizes)
        self._again |= self._first.intersection(contents)
        for k in np.flatnonzero(sizes > self._left_out):
            if contents[k] in self._found:
                self._found[contents[k]].count += 1
            else:
                self._found[contents[k]] = _Found(sizes[k], [leaf[k].copy() for leaf in leaves])
        ranked = sorted(self._found.items(), key=lambda item: -item[1].size)
        for content, row in ranked[self._count :]:
            self._left_out = max(self._left_out, row.size)
            del self._found[content]

    def kept(self) -> KeptRows:
        """Return the most important rows of all batches."""
        none = no_rows(self._like, self._count)
        # Copies of a row that was left out were counted before or after, not both.
        least = self._left_out * (1 + ROUNDING)
        rows = [row for row in self._found.values() if row.size > least]
        if not rows or 2 * len(self._again) < len(self._first):
            return none
        shares = np.zeros(self._count)
        shares[: len(rows)] = [row.count / self._seen for row in rows]
        leaves, structure = jax.tree.flatten(none.batch)
        filled = [
            leaf.at[: len(rows)].set(np.stack([row.leaves[k] for row in rows]))
            for k, leaf in enumerate(leaves)
        ]
        batch = jax.tree.unflatten(structure, filled)
        return KeptRows(batch, jnp.asarray(shares, none.shares.dtype))


class _Found:
    """A row: how much it matters, its numbers, and how many rows have these."""

    def __init__(self, size: float, leaves: list[np.ndarray]) -> None:
        self.size, self.leaves, self.count = float(size), leaves, 1


def _plain(leaf: Any) -> np.ndarray:
    """Return the array with one kind of zero and of NaN, so that equal numbers have equal bytes."""
    leaf = np.asarray(leaf)
    if leaf.dtype.kind not in "fc":
        return leaf
    return np.where(np.isnan(leaf), np.nan, leaf + 0).astype(leaf.dtype)


def _contents(leaves: list[np.ndarray]) -> list[bytes]:
    """Return the bytes of each row of arrays (n, ...)."""
    flat = [np.ascontiguousarray(leaf).reshape(len(leaf), -1).view(np.uint8) for leaf in leaves]
    return [row.tobytes() for row in np.concatenate(flat, axis=1)]
