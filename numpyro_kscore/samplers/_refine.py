"""``refine``: from draws of a guide to exact ones, by many short Markov chains."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import SVI

from numpyro_kscore._model.program import Program
from numpyro_kscore._util.checks import check_count, check_positive
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore._util.pytree import with_leading
from numpyro_kscore.diagnostics._chains import WINDOW
from numpyro_kscore.diagnostics._codes import Code, Verdict
from numpyro_kscore.diagnostics._converters import ConvertedFit, make_converter
from numpyro_kscore.diagnostics._messages import advise, describe, verdict_lines
from numpyro_kscore.diagnostics._missed_modes import UNSEARCHED, Modes, find_modes_without_draws
from numpyro_kscore.samplers._convergence import Chains, judge_chains, scale_of
from numpyro_kscore.samplers._guide import Guide, open_guide
from numpyro_kscore.samplers._superchains import ChainSettings, run_chains


@dataclass(frozen=True, eq=False)
class Refinement:
    """Draws of Markov chains that started from a guide, and whether they have settled.

    Arrays of shape (d,) are about the unconstrained values of the latents, see ``names``.

    Attributes:
        verdict: ``"good"`` if everything has settled and nothing speaks against the draws,
            ``"bad"`` if modes are missed, otherwise ``"cannot tell"``.
        codes: findings to match on: some of ``"settled"``, ``"mode missed"``, ``"chains apart"``,
            ``"chains moving"``, ``"too few draws"``, ``"few far draws"``, ``"chains stuck"``,
            ``"divergences"`` and ``"draws lost"``.
        findings: a sentence for each code.
        advice: suggestions of what to try next.
        converged: whether all means and standard deviations have settled within the limit of
            gradients.
        samples: latent and deterministic sites by name, (chain, draw, ...).
        names: names of the unconstrained values, such as ``"theta[3]"``.
        rhat: nested R-hat of the value or its squared deviation, whichever is larger, (d,).
        mean: means, (d,).
        sd: standard deviations, (d,). Like the means they are of values that are cut off ten
            half-ranges from the median, so that heavy tails have them.
        mean_error: Monte Carlo errors of the means, in standard deviations, (d,).
        sd_error: Monte Carlo errors of the standard deviations, relative to them, (d,).
        mean_change: means less those of the guide, in standard deviations, (d,).
        sd_change: standard deviations over those of the guide, (d,).
        acceptance: mean probability of acceptance of each chain, (chain,).
        superchain: which superchain a chain is of, (chain,): its chains have a common start.
        num_gradients: gradients of the model in all chains, those included that found the metric;
            without those of the search for modes.
        num_transitions: transitions of each chain, the same.
        modes: what the search for modes found.

    Example::

        from numpyro_kscore import refine

        refined = refine(svi, result, y)
        refined.verdict  # "good"
        refined.names  # ("loc", "scale")
        refined.rhat  # (2,)
        dict(zip(refined.names, refined.mean_change, strict=True))  # of the guide's means, in sd
    """

    verdict: Verdict
    codes: tuple[Code, ...]
    findings: tuple[str, ...]
    advice: tuple[str, ...]
    converged: bool
    samples: dict[str, np.ndarray] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    rhat: np.ndarray = field(repr=False)
    mean: np.ndarray = field(repr=False)
    sd: np.ndarray = field(repr=False)
    mean_error: np.ndarray = field(repr=False)
    sd_error: np.ndarray = field(repr=False)
    mean_change: np.ndarray = field(repr=False)
    sd_change: np.ndarray = field(repr=False)
    acceptance: np.ndarray = field(repr=False)
    superchain: np.ndarray = field(repr=False)
    num_gradients: int
    num_transitions: int
    modes: Modes
    _program: Program = field(repr=False)

    def __str__(self) -> str:
        chains, draws = next(iter(self.samples.values())).shape[:2]
        far = int(np.argmax(np.abs(self.mean_change)))
        wide = int(np.argmax(np.abs(np.log(self.sd_change))))
        lines = [
            *verdict_lines(self),
            f"{chains} chains of {draws} draws, {self.num_gradients} gradients; "
            f"{np.mean(self.acceptance):.0%} of the transitions accepted",
            f"largest nested R-hat: {np.max(self.rhat):.3f} "
            f"({self.names[int(np.argmax(self.rhat))]})",
            f"largest error: {np.max(self.mean_error):.3f} sd of a mean, "
            f"{np.max(self.sd_error):.1%} of an sd",
            f"largest change of a mean of the guide: {self.mean_change[far]:+.2f} sd "
            f"({self.names[far]})",
            f"largest change of an sd of the guide: by {self.sd_change[wide]:.2f} "
            f"({self.names[wide]})",
            str(self.modes),
        ]
        return "\n".join(lines)

    def to_arviz(self, log_likelihood: bool = False, **groups: Any) -> Any:
        """The chains as a ``DataTree`` (ArviZ 1.x) or ``InferenceData`` (ArviZ 0.2x).

        ``sample_stats`` has the superchain of every chain, for nested R-hat; ArviZ's own R-hat is
        meant for few long chains, and is too large for these.

        Args:
            log_likelihood: whether to evaluate that of every observation, which ``loo`` needs.
            **groups: options of ArviZ's ``from_numpyro``: ``prior``, ``posterior_predictive``,
                ``predictions``, ``constant_data``, ``coords``, ``dims`` and others.

        Returns:
            The posterior, observed data, and what else was asked for.

        Raises:
            ImportError: without ArviZ.
        """
        convert = make_converter()
        program = self._program
        draws = next(iter(self.samples.values())).shape[1]
        stats = {"superchain": np.repeat(self.superchain[:, None], draws, axis=1)}
        model = handlers.substitute(program.model, data=dict(program.params))
        fit = ConvertedFit(program._replace(model=model), self.samples, stats)
        with warnings.catch_warnings():
            # Chains are many and short on purpose.
            warnings.filterwarnings("ignore", message="More chains")
            tree = convert(fit, {"prior": None, "log_likelihood": log_likelihood, **groups})
        tree["sample_stats"].attrs.update(
            nested_rhat=float(np.max(self.rhat)),
            converged=int(self.converged),
            verdict=self.verdict,
            num_gradients=self.num_gradients,
        )
        return tree


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
        **kwargs: keyword arguments of the model.

    Returns:
        Draws by site, and what is known of them.

    Raises:
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
    check_count("num_superchains", num_superchains, minimum=4)
    check_count("num_chains", num_chains, minimum=2 * num_superchains)
    check_count("max_gradients", max_gradients)
    check_positive("tol", tol)
    if num_chains % num_superchains:
        raise ValueError(
            f"num_chains: expected a multiple of num_superchains, {num_superchains}; got "
            f"{num_chains}"
        )
    key = jax.random.key(0) if rng_key is None else rng_key
    guide = open_guide(svi, result, args, kwargs, key, num_chains)
    settings = ChainSettings(num_chains, num_superchains, max_gradients, tol)
    chains = run_chains(guide, settings, key_apart(key, 2))
    modes = UNSEARCHED
    if search_modes:
        flat, sites = chains.draws.reshape(-1, chains.draws.shape[-1]), guide.layout.sites
        modes = find_modes_without_draws(guide.density, flat, sites, key_apart(key, 3))
    return _refinement(guide, chains, modes, settings)


def _refinement(guide: Guide, chains: Chains, modes: Modes, settings: ChainSettings) -> Refinement:
    verdict, findings = judge_chains(chains, modes, guide.num_lost, guide.names, settings.tol)
    moments = chains.moments
    u = np.asarray(guide.unconstrained(jnp.asarray(guide.draws)), np.float64)
    scale = scale_of(u[np.isfinite(u).all(axis=1)])
    standard = scale.standardize(u)
    mean = scale.center + scale.width * standard.mean(0)
    sd = scale.width * standard.std(0)
    count, length, dim = chains.draws.shape
    sites = jax.device_get(guide.target.constrain(jnp.asarray(chains.draws.reshape(-1, dim))))
    return Refinement(
        verdict,
        tuple(finding.code for finding in findings),
        describe(findings),
        advise(findings),
        chains.has_settled,
        with_leading((count, length), sites),
        guide.names,
        moments.rhat,
        moments.mean,
        moments.sd,
        moments.mean_error,
        moments.sd_error,
        (moments.mean - mean) / moments.sd,
        moments.sd / np.maximum(sd, 1e-30),
        chains.acceptance,
        np.repeat(np.arange(settings.num_superchains), count // settings.num_superchains),
        chains.num_gradients,
        chains.num_windows * WINDOW,
        modes,
        guide.program,
    )
