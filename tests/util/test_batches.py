"""Batches of any loader: what is read, in which order, and what is refused."""

import functools
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore._util import batches as batches_module
from numpyro_kscore._util.batches import Batches, Position, ahead

LOADER = [(np.full(2, k), np.arange(3)) for k in range(5)]


def firsts(stack):
    """The numbers of the batches in a stack of those of ``LOADER``."""
    return stack[0][0][:, 0].tolist()


def taken(loader, size, count, start=Position()):  # noqa: B008
    stream = Batches(loader, (), {}).stream(size, start)
    return [next(stream) for _ in range(count)]


class Counted:
    """An iterator with a state, as those of grain have it, that counts what is read."""

    def __init__(self):
        self.place, self.reads = 0, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == 5:
            raise StopIteration
        self.place, self.reads = self.place + 1, self.reads + 1
        return (np.full(2, self.place - 1),)

    def get_state(self):
        return json.dumps({"place": self.place}).encode()

    def set_state(self, state):
        self.place = json.loads(state)["place"]


@pytest.mark.parametrize(
    "loader", [LOADER, lambda: iter(LOADER), lambda: (item for item in LOADER)]
)
def test_epochs_follow_each_other(loader):
    found = taken(loader, 4, 3)
    assert [firsts(stack) for stack, _ in found] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
    assert [(at.epoch, at.batch) for _, at in found] == [(0, 4), (1, 3), (2, 2)]
    again = taken(loader, 4, 1, found[1][1])
    assert firsts(again[0][0]) == [3, 4, 0, 1]
    assert again[0][1] == found[2][1]


def turned(k):
    return LOADER[k:] + LOADER[:k]


def named(size=2, *, epoch):
    return turned(epoch) if size == 2 else []


def in_place(k, /, size=2):
    return turned(k) if size == 2 else []


@pytest.mark.parametrize(
    "loader",
    [
        lambda epoch: turned(epoch),
        lambda k: turned(k),
        lambda epoch=0: turned(epoch),
        named,
        in_place,
        functools.partial(named, 2),
    ],
)
def test_a_function_may_order_each_epoch(loader):
    found = taken(loader, 5, 3)
    assert [firsts(stack)[0] for stack, _ in found] == [0, 1, 2]


@pytest.mark.parametrize(
    "loader",
    [
        lambda size=5: LOADER[:size],
        lambda *sizes: LOADER if not sizes else [],
        lambda **epoch: LOADER,
    ],
)
def test_other_arguments_of_a_function_are_no_epoch(loader):
    found = taken(loader, 5, 3)
    assert [firsts(stack)[0] for stack, _ in found] == [0, 0, 0]


def test_an_iterator_goes_back_to_its_state():
    """The iterator does not read what came before."""
    made = []

    def loader():
        made.append(Counted())
        return made[-1]

    (_, at), (expected, _) = taken(loader, 3, 2)
    found = taken(loader, 2, 1, at)
    assert firsts(found[0][0]) == firsts(expected)[:2]
    assert made[-1].reads == 2


def test_items_are_arguments():
    fixed = Batches([{"x": np.ones(2)}], (1,), {"y": 2})
    args, kwargs = fixed.arguments(fixed.first)
    assert args == (1,)
    assert kwargs["y"] == 2
    assert isinstance(kwargs["x"], jax.Array)
    for item in ((np.ones(2), 3), [np.ones(2), 3]):
        args, kwargs = Batches([item], (7,), {}).arguments(((1, 2), {}))
        assert (args, kwargs) == ((1, 2, 7), {})
    assert Batches([np.ones(2)], (), {}).first[0][0].shape == (2,)


def test_numbers_have_the_precision_of_the_program(x64):
    loader = [(np.ones(2), np.ones(2, np.float32), np.arange(2), np.array([True]))]
    types = [str(leaf.dtype) for leaf in jax.tree.leaves(Batches(loader, (), {}).first)]
    assert types == ["float64", "float32", "int64", "bool"]
    with jax.enable_x64(False):
        made = Batches(loader, (), {})
        # Another thread does not know of it.
        stack, _ = next(ahead(made.stream(1, Position())))
    types = [str(leaf.dtype) for leaf in jax.tree.leaves(stack)]
    assert types == ["float32", "float32", "int32", "bool"]


