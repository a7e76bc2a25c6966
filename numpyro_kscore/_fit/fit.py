"""``fit``: stochastic variational inference that stops when it has converged."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from numpyro.infer import SVI

from numpyro_kscore._fit.expansion import make_expander
from numpyro_kscore._fit.fit_options import FitOptions
from numpyro_kscore._fit.last_look import covers, last_look, look_closely
from numpyro_kscore._fit.loop import MOST_RECOVERIES, Bar, run_chunks
from numpyro_kscore._fit.programs import make_chunk, make_first_looks, make_look
from numpyro_kscore._fit.result import FitResult, finish
from numpyro_kscore._fit.step_size import warn_of_schedule
from numpyro_kscore._fit.svi import Inference, open_svi
from numpyro_kscore._model.call_checks import check_batch, check_call, check_data, check_svi
from numpyro_kscore._model.supports import check_within_supports
from numpyro_kscore._util.batches import Batches
from numpyro_kscore._util.checks import is_concrete
from numpyro_kscore._util.deadline import due_in
from numpyro_kscore._util.keys import check_key


def fit(
    svi: SVI,
    rng_key: jax.Array,
    *args: Any,
    loader: Any = None,
    max_steps: int = 5_000,
    max_seconds: float | None = None,
    tol: float = 0.1,
    patience: int = 3,
    chunk_size: int = 80,
    criterion: str = "stein",
    checkpoint: str | os.PathLike[str] | None = None,
    callback: Callable[..., Any] | None = None,
    progress_bar: bool = True,
    forward_mode_differentiation: bool = False,
    init_state: Any = None,
    init_params: dict[str, Any] | None = None,
    **kwargs: Any,
) -> FitResult:
    """Fit a guide until it has converged.

    Steps run in compiled chunks. Each chunk ends with a look at the guide, at the mean of the
    parameters over the chunk: the mean loss, and the kernel Stein discrepancy of 1024 fresh draws
    from the model's score (:func:`~numpyro_kscore.diagnostics.stein_discrepancy`).

    An :class:`~numpyro_kscore.AutoImplicit` that starts at the model takes no step. Where the
    density of a guide is followed, as that of :class:`~numpyro_kscore.AutoImplicit` in 4 to 1000
    dimensions, the first look is at the start. If that is not at the model, the step size falls to
    0 along a cosine over 4 chunks, then over 4, 8, 16, … more, until a round raises the bound by
    too little.

    Elsewhere the fit first searches at full step size. The search ends when, ``patience`` times in
    a row, neither number was lower in the last window of chunks than in the one before, beyond the
    error of the difference; or when the discrepancy is below ``tol`` and the loss has stopped
    falling; or after two fifths of ``max_steps``. Then the fit settles: the step size falls to 0
    along a cosine over as many steps as the search took, in the last case over all that are left.
    If that lowered the loss by much, another round follows, twice as long (docs/convergence). With
    the defaults of :class:`~numpyro_kscore.ImplicitELBO` it settles with more particles, since few
    of them do not show fine shapes. The optimizer should therefore have a constant step size:
    ``optax.adam(1e-2)``.

    A step whose loss or gradient is not finite is skipped. A chunk is undone if more than half of
    its steps were skipped, or if the guide is not finite after it: the fit goes on from the state
    before, with new randomness and half the step size, up to five times. After an interrupt from
    the keyboard the best state so far is returned.

    Under a subsampled plate the model's score is that of a random subset. The discrepancy includes
    the difference from the score of all data, and may never be below ``tol``.

    Args:
        svi: model, guide, optimizer and loss. With ``criterion="stein"`` the guide must be one
            that :class:`~numpyro_kscore.ImplicitELBO` accepts, whatever the loss. Give the
            optimizer a constant step size: steps are multiplied by factors of the fit's own, so
            that a schedule counts twice, and where it has fallen to zero the guide stands still.
        rng_key: random key.
        *args: arguments of model and guide.
        loader: batches of data that need not fit in memory: an iterable that can be iterated over
            again, or a function that returns an iterator (docs/loader). Each item of it is a call
            of model and guide: a tuple or list of arguments, which ``args`` follow; a dict of
            keyword arguments, with ``kwargs``; or one argument. All have the same shapes, and the
            model scales its likelihood from a batch to all data. A function with an argument that
            is called ``epoch`` or has no default is given the number of the epoch.
        max_steps: upper limit of the number of steps; whole chunks are taken.
        max_seconds: time after which no further chunk is begun; None sets no limit. It counts from
            the call, with the start of the guide and compilation. A search with many latents ends
            with what it has then; other parts are not cut short, and one chunk is always taken.
        tol: tolerance, in standard deviations of the posterior: changes of the guide smaller than
            a shift of every mean by ``tol`` do not prolong the search.
        patience: number of successive looks without improvement that ends the search.
        chunk_size: steps between two looks, at least 5.
        criterion: ``"stein"``; or ``"loss"``, the loss alone, for guides with points, discrete
            latents or samplers that are not reparameterized, and for aggregate posteriors.
        checkpoint: file to write after every chunk. If it exists, the fit continues from it, with
            bit for bit the result of a fit without interruption. It does not hold the arguments of
            the model, or data of the loader: pass the same ones.
        callback: called after every chunk as ``callback(step, state, metrics)``, with the number of
            steps, the ``SVIState`` with the mean parameters of the chunk, and a dict of floats: the
            fields of :class:`~numpyro_kscore._fit.progress.Look`, ``"step_size"`` (its factor),
            ``"epoch"`` of the loader and ``"seconds"``. It ends the fit if it returns True.
        progress_bar: whether to show a progress bar, if tqdm is installed.
        forward_mode_differentiation: as in ``SVI.run``.
        init_state: initial state, as in ``SVI.run``.
        init_params: initial parameters, as in ``SVI.run``.
        **kwargs: keyword arguments of model and guide.

    Returns:
        The mean parameters of the last chunk, or of the last one before loss or discrepancy rose
        beyond three standard errors, and how the fit went.

    Warns:
        UserWarning: if the fit did not converge, ran away, met numbers that are not finite, or
            settled far from the posterior; for a model that has neither data nor a factor.

    Raises:
        TypeError: for anything but an ``SVI`` and a random key, inside ``jit`` or ``vmap``, and
            for an optimizer whose state does not hold the parameters; for a loader that is none.
        ValueError: for a setting out of range, a guide for which no discrepancy can be computed,
            a checkpoint that is damaged or of another fit; for a loader that has no batches, ends
            for good, or whose batches differ in shape or have numbers that are not finite, where
            the model's density is not; for a model that looks up rows of a batch by the indices
            of a plate of all rows; for a model without data where an argument is None.
        FloatingPointError: if no chunk gave finite numbers.

    Example::

        result = fit(svi, random.key(1), y, checkpoint="fit.checkpoint", progress_bar=False)
        result.info.converged  # True
    """
    check_svi(svi)
    _check_key(rng_key)
    begin = time.perf_counter()
    path = None if checkpoint is None else Path(checkpoint)
    settings = FitOptions(
        max_steps, max_seconds, tol, patience, chunk_size, criterion, path, progress_bar, callback
    )
    if criterion == "stein" and getattr(svi.loss, "aggregate", None) is not None:
        raise ValueError(
            "criterion: expected 'loss' for an objective with aggregate, whose target is not the "
            "posterior that the discrepancy refers to; got 'stein'"
        )
    batches = None if loader is None else Batches(loader, args, kwargs)
    given = (args, kwargs) if batches is None else batches.arguments(batches.first)
    explained = contextlib.nullcontext() if batches is None else batches.explained()
    with explained, due_in(max_seconds), Bar(settings) as bar:
        _check_given(svi, *given, is_batch=batches is not None)
        inference = open_svi(svi, rng_key, given, batches, criterion, init_state, init_params)
        warn_of_schedule(svi, svi.optim.get_params(inference.state.optim_state), max_steps)
        # A start whose tails are too thin is not left as it is, however near it is.
        is_final = inference.can_be_exact and inference.is_final
        can_be_exact = inference.can_be_exact and (is_final or covers(inference.exact_draws))
        is_finer = inference.settling is not None
        rule = settings.rule(inference.dim, can_be_exact, inference.is_quiet, is_final, is_finer)
        look = make_look(inference, forward_mode_differentiation, rng_key)
        run, stopped = run_chunks(
            make_chunk(inference, forward_mode_differentiation, look),
            make_first_looks(inference, look, rule),
            make_expander(inference, chunk_size),
            batches,
            inference.state,
            rule,
            settings,
            rng_key,
            bar,
        )
    if run.progress.cause == "nan" and not run.progress.looks:
        _explain_failure(inference)
    weights = last_look(inference, run, rng_key, time.perf_counter() - begin, stopped)
    close = None if weights is not None else look_closely(inference, run, look, stopped)
    return finish(svi, run, rule, stopped, time.perf_counter() - begin, weights, close)


def _check_key(rng_key: Any) -> None:
    """Raise ``TypeError`` for anything but a random key that has a value."""
    check_key("rng_key", rng_key, "the data")
    if not is_concrete(rng_key):
        raise TypeError(
            "fit: expected a call outside of jit and vmap, since it decides by concrete numbers; "
            "got a traced rng_key. Use svi.run there"
        )


def _check_given(svi: SVI, args: tuple[Any, ...], kwargs: dict[str, Any], is_batch: bool) -> None:
    """Raise unless the arguments, or those with a batch, are data of the model."""
    kwargs = {**kwargs, **svi.static_kwargs}
    if is_batch:
        check_batch(svi.model, args, kwargs)
    else:
        check_call("fit", inspect.signature(fit).parameters, svi.model, args, kwargs)
    check_data(svi.model, args, kwargs)


def _explain_failure(inference: Inference) -> NoReturn:
    """Raise an error that explains why no step gave finite numbers."""
    error = FloatingPointError(
        f"fit: expected finite losses and gradients; got none in {MOST_RECOVERIES + 1} attempts "
        "at the first steps. Look for a density that is not finite where the guide starts, or that "
        "ends where no support does, as Uniform(0, b) of data with a latent b: write the end as a "
        "support. Or try another init_loc_fn, init_params or a smaller init_scale"
    )
    svi, (args, kwargs) = inference.svi, inference.given
    params, kwargs = svi.get_params(inference.state), {**kwargs, **svi.static_kwargs}
    check_within_supports(svi.model, svi.guide, args, kwargs, params, error)
    raise error
