"""A second call with the same shapes compiles nothing, outside of ``jit`` too."""

import jax
import jax.numpy as jnp
import pytest
from jax import random

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import KernelDensity, Subset
from numpyro_kscore.regularizers import Tikhonov

# Above three dimensions distances are computed one way or another: see kernels/_pairwise.
SAMPLES, POINTS = (random.normal(random.key(k), (24, 4)) for k in (0, 1))
GIVEN = ScoreEstimator(regularizer=Tikhonov(1e-2), bandwidth="median", standardize="full")
ESTIMATORS = {
    "score": GIVEN,
    "groups": ScoreEstimator(regularizer=Tikhonov(1e-2), bandwidth="median", base="auto"),
    "subset": ScoreEstimator(regularizer=Tikhonov(1e-2), bandwidth="median", subset=Subset(12)),
    "smoothed": KernelDensity(),
}
USES = {
    "fit": lambda estimator, score: estimator.fit(SAMPLES),
    "values": lambda estimator, score: score(POINTS),
    "log density": lambda estimator, score: score.log_density(POINTS),
    "divergence": lambda estimator, score: score.divergence(POINTS),
    "at samples": lambda estimator, score: score.at_samples,
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.thorough
def test_a_second_call_compiles_nothing(name, caplog):
    estimator = ESTIMATORS[name]
    score = estimator.fit(SAMPLES)
    for use in USES.values():
        use(estimator, score)
    with jax.log_compiles():
        for use in USES.values():
            jax.block_until_ready(use(estimator, score))
    assert not [r.getMessage() for r in caplog.records if "XLA compilation" in r.getMessage()]


@pytest.mark.thorough
def test_functions_of_one_shape_share_a_program(caplog):
    first = GIVEN.fit(SAMPLES)
    first(POINTS)
    second = GIVEN.fit(SAMPLES + 1.0)
    with jax.log_compiles():
        found = second(POINTS + 1.0)
    assert not [r.getMessage() for r in caplog.records if "XLA compilation" in r.getMessage()]
    # Rounding of points as large as 4, 4e-7, which a strength of 1e-2 amplifies a hundred times.
    assert jnp.allclose(found, first(POINTS), atol=1e-3)
