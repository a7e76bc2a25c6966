"""Can this fit be trusted? ``diagnose`` runs every diagnostic and answers in words.

Each question has a function of its own: :func:`~numpyro_kscore.khat` (is the guide close enough to
be corrected?), :func:`~numpyro_kscore.diagnostics.ksd` (is the local shape right?),
:func:`~numpyro_kscore.diagnostics.mode_jump_test` (is there a mode where the guide has no draws?),
:func:`spread_ratios` (too narrow, or too wide?), :func:`fisher_divergence` (by how much, at
least?). NumPyro's ``vsbc_diagnostic`` asks whether the *procedure* is calibrated over data sets, by
fitting many; :func:`vsbc` calls it for an ``SVI``, whatever its objective.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import SVI
from numpyro.infer.calibration import vsbc_diagnostic

from numpyro_kscore._tracing.draws import GuideDraws
from numpyro_kscore._util.checks import as_scored, check_count
from numpyro_kscore._util.keys import check_key, key_apart
from numpyro_kscore.diagnostics._codes import Code, Verdict
from numpyro_kscore.diagnostics._decide import decide
from numpyro_kscore.diagnostics._discrepancy import Discrepancy
from numpyro_kscore.diagnostics._draws import (
    evaluate_fitted,
    fitted_guide,
    log_joint,
)
from numpyro_kscore.diagnostics._estimate import KhatEstimate
from numpyro_kscore.diagnostics._khat import check_is_draws, compute_khat, energy_estimator, khat
from numpyro_kscore.diagnostics._messages import advise, describe
from numpyro_kscore.diagnostics._pareto import pareto_smooth, weight_ess
from numpyro_kscore.diagnostics._stein_tests import (
    JumpTest,
    SteinTest,
    compute_jump_test,
    compute_ksd,
)
from numpyro_kscore.estimators._coordinates import whiten_samples

__all__ = ["Diagnosis", "diagnose", "fisher_divergence", "spread_ratios", "vsbc"]

# Draws for tests over all pairs, which need no more.
TEST_DRAWS = 1_000


class Diagnosis(NamedTuple):
    """The answers of all diagnostics to one fit.

    Attributes:
        verdict: ``"good"``, ``"bad"`` or ``"cannot tell"``.
        codes: what was found, to match on: some of ``"draws lost"``, ``"mode missed"``,
            ``"far draws missed"``, ``"collapsed"``, ``"too narrow"``, ``"too wide"``,
            ``"shape differs"``, and last ``"correctable"``, ``"not correctable"``,
            ``"correction unknown"``, ``"khat unknown"`` or ``"nothing found"``.
        findings: the same in words, a sentence for each code.
        advice: what to try next, in words.
        khat: k̂ and its interval.
        stein: the kernel Stein discrepancy and its test.
        jumps: the test by long Metropolis steps.
        spread: least and largest ratio, over directions, of the guide's standard deviation to the
            model's.
        ess: effective number of draws with smoothed weights.
        num_draws: number of draws.
    """

    verdict: Verdict
    codes: tuple[Code, ...]
    findings: tuple[str, ...]
    advice: tuple[str, ...]
    khat: KhatEstimate
    stein: SteinTest
    jumps: JumpTest
    spread: tuple[float, float]
    ess: float
    num_draws: int

    def __str__(self) -> str:
        lines = [
            f"verdict: {self.verdict}",
            *(f"  {finding}" for finding in self.findings),
            *(f"  try: {advice}" for advice in self.advice),
            f"{self.khat}",
            f"kernel Stein discrepancy² {float(self.stein.u_statistic):.3g} ± "
            f"{float(self.stein.standard_error):.1g} sd², p = {float(self.stein.p_value):.3f}",
            f"long jumps between {int(self.jumps.num_modes)} mode(s): p = "
            f"{float(self.jumps.p_value):.3f}",
            f"guide's sd over the model's: {self.spread[0]:.2f} to {self.spread[1]:.2f}",
            f"effective draws after weighting: {self.ess:.0f} of {self.num_draws}",
        ]
        return "\n".join(lines)


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
        ValueError: if the shapes differ or something is not finite.
    """
    return _spread_ratios(*as_scored(samples, scores, minimum=4))


