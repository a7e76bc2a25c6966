"""Kernels and the radial profiles they are made of."""

from numpyro_kscore.kernels._contract import (
    DivergenceWeights,
    FieldWeights,
    Kernel,
    PotentialWeights,
)
from numpyro_kscore.kernels._matrix import CurlFree, Diagonal
from numpyro_kscore.kernels._profiles import (
    IMQ,
    Gaussian,
    Matern,
    Mixture,
    Profile,
    RadialProfile,
    RationalQuadratic,
    multi_bandwidth,
)

__all__ = [
    "IMQ",
    "CurlFree",
    "Diagonal",
    "DivergenceWeights",
    "FieldWeights",
    "Gaussian",
    "Kernel",
    "Matern",
    "Mixture",
    "PotentialWeights",
    "Profile",
    "RadialProfile",
    "RationalQuadratic",
    "multi_bandwidth",
]
