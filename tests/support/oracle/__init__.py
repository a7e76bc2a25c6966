"""Dense float64 reference for the kernel score estimators, written from their definition.

Everything follows from one positive-definite matrix-valued kernel: curl-free,
``K(x, y) = -grad_x grad_x^T phi(|x - y|^2 / h^2)``, or diagonal,
``K(x, y) = phi(|x - y|^2 / h^2) I``. With ``L f = (1/n) sum_j K(., x_j) f(x_j)``,
``zeta(x) = (1/n) sum_j div_{x_j} K(x_j, x)^T`` and a base score ``s0`` the estimator is

    s = s0 - g(L) zeta',    zeta' = zeta + L s0.

On the samples ``L`` is the matrix ``K / n``. Elsewhere the exact functional calculus uses
``g(L) = g(0) + r(L) L`` with ``r(t) = (g(t) - g(0)) / t``, and ``L r(L) f = S* r(K/n) S f`` for the
sampling operator ``S`` and its adjoint ``S* c = (1/n) sum_j K(., x_j) c_j``.

Kernels are held twice: by explicit derivatives of phi (NumPy) and by automatic differentiation
(the ``*_autodiff`` functions, which need 64-bit mode). Nothing here is imported from the library.
"""

from .accuracy import relative_error
from .coordinates import (
    gaussian_score,
    held_out_gaussian,
    held_out_parameters,
    left_out_gaussian_scores,
    local_shape,
    median_distance,
    whitener,
)
from .estimators import estimate, literal_nu_steps
from .filters import (
    Filter,
    cutoff_for_share,
    landweber,
    nu_exact,
    nu_method,
    nu_residual_jacobi,
    spectral_cutoff,
    tikhonov,
    truncated_tikhonov,
)
from .kernels import Kernel
from .landmarks import nystrom
from .profiles import gaussian, imq, matern, mixture, rational_quadratic, shifted_exponential
from .random_features import FeatureFields, filtered
from .smoothing import kernel_density

__all__ = [
    "FeatureFields",
    "Filter",
    "Kernel",
    "cutoff_for_share",
    "estimate",
    "filtered",
    "gaussian",
    "gaussian_score",
    "held_out_gaussian",
    "held_out_parameters",
    "imq",
    "kernel_density",
    "landweber",
    "left_out_gaussian_scores",
    "literal_nu_steps",
    "local_shape",
    "matern",
    "median_distance",
    "mixture",
    "nu_exact",
    "nu_method",
    "nu_residual_jacobi",
    "nystrom",
    "rational_quadratic",
    "relative_error",
    "shifted_exponential",
    "spectral_cutoff",
    "tikhonov",
    "truncated_tikhonov",
    "whitener",
]
