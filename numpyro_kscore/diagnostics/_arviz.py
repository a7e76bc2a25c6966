"""``to_arviz``: a fit as an ArviZ data structure, of versions 1.x and 0.2x."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.handlers import substitute
from numpyro.infer.svi import SVI

from numpyro_kscore._model.draws import GuideDraws, WeightedDraws
from numpyro_kscore._model.program import Program
from numpyro_kscore._model.weights import (
    NUM_DRAWS,
    check_has_density,
    draw_weighted,
    has_density,
    unconstrained_draws,
    warn_of_weights,
)
from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore._util.line import Line
from numpyro_kscore._util.pareto import importance_resample, weight_ess
from numpyro_kscore._util.pytree import named_leaves
from numpyro_kscore.diagnostics._converters import (
    ConvertedFit,
    add_log_likelihoods,
    make_converter,
    one_chain,
)
from numpyro_kscore.diagnostics._fitted import FittedGuide, fitted_guide
from numpyro_kscore.diagnostics._guide_draws import evaluate_fitted
from numpyro_kscore.diagnostics._khat import KhatEstimate, exact_khat
from numpyro_kscore.diagnostics._khat import khat as compute_khat
from numpyro_kscore.diagnostics._predictive import (
    at_first,
    draw_discrete,
    draw_posterior_predictive,
    draw_prior,
    find_constant_data,
    has_discrete,
    log_likelihoods,
    warn_of_factors,
    without_factors,
)
from numpyro_kscore.estimators._base.standardization import whiten_samples
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator
from numpyro_kscore.estimators._fit.settings import Median
from numpyro_kscore.kernels._median import median_distance
from numpyro_kscore.kernels._pairwise import cancels, squared_distances

# Least number of draws for k̂ and an estimate of log q, however few are kept.
ENERGY_DRAWS = 2_000
# Largest difference of log densities of the same draws, as a fraction of their range: they are
# compiled separately.
SAME = 1e-3


def to_arviz(
    svi: SVI,
    result: Any,
    *args: Any,
    num_samples: int = 1_000,
    prior: dict[str, Any] | bool | None = None,
    posterior_predictive: dict[str, Any] | bool | None = None,
    predictions: dict[str, Any] | None = None,
    constant_data: dict[str, Any] | None = None,
    predictions_constant_data: dict[str, Any] | None = None,
    log_likelihood: bool = False,
    infer_discrete: bool = False,
    coords: dict[str, Any] | None = None,
    dims: dict[str, list[str]] | None = None,
    pred_dims: dict[str, list[str]] | None = None,
    extra_event_dims: dict[str, list[str]] | None = None,
    index_origin: int | None = None,
    khat: KhatEstimate | bool = True,
    resample: bool = False,
    rng_key: Array | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Any:
    """A fit as a ``DataTree`` (ArviZ 1.x) or ``InferenceData`` (ArviZ 0.2x).

    Keyword names are those of ArviZ's ``from_numpyro_svi``; all others are passed to the model. The
    groups are:

    * ``posterior``: latent and deterministic sites, dimensions ``(chain, draw)`` and then those of
      plates, by name. Draws of one guide are one chain. Noise of the guide is left out, and so are
      discrete latents and what is computed from them, unless ``infer_discrete=True``.
    * ``sample_stats``: ``lp``, the model's log density in unconstrained coordinates, and
      ``log_q``, the guide's: exact if it has one, otherwise estimated up to a constant
      (``attrs["log_q_normalized"]`` says which); ``khat`` with ``khat_low`` and ``khat_high``;
      ``losses`` of all steps.
    * ``log_likelihood``, ``posterior_predictive``, ``prior`` and ``prior_predictive`` on request.
    * ``observed_data``, without factors, which are no data; and ``constant_data``, by default the
      arrays among the arguments that are not observed.

    Args:
        svi: model, guide and loss.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        *args: arguments of the model, as in the fit.
        num_samples: number of draws in the result.
        prior: prior draws, by site with leading axis n; True makes ``num_samples`` of them.
        posterior_predictive: draws of observed sites, leading axis ``num_samples``; True makes
            them.
        predictions: draws for other inputs, leading axis ``num_samples``.
        constant_data: arrays by name; replaces those found among the arguments.
        predictions_constant_data: the same for ``predictions``.
        log_likelihood: whether to evaluate that of every observation, which ``loo`` needs, with
            its own discrete latents summed out. That of a masked observation is zero at all
            draws, which ``loo`` of ArviZ 1.x refuses: give it the others.
        infer_discrete: whether to draw the discrete latents that are summed out of the model from
            their posterior given the others, as NumPyro's ``Predictive(..., infer_discrete=True)``.
        coords: labels of dimensions.
        dims: names of dimensions by site; by default those of plates.
        pred_dims: the same for ``predictions``.
        extra_event_dims: names of event dimensions, added to those of plates.
        index_origin: first label of dimensions without labels.
        khat: True computes it from at least 2000 draws, in ten seconds or so where the guide's
            density must be estimated; False leaves out
            ``khat``, and ``log_q`` if the guide has no density. An estimate from
            :func:`~numpyro_kscore.khat` is used unchanged; it must be of
            the same draws, which the same ``rng_key`` makes.
        resample: whether to draw the posterior's draws from 10 000 or more of the guide's, by
            Pareto-smoothed importance weights. Its guide must have a density that is known at its
            draws. Their effective number is in ``attrs["effective_draws"]``.
        rng_key: random key; by default ``jax.random.key(0)``.
        progress_bar: whether to show how many draws are weighed, if tqdm is installed.
        **kwargs: keyword arguments of the model.

    Returns:
        A ``DataTree`` with ArviZ 1.x, ``InferenceData`` with 0.2x.

    Warns:
        UserWarning: with ``log_likelihood``, of factors in plates of the data, which are left out;
            with ``resample``, of weights that cannot be trusted.

    Raises:
        ImportError: without ArviZ.
        TypeError: for anything but an SVI and its result, and arguments the model cannot take.
        ValueError: for a model that observes nothing at these arguments, or a guide whose draws
            cannot be evaluated; for a ``khat`` of other draws; with ``log_likelihood``, for
            observations that share discrete latents; with ``infer_discrete``, for a model without
            any, or with some inside a scan.

    Example::

        from numpyro_kscore import to_arviz

        tree = to_arviz(svi, result, y, khat=False)
        tree["posterior"]["loc"]  # (1, 1000)
    """
    convert = make_converter()
    check_count("num_samples", num_samples)
    key = jax.random.key(0) if rng_key is None else rng_key
    fitted = fitted_guide(svi, result, args, kwargs, key)
    with Line("to_arviz", progress_bar) as line:
        draws, estimate, effective = _draws_and_khat(fitted, num_samples, khat, resample, key, line)
    kept = min(num_samples, draws.samples.shape[0])
    samples = jax.device_get(fitted.target.plain.constrain(jnp.asarray(draws.samples[:kept])))
    stats = one_chain(_sample_stats(draws, estimate, kept))

    program = _substituted(fitted.program)
    keys = jax.random.split(key_apart(key, 2))
    if posterior_predictive is True:
        posterior_predictive = draw_posterior_predictive(keys[0], program, samples)
    prior = draw_prior(keys[1], program, num_samples) if prior is True else prior
    likelihoods = _summed_likelihoods(program, samples) if log_likelihood else {}
    found = find_constant_data(program, samples) if constant_data is None else constant_data
    if infer_discrete:
        samples |= jax.device_get(draw_discrete(key_apart(key, 3), program, samples))
    groups = {
        "prior": named_leaves(prior) if prior else None,
        "posterior_predictive": one_chain(posterior_predictive or None),
        "predictions": one_chain(predictions),
        "constant_data": found or None,
        "predictions_constant_data": predictions_constant_data,
        "log_likelihood": log_likelihood and not likelihoods,
        "coords": coords,
        "dims": dims,
        "pred_dims": pred_dims,
        "extra_event_dims": extra_event_dims,
        "index_origin": index_origin,
    }
    program = program._replace(model=without_factors(at_first(program.model, samples)))
    tree = convert(ConvertedFit(program, one_chain(samples), stats), groups)
    _add_scalars(tree, result, estimate, draws, effective, svi)
    add_log_likelihoods(tree, likelihoods)
    return tree


def _substituted(program: Program) -> Program:
    """The program with the parameters of the model at their values."""
    return program._replace(model=substitute(program.model, data=dict(program.params)))


def _draws_and_khat(
    fitted: FittedGuide,
    num_samples: int,
    khat: KhatEstimate | bool,
    resample: bool,
    key: Array,
    line: Line,
) -> tuple[GuideDraws | WeightedDraws, KhatEstimate | None, float | None]:
    """At least ``num_samples`` draws, unless some are lost, and k̂ unless ``khat`` is False.

    The last is the number of effective draws that they are resampled from, if they are.
    """
    if not isinstance(khat, bool | KhatEstimate):
        raise TypeError(
            f"khat: expected True, False or what khat returned; got {khat!r}. Its value alone has "
            "no weights: pass all of it"
        )
    if resample:
        check_has_density(fitted.layout, "resample")
    if has_density(fitted.layout):
        num_draws = max(num_samples, NUM_DRAWS if resample else ENERGY_DRAWS if khat else 0)
        weighted = draw_weighted(
            key,
            fitted.program,
            fitted.layout,
            num_draws,
            tell=line.weights,
            is_defended=resample,
        )
        weighted = unconstrained_draws(weighted, fitted.target.push())
        estimate = exact_khat(weighted) if khat is True else khat or None
        if not resample:
            return weighted, estimate, None
        warn_of_weights(weighted, stacklevel=4)
        chosen = _resampled(weighted, num_samples, key_apart(key, 4))
        return chosen, estimate, weight_ess(weighted.log_weights)
    num_draws = num_samples if khat is False else max(num_samples, ENERGY_DRAWS)
    draws = evaluate_fitted(fitted, max(num_draws, 4), key)
    line.tell("estimating k̂")
    return draws, compute_khat(draws) if khat is True else khat or None, None


def _resampled(draws: WeightedDraws, count: int, key: Array) -> WeightedDraws:
    """Some draws by their weights, with their densities."""
    arrays = draws.samples, draws.log_density, draws.log_q
    chosen = jax.device_get(importance_resample(key, arrays, draws.log_weights, count))
    samples, log_density, log_q = chosen
    return WeightedDraws(samples, log_density, log_q, draws.num_lost, draws.folded)


def _summed_likelihoods(program: Program, samples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Log likelihoods with discrete latents summed out; empty where ArviZ computes them."""
    warn_of_factors(program, samples)
    found = log_likelihoods(program, samples) if has_discrete(program, samples) else {}
    return jax.device_get(found)


