"""Input that presets and landmarks refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import (
    Landmarks,
    kef,
    kef_cg,
    landweber,
    nkef,
    nu_method,
    spectral_cutoff,
    ssge,
    stein,
    truncated_tikhonov,
)
from numpyro_kscore.kernels import Matern
from numpyro_kscore.regularizers import SpectralCutoff
from numpyro_kscore.solvers import Krylov
from support.samples import make_data

GOOD = np.asarray(make_data(11, 2, 5, seed=5)[0], np.float32)


def trace(function):
    """A trace, where only shapes and concrete settings are known."""
    return jax.eval_shape(function, jax.ShapeDtypeStruct(GOOD.shape, jnp.float32))


def fit(estimator):
    return trace(estimator.fit)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "lam: expected a positive finite number; got 0", lambda: stein(0.0)),
        (ValueError, "lam: expected a positive finite number; got -1", lambda: nkef(-1.0)),
        (ValueError, "lam: .*; got nan", lambda: kef(float("nan"))),
        (ValueError, "lam: .*; got 0", lambda: kef_cg(0)),
        (ValueError, "lam: .*; got -0.1", lambda: truncated_tikhonov(-0.1)),
        (ValueError, "lam: expected a non-negative number; got -1", lambda: ssge(lam=-1.0)),
        (ValueError, r"fraction: .*\(0, 1\]; got 1.5", lambda: spectral_cutoff(1.5)),
        (ValueError, "fraction: .*positive.*; got 0", lambda: ssge(0.0)),
        (ValueError, "num_steps: .*at least 1; got 0", lambda: nu_method(0)),
        (ValueError, "num_steps: .*at least 1; got -3", lambda: landweber(-3)),
        (TypeError, "num_steps: expected an integer; got 2.5", lambda: nu_method(2.5)),
        (ValueError, "nu: expected a positive finite number; got 0", lambda: nu_method(9, 0.0)),
        (ValueError, "nu: .*; got -1", lambda: nu_method(9, -1.0)),
        (ValueError, "step_size: .*; got -1", lambda: landweber(9, -1.0)),
        (ValueError, "max_steps: .*at least 1; got 0", lambda: kef_cg(max_steps=0)),
        (ValueError, "tol: .*; got 0", lambda: kef_cg(tol=0.0)),
        (ValueError, "bandwidth: expected .*; got 'scott'", lambda: kef(bandwidth="scott")),
        *(
            (
                ValueError,
                "profile: expected at least 4 continuous derivatives for CurlFree; got .*with 2",
                lambda preset=preset: fit(preset(profile=Matern(1.5))),
            )
            for preset in (kef, kef_cg, nkef, nu_method, landweber, spectral_cutoff)
        ),
        (ValueError, "count: .*at least 1; got 0", lambda: Landmarks(0)),
        (TypeError, "count: expected an integer; got 2.0", lambda: Landmarks(2.0)),
        (ValueError, r"fraction: .*\(0, 1\]; got 1.01", lambda: Landmarks(fraction=1.01)),
        (ValueError, "fraction: .*positive.*; got 0", lambda: Landmarks(fraction=0.0)),
        (
            ValueError,
            "landmarks: expected at most as many as there are samples, 11; got 12",
            lambda: fit(nkef(landmarks=Landmarks(12))),
        ),
        (
            ValueError,
            "at most as many as there are samples, 11; got 12",
            lambda: jax.eval_shape(
                lambda rows: nkef(landmarks=Landmarks(indices=rows)).fit(GOOD),
                jax.ShapeDtypeStruct((12,), jnp.int32),
            ),
        ),
        (ValueError, "landmarks: .*; got none", lambda: Landmarks()),
        (
            ValueError,
            "landmarks: expected one of count, fraction and indices; got count and fraction",
            lambda: Landmarks(2, 0.5),
        ),
        (
            ValueError,
            r"indices: expected values in \[0, 11\); got values from 1 to 11",
            lambda: fit(nkef(landmarks=Landmarks(indices=[1, 11]))),
        ),
        (
            ValueError,
            "indices: .*got values from -1 to 3",
            lambda: fit(nkef(landmarks=Landmarks(indices=[3, -1]))),
        ),
        (
            ValueError,
            "indices: expected distinct values; got 2 repeated",
            lambda: fit(nkef(landmarks=Landmarks(indices=[3, 1, 3, 3]))),
        ),
        (
            TypeError,
            "indices: expected integers; got dtype float",
            lambda: fit(nkef(landmarks=Landmarks(indices=np.ones(2)))),
        ),
        (
            ValueError,
            r"indices: expected shape \(m,\).*; got \(1, 2\)",
            lambda: fit(nkef(landmarks=Landmarks(indices=[[1, 2]]))),
        ),
        (
            ValueError,
            "key: expected None with indices",
            lambda: Landmarks(indices=[1], key=jax.random.key(0)),
        ),
        (
            TypeError,
            "landmarks: expected None or Landmarks.*; got 5",
            lambda: fit(nkef(landmarks=5)),
        ),
        (
            TypeError,
            "regularizer: expected a filter that is continuous.*got SpectralCutoff",
            lambda: fit(
                ScoreEstimator(
                    regularizer=SpectralCutoff(0.1), landmarks=Landmarks(3), solver=Krylov()
                )
            ),
        ),
        *(
            (
                TypeError,
                "log_density: expected a curl-free kernel; got Diagonal",
                lambda estimator=estimator: trace(lambda x: estimator.fit(x).log_density(x)),
            )
            for estimator in (ssge(), stein())
        ),
        (
            ValueError,
            "landmarks: expected at most .*factorized; got 5000",
            lambda: jax.eval_shape(
                nkef(landmarks=Landmarks(5000)).fit, jax.ShapeDtypeStruct((9000, 2), jnp.float32)
            ),
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(error, message, call):
    with pytest.raises(error, match=f"(?s){message}"):
        call()
