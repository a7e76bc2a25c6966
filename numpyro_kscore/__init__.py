"""Implicit variational inference for NumPyro by nonparametric score estimation."""

from numpyro_kscore._pytree import pytree, static
from numpyro_kscore.autoguide import AutoImplicit, AutoSemiImplicit
from numpyro_kscore.convergence import Convergence, FitResult, fit
from numpyro_kscore.discrepancy import Discrepancy, stein_discrepancy
from numpyro_kscore.distributions import Implicit, KernelExponentialFamily
from numpyro_kscore.elbo import ImplicitELBO
from numpyro_kscore.estimators import Median, ScoreEstimator
from numpyro_kscore.iterations import Landweber, NuMethod
from numpyro_kscore.kernels import CurlFree, Diagonal, Kernel
from numpyro_kscore.nystrom import Landmarks
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
from numpyro_kscore.selection import AutoBandwidth
from numpyro_kscore.solvers import ConjugateGradient, Dense, Krylov, Recursion, Solver

__all__ = [
    "AutoBandwidth",
    "AutoImplicit",
    "AutoSemiImplicit",
    "ConjugateGradient",
    "Convergence",
    "CurlFree",
    "Dense",
    "Diagonal",
    "Discrepancy",
    "Filter",
    "FitInfo",
    "FitResult",
    "Gaussian",
    "IMQ",
    "Implicit",
    "ImplicitELBO",
    "Kernel",
    "KernelExponentialFamily",
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
    "Tikhonov",
    "TruncatedTikhonov",
    "fit",
    "kef",
    "kef_cg",
    "landweber",
    "multi_bandwidth",
    "nkef",
    "nu_method",
    "pytree",
    "spectral_cutoff",
    "ssge",
    "static",
    "stein",
    "stein_discrepancy",
    "truncated_tikhonov",
]

__version__ = "0.1.0"
