"""The settings a fit is compiled for, and rules that take the bandwidth from the samples."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from numpyro_kscore._util.checks import check_positive
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.estimators._operators.operator_options import Landmarks, RandomFeatures, Subset
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.regularizers._filters import Regularizer
from numpyro_kscore.solvers._spectrum import Solver


@pytree
class Median:
    """The median heuristic: the bandwidth is the median distance of samples, times a factor.

    Args:
        factor: positive multiplier.

    Example::

        from numpyro_kscore.estimators import Median, nu_method

        score = nu_method(bandwidth=Median(0.8)).fit(samples)
        score.info.bandwidth  # 1.28
    """

    factor: Any = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)


@pytree
class AutoBandwidth:
    """A bandwidth rule: the multiple of a reference with the least held-out loss.

    For a score estimator multiples less than the first have to be better by two standard errors.

    The reference is the median distance for a :class:`~numpyro_kscore.ScoreEstimator`, and the
    normal-reference bandwidth for a :class:`~numpyro_kscore.estimators.KernelDensity`.

    Args:
        factors: positive multiples that are tried; each costs as much as the fit itself.

    Example::

        from numpyro_kscore.estimators import AutoBandwidth, KernelDensity

        score = KernelDensity(AutoBandwidth((0.5, 0.7, 1.0))).fit(samples)
        score.info.losses  # (3,)
    """

    factors: tuple[float, ...] = static(default=(1.0, 2.0, 4.0, 0.5))

    def __post_init__(self) -> None:
        # A static field must be hashable, which lists and arrays are not.
        factors = tuple(float(factor) for factor in np.atleast_1d(self.factors))
        if not factors:
            raise ValueError("factors: expected at least one multiple; got none")
        check_positive("factors", np.array(factors))
        object.__setattr__(self, "factors", factors)


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
