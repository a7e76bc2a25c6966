"""Regularizers: scalar filters on the spectrum of the kernel operator."""

from numpyro_kscore.regularizers._filters import (
    Filter,
    Regularizer,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
)
from numpyro_kscore.regularizers._iterations import LandweberIteration, NuMethod

__all__ = [
    "Filter",
    "LandweberIteration",
    "NuMethod",
    "Regularizer",
    "SpectralCutoff",
    "Tikhonov",
    "TruncatedTikhonov",
]