@jax.jit
def _spread_ratios(x: Array, s: Array) -> Array:
    coordinates = whiten_samples(x)
    product = -coordinates.scores_to_kernel(s).T @ coordinates.to_kernel(x) / x.shape[0]
    return jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(0.5 * (product + product.T)), 0.0))


def vsbc(svi: SVI, rng_key: Array, *args: Any, **kwargs: Any) -> Any:
    """NumPyro's simulation-based calibration of a whole fit: ``numpyro.infer.vsbc_diagnostic``.

    Draws parameters from the prior and data from the model, fits the guide anew to each, and ranks
    the parameters among the guide's draws. This tests the procedure, not one fit, and costs one fit
    for each simulation.

    Args:
        svi: model, guide, optimizer and loss.
        rng_key: random key.
        *args: arguments of the model; None for observed values.
        **kwargs: keyword arguments of ``vsbc_diagnostic`` (``num_simulations``, ``num_svi_steps``,
            ``num_samples``, ``observed_sites``, …) and of the model.

    Returns:
        NumPyro's ``VSBCResult``.

    Raises:
        TypeError: for anything but an ``SVI`` and a random key.
    """
    if not isinstance(svi, SVI):
        raise TypeError(f"svi: expected an SVI of numpyro.infer; got {svi!r}")
    check_key(rng_key)
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        # NumPyro 0.22 reshapes the words of a key, which a typed key does not show.
        rng_key = jax.random.key_data(rng_key)
    return vsbc_diagnostic(rng_key, svi.model, svi.guide, svi.optim, svi.loss, *args, **kwargs)


def diagnose(
    svi: SVI,
    result: Any,
    *args: Any,
    num_samples: int = 4_000,
    rng_key: Array | None = None,
    verbose: bool = True,
    **kwargs: Any,
) -> Diagnosis:
    """Run every diagnostic on a fit, and print the verdict, its reasons and what to try.

    Args:
        svi: model, guide and loss.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        *args: arguments of the model, as in the fit.
        num_samples: fresh draws of the guide, at least 100.
        rng_key: random key; by default ``jax.random.key(0)``.
        verbose: whether to print the diagnosis.
        **kwargs: keyword arguments of the model.

    Returns:
        Verdict, findings, advice, and all numbers they rest on.

    Raises:
        TypeError: see :func:`~numpyro_kscore.evaluate_guide`.
        ValueError: see there.
        ImportError: without ArviZ.

    Cost: twenty to thirty seconds of a CPU core for cheap models, most of it compilation.
    """
    check_count("num_samples", num_samples, minimum=100)
    key = jax.random.key(0) if rng_key is None else rng_key
    fitted = fitted_guide(svi, result, args, kwargs, key)
    draws = evaluate_fitted(fitted, num_samples, key)

    def log_density(flat: Array) -> Array:
        return log_joint(flat, fitted.program, fitted.layout, key)

    samples, scores = draws.samples[:TEST_DRAWS], draws.scores[:TEST_DRAWS]
    estimate = compute_khat(draws, draws.log_q is not None, energy_estimator())
    stein = compute_ksd(samples, scores, key_apart(key, 3))
    jumps = compute_jump_test(log_density, samples, key_apart(key, 4))
    ratios = np.asarray(_spread_ratios(draws.samples, draws.scores))
    spread = float(ratios[0]), float(ratios[-1])
    smoothed = pareto_smooth(estimate.log_weights)[0]
    verdict, findings = decide(estimate, stein, jumps, spread, draws.num_lost)
    diagnosis = Diagnosis(
        verdict,
        tuple(finding.code for finding in findings),
        describe(findings, estimate.reason),
        advise(findings),
        estimate,
        stein,
        jumps,
        spread,
        weight_ess(smoothed),
        int(draws.samples.shape[0]),
    )
    if verbose:
        print(diagnosis)
    return diagnosis
