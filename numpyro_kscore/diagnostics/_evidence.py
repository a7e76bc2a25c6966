"""The evidence of a model by importance weights of a fitted guide."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from numpyro.infer import SVI

from numpyro_kscore._model.weights import NUM_DRAWS, check_has_density, draw_weighted
from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.line import Line
from numpyro_kscore.diagnostics._fitted import fitted_guide
from numpyro_kscore.diagnostics._weighing import Evidence, evidence_of


def log_evidence(
    svi: SVI,
    result: Any,
    *args: Any,
    num_samples: int = NUM_DRAWS,
    rng_key: Array | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Evidence:
    """The log evidence of a model, log p(data), by importance weights of a fitted guide.

    The difference of two models' evidence is the logarithm of their Bayes factor. It needs proper
    priors, and a model whose density is normalized: constants of ``numpyro.factor`` count.

    Args:
        svi: model, guide and loss. The guide must have a density that is known at its draws, as
            :class:`~numpyro_kscore.AutoImplicit` has, and guides of distributions alone; or one
            given its noise, as :class:`~numpyro_kscore.AutoSemiImplicit` has (docs/weights).
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        *args: arguments of the model, as in the fit.
        num_samples: number of draws, at least 100.
        rng_key: random key; by default ``jax.random.key(0)``.
        progress_bar: whether to show how many draws are weighed, if tqdm is installed.
        **kwargs: keyword arguments of the model.

    Returns:
        The evidence, its standard error, and k̂ of the weights: from 0.7 on, unless weights are
        nearly equal, it is a lower bound at best.

    Raises:
        TypeError: see :func:`~numpyro_kscore.evaluate_guide`.
        ValueError: see there; for fewer than 100 draws, and a guide without a known density.
        FloatingPointError: if fewer than half of the draws are finite.

    Cost: ``num_samples`` values of the model; 1000 densities each of a guide that has one given
    noise.

    Source: log of the mean of p(data, z)/q(z) over draws z of the guide; for one that has a density
    given noise the balance heuristic (Veach and Guibas 1995) over noise.

    Example::

        from numpyro_kscore import log_evidence

        print(log_evidence(svi, result, y))  # with its error and k̂
    """
    check_count("num_samples", num_samples, minimum=100)
    key = jax.random.key(0) if rng_key is None else rng_key
    with Line("log_evidence", progress_bar) as line:
        fitted = fitted_guide(svi, result, args, kwargs, key)
        check_has_density(fitted.layout, "log_evidence")
        draws = draw_weighted(key, fitted.program, fitted.layout, num_samples, tell=line.weights)
    return evidence_of(draws.log_weights, draws.rounding, draws.log_shares)
