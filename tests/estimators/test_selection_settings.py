"""``"auto"`` as a setting: one trace, batches, pytrees and messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import AutoBandwidth, kef, nkef
from numpyro_kscore.regularizers import (
    LandweberIteration,
    NuMethod,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
)
from numpyro_kscore.solvers import Dense
from support.compiling import quick_jit
from support.samples import make_scaled

D, FACTORS = 2, (1.0, 2.5)
SAMPLES = make_scaled(13, D)
BANDWIDTHS = "bandwidth: expected 'median', 'auto' or a positive finite number, or a rule.*best"


@pytest.mark.thorough
def test_batches_and_one_trace():
    """Each data set under vmap has its selection; new data compile nothing."""
    traces = 0

    def selected(x):
        nonlocal traces
        traces += 1
        estimator = ScoreEstimator(bandwidth=AutoBandwidth(FACTORS), standardize="none", base=None)
        info = estimator.at_samples(x).info
        return info.selection, info.finite

    plain = quick_jit(selected)
    batch = jnp.stack([jnp.asarray(make_scaled(24, D, seed), jnp.float32) for seed in range(3)])
    singles = [plain(x)[0] for x in batch]
    assert traces == 1
    mapped, finite = quick_jit(jax.vmap(selected))(batch)
    assert np.all(finite)
    assert mapped.strength.shape == mapped.bandwidth.shape == (3,)
    for k, single in enumerate(singles):
        assert int(mapped.column[k]) == int(single.column)
        assert float(mapped.strength[k]) == float(single.strength)
        assert float(mapped.bandwidth[k]) == pytest.approx(float(single.bandwidth), rel=1e-5)
        np.testing.assert_allclose(mapped.loss[k], single.loss, rtol=1e-3, atol=1e-3)
    # Otherwise the indices above would not be tested.
    assert len({int(single.column) for single in singles}) > 1


def test_configurations_survive_the_pytree():
    for value in (Tikhonov("auto"), NuMethod("auto"), AutoBandwidth((1.0, 2.0)), ScoreEstimator()):
        leaves, structure = jax.tree.flatten(value)
        assert jax.tree.unflatten(structure, leaves) == value
    assert Tikhonov("auto").is_auto
    assert not Tikhonov(0.1).is_auto
    assert AutoBandwidth([1, 2]) == AutoBandwidth(np.array([1.0, 2.0])) == AutoBandwidth((1.0, 2.0))
    assert hash(AutoBandwidth([1, 2])) == hash(AutoBandwidth((1.0, 2.0)))
    # In a space of millions of dimensions there is still a step to take.
    assert [member.num_steps for member in NuMethod("auto").path(1e-8)] == [512]


@pytest.mark.parametrize(
    ("error", "make", "message"),
    [
        *(
            (
                ValueError,
                lambda family=family: family("best"),
                "num_steps: expected 'auto' or an integer of at least 1; got 'best'",
            )
            for family in (NuMethod, LandweberIteration)
        ),
        (
            ValueError,
            lambda: Tikhonov("best"),
            "lam: expected 'auto' or a positive finite number; got 'best'",
        ),
        (ValueError, lambda: TruncatedTikhonov("auto"), "lam: expected a positive.*got 'auto'"),
        (ValueError, lambda: nkef("auto"), "lam: expected a positive.*got 'auto'"),
        (ValueError, lambda: SpectralCutoff("auto"), "lam: expected a non-neg.*got 'auto'"),
        (
            ValueError,
            lambda: SpectralCutoff(fraction="auto"),
            "fraction: expected.*got 'auto'",
        ),
        (ValueError, lambda: AutoBandwidth(()), "factors: expected at least one.*got none"),
        (ValueError, lambda: AutoBandwidth((1.0, -2.0)), "factors: expected a positive"),
        (ValueError, lambda: ScoreEstimator(bandwidth="best"), BANDWIDTHS),
        (TypeError, lambda: kef("auto"), r"solver: expected Krylov\(\).*got Dense"),
        (TypeError, lambda: nkef(bandwidth="auto"), r"solver: expected Krylov\(\).*got Dense"),
        (
            TypeError,
            lambda: ScoreEstimator(solver=Dense()).fit(SAMPLES),
            r"solver: expected Krylov\(\) with an automatic strength.*got Dense",
        ),
        (
            TypeError,
            lambda: ScoreEstimator(
                regularizer=SpectralCutoff(0.1), solver=Dense(), bandwidth="auto"
            ).fit(SAMPLES),
            r"solver: expected Krylov\(\) with an automatic strength.*got Dense",
        ),
        (
            ValueError,
            lambda: Tikhonov("auto").evaluate(jnp.ones(2)),
            "lam: expected a number here; got 'auto'. Only ScoreEstimator",
        ),
        (
            ValueError,
            lambda: NuMethod("auto").evaluate(jnp.ones(2)),
            "num_steps: expected a number here; got 'auto'. Only ScoreEstimator",
        ),
        (
            ValueError,
            lambda: LandweberIteration("auto").evaluate(jnp.ones(2)),
            "num_steps: expected a number here; got 'auto'. Only ScoreEstimator",
        ),
    ],
)
def test_messages(error, make, message):
    with pytest.raises(error, match=f"(?s){message}"):
        make()
