"""``refine``: from draws of a guide to exact ones, by many short Markov chains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import SVI

from numpyro_kscore._tracing.layout import coordinate_names
from numpyro_kscore._util.checks import check_count, check_positive
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._modes import UNSEARCHED, Modes, find_modes
from numpyro_kscore.diagnostics._movement import make_frame, start_state
from numpyro_kscore.samplers._convergence import Moments, scale_of
from numpyro_kscore.samplers._findings import advise, describe, find
from numpyro_kscore.samplers._guide import Guide, open_guide
from numpyro_kscore.samplers._loop import Settings, run_chains
from numpyro_kscore.samplers._outcome import Chains
from numpyro_kscore.samplers._refinement import Refinement
from numpyro_kscore.samplers._windows import WINDOW, check_blackjax

__all__ = ["refine"]

# Chains of the search for modes: enough for a covariance.
SEARCH_CHAINS, SEARCH_CHAINS_A_DIMENSION, MOST_SEARCH_CHAINS = 64, 4, 512


def refine(
    svi: SVI,
    result: Any,
    *args: Any,
    rng_key: Array | None = None,
    num_chains: int = 64,
    num_superchains: int = 16,
    max_gradients: int = 1_000_000,
    tol: float = 0.01,
    search_modes: bool = True,
    verbose: bool = True,
    **kwargs: Any,
) -> Refinement:
    """Make a fit exact: many short chains of Hamiltonian Monte Carlo from draws of the guide.

    Chains run in the guide's coordinates, whitened by its covariance, all with one step size. In
    windows of ten transitions, of one compiled program, they first find a step size, and another
    covariance if that of the guide does not fit; these windows are left out. Then groups of chains,
    the superchains, start at common points, and go on until nested R-hat says that superchains
    agree, and no mean or spread changes from the earlier to the later draws. Every transition has
    a Metropolis step: what is left is the error of finitely many draws, about 0.03 standard
    deviations for the worst mean with the default ``tol``.

    Args:
        svi: model, guide and loss; the guide may be one of NumPyro's.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned; the fit may be poor.
        *args: arguments of the model, as in the fit.
        rng_key: random key; by default ``jax.random.key(0)``.
        num_chains: number of chains, a multiple of ``num_superchains``.
        num_superchains: groups of chains with a common start, at least 4.
        max_gradients: gradients of the model, over all chains, after which it gives up.
        tol: nested R-hat less 1, of every mean and mean square, below which chains have settled.
            The Monte Carlo error of a mean is at most ``sqrt(2 tol / num_superchains)`` standard
            deviations then, and that of a standard deviation as large a part of it.
        search_modes: whether to look for modes that the chains do not reach, as ``diagnose`` does.
        verbose: whether to print the result.
        **kwargs: keyword arguments of the model.

    Returns:
        Draws by site, and what is known of them.

    Raises:
        ImportError: without BlackJAX: ``pip install "numpyro-kscore[samplers]"``.
        TypeError: see :func:`~numpyro_kscore.evaluate_guide`.
        ValueError: see there; and for numbers out of range.
        FloatingPointError: if fewer than half of the guide's draws, or of the densities there, are
            finite.

    Cost: 10 to 30 thousand gradients of the model where the guide is near a posterior without
    strong curvature. The search for modes takes up to 48 ascents, and 100 transitions of 64 to 512
    chains from afar.
    Source: Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman 2024 (nested R-hat).

    Example::

        from numpyro_kscore import refine

        refined = refine(svi, result, y)  # prints what is known of the chains
        refined.converged  # True
        refined.samples["scale"].shape[0]  # 64: one row for each chain
        tree = refined.to_arviz()
    """
    check_blackjax()
    _check_numbers(num_chains, num_superchains, max_gradients, tol)
    key = jax.random.key(0) if rng_key is None else rng_key
    guide = open_guide(svi, result, args, kwargs, key)
    settings = Settings(num_chains, num_superchains, max_gradients, tol)
    chains = run_chains(guide, settings, key_apart(key, 2))
    modes = _search(guide, chains, key_apart(key, 3)) if search_modes else UNSEARCHED
    refined = _refinement(guide, chains, modes, settings)
    if verbose:
        print(refined)
    return refined


def _check_numbers(num_chains: int, num_superchains: int, max_gradients: int, tol: float) -> None:
    check_count("num_superchains", num_superchains, minimum=4)
    check_count("num_chains", num_chains, minimum=2 * num_superchains)
    check_count("max_gradients", max_gradients)
    check_positive("tol", tol)
    if num_chains % num_superchains:
        raise ValueError(
            f"num_chains: expected a multiple of num_superchains, {num_superchains}; got "
            f"{num_chains}"
        )


def _search(guide: Guide, chains: Chains, key: Array) -> Modes:
    """Modes that the chains have no draws in."""
    *_, dim = chains.draws.shape
    flat = chains.draws.reshape(-1, dim)
    count = max(SEARCH_CHAINS, min(SEARCH_CHAINS_A_DIMENSION * dim, MOST_SEARCH_CHAINS))
    chosen = jax.random.permutation(key_apart(key, 4), len(flat))[:count]
    points = jnp.asarray(flat)
    frame = make_frame(points)
    home = start_state(guide.density, frame, points[chosen])
    values = np.asarray(home.value)
    sites = guide.fitted.layout.sites
    finite = np.isfinite(values)
    return find_modes(guide.density, frame, flat, values[finite], home, sites, key)


def _refinement(guide: Guide, chains: Chains, modes: Modes, settings: Settings) -> Refinement:
    program, layout, *_ = guide.fitted
    names = coordinate_names(layout.sites)
    verdict, findings = find(chains, modes, guide.num_lost, names, settings.tol)
    mean_change, sd_change = _changes(guide, chains.moments)
    count, length, dim = chains.draws.shape
    sites = jax.device_get(
        program.target(layout).constrain(jnp.asarray(chains.draws.reshape(-1, dim)))
    )
    moments = chains.moments
    return Refinement(
        verdict,
        tuple(finding.code for finding in findings),
        describe(findings),
        advise(findings),
        chains.has_settled,
        {name: value.reshape(count, length, *value.shape[1:]) for name, value in sites.items()},
        names,
        moments.rhat,
        moments.mean,
        moments.sd,
        moments.mean_error,
        moments.sd_error,
        mean_change,
        sd_change,
        chains.acceptance,
        np.repeat(np.arange(settings.num_superchains), count // settings.num_superchains),
        chains.num_gradients,
        chains.num_windows * WINDOW,
        modes,
        program,
    )


def _changes(guide: Guide, moments: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Changes of means, in standard deviations, and of standard deviations, as ratios."""
    u = np.asarray(guide.unconstrained(jnp.asarray(guide.draws)), np.float64)
    scale = scale_of(u[np.isfinite(u).all(axis=1)])
    standard = scale.standardize(u)
    mean = scale.center + scale.width * standard.mean(0)
    sd = scale.width * standard.std(0)
    return (moments.mean - mean) / moments.sd, moments.sd / np.maximum(sd, 1e-30)
