"""Implicit variational inference for NumPyro by nonparametric score estimation."""

from importlib.metadata import PackageNotFoundError, version

from numpyro_kscore import (
    diagnostics,
    estimators,
    functions,
    kernels,
    regularizers,
    samplers,
    sliced,
    solvers,
)
from numpyro_kscore._fit.fit import fit
from numpyro_kscore._fit.portable import load_guide, save_guide
from numpyro_kscore._fit.result import FitInfo, FitResult
from numpyro_kscore._guides.autoguide import AutoImplicit
from numpyro_kscore._guides.semi_implicit import AutoSemiImplicit
from numpyro_kscore._model.implicit import Implicit
from numpyro_kscore._objective.elbo import ImplicitELBO
from numpyro_kscore._starts.initial_gaussian import initial_gaussian
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.diagnostics import (
    Diagnosis,
    diagnose,
    evaluate_guide,
    khat,
    log_evidence,
    to_arviz,
)
from numpyro_kscore.estimators import KernelExponentialFamily, ScoreEstimator
from numpyro_kscore.samplers import refine, warm_start

__all__ = [
    "AutoImplicit",
    "AutoSemiImplicit",
    "Diagnosis",
    "FitInfo",
    "FitResult",
    "Implicit",
    "ImplicitELBO",
    "KernelExponentialFamily",
    "ScoreEstimator",
    "diagnose",
    "diagnostics",
    "estimators",
    "evaluate_guide",
    "fit",
    "functions",
    "initial_gaussian",
    "khat",
    "kernels",
    "load_guide",
    "log_evidence",
    "pytree",
    "refine",
    "regularizers",
    "samplers",
    "save_guide",
    "sliced",
    "solvers",
    "static",
    "to_arviz",
    "warm_start",
]

try:
    __version__ = version("numpyro-kscore")
except PackageNotFoundError:
    # A source tree that was never installed.
    __version__ = "0+unknown"
