"""Implicit variational inference for NumPyro by nonparametric score estimation."""

from importlib.metadata import PackageNotFoundError, version

from numpyro_kscore._pytree import pytree, static
from numpyro_kscore.arviz_io import to_arviz
from numpyro_kscore.autoguide import AutoImplicit, AutoSemiImplicit
from numpyro_kscore.convergence import Convergence, FitResult, fit
from numpyro_kscore.diagnostics import (
    Diagnosis,
    diagnose,
    fisher_divergence,
    spread_ratios,
    vsbc,
)
from numpyro_kscore.discrepancy import Discrepancy, stein_discrepancy
from numpyro_kscore.distributions import Implicit, KernelExponentialFamily
from numpyro_kscore.draws import GuideDraws, evaluate_guide
from numpyro_kscore.elbo import ImplicitELBO
from numpyro_kscore.estimators import ScoreEstimator
from numpyro_kscore.importance import Khat, khat
from numpyro_kscore.iterations import Landweber, NuMethod
from numpyro_kscore.kernels import CurlFree, Diagonal, Kernel
from numpyro_kscore.nystrom import Landmarks
from numpyro_kscore.pareto import importance_resample, pareto_smooth, weight_ess
from numpyro_kscore.presets import (
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
from numpyro_kscore.profiles import (
    IMQ,
    Gaussian,
    Matern,
    Mixture,
    Profile,
    RadialProfile,
    RationalQuadratic,
    multi_bandwidth,
)
from numpyro_kscore.regularizers import (
    Filter,
    Regularizer,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
)
from numpyro_kscore.score import FitInfo, Score
from numpyro_kscore.selection import AutoBandwidth, Median
from numpyro_kscore.solvers import ConjugateGradient, Dense, Krylov, Recursion, Solver
from numpyro_kscore.stein_test import JumpTest, SteinTest, ksd, mode_jump_test
from numpyro_kscore.subset import Subset

__all__ = [
    "AutoBandwidth",
    "AutoImplicit",
    "AutoSemiImplicit",
    "ConjugateGradient",
    "Convergence",
    "CurlFree",
    "Dense",
    "Diagnosis",
    "Diagonal",
    "Discrepancy",
    "Filter",
    "FitInfo",
    "FitResult",
    "Gaussian",
    "GuideDraws",
    "IMQ",
    "Implicit",
    "ImplicitELBO",
    "JumpTest",
    "Kernel",
    "KernelExponentialFamily",
    "Khat",
    "Krylov",
    "Landmarks",
    "Landweber",
    "Matern",
    "Median",
    "Mixture",
    "NuMethod",
    "Profile",
    "RadialProfile",
    "RationalQuadratic",
    "Recursion",
    "Regularizer",
    "Score",
    "ScoreEstimator",
    "Solver",
    "SpectralCutoff",
    "SteinTest",
    "Subset",
    "Tikhonov",
    "TruncatedTikhonov",
    "diagnose",
    "evaluate_guide",
    "fisher_divergence",
    "fit",
    "importance_resample",
    "kef",
    "kef_cg",
    "khat",
    "ksd",
    "landweber",
    "mode_jump_test",
    "multi_bandwidth",
    "nkef",
    "nu_method",
    "pareto_smooth",
    "pytree",
    "spectral_cutoff",
    "spread_ratios",
    "ssge",
    "static",
    "stein",
    "stein_discrepancy",
    "to_arviz",
    "truncated_tikhonov",
    "vsbc",
    "weight_ess",
]

try:
    __version__ = version("numpyro-kscore")
except PackageNotFoundError:
    # A source tree that was never installed.
    __version__ = "0+unknown"
