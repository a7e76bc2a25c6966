"""Fits to samples in batches are fits to all samples at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import RandomFeatures
from numpyro_kscore.estimators._operators import features as feature_module
from numpyro_kscore.estimators._operators.features import (
    Features,
    Rows,
    add_rows,
    no_moments,
)
from numpyro_kscore.kernels import CurlFree
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import Krylov
from support.compiling import quick_jit
from support.samples import make_data

SAMPLES, POINTS = make_data(47, 2, 5, seed=2)
FEATURES = RandomFeatures(12, key=jax.random.key(1))
BASE = dist.Normal(jnp.array([0.5, -1.0]), 2.0).to_event(1)
# Coordinates that do not depend on the samples, but for their mean.
FIXED = ScoreEstimator(
    CurlFree(), Tikhonov("auto"), Krylov(12), 1.5, "none", BASE, features=FEATURES
)


def run(estimator, *batches):
    state = estimator.init_stream(batches[0])
    for batch in batches[1:]:
        state = estimator.partial_fit(state, batch)
    return state, estimator.finish(state)


@pytest.mark.thorough
def test_batches_are_one_fit(x64, monkeypatch):
    """Odd and even sizes in tiles that divide neither; the choice of λ is that of one fit, too.

    Features at other origins are other features, so the first batch is given the mean of all.
    """
    monkeypatch.setattr(feature_module, "TILE_ROWS", 4)
    samples = SAMPLES.copy()
    samples[16:] += samples[:16].mean(axis=0) - samples[16:].mean(axis=0)

    @quick_jit
    def fit(samples, points):
        state, _ = run(FIXED, samples[:16], samples[16:21], samples[21:26], samples[26:])
        at_once = FIXED.init_stream(samples)
        # Errors of the losses come from the first batch: here the same for both.
        stream = FIXED.finish(dataclasses.replace(state, some=at_once.some))
        whole = FIXED.fit(samples)
        # A stream keeps no samples that could be told from copies.
        chosen = [s.info.selection._replace(distinct=0.0) for s in (stream, whole)]
        values = [(s.expansion, c, s(points)) for s, c in zip((stream, whole), chosen, strict=True)]
        return state.num_samples, state.halves, at_once.halves, stream, *values

    number, some, every, stream, *values = fit(samples, POINTS)
    assert int(number) == 47
    for pair in ((some, every), values):
        for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    assert np.isnan(stream.info.selection.distinct)
    assert bool(stream.info.converged)
    assert 0 < int(stream.info.selection.column)
    with pytest.raises(ValueError, match="at_samples: expected a fit that keeps its samples"):
        _ = stream.at_samples


@pytest.mark.thorough
def test_a_stream_traces_once_and_does_not_grow():
    """Whitened by the first batch, with its Gaussian; the operator stops after its samples."""
    estimator = ScoreEstimator(
        regularizer=NuMethod(5), features=RandomFeatures(12, operator_samples=20)
    )
    traces = []

    @quick_jit
    def add(state, batch):
        traces.append(batch)
        return estimator.partial_fit(state, batch)

    batches = np.float32(SAMPLES[:45]).reshape(5, 9, 2)
    states = [estimator.init_stream(batches[0])]
    for batch in batches[1:]:
        states.append(add(states[-1], batch))
    assert len(traces) == 1
    shapes = [jax.tree.map(jnp.shape, state) for state in states]
    assert all(shape == shapes[0] for shape in shapes)
    products = [int(jnp.sum(state.halves.products.number)) for state in states]
    assert products == [9, 18, 27, 27, 27]
    assert [int(state.num_samples) for state in states] == [9, 18, 27, 36, 45]
    assert np.all(np.isfinite(estimator.finish(states[-1])(np.float32(POINTS))))


@pytest.mark.thorough
def test_means_of_a_million_samples_in_float32():
    """Against float64: errors are those of rounding, not of a sum that has become too large.

    Products are of size 1/2. A mean of tiles has errors of some units in the last place of a
    tile's sum, 2048 · 6e-8 relative at the very worst; 2e-6 is 2 % of that.
    """
    n, k = 1_000_000, 4
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 1)).astype(np.float32)
    lengths = np.array([0.5, 1.0, 1.7, 3.0], np.float32)
    features = Features(jnp.ones((k, 1)), jnp.asarray(lengths), jnp.ones(()))

    @jax.jit
    def moments(x):
        rows = Rows(x, -x, None)
        return add_rows(no_moments(features), features, rows, None).over_both()

    found = moments(x)
    phases = np.float64(x) * np.float64(lengths)
    sines, cosines = np.sin(phases), np.cos(phases)
    np.testing.assert_allclose(found.products.values.sines, sines.T @ sines / n, atol=2e-6)
    target = np.mean(lengths * cosines - x * sines, axis=0)
    np.testing.assert_allclose(found.targets.values.own[0], target, atol=2e-6)


def test_bad_batches_are_refused():
    batch = np.float32(SAMPLES[:20])
    estimator = ScoreEstimator(regularizer=NuMethod(5), features=FEATURES)
    plain = dataclasses.replace(estimator, features=None)
    with pytest.raises(ValueError, match="features: expected RandomFeatures.*for a stream"):
        plain.init_stream(batch)
    with pytest.raises(ValueError, match="samples: expected at least 2 rows"):
        estimator.init_stream(batch[:1])
    state = quick_jit(estimator.init_stream)(batch)
    with pytest.raises(ValueError, match=r"batch: expected 2 column\(s\)"):
        estimator.partial_fit(state, batch[:, :1])
    with jax.enable_x64(True), pytest.raises(TypeError, match="batch: expected float32, as the"):
        estimator.partial_fit(state, np.float64(batch))
    with pytest.raises(ValueError, match="batch: expected finite values"):
        estimator.partial_fit(state, np.full_like(batch, np.nan))
