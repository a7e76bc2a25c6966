"""Digests of programs: equal only where the machine code may be the same."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.extend.core import Primitive

from numpyro_kscore._util.fingerprint import fingerprint

LONG = np.arange(5000.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Named:
    """An object that is no program and no list, and whose text shows a part of its content."""

    numbers: np.ndarray


def digest(fn, *args):
    return fingerprint(jax.make_jaxpr(fn)(*args))


def _with_inner(constant):
    @jax.jit
    def inner(x):
        return x * constant

    return lambda x, y: inner(x) + y


def _smooth(power):
    @jax.custom_jvp
    def fn(x):
        return x**power

    @fn.defjvp
    def _rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return fn(x), power * x ** (power - 1) * t

    return lambda x, y: fn(x) + y


# Programs of two vectors that differ in one thing each.
PROGRAMS = {
    "difference": lambda x, y: x - y,
    "difference, the other way": lambda x, y: y - x,
    "of one alone": lambda x, y: x - x,
    "literal": lambda x, y: x - 1.0,
    "another literal": lambda x, y: x - 2.0,
    "another type": lambda x, y: x.astype(jnp.float16),
    "a third type": lambda x, y: x.astype(jnp.bfloat16),
    "outputs": lambda x, y: (x, y),
    "outputs, the other way": lambda x, y: (y, x),
    "inner constant": _with_inner(LONG),
    # A number in the middle, which the text of an array leaves out.
    "another inner constant": _with_inner(np.where(LONG == 2500, -1.0, LONG)),
    "scan": lambda x, y: lax.scan(lambda c, _: (c + y, None), x, None, length=3),
    "a longer scan": lambda x, y: lax.scan(lambda c, _: (c + y, None), x, None, length=4),
    "condition": lambda x, y: lax.cond(x[0] > 0, lambda: x, lambda: y),
    "condition, the other way": lambda x, y: lax.cond(x[0] > 0, lambda: y, lambda: x),
    "sum": lambda x, y: jnp.sum(jnp.outer(x[:3], y[:3]), axis=0),
    "sum over another axis": lambda x, y: jnp.sum(jnp.outer(x[:3], y[:3]), axis=1),
    "rolled": lambda x, y: jnp.roll(x, -1),
    "rolled by two": lambda x, y: jnp.roll(x, -2),
    "own derivative": _smooth(2),
    "another function with one": _smooth(3),
    "draws": lambda x, y: random.normal(random.key(0), x.shape),
    "draws by another generator": lambda x, y: random.normal(random.key(0, impl="rbg"), x.shape),
}


def test_programs_that_differ_have_digests_of_their_own():
    x = jnp.zeros(5000)
    found = {name: digest(fn, x, x) for name, fn in PROGRAMS.items()}
    assert None not in found.values()
    for first, second in itertools.combinations(found, 2):
        assert found[first] != found[second], (first, second)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_program_has_the_same_digest(name):
    x = jnp.zeros(5000)
    assert digest(PROGRAMS[name], x, x) == digest(PROGRAMS[name], x + 1, x)


def test_values_of_own_constants_do_not_count_and_shapes_do():
    def over(data):
        return digest(lambda x: x + jnp.sum(data), 0.0)

    assert over(np.ones(3)) == over(np.zeros(3))
    assert over(np.ones(3)) != over(np.ones(4))
    assert digest(lambda x: x + 1, 0.0) != digest(lambda x: x + 1, jnp.zeros(()))  # weakly typed


def test_closures_made_anew_are_the_same_program():
    x = jnp.zeros(5000)
    assert digest(_smooth(2), x, x) == digest(_smooth(2), x, x)
    assert digest(_with_inner(LONG), x, x) == digest(_with_inner(LONG.copy()), x, x)


def test_settings_of_jax_count():
    x = jnp.zeros((3, 3))
    before = digest(jnp.matmul, x, x)
    with jax.default_matmul_precision("float32"):
        assert digest(jnp.matmul, x, x) != before
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        assert digest(jnp.matmul, x, x) != before
    assert digest(jnp.matmul, x, x) == before


def test_what_its_text_does_not_determine_has_none():
    def telling(x):
        jax.debug.callback(lambda a: None, x)
        return x

    def asking(x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((), jnp.float32), x)

    def named(x):
        return primitive.bind(x, data=Named(LONG))

    primitive = Primitive("named")
    primitive.def_abstract_eval(lambda x, data: x)
    assert digest(named, 0.0) is None
    assert digest(telling, 0.0) is None
    assert digest(asking, jnp.float32(0.0)) is None
