"""Precisions of matrix products, read off the traced program: no accelerator is needed."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import Subset
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import ConjugateGradient, Krylov

COARSE = {"tensorfloat32": "HIGH", "bfloat16": "DEFAULT"}


def products(jaxpr, path=()):
    """Counts of each precision, inside loops and outside."""
    found = collections.Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            precision = equation.params["precision"]
            found[precision and precision[0].name, "scan" in path] += 1
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: isinstance(v, ClosedJaxpr | Jaxpr)
        ):
            inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            if isinstance(inner, Jaxpr):
                found += products(inner, (*path, equation.primitive.name))
    return found


def traced(estimator, **options):
    def evaluate(x):
        score = estimator.fit(x)
        at_samples = estimator.at_samples(x, **options).scores
        return score(x), score.divergence(x), score.log_density(x), at_samples

    return products(jax.make_jaxpr(evaluate)(jnp.ones((32, 3))).jaxpr)


@pytest.mark.parametrize("precision", COARSE)
@pytest.mark.parametrize("subset", [None, Subset(16)], ids=["all", "subset"])
@pytest.mark.thorough
def test_only_products_of_the_krylov_space_are_coarse(precision, subset):
    """Three coarse products a step: one loop in the fit, one in the fit at the samples only."""
    estimator = ScoreEstimator(
        regularizer=NuMethod(20), solver=Krylov(6), subset=subset, precision=precision
    )
    found = traced(estimator)
    coarse = {key: count for key, count in found.items() if key[0] != "HIGHEST"}
    assert coarse == {(COARSE[precision], True): 6}


@pytest.mark.parametrize(
    "estimator",
    [
        ScoreEstimator(regularizer=NuMethod(20), precision="float32"),
        ScoreEstimator(regularizer=Tikhonov(1e-2), solver=ConjugateGradient()),
    ],
    ids=["asked", "conjugate-gradients"],
)
def test_all_products_are_full(estimator):
    assert {precision for precision, _ in traced(estimator, debias="jackknife")} == {"HIGHEST"}


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="precision: expected one of 'float32', 'tensorfloat32'"):
        ScoreEstimator(precision="float16")
