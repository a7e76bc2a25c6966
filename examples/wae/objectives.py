"""Score estimators by name, and the objective of a Wasserstein autoencoder with each."""

from collections.abc import Callable
from typing import Any

from numpyro_kscore import ImplicitELBO, ScoreEstimator
from numpyro_kscore.estimators import (
    Landmarks,
    Median,
    kef,
    kef_cg,
    landweber,
    nkef,
    nu_method,
    ssge,
    stein,
)
from numpyro_kscore.regularizers import NuMethod
from numpyro_kscore.sliced import SlicedScoreMatching
from numpyro_kscore.solvers import Krylov

ROWS = "rows"  # the plate of a batch's images
# Estimators as published, except for the solver where a dense one is too large. Each comes with the
# name of its parameter and the value used here.
ESTIMATORS: dict[str, tuple[Callable[[Any, int], Any] | None, str, float]] = {
    "default": (None, "", 0.0),
    # What posteriors get: in whitened coordinates, with the prior's score as base and a jackknife.
    "whitened-nu": (lambda steps, dim: _whitened_nu(int(steps)), "steps", 45),
    "nu": (lambda steps, dim: nu_method(int(steps), solver=_krylov(dim)), "steps", 90),
    "landweber": (lambda steps, dim: landweber(int(steps), solver=_krylov(dim)), "steps", 1000),
    "kef": (lambda lam, dim: kef(lam, solver=Krylov(64)), "lam", 1e-4),
    "kef-cg": (lambda lam, dim: kef_cg(lam), "lam", 1e-4),
    "nkef-20": (lambda lam, dim: _nkef(lam, 0.2), "lam", 1e-4),
    "nkef-40": (lambda lam, dim: _nkef(lam, 0.4), "lam", 1e-4),
    "nkef-80": (lambda lam, dim: _nkef(lam, 0.8), "lam", 1e-4),
    "ssge": (lambda share, dim: ssge(share), "share", 0.99),
    "stein": (lambda lam, dim: stein(lam), "lam", 1e-4),
    "ssm": (
        lambda rate, dim: SlicedScoreMatching(
            (256, 256), learning_rate=rate, standardize="none", base=None
        ),
        "rate",
        1e-3,
    ),
}


def _krylov(latent_dim: int) -> Krylov:
    """Enough steps to reproduce 90 iterations of the ν-method on 64 codes to 5 · 10⁻⁵."""
    return Krylov(24 if latent_dim < 32 else 12 if latent_dim < 128 else 8)


def _whitened_nu(num_steps: int) -> ScoreEstimator:
    return ScoreEstimator(
        regularizer=NuMethod(num_steps), bandwidth=Median(0.8), standardize="full"
    )


def _nkef(lam: float, fraction: float) -> Any:
    return nkef(lam, landmarks=Landmarks(fraction=fraction), solver=Krylov(32))


def make_objective(name: str, value: float | None, latent_dim: int) -> ImplicitELBO:
    """The objective with one of ``ESTIMATORS``.

    Published estimators are used as published: without a base score and without bias correction.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"estimator: expected one of {', '.join(ESTIMATORS)}; got {name!r}")
    make, _, default = ESTIMATORS[name]
    if make is None:
        return ImplicitELBO(1, aggregate=ROWS)
    estimator = make(default if value is None else value, latent_dim)
    if name == "whitened-nu":
        return ImplicitELBO(1, estimator=estimator, debias="jackknife", aggregate=ROWS)
    return ImplicitELBO(1, estimator=estimator, base=None, debias=None, aggregate=ROWS)