def test_means_are_over_all_batches_once():
    """The sum is in double precision: in single precision it would be 2^24."""
    values = [2.0**24] + 40 * [1.0]
    made = Batches([np.array([v], np.float32) for v in values], (), {})
    assert made.count == 41
    found = made.mean(lambda stack: stack[0][0])
    np.testing.assert_array_equal(found, [np.mean(values)])


def test_a_sample_is_spread_over_all(monkeypatch):
    monkeypatch.setattr(batches_module, "SAMPLE_ROWS", 8)
    made = Batches([np.full(2, k) for k in range(100)], (), {})
    sample = made.sample[0][0][:, 0]
    assert 4 <= len(sample) < 8
    assert len(set(np.diff(sample))) == 1
    assert sample[-1] + np.diff(sample)[0] >= 100
    np.testing.assert_array_equal(made.sample_mean(lambda stack: stack[0][0]), 2 * [sample.mean()])


def test_one_item_is_read_ahead():
    read, go_on = [], threading.Event()

    def items():
        for k in range(4):
            read.append(k)
            yield k

    stream = ahead(items())
    assert next(stream) == 0
    deadline = time.monotonic() + 5
    while len(read) < 2 and time.monotonic() < deadline:
        go_on.wait(0.01)
    go_on.wait(0.05)
    assert read == [0, 1]
    assert list(stream) == [1, 2, 3]


def test_errors_of_a_loader_come_through():
    def loader():
        yield np.ones(2)
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        Batches(loader, (), {})


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (np.ones((3, 2)), "expected an iterable of batches, or a function.*got ndarray"),
        (jnp.ones((3, 2)), "expected an iterable of batches.*got ArrayImpl"),
        (jax.random.key(0), "expected an iterable of batches.*got PRNGKeyArray"),
        ({"x": np.ones(2)}, "expected an iterable of batches.*got dict"),
        (3, "expected an iterable of batches.*got 3"),
        (lambda: 3, "expected a function that returns an iterator; it gave 3"),
        ([("a", 1)], "expected batches of arrays of numbers; got str as argument 0"),
        ([{"x": {"y": [None, "a"]}}], r"expected batches of arrays.*got str as 'x'\['y'\]\[1\]"),
    ],
)
def test_loaders_that_are_none(loader, message):
    with pytest.raises(TypeError, match="^loader: " + message):
        Batches(loader, (), {})


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "expected at least one batch; got none"),
        ([()], "expected arrays in every batch"),
        (
            [(np.ones((3, 2)),), (np.ones((3, 2)),), (np.ones((1, 2)),)],
            r"expected.*float32\[3, 2\] as argument 0; got float32\[1, 2\] in batch 2 of .*Drop",
        ),
        (
            [{"x": np.ones(3)}, {"x": np.arange(3)}],
            r"expected.*float32\[3\] as 'x'; got int32\[3\] in batch 1 of epoch 0. Convert it",
        ),
        (
            (np.ones((400, 2)), np.ones(400)),
            r"expected.*got float32\[400\] in batch 1.*all data is no loader: give them to fit as",
        ),
        ([np.ones(2), {"x": np.ones(2)}], "expected batches of one structure.*in batch 1 of"),
        ([{"y": np.ones(2)}], r"expected every keyword argument once; got \['y'\] both"),
    ],
)
def test_batches_that_do_not_fit(loader, message):
    with pytest.raises(ValueError, match="^loader: " + message):
        Batches(loader, (), {"y": 1})


def test_iterators_that_end():
    with pytest.warns(UserWarning, match="got an iterator that ends once"):
        made = Batches(iter(LOADER), (), {})
    assert made.count is None
    stream = made.stream(3, Position())
    assert firsts(next(stream)[0]) == [0, 1, 2]
    with pytest.raises(ValueError, match="got an iterator that ended after 5. Give something that"):
        next(stream)
    # A function that gives the same iterator again.
    once = iter(LOADER)
    with pytest.raises(ValueError, match="every time it is iterated over; got none in epoch 0"):
        list(Batches(lambda: once, (), {}).mean(lambda stack: stack[0][0]))


def test_a_loader_without_an_end(monkeypatch):
    monkeypatch.setattr(batches_module, "MOST_BATCHES", 7)

    def endless():
        while True:
            yield np.ones(2)

    with pytest.warns(UserWarning, match="got more than 7 batches.*Give it a length"):
        made = Batches(endless, (), {})
    assert made.count is None
    next(made.stream(20, Position()))
