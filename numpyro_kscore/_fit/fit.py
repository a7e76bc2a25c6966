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

from numpyro_kscore._fit.checkpoint import load_checkpoint, save_checkpoint
from numpyro_kscore._fit.chunks import (
    LOSS_BLOCKS,
    Chunk,
    inspect_svi,
    latent_size,
    make_chunk,
    parameter_slots,
    strongly_typed,
)
from numpyro_kscore._fit.messages import describe
from numpyro_kscore._fit.stopping import (
    Cause,
    Doubt,
    Look,
    Progress,
    Rule,
    advance,
    conclude,
    step_sizes,
)
from numpyro_kscore._util.checks import check_choice, check_count, check_positive, is_concrete
from numpyro_kscore._util.keys import check_key, key_apart

__all__ = ["FitInfo", "FitResult", "fit"]

MOST_RECOVERIES = 5


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


class _Run(NamedTuple):
    """What a fit carries from chunk to chunk, and keeps in its checkpoint."""

    state: Any
    best: Any
    progress: Progress
    losses: tuple[np.ndarray, ...]


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
    if not isinstance(svi, SVI):
        raise TypeError(f"svi: expected an SVI of numpyro.infer; got {svi!r}")
    check_key(rng_key)
    if not is_concrete(rng_key):
        raise TypeError(
            "fit: expected a call outside of jit and vmap, since it looks at what it finds; got a "
            "traced rng_key. Use svi.run there"
        )
    check_count("max_steps", max_steps, minimum=LOSS_BLOCKS)
    check_count("patience", patience)
    check_count("chunk_size", chunk_size, minimum=LOSS_BLOCKS)
    check_positive("tol", tol)
    check_choice("criterion", criterion, ("stein", "loss"))
    if criterion == "stein" and getattr(svi.loss, "aggregate", None) is not None:
        raise ValueError(
            "criterion: expected 'loss' for an objective with aggregate, which does not aim at the "
            "posterior the discrepancy is taken from; got 'stein'"
        )
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"checkpoint: expected a file in a folder that is there; got {path}")

    # SVI.init also tells the SVI what constraints its parameters have.
    state = svi.init(rng_key, *args, init_params=init_params, **kwargs)
    state = strongly_typed(state if init_state is None else init_state)
    slots = parameter_slots(svi, state.optim_state)
    layout = None if criterion == "loss" else inspect_svi(svi, state, args, kwargs)
    num_chunks = max(1, max_steps // chunk_size)
    dim = latent_size(svi, state, args, kwargs) if layout is None else layout.size
    rule = Rule(max_steps // num_chunks, num_chunks, float(tol), patience, dim)
    settings = {**rule._asdict(), "criterion": criterion, "rng_key": _key_words(rng_key)}
    chunk = make_chunk(svi, layout, slots, args, kwargs, forward_mode_differentiation)

    run = _Run(state, state, Progress(), ())
    if path is not None and path.exists():
        run = _restore(path, run, settings)
    interrupted = False
    bar = _progress_bar(progress_bar, rule, run)
    try:
        while run.progress.phase != "done":
            run = _advance(run, chunk(run.state, step_sizes(run.progress, rule)), rule)
            if path is not None:
                _save(path, run, settings)
            if bar is not None:
                _show(bar, run, rule)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if bar is not None:
            bar.close()
    return _finish(svi, run, rule, interrupted)


def _advance(run: _Run, found: Chunk, rule: Rule) -> _Run:
    """Take over a chunk of steps, or go back to the state before."""
    progress = run.progress
    if not bool(found.finite):
        progress = progress._replace(recoveries=progress.recoveries + 1)
        if progress.recoveries > MOST_RECOVERIES:
            return run._replace(progress=progress._replace(phase="done", cause="nan"))
        key = key_apart(run.state.rng_key, progress.recoveries)
        return run._replace(state=run.state._replace(rng_key=key), progress=progress)
    seen = {name: value.item() for name, value in jax.device_get(found.look).items()}
    look = Look(**{name: seen.get(name, float("nan")) for name in Look._fields})
    progress = advance(progress, look, rule)
    is_best = progress.best == len(progress.looks) - 1
    losses = (*run.losses, np.asarray(found.losses))
    return _Run(found.state, found.averaged if is_best else run.best, progress, losses)


def _finish(svi: SVI, run: _Run, rule: Rule, interrupted: bool) -> FitResult:
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
    losses = jnp.asarray(np.concatenate([np.zeros(0, np.float32), *run.losses]))
    return FitResult(svi.get_params(run.best), run.best, losses, info)


def _save(path: Path, run: _Run, settings: dict[str, Any]) -> None:
    # A row, being a tuple, is written as a list of its fields.
    record = {"settings": settings, "progress": run.progress._asdict()}
    losses = np.concatenate([np.zeros(0, np.float32), *run.losses])
    save_checkpoint(path, (run.state, run.best), record, losses)


def _restore(path: Path, run: _Run, settings: dict[str, Any]) -> _Run:
    template = (run.state, run.best)
    (state, best), record, losses = load_checkpoint(path, template)
    kept = record["settings"]
    differing = [name for name in settings if kept.get(name) != settings[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"checkpoint: expected a fit with {name} = {settings[name]}; got one with "
            f"{kept.get(name)} in {path}. Give the same settings, another path, or delete the file"
        )
    progress = Progress(**record["progress"])
    progress = progress._replace(looks=tuple(Look(*look) for look in progress.looks))
    return _Run(state, best, progress, (losses,))


def _key_words(rng_key: jax.Array) -> list[int]:
    is_typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(rng_key) if is_typed else rng_key
    return [int(word) for word in np.asarray(data).ravel()]


def _progress_bar(wanted: bool, rule: Rule, run: _Run) -> Any:
    if not wanted:
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    done = len(run.progress.looks) * rule.chunk_size
    return tqdm(total=rule.num_chunks * rule.chunk_size, initial=done)


def _show(bar: Any, run: _Run, rule: Rule) -> None:
    if not run.progress.looks:
        return
    look = run.progress.looks[-1]
    text = f"{run.progress.phase}, loss {look.loss:.4f}"
    if np.isfinite(look.discrepancy):
        text += f", discrepancy² {look.discrepancy:.2g} ± {look.discrepancy_error:.1g}"
    bar.set_postfix_str(text, refresh=False)
    bar.update(len(run.progress.looks) * rule.chunk_size - bar.n)
