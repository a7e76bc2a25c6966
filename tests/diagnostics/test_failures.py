"""A diagnosis whose parts end with errors has a verdict, and says what it could not do."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_kscore._model.layout import Site
from numpyro_kscore._model.tall_density import ModelDensity
from numpyro_kscore.diagnostics._budget import Clock, Stages
from numpyro_kscore.diagnostics._examine import examine
from numpyro_kscore.diagnostics._missed_modes import find_modes_without_draws
from numpyro_kscore.diagnostics._weighing import WeightedDraws, weigh

SITES = (Site("z", (2,), 0, ()),)
DRAWS = np.random.default_rng(0).normal(size=(2_000, 2)).astype(np.float32)


def broken(x):
    raise NotImplementedError("vmap is not supported\nand more")


def test_chains_that_cannot_run():
    found = examine(DRAWS, ModelDensity(broken), SITES, random.key(0))
    assert found.verdict == "cannot tell"
    assert found.codes == ("failed",)
    assert "Markov chains: NotImplementedError: vmap is not supported" in found.findings[0]
    assert "and more" not in str(found)
    assert "NUTS" in found.advice[0]


@pytest.mark.parametrize(("slope", "verdict"), [(0.0, "good"), (0.5, "bad")])
def test_weights_decide_where_modes_cannot_be_searched_for(slope, verdict):
    """Weights exp(slope x) of normal draws move the mean by the slope."""
    weights = weigh(WeightedDraws(DRAWS, slope * DRAWS[:, 0], np.zeros(len(DRAWS)), 0, 0.0))
    density = ModelDensity(broken)
    found = examine(DRAWS, density, SITES, random.key(0), weights=weights)
    assert found.verdict == verdict
    # A bad guide needs no search.
    assert ("failed" in found.codes) == (verdict == "good")
    # Errors of means of 2000 draws are .022, and 1.3 times that with weights.
    np.testing.assert_allclose(found.movement.shift, [-slope, 0.0], atol=0.1)


def test_draws_that_are_not_finite_are_an_error_of_the_user():
    stages = Stages()

    def run():
        raise FloatingPointError("half of the draws")

    with pytest.raises(FloatingPointError):
        stages.attempt("a part", run, None)
    assert stages.attempt("a part", lambda: jnp.ones(2).shape, None) == (2,)
    assert stages.failed == ()


def normal(x):
    return -0.5 * jnp.sum(x**2), -x


def test_a_search_for_modes_ends_with_the_time():
    late, early = Clock(0.0), Clock(1e6)
    searched = [
        find_modes_without_draws(normal, DRAWS, SITES, random.key(0), clock=clock)
        for clock in (late, early)
    ]
    assert [modes.num_missed for modes in searched] == [0, 0]
    assert searched[0].num_arrived == 0
    assert "would not have been seen" in str(searched[0])
    assert searched[1].num_arrived == searched[1].num_paths
    # Without time there are no chains and no gradients; what there was time for is spent.
    assert late.left == 0
    assert early.left < 1e6
