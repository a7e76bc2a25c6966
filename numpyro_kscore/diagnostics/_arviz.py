"""``to_arviz``: what a fit gave, as ArviZ knows it. For any guide, with a density or without."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import Predictive
from numpyro.infer.svi import SVI
from numpyro.primitives import Messenger

from numpyro_kscore._tracing.program import Program
from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.keys import key_apart
from numpyro_kscore.diagnostics._draws import (
    GuideDraws,
    constrain,
    evaluate_fitted,
    fitted_guide,
    whitening,
)
from numpyro_kscore.diagnostics._khat import KhatEstimate
from numpyro_kscore.diagnostics._khat import khat as compute_khat
from numpyro_kscore.estimators._bandwidth import Median
from numpyro_kscore.estimators._coordinates import median_distance
from numpyro_kscore.estimators._estimator import ScoreEstimator
from numpyro_kscore.kernels._pairwise import cancels, squared_distances

__all__ = ["to_arviz"]

INSTALL = 'Run: pip install "numpyro-kscore[arviz]"'
# Draws an energy is fitted to at least, whatever the number that is kept.
ENERGY_DRAWS = 2_000
# Share of their range by which log densities of the same draws may differ, being compiled apart.
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
    coords: dict[str, Any] | None = None,
    dims: dict[str, list[str]] | None = None,
    pred_dims: dict[str, list[str]] | None = None,
    extra_event_dims: dict[str, list[str]] | None = None,
    index_origin: int | None = None,
    khat: KhatEstimate | bool = True,
    rng_key: Array | None = None,
    **kwargs: Any,
) -> Any:
    """A fit as a ``DataTree`` (ArviZ 1.x) or ``InferenceData`` (ArviZ 0.2x).

    Keyword names are those of ArviZ's ``from_numpyro_svi``; those of the model go to the model.
    Groups and what is in them:

    * ``posterior``: latent and deterministic sites, dimensions ``(chain, draw)`` and then those of
      plates, by name. Draws of one guide are one chain. Noise of the guide is left out.
    * ``sample_stats``: ``lp``, the model's log density in unconstrained coordinates, and
      ``log_q``, the guide's: exact where it has one, otherwise its energy, known up to a constant
      (``attrs["log_q_normalized"]`` says which); ``khat`` with ``khat_low`` and ``khat_high``;
      ``losses`` of all steps.
    * ``log_likelihood``, ``posterior_predictive``, ``prior`` and ``prior_predictive`` on request.
    * ``observed_data``; and ``constant_data``, by default the arrays among the arguments that are
      not observed.

    Args:
        svi: model, guide and loss.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        *args: arguments of the model, as in the fit.
        num_samples: draws that are kept.
        prior: prior draws, by site with leading axis n; True makes ``num_samples`` of them.
        posterior_predictive: draws of observed sites, leading axis ``num_samples``; True makes
            them.
        predictions: draws for other inputs, leading axis ``num_samples``.
        constant_data: arrays by name; replaces those found among the arguments.
        predictions_constant_data: the same for ``predictions``.
        log_likelihood: whether to evaluate that of every observation: what ``loo`` needs.
        coords: labels of dimensions.
        dims: names of dimensions by site; read off plates by default.
        pred_dims: those of ``predictions``.
        extra_event_dims: names of event dimensions, added to those of plates.
        index_origin: of labels that are not given.
        khat: True computes it, for ten seconds or so, from the draws that are kept and more; False
            leaves out ``khat``, and ``log_q`` where the guide has no density; what
            :func:`~numpyro_kscore.khat` or ``diagnose(...).khat`` gave is taken as it is, if it is
            of the same draws, which the same ``rng_key`` makes.
        rng_key: random key; by default ``jax.random.key(0)``.
        **kwargs: keyword arguments of the model.

    Returns:
        A ``DataTree`` with ArviZ 1.x, ``InferenceData`` with 0.2x.

    Raises:
        ImportError: without ArviZ.
        TypeError: for anything but an SVI and its result, and arguments the model cannot take.
        ValueError: for a model that observes nothing at these arguments, or a guide whose draws
            cannot be evaluated.
    """
    make = _converter()
    check_count("num_samples", num_samples)
    if not isinstance(khat, bool | KhatEstimate):
        raise TypeError(
            f"khat: expected True, False or what khat returned; got {khat!r}. Its value alone has "
            "no weights: pass all of it"
        )
    key = jax.random.key(0) if rng_key is None else rng_key
    fitted = fitted_guide(svi, result, args, kwargs, key)
    program = fitted.program
    wanted = num_samples if khat is False else max(num_samples, ENERGY_DRAWS)
    draws = evaluate_fitted(fitted, max(wanted, 4), key)
    found = khat if isinstance(khat, KhatEstimate) else None
    if khat is True:
        found = compute_khat(draws)
    kept = min(num_samples, draws.samples.shape[0])
    samples = jax.device_get(constrain(program, fitted.layout, draws.samples[:kept]))
    stats = _sample_stats(draws, found, kept)

    predict_key, prior_key = jax.random.split(key_apart(key, 2))
    model = substitute(program.model, data=dict(program.params))
    if posterior_predictive is True:
        posterior_predictive = _posterior_predictive(predict_key, model, program, samples)
    if prior is True:
        prior = _prior(prior_key, model, program, num_samples)
    if constant_data is None:
        constant_data = _constant_data(model, program, samples)
    groups = {
        "prior": prior or None,
        "posterior_predictive": _one_chain(posterior_predictive or None),
        "predictions": _one_chain(predictions),
        "constant_data": constant_data or None,
        "predictions_constant_data": predictions_constant_data,
        "log_likelihood": log_likelihood,
        "coords": coords,
        "dims": dims,
        "pred_dims": pred_dims,
        "extra_event_dims": extra_event_dims,
        "index_origin": index_origin,
    }
    tree = make(_Fit(model, program, _one_chain(samples), _one_chain(stats)), groups)
    _add_scalars(tree, result, found, draws, svi)
    return tree


class _Fit(NamedTuple):
    """What a converter asks for."""

    model: Callable[..., Any]
    program: Program
    samples: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]


def _converter() -> Callable[[_Fit, dict[str, Any]], Any]:
    """The NumPyro converter of the ArviZ that is installed."""
    try:
        from arviz_base.io_numpyro import NumPyroConverter, NumPyroInferenceAdapter
    except ImportError:
        return _old_converter()

    class Adapter(NumPyroInferenceAdapter):
        """Draws of a guide as one chain."""

        def __init__(self, fit: _Fit) -> None:
            self.fit = fit
            shape = next(iter(fit.samples.values())).shape[:2]
            args, kwargs = fit.program.args, fit.program.kwargs
            super().__init__(fit, fit.model, args, kwargs, shape)

        @property
        def sample_dims(self) -> list[str]:
            return ["chain", "draw"]

        def get_samples(self, seed: int | None = None, **_: Any) -> dict[str, Any]:
            return self.fit.samples

        def get_sample_stats(self, **_: Any) -> dict[str, Any]:
            return self.fit.stats

    def make(fit: _Fit, groups: dict[str, Any]) -> Any:
        groups = {**groups, "prior": _one_chain(groups["prior"])}
        return NumPyroConverter(posterior=Adapter(fit), **groups).to_datatree()

    return make


def _old_converter() -> Callable[[_Fit, dict[str, Any]], Any]:
    try:
        from arviz.data.io_numpyro import NumPyroConverter
    except ImportError as error:
        raise ImportError(f"to_arviz: expected ArviZ; got none installed. {INSTALL}") from error

    def make(fit: _Fit, groups: dict[str, Any]) -> Any:
        count = next(iter(fit.samples.values())).shape[1]

        def samples(group_by_chain: bool = True) -> dict[str, np.ndarray]:
            if group_by_chain:
                return fit.samples
            return {name: value[0] for name, value in fit.samples.items()}

        # What that converter reads of an MCMC object, and no more.
        chains = SimpleNamespace(
            get_samples=samples,
            get_extra_fields=lambda group_by_chain=True: fit.stats,
            num_chains=1,
            num_samples=count,
            thinning=1,
            sampler=SimpleNamespace(model=fit.model),
            _args=fit.program.args,
            _kwargs=fit.program.kwargs,
        )
        return NumPyroConverter(posterior=chains, **groups).to_inference_data()

    return make


def _one_chain(values: Any) -> Any:
    if values is None:
        return None
    return {name: np.asarray(value)[None] for name, value in values.items()}


def _sample_stats(
    draws: GuideDraws, found: KhatEstimate | None, kept: int
) -> dict[str, np.ndarray]:
    stats = {"lp": np.asarray(draws.log_density[:kept])}
    if draws.log_q is not None:
        stats["log_q"] = np.asarray(draws.log_q[:kept])
    elif found is not None:
        known = found.log_q[:kept]
        # What both say of the model's log density, which one of them knows up to a constant.
        apart = known + found.log_weights[:kept] - stats["lp"][: len(known)]
        if np.ptp(apart) > SAME * max(1.0, float(np.ptp(stats["lp"]))):
            raise ValueError(
                "khat: expected that of the draws that are kept; got one of other draws. Give "
                "to_arviz the rng_key of evaluate_guide or diagnose, or khat=True"
            )
        stats["log_q"] = np.full(kept, np.nan)
        stats["log_q"][: len(known)] = known
    return stats


def _add_scalars(
    tree: Any, result: Any, found: KhatEstimate | None, draws: GuideDraws, svi: SVI
) -> None:
    """Numbers of the fit as a whole, which have no dimension of draws."""
    import xarray

    data = tree["sample_stats"]
    losses = np.asarray(getattr(result, "losses", np.zeros(0)))
    data["losses"] = xarray.DataArray(losses, dims="step")
    attrs: dict[str, Any] = {"num_steps": int(losses.shape[0]), "guide_draws_lost": draws.num_lost}
    if found is not None:
        for name in ("value", "low", "high"):
            data["khat" if name == "value" else f"khat_{name}"] = float(getattr(found, name))
        attrs["khat_verdict"], attrs["khat_reason"] = found.verdict, found.reason
    if "log_q" in data:
        attrs["log_q_normalized"] = int(draws.log_q is not None)
    estimator = getattr(svi.loss, "estimator", None)
    if isinstance(estimator, ScoreEstimator):
        attrs["score_regularizer"] = repr(estimator.regularizer)
        if not estimator.regularizer.is_auto:
            data["lam_or_num_steps"] = float(estimator.regularizer.strength())
        if isinstance(estimator.bandwidth, Median):
            some = whitening(draws.samples).to_kernel(draws.samples)[:1024]
            median = median_distance(squared_distances(some, some, cancels(some)))
            data["bandwidth"] = float(estimator.bandwidth.factor * median)
    data.attrs.update(attrs)


def _is_data(site: dict[str, Any]) -> bool:
    """Whether a site is observed and could be drawn, which factors cannot."""
    is_observed = site["type"] == "sample" and site["is_observed"]
    return bool(is_observed and not isinstance(site["fn"], dist.Unit))


class _Unobserved(Messenger):
    """Lets a model draw what it observes."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Take away the value of an observed site, but for factors, which have no draws."""
        if _is_data(msg):
            msg["is_observed"], msg["value"] = False, None


