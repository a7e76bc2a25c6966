"""How far draws are from a model, by the model's score at them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_kscore._tracing.draws import GuideDraws
from numpyro_kscore._util.checks import as_scored
from numpyro_kscore.diagnostics._discrepancy import Discrepancy
from numpyro_kscore.diagnostics._estimate import KhatEstimate
from numpyro_kscore.diagnostics._khat import check_is_draws, khat
from numpyro_kscore.estimators._base.coordinates import whiten_samples

__all__ = ["fisher_divergence", "spread_ratios"]


def fisher_divergence(draws: GuideDraws, fitted: KhatEstimate | None = None) -> Discrepancy:
    """A lower bound of the Fisher divergence ``E|s_q - s_p|²``, averaged over dimensions.

    For any field f, ``-2 E[½|f|² + f·s_p + div f]`` is the divergence less ``E|f - (s_q - s_p)|²``.
    Here f is the estimated difference of the scores, at held-out draws. In whitened coordinates the
    bound has no units: for a Gaussian guide in which only the means are wrong, the divergence is
    their mean squared error in standard deviations squared. The bound is zero if no difference is
    found.

    Args:
        draws: from :func:`~numpyro_kscore.evaluate_guide`.
        fitted: k̂ of the same draws, which saves its computation; ignored if it is exact.

    Returns:
        The bound and its standard error.

    Raises:
        TypeError: if the draws are not ``GuideDraws``.
        ValueError: for draws that do not fit together, or without their Laplacian.
        FloatingPointError: see :func:`~numpyro_kscore.khat`.
        ImportError: without ArviZ.

    Cost: that of :func:`~numpyro_kscore.khat`; nothing with ``fitted``.

    Example::

        from numpyro_kscore.diagnostics import fisher_divergence

        bound = fisher_divergence(draws)
        bound.value < 0.1 + 3 * bound.standard_error  # True
    """
    check_is_draws(draws)
    if draws.laplacian is None:
        raise ValueError(
            "draws: expected the model's Laplacian; got None. evaluate_guide gives it if it is "
            "finite at every draw"
        )
    if fitted is None or fitted.energy == "exact":
        fitted = khat(draws, exact=False)
    value, error = fitted.fisher
    return Discrepancy(jnp.asarray(value), jnp.asarray(error))


def spread_ratios(samples: Any, scores: Any) -> Array:
    """Ratios of the guide's standard deviations to the model's, by direction.

    If the draws are from the model, ``-E[s zᵀ]`` is the identity in whitened coordinates, by
    Stein's identity. Its eigenvalues are the ratios of variances if both are Gaussian; in general
    they compare the guide's spread with the model's curvature, averaged over the guide. A ratio is
    the square root, or 0 for a negative eigenvalue: the model is not concave there on average.

    Args:
        samples: draws of the guide, (n, d).
        scores: the model's score at them, (n, d).

    Returns:
        Ratios, without units, ascending, (d,).

    Raises:
        TypeError: if they are not floating point.
        ValueError: if the shapes differ, there are fewer than 4 draws, or something is not finite.

    Cost: O(n d² + d³).

    Example::

        from numpyro_kscore.diagnostics import spread_ratios

        ratios = spread_ratios(samples, -samples / 2**2)  # of a model that is twice as wide
        ratios  # (2,): about 0.5, but for the noise of 200 draws
        max(abs(ratios - 0.5)) < 0.1  # True
    """
    return _spread_ratios(*as_scored(samples, scores, minimum=4))


@jax.jit
def _spread_ratios(x: Array, s: Array) -> Array:
    coordinates = whiten_samples(x)
    product = -coordinates.scores_to_kernel(s).T @ coordinates.to_kernel(x) / x.shape[0]
    return jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(0.5 * (product + product.T)), 0.0))
