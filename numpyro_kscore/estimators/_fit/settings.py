"""The settings a fit is compiled for."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding

from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._fit.bandwidth import AutoBandwidth
from numpyro_kscore.estimators._operators.random_features import RandomFeatures
from numpyro_kscore.estimators._operators.row_selection import Landmarks, Subset
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._spectrum import Solver

__all__ = ["FitSettings"]


@pytree
class FitSettings:
    """An estimator's configuration without its base: what a compiled fit depends on.

    Attributes:
        kernel: the kernel at unit bandwidth.
        regularizer: the filter; with landmarks the form it has on an operator without null space.
        solver: applies the filter.
        bandwidth: a number in standardized units, or a rule: ``Median`` or ``AutoBandwidth``.
        landmarks: samples whose span the estimate lies in, or None.
        subset: samples the operator is averaged over, or None.
        features: random features in whose span the estimate lies, or None.
        standardize: ``"local"``, ``"full"``, ``"diagonal"`` or ``"none"``.
        normalize: whether the kernel is divided by its trace.
        sharding: how samples are divided over devices, or None.
        precision: of the products of a Krylov space with the Gram operator.
    """

    kernel: Kernel
    regularizer: Regularizer
    solver: Solver
    bandwidth: Any
    landmarks: Landmarks | None
    subset: Subset | None
    features: RandomFeatures | None
    standardize: str = static()
    normalize: bool = static()
    sharding: NamedSharding | None = static()
    precision: str = static()

    @property
    def is_auto(self) -> bool:
        """Whether the strength or the bandwidth is selected by held-out loss."""
        return self.regularizer.is_auto or isinstance(self.bandwidth, AutoBandwidth)
