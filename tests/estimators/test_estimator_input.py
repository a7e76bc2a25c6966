"""Samples that are degenerate, and input that estimators refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels import CurlFree, Diagonal, Gaussian, Matern
from numpyro_kscore.regularizers import (
    LandweberIteration,
    NuMethod,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
)
from numpyro_kscore.solvers import ConjugateGradient, Dense, Krylov, Recursion
from support import oracle
from support.compiling import default_jit
from support.estimating import SAMPLES, D, M, N

# ----------------------------------------------------------------------------- degenerate samples


def degenerate_sets():
    duplicated = np.concatenate([SAMPLES[: N // 2]] * 2)
    collapsed = np.tile(SAMPLES[:1], (N, 1))
    constant = SAMPLES.copy()
    constant[:, 1] = 4.0
    collinear = SAMPLES.copy()
    collinear[:, 2] = 2.0 * collinear[:, 0]
    far = SAMPLES.copy()
    far[0] = 1e6
    return {
        "duplicated": duplicated,
        "collapsed": collapsed,
        "all but one collapsed": np.concatenate([collapsed[1:], SAMPLES[1:2]]),
        "at the origin": np.zeros((N, D)),
        "constant coordinate": constant,
        "collinear": collinear,
        "outlier": far,
        "tiny": 1e-15 * SAMPLES,
        "huge": 1e15 * SAMPLES,
        "far from the origin": SAMPLES + 1e4,
    }


@pytest.mark.parametrize(
    ("kernel", "regularizer", "solver", "standardize", "normalize", "base"),
    [
        (CurlFree(), NuMethod(50), Krylov(16), "full", True, "gaussian"),
        (CurlFree(Matern(2.5)), Tikhonov(1e-3), ConjugateGradient(), "diagonal", True, None),
        pytest.param(
            *(CurlFree(), TruncatedTikhonov(1e-3), Dense(), "none", True, None),
            marks=pytest.mark.slow,
        ),
        (Diagonal(Gaussian()), SpectralCutoff(fraction=0.95), Dense(), "none", False, None),
        pytest.param(
            *(Diagonal(), LandweberIteration(50), Recursion(), "full", True, "gaussian"),
            marks=pytest.mark.slow,
        ),
        (CurlFree(), NuMethod(50), Recursion(), "full", True, None),
    ],
    ids=["nu-krylov", "cg", "truncated", "ssge", "landweber", "nu-recursion"],
)
@pytest.mark.thorough
def test_degenerate_samples_are_finite(kernel, regularizer, solver, standardize, normalize, base):
    estimator = ScoreEstimator(
        kernel, regularizer, solver, standardize=standardize, normalize=normalize, base=base
    )

    @default_jit
    def fit(samples, points):
        score = estimator.fit(samples)
        return score.at_samples, score(points), score.info.finite

    bad = []
    for name, samples in degenerate_sets().items():
        at_samples, at_points, finite = fit(jnp.asarray(samples), jnp.asarray(samples[:M] * 1.01))
        if not (bool(finite) and np.isfinite(at_samples).all() and np.isfinite(at_points).all()):
            bad.append(name)
        if name == "duplicated":
            assert oracle.relative_error(at_samples[N // 2 :], at_samples[: N // 2]) < 1e-4
        if name in ("collapsed", "at the origin") and base is None:
            # ζ vanishes where nothing differs: no direction is preferred.
            np.testing.assert_allclose(at_samples, 0.0, atol=1e-6)
    assert not bad


# -------------------------------------------------------------------------------------- bad input


def fit_default(samples, base_scores=None, **kwargs):
    options = {"base": None, "regularizer": NuMethod(50)} | kwargs
    return ScoreEstimator(**options).fit(samples, base_scores)


def trace(function):
    return jax.eval_shape(function, jnp.asarray(GOOD))


def with_entry(value):
    samples = SAMPLES.astype(np.float32)
    samples[1, 2] = value
    return jnp.asarray(samples)


GOOD = np.asarray(SAMPLES, np.float32)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ValueError, lambda: fit_default(with_entry(np.nan))),
        (ValueError, lambda: fit_default(with_entry(np.inf))),
        (ValueError, lambda: fit_default(GOOD[:1])),
        (ValueError, lambda: fit_default(GOOD[:, 0])),
        (ValueError, lambda: fit_default(GOOD[None])),
        (ValueError, lambda: fit_default(GOOD[:, :0])),
        (TypeError, lambda: fit_default(np.arange(6).reshape(3, 2))),
        (TypeError, lambda: fit_default(GOOD.astype(complex))),
        (ValueError, lambda: fit_default(GOOD, GOOD[:-1])),
        (ValueError, lambda: fit_default(GOOD, GOOD[:, :-1])),
        (ValueError, lambda: fit_default(GOOD, with_entry(np.nan))),
        (ValueError, lambda: fit_default(GOOD, base=dist.Normal(0.0, 1.0))),
        ((TypeError, ValueError), lambda: fit_default(GOOD, base="cauchy")),
        ((TypeError, ValueError), lambda: fit_default(GOOD, base=3.0)),
        (ValueError, lambda: fit_default(GOOD, base=lambda x: x[:, :1])),
        (ValueError, lambda: fit_default(GOOD, kernel=CurlFree(Matern(1.5)))),
        (ValueError, lambda: fit_default(GOOD, bandwidth=-1.0)),
        (ValueError, lambda: fit_default(GOOD, bandwidth="scott")),
        (ValueError, lambda: fit_default(GOOD, standardize="whiten")),
        (TypeError, lambda: trace(lambda x: fit_default(x, kernel=Diagonal()).log_density(x))),
        (ValueError, lambda: trace(lambda x: fit_default(x)(x[:, :2]))),
        (ValueError, lambda: trace(lambda x: fit_default(x)(x[0]))),
        (ValueError, lambda: Krylov(0)),
        (ValueError, lambda: ConjugateGradient(0)),
        (ValueError, lambda: ConjugateGradient(10, 0.0)),
        *(
            (TypeError, lambda r=r, s=s: fit_default(GOOD, regularizer=r, solver=s))
            for r, s in (
                (TruncatedTikhonov(), Krylov()),
                (SpectralCutoff(fraction=0.9), Krylov()),
                (NuMethod(), ConjugateGradient()),
                (LandweberIteration(), ConjugateGradient()),
                (TruncatedTikhonov(), ConjugateGradient()),
                (Tikhonov(), Recursion()),
                (SpectralCutoff(fraction=0.9), Recursion()),
            )
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(error, call):
    with pytest.raises(error, match=r"(?s)expected.*got"):
        call()


def test_capabilities_are_checked_while_tracing():
    with pytest.raises(TypeError, match=r"NuMethod\(…\) or LandweberIteration\(…\) with"):
        jax.eval_shape(
            ScoreEstimator(regularizer=Tikhonov(0.1), solver=Recursion()).fit, jnp.asarray(GOOD)
        )
    with pytest.raises(TypeError, match=r"(?s)expected.*got"):
        jax.eval_shape(
            ScoreEstimator(regularizer=TruncatedTikhonov(), base=None).fit, jnp.asarray(GOOD)
        )
    with pytest.raises(ValueError, match=r"(?s)expected.*got"):
        jax.eval_shape(
            ScoreEstimator(base=None, regularizer=NuMethod(50)).fit, jnp.asarray(GOOD[:1])
        )


@pytest.mark.thorough
def test_values_that_go_bad_under_jit_are_reported_as_data():
    estimator = ScoreEstimator(base=None, regularizer=NuMethod(50), standardize="none")
    score = default_jit(estimator.at_samples)(with_entry(np.nan))
    assert not bool(score.info.finite)
    assert not bool(score.info.converged)
    with pytest.raises(FloatingPointError, match=r"(?s)expected.*got"):
        score.info.raise_if_failed()