def _sample_stats(
    draws: GuideDraws | WeightedDraws, estimate: KhatEstimate | None, kept: int
) -> dict[str, np.ndarray]:
    stats = {"lp": np.asarray(draws.log_density[:kept])}
    if draws.log_q is not None:
        stats["log_q"] = np.asarray(draws.log_q[:kept])
    elif estimate is not None:
        known = estimate.log_q[:kept]
        # Both give the model's log density, the estimate up to a constant.
        apart = known + estimate.log_weights[:kept] - stats["lp"][: len(known)]
        if np.ptp(apart) > SAME * max(1.0, float(np.ptp(stats["lp"]))):
            raise ValueError(
                "khat: expected that of the draws that are kept; got one of other draws. Give "
                "to_arviz the rng_key of evaluate_guide or diagnose, or khat=True"
            )
        stats["log_q"] = np.full(kept, np.nan)
        stats["log_q"][: len(known)] = known
    return stats


def _add_scalars(
    tree: Any,
    result: Any,
    estimate: KhatEstimate | None,
    draws: GuideDraws | WeightedDraws,
    effective: float | None,
    svi: SVI,
) -> None:
    """Numbers of the fit as a whole, which have no dimension of draws."""
    import xarray

    data = tree["sample_stats"]
    losses = np.asarray(getattr(result, "losses", np.zeros(0)))
    data["losses"] = xarray.DataArray(losses, dims="step")
    attrs: dict[str, Any] = {"num_steps": int(losses.shape[0]), "guide_draws_lost": draws.num_lost}
    if estimate is not None:
        for name in ("value", "low", "high"):
            data["khat" if name == "value" else f"khat_{name}"] = float(getattr(estimate, name))
        attrs["khat_verdict"], attrs["khat_reason"] = estimate.verdict, estimate.reason
    if effective is not None:
        attrs["effective_draws"] = effective
    if "log_q" in data:
        attrs["log_q_normalized"] = int(draws.log_q is not None)
    estimator = getattr(svi.loss, "estimator", None)
    if isinstance(estimator, ScoreEstimator):
        attrs["score_regularizer"] = repr(estimator.regularizer)
        if not estimator.regularizer.is_auto:
            data["lam_or_num_steps"] = float(estimator.regularizer.strength())
        if isinstance(estimator.bandwidth, Median):
            median = quick_jit(_whitened_median)(jnp.asarray(draws.samples))
            data["bandwidth"] = float(estimator.bandwidth.factor * median)
    data.attrs.update(attrs)


def _whitened_median(samples: Array) -> Array:
    """Median distance of up to 1024 of the samples, in whitened coordinates."""
    some = whiten_samples(samples).to_kernel(samples)[:1024]
    return median_distance(squared_distances(some, some, cancels(some)))
