"""The frozen dataclasses that configurations are made of, as JAX sees them."""

import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import pytest

import numpyro_kscore
from numpyro_kscore import ScoreEstimator, pytree, static
from numpyro_kscore.estimators import Median
from numpyro_kscore.kernels import IMQ, CurlFree, Diagonal, Gaussian, RadialProfile
from numpyro_kscore.regularizers import Tikhonov
from support.compiling import quick_jit


def configurations():
    """One object of every public class that can be made without arguments."""
    made = {}
    namespaces = ("estimators", "kernels", "regularizers", "sliced", "solvers")
    for module in map(functools.partial(getattr, numpyro_kscore), namespaces):
        for name in module.__all__:
            public = getattr(module, name)
            if isinstance(public, type) and hasattr(public, "__dataclass_fields__"):
                try:
                    made[name] = public()
                except (TypeError, ValueError):  # needs arguments
                    continue
    return made


def test_structures_of_different_classes_differ():
    """JAX picks compiled programs by structure: two that compare equal share one program."""
    made = configurations()
    assert {"CurlFree", "Diagonal", "IMQ", "Krylov", "Dense", "NuMethod"} <= set(made)
    same = [
        (first, second)
        for first, second in itertools.combinations(made, 2)
        if jax.tree.structure(made[first]) == jax.tree.structure(made[second])
    ]
    assert same == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ScoreEstimator(CurlFree()), ScoreEstimator(Diagonal())),
        (ScoreEstimator(CurlFree(IMQ())), ScoreEstimator(CurlFree(Gaussian()))),
        (ScoreEstimator(bandwidth=Median()), ScoreEstimator(bandwidth="auto")),
        (CurlFree(IMQ(0.5)), CurlFree(IMQ(0.7))),
    ],
    ids=["kernel", "profile", "bandwidth", "exponent"],
)
def test_structures_of_different_estimators_differ(first, second):
    assert jax.tree.structure(first) != jax.tree.structure(second)


def make_class():
    @pytree
    class Power:
        value: object
        power: int = static(default=1)

    return Power


@pytest.mark.thorough
def test_one_program_for_each_class_and_no_more():
    """Many pairs of classes are tried, since a mix-up needs hashes that share some bits."""
    for _ in range(100):
        plus, minus = make_class(), make_class()
        calls = []

        @quick_jit
        def signed(x, calls=calls, plus=plus):
            calls.append(x)
            return x.value if type(x) is plus else -x.value

        results = [float(signed(kind(jnp.float32(2.0), 1))) for kind in (plus, minus, plus)]
        assert results == [2.0, -2.0, 2.0]
        assert len(calls) == 2


def test_classes_of_ones_own():
    """They work with the decorator; without it the message says what to do."""

    class Plain(RadialProfile):
        def __call__(self, s):
            return jnp.exp(-s)

    @pytree
    class Decorated(Plain):
        pass

    samples = jax.random.normal(jax.random.key(0), (20, 2))
    estimator = ScoreEstimator(CurlFree(Decorated()), Tikhonov(1e-2), base=None)
    assert jnp.all(jnp.isfinite(quick_jit(lambda x: estimator.fit(x)(x))(samples)))
    with pytest.raises(TypeError, match="Plain: expected a pytree.*@numpyro_kscore.pytree"):
        ScoreEstimator(CurlFree(Plain())).fit(samples)


def test_paths_and_leaves():
    estimator = ScoreEstimator(bandwidth=jnp.asarray(1.5))
    (path, leaf), *rest = jax.tree_util.tree_flatten_with_path(estimator)[0]
    assert jax.tree_util.keystr(path) == ".bandwidth"
    assert leaf == 1.5
    assert rest == []
    assert jax.tree.map(lambda x: 2 * x, estimator).bandwidth == 3.0


@pytest.mark.parametrize("name", sorted(configurations()))
def test_round_trips(name):
    made = configurations()[name]
    leaves, structure = jax.tree.flatten(made)
    assert jax.tree.unflatten(structure, leaves) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(structure) == hash(jax.tree.structure(pickle.loads(pickle.dumps(made))))
