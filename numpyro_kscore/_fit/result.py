"""The result of a fit."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI

from numpyro_kscore._fit.progress import CloseLook, Look, Rule, Run
from numpyro_kscore._fit.stopping import conclude
from numpyro_kscore.diagnostics._codes import Cause, Doubt
from numpyro_kscore.diagnostics._messages import fit_reason
from numpyro_kscore.diagnostics._weighing import Weighing


class FitInfo(NamedTuple):
    """The report of how a fit went.

    Attributes:
        steps: number of steps, skipped ones included.
        converged: whether it stopped because nothing improved any more, or because the discrepancy
            was below ``tol``.
        cause: why it stopped: ``"plateau"``, ``"tol"``, ``"budget"``, ``"runaway"``, ``"nan"``,
            ``"interrupted"``, ``"callback"`` or ``"time"``; the first two are convergence.
        doubt: what is wrong with a fit that converged: ``"far"`` from the model, ``"moments"``
            that are off, too few draws in a ``"tail"``, too ``"noisy"`` to tell, many steps
            ``"skipped"``, ``"recovered"`` from numbers that were not finite; empty if nothing is.
        reason: both in words.
        best_step: the last of the steps whose mean is returned; 0 is the start.
        recoveries: how often a chunk was undone and tried again.
        skipped: number of steps skipped because their loss or gradient was not finite.
        trace_steps: number of steps before each look at the guide, (k,); the first is 0 where the
            start was looked at.
        discrepancy: squared discrepancy of the guide at each look, (k,); NaN with
            ``criterion="loss"``.
        discrepancy_error: its standard error, (k,).
        trace: all numbers of each look.
        weights: what importance weights of the returned guide say, if the fit converged and the
            guide's density is known at its draws (docs/weights).

    Example::

        result.info.raise_if_failed()  # does nothing here
        result.info.converged  # True
        print(result.info.steps, result.info.reason)
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
    weights: Weighing | None = None

    def raise_if_failed(self) -> None:
        """Raise ``FloatingPointError`` unless the fit converged."""
        if not self.converged:
            raise FloatingPointError(f"fit: expected convergence; got none: {self.reason}")


class FitResult(NamedTuple):
    """The result of :func:`fit`; the first three fields are those of NumPyro's ``SVIRunResult``.

    Attributes:
        params: the fitted parameters.
        state: the ``SVIState`` that holds them; ``init_state=`` continues from it.
        losses: losses of all steps, (steps,), or of the start, (1,), if none was needed; NaN where
            a step was skipped.
        info: how it went.
        seconds: elapsed seconds, compilation included; after a checkpoint those since then.

    Example::

        latents = guide.sample_posterior(random.key(2), result.params, sample_shape=(1000,))
        latents["loc"]  # (1000,)
        result.losses[-1]  # ()
    """

    params: dict[str, Any]
    state: Any
    losses: jax.Array
    info: FitInfo
    seconds: float = float("nan")


def finish(
    svi: SVI,
    run: Run,
    rule: Rule,
    stopped: Cause,
    seconds: float,
    weights: Weighing | None,
    close: CloseLook | None,
) -> FitResult:
    """Turn a run into a result, with a warning if something is wrong with it.

    ``stopped`` is what ended the fit before the rule did, or empty.
    """
    progress, looks = run.progress, run.progress.looks
    start = () if progress.start is None else (progress.start,)
    trace = (*start, *looks)
    losses = run.all_losses() if looks else np.array([look.loss for look in start])
    ending = conclude(progress, rule, stopped, weights, close)
    reason, advice = fit_reason(ending.cause, ending.doubt, ending._asdict())
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
        trace_steps=size * np.arange(1 - len(start), len(looks) + 1),
        discrepancy=np.array([look.discrepancy for look in trace]),
        discrepancy_error=np.array([look.discrepancy_error for look in trace]),
        trace=trace,
        weights=weights,
    )
    return FitResult(svi.get_params(run.best), run.best, jnp.asarray(losses), info, seconds)
