"""The settings a fit is compiled for."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._fit.bandwidth import AutoBandwidth
from numpyro_kscore.estimators._operators.operator_options import Landmarks, RandomFeatures, Subset
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._spectrum import Solver


@pytree
class FitSettings:
    """An estimator's configuration without its base: what a compiled fit depends on.

    Fields are those of :class:`~numpyro_kscore.ScoreEstimator`. The bandwidth is a number in
    standardized units, or a rule; with landmarks the regularizer has the form for an operator
    without null space.
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

    def scale(self, dim: int, bandwidth: jax.Array) -> jax.Array:
        """Factor on the kernel in ``dim`` dimensions, with points in units of the bandwidth."""
        if self.normalize:
            return 1.0 / self.kernel.trace(dim).astype(bandwidth.dtype)
        return bandwidth ** -self.kernel.scale_exponent()
