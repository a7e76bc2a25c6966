"""Batches of data of any size: stacked, read ahead, passed over, and from a position on.

No more than two stacks of batches are in memory, one in use and one that is read meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.loading import AGAIN, Form, as_batch, opener, restore_state, state_of

T = TypeVar("T")

# Batches of a stack in a pass over all.
PASS_SIZE = 16
# A loader without a length that has no end after so many batches is taken to have none.
MOST_BATCHES = 100_000
# Approximate number of rows in the sample, with which a start is looked for.
SAMPLE_ROWS = 8192
END: Any = object()
# Errors where a traced value is used as a number.
TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Position(NamedTuple):
    """A place in the stream of batches, after so many whole epochs and batches of the next.

    ``state`` is that of the loader's iterator, as JSON, if it has one.
    """

    epoch: int = 0
    batch: int = 0
    state: str | None = None


class Batches:
    """The batches of a loader, as arguments of model and guide.

    A loader is an iterable of batches, or a function that returns one. A function with an argument
    that is called ``epoch`` or has no default is given the number of the epoch. ``args`` follow
    those of a batch, and ``kwargs`` join its keyword arguments.

    Attributes:
        first: the first batch, of device arrays.
        sample: batches that are spread over all, with a leading axis.
        count: number of batches of an epoch; None if they cannot be passed over.

    Cost: a pass over all batches, which checks their shapes.
    """

    def __init__(self, loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open = opener(loader)
        self._args, self._kwargs = args, kwargs
        # Threads do not know of a precision that is set for a block.
        self._is_double = jnp.result_type(float) == jnp.float64
        stream = self._open(0)
        # An iterator is its own iterator, and ends once.
        self._once = stream if stream is loader else None
        item = next(stream, END)
        if item is END:
            raise ValueError(f"loader: expected at least one batch; got none. {AGAIN}")
        example = as_batch(item, self._is_double)
        twice = sorted(set(example[1]) & set(kwargs))
        if twice:
            raise ValueError(
                f"loader: expected every keyword argument once; got {twice} both in its batches "
                "and in the call"
            )
        self._form = Form(example)
        self.first = jax.tree.map(jnp.asarray, example)
        enough = max(1, SAMPLE_ROWS // self._form.num_rows)
        self._items: list[Any] = []
        if self._once is None:
            kept, self.count = self._survey(enough, hasattr(loader, "__len__"))
        else:
            self._items = [item, *itertools.islice(stream, enough - 1)]
            kept, self.count = list(self._checked(self._items, 0)), None
        self.sample = _stacked(kept)
        if self.count is None:
            self._warn()

    def _survey(self, enough: int, has_length: bool) -> tuple[list[Any], int | None]:
        """Batches that are spread over all, and the number of all."""
        kept: list[Any] = []
        stride, count = 1, 0
        for batch in self._epoch():
            if not has_length and count == MOST_BATCHES:
                return kept, None
            if count % stride == 0:
                kept.append(jax.tree.map(np.array, batch))
            if len(kept) == 2 * enough:
                kept, stride = kept[::2], 2 * stride
            count += 1
        return kept, count

    def _warn(self) -> None:
        is_once = self._once is not None
        got = "an iterator that ends once" if is_once else f"more than {MOST_BATCHES} batches"
        advice = AGAIN if is_once else "Give it a length (__len__) if it has an end"
        warnings.warn(
            f"loader: expected batches that can be passed over as a whole; got {got}. Without "
            "passes over all data the noise of the batches stays, which moves and widens the "
            f"posteriors of many rows. {advice}",
            UserWarning,
            stacklevel=4,
        )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """A context in which errors of JAX about traced values name the numbers in batches."""
        try:
            yield
        except TypeError as error:
            # Traced numbers in a shape raise a plain TypeError.
            if self._form.numbers and (isinstance(error, TRACED) or "Tracer" in str(error)):
                error.add_note(
                    f"loader: all that is in a batch is traced, and so are its numbers, "
                    f"{' and '.join(self._form.numbers)}. Give sizes and flags as arguments of "
                    "fit, next to loader=, or take sizes from the shapes of arrays"
                )
            raise

    def with_kwargs(self, kwargs: dict[str, Any]) -> Batches:
        """The same batches with more keyword arguments."""
        other = copy.copy(self)
        other._kwargs = {**self._kwargs, **kwargs}
        return other

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments of model and guide with a batch."""
        args, kwargs = batch
        return (*args, *self._args), {**kwargs, **self._kwargs}

    def mean(
        self, of_each: Callable[[Any], Any], see: Callable[[Any, Any, int], None] | None = None
    ) -> Any:
        """The mean of a function over the batches of an epoch, as a tree of float64 arrays.

        The function is compiled, and maps batches with a leading axis to values with one. ``see``
        is given the batches, the values, and how many of both count.
        """
        return _mean(of_each, ahead(_in_stacks(self._epoch())), see)

    def sample_mean(self, of_each: Callable[[Any], Any]) -> Any:
        """The mean of a function, as for :meth:`mean`, over the sample."""
        leaves, structure = jax.tree.flatten(self.sample)
        rows = (jax.tree.unflatten(structure, row) for row in zip(*leaves, strict=True))
        return _mean(of_each, _in_stacks(rows))

    def stream(self, size: int, start: Position) -> Iterator[tuple[Any, Position]]:
        """Stacks of ``size`` batches, one epoch after another, each with the position after it."""
        epoch, index, iterator = start.epoch, start.batch, self._at(start)
        while True:
            taken: list[Any] = []
            while len(taken) < size:
                item = next(iterator, END)
                if item is END:
                    self._check_end(epoch, index)
                    epoch, index = epoch + 1, 0
                    iterator = self._open(epoch)
                else:
                    taken += self._checked([item], epoch, index)
                    index += 1
            yield _stacked(taken), Position(epoch, index, state_of(iterator))

    def _at(self, start: Position) -> Iterator[Any]:
        """An iterator that goes on from a position."""
        if self._once is not None:
            iterator: Iterator[Any] = itertools.chain(self._items, self._once)
        else:
            iterator = self._open(start.epoch)
            if start.state is not None and hasattr(iterator, "set_state"):
                restore_state(iterator, start.state)
                return iterator
        for _ in itertools.islice(iterator, start.batch):
            pass
        return iterator

    def _check_end(self, epoch: int, index: int) -> None:
        """Raise unless another epoch can follow."""
        if self._once is not None:
            raise ValueError(
                f"loader: expected batches until the fit is done; got an iterator that ended after "
                f"{index}. {AGAIN}"
            )
        if index == 0:
            raise ValueError(
                f"loader: expected batches every time it is iterated over; got none in epoch "
                f"{epoch}. {AGAIN}"
            )

    def _epoch(self) -> Iterator[Any]:
        count = 0
        for batch in self._checked(self._open(0), 0):
            count += 1
            yield batch
        self._check_end(0, count)

    def _checked(self, items: Any, epoch: int, index: int = 0) -> Iterator[Any]:
        for k, item in enumerate(items):
            batch = as_batch(item, self._is_double)
            self._form.check(batch, epoch, index + k)
            yield batch


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; a thread reads the next one while one is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, END)
        while (item := coming.result()) is not END:
            coming = pool.submit(next, items, END)
            yield item


def _mean(
    of_each: Callable[[Any], Any],
    stacks: Iterator[tuple[Any, int]],
    see: Callable[[Any, Any, int], None] | None = None,
) -> Any:
    total, num_batches = None, 0
    for stack, count in stacks:
        values = of_each(stack)
        if see is not None:
            see(stack, values, count)
        # Double precision on the host: sums over all data are far larger than what counts.
        found = jax.tree.map(
            lambda a, k=count: np.sum(np.asarray(a)[:k], axis=0, dtype=float), values
        )
        total = found if total is None else jax.tree.map(np.add, total, found)
        num_batches += count
    return jax.tree.map(lambda a: a / num_batches, total)


def _stacked(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def _in_stacks(batches: Iterator[Any]) -> Iterator[tuple[Any, int]]:
    """Stacks of batches, the last one filled up, and how many of their batches count."""
    while taken := list(itertools.islice(batches, PASS_SIZE)):
        missing = PASS_SIZE - len(taken)
        yield _stacked(taken + taken[-1:] * missing), len(taken)
