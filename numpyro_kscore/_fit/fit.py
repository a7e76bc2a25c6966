"""``fit``: stochastic variational inference that stops when it has converged, and says so."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI

from numpyro_kscore._fit.chunks import (
    inspect_svi,
    latent_size,
    make_chunk,
    parameter_slots,
    strongly_typed,
)
from numpyro_kscore._fit.loop import MOST_RECOVERIES, Run, run_chunks
from numpyro_kscore._fit.messages import describe
from numpyro_kscore._fit.settings import Settings
from numpyro_kscore._fit.stopping import Cause, Doubt, Look, Rule, conclude
from numpyro_kscore._util.checks import is_concrete
from numpyro_kscore._util.keys import check_key

__all__ = ["FitInfo", "FitResult", "fit"]


class FitInfo(NamedTuple):
    """How a fit went.

    Attributes:
        steps: taken in all, skipped ones included.
        converged: whether it stopped because nothing improved any more, or the discrepancy was
            below ``tol``.
        cause: why it stopped: ``"plateau"``, ``"tol"``, ``"budget"``, ``"runaway"``, ``"nan"`` or
            ``"interrupted"``; the first two are convergence.
        doubt: what is wrong with a fit that converged: ``"far"`` from the model, too ``"noisy"``
            to tell, ``"recovered"`` from numbers that were not finite; empty if nothing is.
        reason: both in words.
        best_step: the last of the steps whose mean is returned.
        recoveries: how often it went back to the state before and tried again.
        skipped: steps whose loss or gradient was not finite, and which were not taken.
        trace_steps: steps after which the guide was looked at, (k,).
        discrepancy: squared, of the guide at the mean parameters of the last chunk, (k,).
        discrepancy_error: its standard error, (k,).
        trace: all that was seen, a row for each of ``trace_steps``.
    """

    steps: int
    converged: bool
    cause: Cause
    doubt: Doubt
    reason: str
    best_step: int
    recoveries: int
    skipped: int
    trace_steps: np.ndarray
    discrepancy: np.ndarray
    discrepancy_error: np.ndarray
    trace: tuple[Look, ...]

    def raise_if_failed(self) -> None:
        """Raise ``FloatingPointError`` unless the fit converged."""
        if not self.converged:
            raise FloatingPointError(f"fit: expected convergence; got none: {self.reason}")


class FitResult(NamedTuple):
    """What :func:`fit` returns; the first three fields are those of NumPyro's ``SVIRunResult``.

    Attributes:
        params: the fitted parameters.
        state: the ``SVIState`` that holds them, to go on from by ``init_state``.
        losses: of all steps; NaN where one was skipped.
        info: how it went.
    """

    params: dict[str, Any]
    state: Any
    losses: jax.Array
    info: FitInfo


def fit(
    svi: SVI,
    rng_key: jax.Array,
    *args: Any,
    max_steps: int = 5_000,
    tol: float = 0.1,
    patience: int = 3,
    chunk_size: int = 100,
    criterion: str = "stein",
    checkpoint: str | os.PathLike[str] | None = None,
    progress_bar: bool = True,
    forward_mode_differentiation: bool = False,
    init_state: Any = None,
    init_params: dict[str, Any] | None = None,
    **kwargs: Any,
) -> FitResult:
    """Fit a guide until it has converged.

    Steps run in compiled chunks. After each the guide is looked at: with the mean of the
    parameters over the chunk, by the kernel Stein discrepancy of 1024 fresh draws from the
    model's score (:func:`~numpyro_kscore.diagnostics.stein_discrepancy`), and by the mean loss. At
    full step size it searches until neither is lower in the last window of chunks than in the one
    before, beyond the error of the difference, ``patience`` times in a row; or until the
    discrepancy is below ``tol`` and the loss falls no more; or for two fifths of ``max_steps``.
    Then it settles: the step size falls to 0 along a cosine over as many steps as the search took,
    or all that are left in the last case. Give the optimizer a constant step size, therefore:
    ``optax.adam(1e-2)``.

    A step whose loss or gradient is not finite is skipped. A chunk with more such steps than
    others, or after which the guide is not finite, is undone: the fit goes on from the state
    before, with new randomness and half the step size, up to five times. Interrupted from the
    keyboard, it returns the best state so far.

    Under a subsampled plate the model's score is that of a random subset: the discrepancy
    includes what that differs by, and may never be below ``tol``.

    Args:
        svi: model, guide, optimizer and loss. Of the guide the criterion asks what
            :class:`~numpyro_kscore.ImplicitELBO` does, whatever the loss.
        rng_key: random key.
        *args: arguments of model and guide.
        max_steps: the most steps; whole chunks are taken.
        tol: what matters, in standard deviations of the posterior: a change of the guide that is
            less than a shift of every mean by ``tol`` does not prolong the search.
        patience: looks in a row without improvement that end the search.
        chunk_size: steps between two looks, at least 5.
        criterion: ``"stein"``; or ``"loss"``, the loss alone, for guides with points, discrete
            latents or samplers that are not reparameterized, and for aggregate posteriors.
        checkpoint: file to write after every chunk. Where it is there already the fit goes on
            from it, and ends as if it had not been interrupted, to the last bit. Arguments of the
            model are not in it: give the same ones.
        progress_bar: whether to show one, by tqdm.
        forward_mode_differentiation: as in ``SVI.run``.
        init_state: a state to begin with, as in ``SVI.run``.
        init_params: parameters to begin with, as in ``SVI.run``.
        **kwargs: keyword arguments of model and guide.

    Returns:
        The mean parameters of the last chunk, or of the last one before loss or discrepancy rose
        beyond three standard errors, and how the fit went.

    Warns:
        UserWarning: if the fit did not converge, ran away, met numbers that are not finite, or
            settled far from the posterior.

    Raises:
        TypeError: for anything but an ``SVI`` and a random key, inside ``jit`` or ``vmap``, and
            for an optimizer whose state does not hold the parameters.
        ValueError: for a setting out of range, a guide the criterion cannot look at, and a
            checkpoint that is damaged or of another fit.
        FloatingPointError: if not a single chunk gave finite numbers.

    Example::

        svi = SVI(model, AutoImplicit(model), optax.adam(1e-2), ImplicitELBO())
        result = fit(svi, random.key(0), data)
        draws = svi.guide.sample_posterior(random.key(1), result.params, sample_shape=(1000,))
    """
    _check_call(svi, rng_key)
    path = None if checkpoint is None else Path(checkpoint)
    settings = Settings(max_steps, tol, patience, chunk_size, criterion, path, progress_bar)
    _check_criterion(svi, criterion)
    # SVI.init also tells the SVI what constraints its parameters have.
    state = svi.init(rng_key, *args, init_params=init_params, **kwargs)
    state = strongly_typed(state if init_state is None else init_state)
    slots = parameter_slots(svi, state.optim_state)
    layout = None if criterion == "loss" else inspect_svi(svi, state, args, kwargs)
    dim = latent_size(svi, state, args, kwargs) if layout is None else layout.size
    rule = settings.rule(dim)
    take_chunk = make_chunk(svi, layout, slots, args, kwargs, forward_mode_differentiation)
    run, interrupted = run_chunks(take_chunk, state, rule, settings, rng_key)
    return _finish(svi, run, rule, interrupted)


def _check_call(svi: SVI, rng_key: jax.Array) -> None:
    if not isinstance(svi, SVI):
        raise TypeError(f"svi: expected an SVI of numpyro.infer; got {svi!r}")
    check_key(rng_key)
    if not is_concrete(rng_key):
        raise TypeError(
            "fit: expected a call outside of jit and vmap, since it looks at what it finds; got a "
            "traced rng_key. Use svi.run there"
        )


def _check_criterion(svi: SVI, criterion: str) -> None:
    if criterion == "stein" and getattr(svi.loss, "aggregate", None) is not None:
        raise ValueError(
            "criterion: expected 'loss' for an objective with aggregate, which does not aim at the "
            "posterior the discrepancy is taken from; got 'stein'"
        )


def _finish(svi: SVI, run: Run, rule: Rule, interrupted: bool) -> FitResult:
    progress, looks = run.progress, run.progress.looks
    if progress.cause == "nan" and not looks:
        raise FloatingPointError(
            f"fit: expected finite losses and gradients; got none in {MOST_RECOVERIES + 1} "
            "attempts at the first steps. Look for draws outside a latent's support, and a model "
            "whose density is not finite where the guide starts; try init_params, a smaller "
            "init_scale or a smaller step size"
        )
    ending = conclude(progress, rule, interrupted)
    reason, advice = describe(ending)
    if advice:
        warnings.warn(f"fit: {reason}. {advice}", UserWarning, stacklevel=3)
    size = rule.chunk_size
    info = FitInfo(
        steps=size * len(looks),
        converged=ending.converged,
        cause=ending.cause,
        doubt=ending.doubt,
        reason=reason,
        best_step=size * (progress.best + 1),
        recoveries=progress.recoveries,
        skipped=sum(look.skipped for look in looks),
        trace_steps=size * np.arange(1, len(looks) + 1),
        discrepancy=np.array([look.discrepancy for look in looks]),
        discrepancy_error=np.array([look.discrepancy_error for look in looks]),
        trace=looks,
    )
    return FitResult(svi.get_params(run.best), run.best, jnp.asarray(run.all_losses()), info)
