"""Published estimators by name, exactly as published: no whitening, no base score.

Each returns a :class:`~numpyro_kscore.ScoreEstimator` on the paper's own scale of the kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from numpyro_kscore.estimators._fit.input_checks import check_solver_of_auto
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator
from numpyro_kscore.estimators._fit.settings import AutoBandwidth
from numpyro_kscore.estimators._operators.operator_options import Landmarks
from numpyro_kscore.kernels._contract import Kernel
from numpyro_kscore.kernels._matrix import CurlFree, Diagonal
from numpyro_kscore.kernels._profiles import IMQ, RadialProfile
from numpyro_kscore.regularizers._filters import (
    Regularizer,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
)
from numpyro_kscore.regularizers._iterations import LandweberIteration, NuMethod
from numpyro_kscore.solvers._solvers import ConjugateGradient, Dense, Krylov
from numpyro_kscore.solvers._spectrum import Solver

PROFILE, KRYLOV, DENSE = IMQ(), Krylov(32), Dense()
LANDMARKS = Landmarks(fraction=0.1)


def _literal(
    kernel: Kernel, regularizer: Regularizer, solver: Solver, bandwidth: Any
) -> ScoreEstimator:
    estimator = ScoreEstimator(
        kernel, regularizer, solver, bandwidth, standardize="none", base=None, normalize=False
    )
    if regularizer.is_auto or isinstance(estimator.bandwidth, AutoBandwidth):
        check_solver_of_auto(solver)
    return estimator


def nu_method(
    num_steps: int = 100,
    nu: float = 1.0,
    *,
    profile: RadialProfile = PROFILE,
    bandwidth: Any = "median",
    solver: Solver = KRYLOV,
) -> ScoreEstimator:
    """The ν-method with a curl-free kernel (Zhou, Shi and Zhu 2020, Examples 3.5 and C.4).

    Args:
        num_steps: iterations t; the regularization is about t⁻².
        nu: qualification.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.
        solver: ``Krylov(32)`` reproduces 100 iterations to rounding; ``Recursion()`` runs them.

    Returns:
        An estimator on the paper's own scale: λ and step counts act on eigenvalues of K/n, and
        scores are in 1/unit of the samples.

    Raises:
        TypeError: for a count that is not an integer; for a strength ``"auto"``, where there is
            one, with another solver than :class:`Krylov`.
        ValueError: for a setting out of range.

    Cost: about 32 products with the Gram operator at the default solver, O(n² d) each.

    Example::

        from numpyro_kscore.estimators import nu_method

        score = nu_method(num_steps=50).fit(samples)
        score(samples[:5])  # (5, 2)
    """
    return _literal(CurlFree(profile), NuMethod(num_steps, nu), solver, bandwidth)


def landweber(
    num_steps: int = 100,
    step_size: Any = 1.0,
    *,
    profile: RadialProfile = PROFILE,
    bandwidth: Any = "median",
    solver: Solver = KRYLOV,
) -> ScoreEstimator:
    """Landweber iteration with a curl-free kernel (Zhou, Shi and Zhu 2020, Theorem 3.4).

    Args:
        num_steps: iterations t; the regularization is about 1/(η t).
        step_size: η.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.
        solver: ``Krylov(...)`` or ``Recursion()``.

    Returns:
        An estimator on the paper's own scale, as that of :func:`nu_method`.

    Cost: about 32 products with the Gram operator at the default solver, O(n² d) each.

    Example::

        from numpyro_kscore.estimators import landweber

        score = landweber(num_steps=1000).fit(samples)
        score(samples[:5])  # (5, 2)
    """
    return _literal(CurlFree(profile), LandweberIteration(num_steps, step_size), solver, bandwidth)


def kef(
    lam: Any = 1e-3,
    *,
    profile: RadialProfile = PROFILE,
    bandwidth: Any = "median",
    solver: Solver = DENSE,
) -> ScoreEstimator:
    """Kernel exponential family, exactly (Sriperumbudur et al. 2017; ZSZ 2020, Theorem 3.1).

    Args:
        lam: λ on the eigenvalues of K/n; with ``Krylov(...)`` also ``"auto"``.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.
        solver: ``Dense()`` costs O((n d)³); ``Krylov(...)`` is exact to its residual.

    Returns:
        An estimator on the paper's own scale, as that of :func:`nu_method`.

    Cost: O((n d)³) time and O((n d)²) memory at the default solver.

    Example::

        from numpyro_kscore.estimators import kef

        score = kef(lam=1e-2).fit(samples)
        score(samples[:5])  # (5, 2)
    """
    return _literal(CurlFree(profile), Tikhonov(lam), solver, bandwidth)


def kef_cg(
    lam: Any = 1e-3,
    *,
    max_steps: int = 40,
    tol: Any = 1e-4,
    profile: RadialProfile = PROFILE,
    bandwidth: Any = "median",
) -> ScoreEstimator:
    """Kernel exponential family by conjugate gradients (Zhou, Shi and Zhu 2020, section 3.5).

    Args:
        lam: λ on the eigenvalues of K/n.
        max_steps: largest number of iterations; at small λ in low dimension 40 are too few, see
            ``info``.
        tol: relative residual to stop at.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.

    Returns:
        An estimator on the paper's own scale, as that of :func:`nu_method`.

    Cost: at most ``max_steps`` products with the Gram operator, O(n² d) each.

    Example::

        from numpyro_kscore.estimators import kef_cg

        score = kef_cg(lam=1e-2).fit(samples)
        score.info.converged  # True
    """
    solver = ConjugateGradient(max_steps, tol)
    return _literal(CurlFree(profile), Tikhonov(lam), solver, bandwidth)


def truncated_tikhonov(
    lam: Any = 1e-3, *, profile: RadialProfile = PROFILE, bandwidth: Any = "median"
) -> ScoreEstimator:
    """Tikhonov in the range of a curl-free kernel: :func:`nkef` with every sample a landmark.

    Implements Zhou, Shi and Zhu (2020), Example 3.6 before its Nyström approximation.

    Args:
        lam: λ on the eigenvalues of K/n.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.

    Returns:
        An estimator on the paper's own scale, as that of :func:`nu_method`.

    Cost: O((n d)³) time and O((n d)²) memory.

    Example::

        from numpyro_kscore.estimators import truncated_tikhonov

        score = truncated_tikhonov(lam=1e-2).fit(samples)
        score(samples[:5])  # (5, 2)
    """
    return _literal(CurlFree(profile), TruncatedTikhonov(lam), DENSE, bandwidth)


def nkef(
    lam: Any = 1e-3,
    *,
    landmarks: Landmarks = LANDMARKS,
    profile: RadialProfile = PROFILE,
    bandwidth: Any = "median",
    solver: Solver = DENSE,
) -> ScoreEstimator:
    """Nyström kernel exponential family (Sutherland et al. 2018; ZSZ 2020, Example 3.6).

    Args:
        lam: λ on the eigenvalues of K/n.
        landmarks: which samples the estimate is a combination of.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.
        solver: ``Dense()`` costs O(n m² d² + m³ d³) for m landmarks; ``Krylov(...)`` and
            ``ConjugateGradient(...)`` O(n m d) a step after O(m³ d³).

    Returns:
        An estimator on the paper's own scale, as that of :func:`nu_method`.

    Example::

        from numpyro_kscore.estimators import Landmarks, nkef

        score = nkef(landmarks=Landmarks(20, key=random.key(0))).fit(samples)
        score(samples[:5])  # (5, 2)
    """
    estimator = _literal(CurlFree(profile), TruncatedTikhonov(lam), solver, bandwidth)
    return dataclasses.replace(estimator, landmarks=landmarks)


def spectral_cutoff(
    fraction: Any = 0.95,
    *,
    lam: Any = None,
    profile: RadialProfile = PROFILE,
    bandwidth: Any = "median",
) -> ScoreEstimator:
    """Spectral cut-off with a curl-free kernel (Zhou, Shi and Zhu 2020, Theorem 3.2).

    Args:
        fraction: fraction of the kernel matrix's trace that the kept eigenvalues hold.
        lam: threshold on the eigenvalues of K/n; replaces ``fraction``.
        profile: radial profile of the kernel.
        bandwidth: ``"median"`` or a number in the samples' units.

    Returns:
        An estimator on the paper's own scale, as that of :func:`nu_method`.

    Cost: O((n d)³) time and O((n d)²) memory.

    Example::

        from numpyro_kscore.estimators import spectral_cutoff

        score = spectral_cutoff(fraction=0.9).fit(samples)
        score(samples[:5])  # (5, 2)
    """
    cutoff = SpectralCutoff(fraction=fraction) if lam is None else SpectralCutoff(lam=lam)
    return _literal(CurlFree(profile), cutoff, DENSE, bandwidth)


def stein(
    lam: Any = 1e-3, *, profile: RadialProfile = PROFILE, bandwidth: Any = "median"
) -> ScoreEstimator:
    """Stein gradient estimator (Li and Turner 2018; ZSZ 2020, Example 3.7).

    Away from the samples it is the function of the kernel's space with these values at them, as
    ZSZ continue it. Li and Turner add each point to the samples and solve again, which is no such
    function; at the samples the two agree.

    Args:
        lam: λ on the eigenvalues of K/n; the η of Li and Turner over n.
        profile: radial profile of the diagonal kernel.
        bandwidth: ``"median"`` or a number in the samples' units.

    Returns:
        An estimator on the paper's own scale, as that of :func:`nu_method`.

    Cost: O(n³ + n² d) time and O(n²) memory.

    Example::

        from numpyro_kscore.estimators import stein

        score = stein(lam=1e-2).fit(samples)
        score(samples[:5])  # (5, 2)
    """
    return _literal(Diagonal(profile), TruncatedTikhonov(lam), DENSE, bandwidth)


def ssge(
    fraction: Any = 0.95,
    *,
    lam: Any = None,
    profile: RadialProfile = PROFILE,
    bandwidth: Any = "median",
) -> ScoreEstimator:
    """Spectral Stein gradient estimator (Shi, Sun and Zhu 2018; ZSZ 2020, Example 3.4).

    Args:
        fraction: fraction of the kernel matrix's trace that the kept eigenvalues hold.
        lam: threshold on the eigenvalues of K/n; replaces ``fraction``.
        profile: radial profile of the diagonal kernel.
        bandwidth: ``"median"`` or a number in the samples' units.

    Returns:
        An estimator on the paper's own scale, as that of :func:`nu_method`.

    Cost: O(n³ + n² d) time and O(n²) memory.

    Example::

        from numpyro_kscore.estimators import ssge

        score = ssge(fraction=0.9).fit(samples)
        score(samples[:5])  # (5, 2)
    """
    curl_free = spectral_cutoff(fraction, lam=lam, bandwidth=bandwidth)
    return dataclasses.replace(curl_free, kernel=Diagonal(profile))
