"""Automatic selection for samples that are degenerate, few, or in any unit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy import chains, score_targets
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators._base.copies import BLOCKS, deal
from numpyro_kscore.estimators._fit.selection import STEPS_OF_MANY
from numpyro_kscore.regularizers import Tikhonov
from support.compiling import quick_jit
from support.samples import make_scaled

SAMPLES = make_scaled(13, 2)


def hard_samples():
    samples = make_scaled(10, 3, seed=7)
    return {
        "plain": samples,
        "twice the same": np.repeat(samples[:5], 2, axis=0),
        "all the same": np.full((10, 3), 1.7),
        "nearly the same": 1e3 + 1e-4 * samples,
        "one coordinate fixed": samples * [1.0, 0.0, 1.0],
        "collinear": samples[:, [0, 0, 1]],
        "one far off": np.concatenate([samples[:9], [[1e6, -1e6, 1e6]]]),
        "tiny": 2.0**-50 * samples,
        "huge": 2.0**50 * samples,
    }


@pytest.mark.thorough
def test_hard_samples():
    """One program for all: finite, and the same in any units."""
    estimator = ScoreEstimator(bandwidth="auto")

    @quick_jit
    def evaluate(x):
        score = estimator.fit(x)
        return score.at_samples, score(x + 0.1 * jnp.std(x)), score.info

    results = {name: evaluate(jnp.asarray(x, jnp.float32)) for name, x in hard_samples().items()}
    for name, (*values, info) in results.items():
        assert bool(info.finite), name
        for value in values:
            assert np.all(np.isfinite(value)), name
    plain = results["plain"]
    for name, unit in (("tiny", 2.0**-50), ("huge", 2.0**50)):
        assert int(results[name][-1].selection.column) == int(plain[-1].selection.column)
        assert int(results[name][-1].selection.row) == int(plain[-1].selection.row)
        np.testing.assert_allclose(results[name][0] * unit, plain[0], rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_losses_on_the_samples_own_scale(x64):
    """The loss and its error follow the units of the samples, the selection does not."""
    estimator = ScoreEstimator(standardize="none", base=None, bandwidth="auto")
    fit = quick_jit(lambda x: estimator.fit(x).info.selection)
    with jax.enable_x64(False):
        selections = [
            fit(jnp.asarray(unit * SAMPLES, jnp.float32)) for unit in (1, 2.0**50, 2.0**-50)
        ]
    assert int(selections[0].column) > 0
    for selected, unit in zip(selections[1:], (2.0**50, 2.0**-50), strict=True):
        assert (int(selected.row), int(selected.column)) == (
            int(selections[0].row),
            int(selections[0].column),
        )
        for name in ("loss", "standard_error"):
            value, expected = getattr(selected, name) * unit**2, getattr(selections[0], name)
            np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("n", "d", "options"),
    [
        (3, 2, {"standardize": "none", "base": None}),
        pytest.param(4, 2, {"standardize": "none", "base": None}, marks=pytest.mark.thorough),
        *(pytest.param(n, d, {}, marks=pytest.mark.slow) for n, d in ((3, 2), (4, 12), (5, 1))),
    ],
)
def test_few_samples(n, d, options):
    """Below four samples none is held out: the strongest member that is not zero."""
    samples = np.float32(make_scaled(n, d, seed=8))
    score = quick_jit(lambda x: ScoreEstimator(**options).at_samples(x))(samples)
    assert score.scores.dtype == score.info.selection.loss.dtype == jnp.float32
    assert bool(score.info.finite)
    if n < 4:
        assert int(score.info.selection.column) == 1
        assert np.all(np.isnan(score.info.selection.loss))
    else:
        assert np.all(np.isfinite(score.info.selection.loss))
        assert float(score.info.selection.loss[0, 0]) == 0.0


@pytest.mark.thorough
def test_nothing_finite_is_no_base():
    """A fixed strength is kept where no loss can be computed."""
    estimator = ScoreEstimator(
        regularizer=Tikhonov(0.1), bandwidth="auto", standardize="none", base=None
    )

    @quick_jit
    def fit(x, s):
        return estimator.at_samples(x, s).info

    samples = jnp.asarray(SAMPLES, jnp.float32)
    info = fit(samples, jnp.full_like(samples, jnp.nan))
    assert int(info.selection.column) == 1
    assert not bool(info.finite)


# ------------------------------------------------------------------------------ how they are dealt


@pytest.mark.parametrize("n", [2, 3, 31, 50, 51, 400, 2047])
def test_halves_are_of_equal_size_and_share_nothing(n):
    first, second, counted = (np.asarray(a) for a in deal(jnp.arange(n)))
    assert np.all(counted)
    assert len(first) == len(second) == n // 2
    np.testing.assert_array_equal(np.sort(np.concatenate([first, second])), np.arange(n // 2 * 2))
    # One by one if they are few, and in blocks otherwise.
    for rows in (first, second):
        assert 1 + np.sum(np.diff(rows) > 1) == min(n // 2, BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "correlation"), [("kernel", 0.9), ("density", 0.95)])
def test_a_chain_is_not_fitted_to_its_own_steps(estimator, correlation):
    """Draws of a standard normal with a correlation from each to the next.

    benchmarks/results/2026-11-27-chains.md has the table: .20 and .24. All figures are means over
    four chains.
    """
    in_blocks, singly = chains.errors(estimator, "normal", correlation, 1000, 4)
    assert in_blocks < 0.4 * singly


@pytest.mark.slow
def test_estimates_from_more_samples_than_the_choice_looks_at_take_more_steps():
    """The steps of the choice would leave a residual of 1e-2 at so little regularization."""
    x = score_targets.TARGETS["spiral"](2).draw(jax.random.key(0), 2100)
    info = ScoreEstimator(base="student", bandwidth="median").fit(x).info
    assert int(info.steps) == STEPS_OF_MANY
    assert bool(info.converged)


@pytest.mark.thorough
def test_a_benchmark_has_both_errors(capsys):
    chains.main(["--quick"])
    lines = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0].strip() for line in lines] == ["normal", "banana"]
    for *_, in_blocks, singly in lines:
        assert min(float(in_blocks), float(singly)) > 0.0
    z = jnp.array([0.3, -1.2])
    np.testing.assert_allclose(chains.unbent(chains.bent(z)), z, rtol=1e-6)
    # In this order the halves are the even and the odd samples.
    order = chains.one_by_one(201)
    first, second, _ = (np.asarray(a) for a in deal(jnp.arange(201)))
    assert set(order[first] % 2) == {0}
    assert set(order[second] % 2) == {1}
