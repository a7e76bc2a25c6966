"""Estimators under the names of the literature, to the letter: no whitening, no base score.

Each returns a :class:`~numpyro_kscore.ScoreEstimator` on the paper's own scale of the kernel.
"""

from __future__ import annotations

from typing import Any

from numpyro_kscore.estimators import ScoreEstimator
from numpyro_kscore.kernels import CurlFree, Diagonal, Kernel
from numpyro_kscore.profiles import IMQ, RadialProfile
from numpyro_kscore.regularizers import (
    Landweber,
    NuMethod,
    Regularizer,
    SpectralCutoff,
    Tikhonov,
)
from numpyro_kscore.solvers import ConjugateGradient, Dense, Krylov, Solver

__all__ = ["kef", "kef_cg", "landweber", "nu_method", "ssge"]


def _literal(
    kernel: Kernel, regularizer: Regularizer, solver: Solver, bandwidth: Any
) -> ScoreEstimator:
    return ScoreEstimator(
        kernel, regularizer, solver, bandwidth, standardize="none", base=None, normalize=False
    )


def nu_method(
    num_steps: int = 100,
    nu: float = 1.0,
    *,
    profile: RadialProfile = IMQ(),  # noqa: B008 (frozen)
    bandwidth: Any = "median",
    solver: Solver = Krylov(32),  # noqa: B008 (frozen)
) -> ScoreEstimator:
    """The ν-method with a curl-free kernel (Zhou, Shi and Zhu 2020, Examples 3.5 and C.4).

    Args:
        num_steps: iterations t; the regularisation is about t⁻².
        nu: qualification.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.
        solver: ``Krylov(32)`` reproduces 100 iterations to rounding; ``Recursion()`` runs them.
    """
    return _literal(CurlFree(profile), NuMethod(num_steps, nu), solver, bandwidth)


def landweber(
    num_steps: int = 100,
    step_size: Any = 1.0,
    *,
    profile: RadialProfile = IMQ(),  # noqa: B008 (frozen)
    bandwidth: Any = "median",
    solver: Solver = Krylov(32),  # noqa: B008 (frozen)
) -> ScoreEstimator:
    """Landweber iteration with a curl-free kernel (Zhou, Shi and Zhu 2020, Theorem 3.4).

    Args:
        num_steps: iterations t; the regularisation is about 1/(η t).
        step_size: η.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.
        solver: ``Krylov(...)`` or ``Recursion()``.
    """
    return _literal(CurlFree(profile), Landweber(num_steps, step_size), solver, bandwidth)


def kef(
    lam: Any = 1e-3,
    *,
    profile: RadialProfile = IMQ(),  # noqa: B008 (frozen)
    bandwidth: Any = "median",
    solver: Solver = Dense(),  # noqa: B008 (frozen)
) -> ScoreEstimator:
    """Kernel exponential family, exactly (Sriperumbudur et al. 2017; ZSZ 2020, Theorem 3.1).

    Args:
        lam: λ on the eigenvalues of K/n.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.
        solver: ``Dense()`` costs O((n d)³); ``Krylov(...)`` is exact to its residual.
    """
    return _literal(CurlFree(profile), Tikhonov(lam), solver, bandwidth)


def kef_cg(
    lam: Any = 1e-3,
    *,
    max_steps: int = 40,
    tol: Any = 1e-4,
    profile: RadialProfile = IMQ(),  # noqa: B008 (frozen)
    bandwidth: Any = "median",
) -> ScoreEstimator:
    """Kernel exponential family by conjugate gradients (Zhou, Shi and Zhu 2020, section 3.5).

    Args:
        lam: λ on the eigenvalues of K/n.
        max_steps: most iterations; at small λ in low dimension 40 are too few, see ``info``.
        tol: relative residual to stop at.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.
    """
    solver = ConjugateGradient(max_steps, tol)
    return _literal(CurlFree(profile), Tikhonov(lam), solver, bandwidth)


def ssge(
    share: Any = 0.95,
    *,
    lam: Any = None,
    profile: RadialProfile = IMQ(),  # noqa: B008 (frozen)
    bandwidth: Any = "median",
) -> ScoreEstimator:
    """Spectral Stein gradient estimator (Shi, Sun and Zhu 2018; ZSZ 2020, Example 3.4).

    Args:
        share: share of the kernel matrix's trace that the kept eigenvalues hold.
        lam: threshold on the eigenvalues of K/n; replaces ``share``.
        profile: radial profile of the diagonal kernel.
        bandwidth: ``"median"`` or a number in the samples' units.
    """
    cutoff = SpectralCutoff(share=share) if lam is None else SpectralCutoff(lam=lam)
    return _literal(Diagonal(profile), cutoff, Dense(), bandwidth)
