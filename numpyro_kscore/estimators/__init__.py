"""Score estimation from samples: the general estimator, and the published ones by name."""

from numpyro_kscore.estimators._density.exponential_family import KernelExponentialFamily
from numpyro_kscore.estimators._density.information import (
    InformationEstimate,
    entropy,
    kl_divergence,
)
from numpyro_kscore.estimators._density.kernel_density import KernelDensity, NormalReference
from numpyro_kscore.estimators._density.kernel_density_score import (
    KernelDensityInfo,
    KernelDensityScore,
)
from numpyro_kscore.estimators._density.normalization import Normalization
from numpyro_kscore.estimators._fit.fitting import StreamState
from numpyro_kscore.estimators._fit.guide_estimator import AtSamples
from numpyro_kscore.estimators._fit.info import ScoreInfo, Selection
from numpyro_kscore.estimators._fit.presets import (
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
from numpyro_kscore.estimators._fit.score import Score
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator
from numpyro_kscore.estimators._fit.settings import AutoBandwidth, Median
from numpyro_kscore.estimators._operators.operator_options import Landmarks, RandomFeatures, Subset

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
