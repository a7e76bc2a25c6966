"""Score estimation from samples: the general estimator, and the published ones by name."""

from numpyro_kscore.estimators._bandwidth import AutoBandwidth, Median
from numpyro_kscore.estimators._contract import AtSamples
from numpyro_kscore.estimators._density import KernelExponentialFamily
from numpyro_kscore.estimators._estimator import ScoreEstimator
from numpyro_kscore.estimators._info import ScoreInfo, Selection
from numpyro_kscore.estimators._information import InformationEstimate, entropy, kl_divergence
from numpyro_kscore.estimators._kernel_density import KernelDensity
from numpyro_kscore.estimators._kernel_density_score import KernelDensityInfo, KernelDensityScore
from numpyro_kscore.estimators._normalization import Normalization
from numpyro_kscore.estimators._presets import (
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
from numpyro_kscore.estimators._random_features import RandomFeatures
from numpyro_kscore.estimators._reference import NormalReference
from numpyro_kscore.estimators._row_selection import Landmarks, Subset
from numpyro_kscore.estimators._score import Score
from numpyro_kscore.estimators._streaming import StreamState

__all__ = [
    "AtSamples",
    "AutoBandwidth",
    "InformationEstimate",
    "KernelDensity",
    "KernelDensityInfo",
    "KernelDensityScore",
    "KernelExponentialFamily",
    "Landmarks",
    "Median",
    "NormalReference",
    "Normalization",
    "RandomFeatures",
    "Score",
    "ScoreEstimator",
    "ScoreInfo",
    "Selection",
    "StreamState",
    "Subset",
    "entropy",
    "kef",
    "kef_cg",
    "kl_divergence",
    "landweber",
    "nkef",
    "nu_method",
    "spectral_cutoff",
    "ssge",
    "stein",
    "truncated_tikhonov",
]