def _prior(
    key: Array, model: Callable[..., Any], program: Program, num_samples: int
) -> dict[str, Any]:
    predictive = Predictive(_Unobserved(model), num_samples=num_samples)
    try:
        return predictive(key, *program.args, **program.kwargs)
    except NotImplementedError as error:
        raise ValueError(
            "prior: expected a model whose sites can all be drawn from; got one that cannot, such "
            "as ImproperUniform. Leave prior out, or pass draws"
        ) from error


def _at_first(
    key: Array, model: Callable[..., Any], program: Program, samples: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Sites of the model at the first of the samples."""
    # As arrays of JAX: within a `scan`, NumPyro takes one after another by a traced index.
    given = substitute(model, data={name: jnp.asarray(v[0]) for name, v in samples.items()})
    return trace(seed(given, key)).get_trace(*program.args, **program.kwargs)


def _posterior_predictive(
    key: Array, model: Callable[..., Any], program: Program, samples: dict[str, np.ndarray]
) -> dict[str, Any]:
    sites = _at_first(key, model, program, samples)
    observed = [name for name, site in sites.items() if _is_data(site)]
    predictive = Predictive(_Unobserved(model), samples, return_sites=observed)
    return predictive(key, *program.args, **program.kwargs)


def _constant_data(
    model: Callable[..., Any], program: Program, samples: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Arrays among the model's arguments that are no observed values."""
    sites = _at_first(jax.random.key(0), model, program, samples)
    observed = [
        np.asarray(site["value"])
        for site in sites.values()
        if site["type"] == "sample" and site["is_observed"]
    ]
    bound = inspect.signature(program.model).bind(*program.args, **program.kwargs).arguments
    found = {}
    for name, value in bound.items():
        if not isinstance(value, np.ndarray | jax.Array) or jnp.ndim(value) == 0:
            continue
        array = np.asarray(value)
        if not any(a.shape == array.shape and np.array_equal(a, array) for a in observed):
            found[name] = array
    return {name: value for name, value in found.items() if name not in sites}
