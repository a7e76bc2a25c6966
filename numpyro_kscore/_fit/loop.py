"""The loop of a fit: chunk after chunk, with a checkpoint, a progress bar and a callback."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_kscore._fit.checkpoint import load_checkpoint, save_checkpoint
from numpyro_kscore._fit.expansion import Expander
from numpyro_kscore._fit.fit_options import FitOptions
from numpyro_kscore._fit.progress import (
    EVALUATION_DRAWS,
    LOOK_BATCHES,
    Chunk,
    Look,
    Progress,
    Rule,
    Run,
    Seen,
)
from numpyro_kscore._fit.stopping import advance, begin, step_sizes
from numpyro_kscore._util.batches import Batches, Position, ahead
from numpyro_kscore._util.deadline import seconds_left
from numpyro_kscore._util.keys import FitKey, as_numbers, key_apart
from numpyro_kscore.diagnostics._codes import Cause

MOST_RECOVERIES = 5


def run_chunks(
    take_chunk: Callable[[Any, Any, bool], Chunk],
    first_looks: Sequence[Callable[[Any], Seen]],
    expander: Expander,
    batches: Batches | None,
    state: Any,
    rule: Rule,
    settings: FitOptions,
    rng_key: jax.Array,
    bar: Bar,
) -> tuple[Run, Cause]:
    """Take chunks until the rule says that the fit is done.

    ``first_looks`` are taken at the start, where bounds are known, until one of them shows that no
    step is needed. ``state`` and ``rng_key`` are those of the start: the state of a checkpoint that
    exists takes the place of the first, and its key must be the second. With the run comes
    ``"interrupted"``, from the keyboard, ``"callback"`` or ``"time"``, if one of them ended it.
    """
    path, begin = settings.checkpoint, time.perf_counter()
    recorded = {
        **rule._asdict(),
        "criterion": settings.criterion,
        "rng_key": as_numbers(rng_key).ravel().tolist(),
        "loader": batches is not None,
    }
    gaps = np.full(EVALUATION_DRAWS, np.nan) if first_looks and rule.knows_bound else None
    if path is not None and path.exists():
        first = Run(state, state, control_variate=expander.like(state), gaps=gaps)
        run = _restore(path, first, recorded)
        bar.begin(run.progress, rule)
    else:
        run = Run(state, state, control_variate=expander.expand(state), gaps=gaps)
        bar.begin(run.progress, rule)
        for look in first_looks:
            if run.progress.phase != "done":
                run = _look_first(run, look(state), rule)
        if run.progress.phase == "done":
            bar.show(run.progress, rule)
            if path is not None:
                _save(path, run, recorded)
    stream = _stream(batches, rule, settings, run.position)
    try:
        while run.progress.phase != "done":
            count = len(run.progress.looks)
            if count and count & (count - 1) == 0:
                # Expand anew after 1, 2, 4, … chunks: a guide moves less and less.
                run = run._replace(control_variate=expander.expand(run.state))
            sizes, (stack, position) = step_sizes(run.progress, rule), next(stream)
            # Everything is sent before the chunk, and nothing is asked for until it is done.
            given = jax.device_put((sizes, run.control_variate, stack))
            chunk = take_chunk(run.state, given, run.progress.phase == "settle")
            run = _take_over(run, chunk, rule)._replace(position=position)
            if path is not None:
                _save(path, run, recorded)
            bar.show(run.progress, rule)
            stopped: Cause = "time" if seconds_left() <= 0 else ""
            if settings.callback is not None and len(run.progress.looks) > count:
                more = {"step_size": float(sizes[-1]), "seconds": time.perf_counter() - begin}
                if _call_back(settings.callback, run, chunk.averaged, rule, more):
                    stopped = "callback"
            if stopped and run.progress.phase != "done":
                return run, stopped
    except KeyboardInterrupt:
        return run, "interrupted"
    finally:
        stream.close()
    return run, ""


def _stream(batches: Batches | None, rule: Rule, settings: FitOptions, start: Position) -> Any:
    """Batches for one chunk after another, with the position after each; None without a loader."""
    if batches is None:
        return ((None, start) for _ in itertools.count())
    looks = LOOK_BATCHES if settings.criterion == "stein" else 0
    return ahead(batches.stream(rule.chunk_size + looks, start))


def _call_back(
    callback: Callable[..., Any], run: Run, averaged: Any, rule: Rule, more: dict[str, float]
) -> bool:
    """Give the last look to a callback, and return whether that ends the fit."""
    look = run.progress.looks[-1]
    numbers = {name: float(value) for name, value in look._asdict().items()}
    metrics = {**numbers, **more, "epoch": float(run.position.epoch)}
    answer = callback(len(run.progress.looks) * rule.chunk_size, averaged, metrics)
    if answer is not None and not isinstance(answer, bool | np.bool_):
        raise TypeError(
            f"callback: expected it to return None, or True to end the fit; got {answer!r}"
        )
    return bool(answer)


def _take_over(run: Run, chunk: Chunk, rule: Rule) -> Run:
    """Go on from the end of a chunk, or from its start if its numbers are not finite."""
    progress = run.progress
    if not bool(chunk.finite):
        progress = progress._replace(recoveries=progress.recoveries + 1)
        if progress.recoveries > MOST_RECOVERIES:
            return run._replace(progress=progress._replace(phase="done", cause="nan"))
        key = key_apart(run.state.rng_key, FitKey.RECOVERY + progress.recoveries)
        return run._replace(state=run.state._replace(rng_key=key), progress=progress)
    look, gaps = _as_look(chunk.look, chunk.gaps, run.gaps)
    rounds = len(progress.rounds)
    progress = advance(progress, look, rule)
    is_best = progress.best == len(progress.looks) - 1
    best = chunk.averaged if is_best else run.best
    if not is_best or len(progress.rounds) == rounds:
        gaps = run.gaps
    # Copy the losses: on a CPU a view would keep the array, some kilobytes a chunk.
    losses = (*run.losses, np.array(chunk.losses))
    return Run(chunk.state, best, progress, losses, run.control_variate, run.position, gaps)


def _look_first(run: Run, seen: Seen, rule: Rule) -> Run:
    """Decide by a look at the start whether steps are needed."""
    if not bool(seen.finite):
        return run
    gaps = np.array(seen.gaps, float)
    look, _ = _as_look(seen.numbers, seen.gaps, gaps)
    look = look._replace(loss=-look.bound, loss_error=look.bound_error, skipped=0)
    progress = begin(look, rule)
    return run if progress.start is None else run._replace(progress=progress, gaps=gaps)


def _as_look(
    numbers: dict[str, Any], gaps: Any, before: np.ndarray | None
) -> tuple[Look, np.ndarray | None]:
    """Return the numbers seen as plain ones, with the change of the gaps since before."""
    seen = {name: value.item() for name, value in jax.device_get(numbers).items()}
    look = Look(**{name: seen.get(name, math.nan) for name in Look._fields})
    if gaps is None or before is None:
        return look, None
    gaps = np.array(gaps, float)
    changes = gaps - before
    known = changes[np.isfinite(changes)]
    if 2 * len(known) <= len(changes):
        return look, gaps
    error = float(np.std(known)) / math.sqrt(len(known))
    return look._replace(gain=float(np.mean(known)), gain_error=error), gaps


def _save(path: Path, run: Run, settings: dict[str, Any]) -> None:
    # JSON writes a look, which is a tuple, as a list of its fields.
    progress, position = run.progress._asdict(), run.position._asdict()
    record = {"settings": settings, "progress": progress, "position": position}
    save_checkpoint(path, _kept(run), record, run.all_losses())


def _kept(run: Run) -> Any:
    return run.state, run.best, run.control_variate, run.gaps


def _restore(path: Path, run: Run, settings: dict[str, Any]) -> Run:
    (state, best, control_variate, gaps), record, losses = load_checkpoint(path, _kept(run))
    stored = record["settings"]
    differing = [name for name in settings if stored.get(name) != settings[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"checkpoint: expected a fit with {name} = {settings[name]}; got one with "
            f"{stored.get(name)} in {path}. Give the same settings, another path, or delete the "
            "file"
        )
    progress = Progress(**record["progress"])
    start = None if progress.start is None else Look(*progress.start)
    looks = tuple(Look(*look) for look in progress.looks)
    progress = progress._replace(looks=looks, start=start, rounds=tuple(progress.rounds))
    gaps, position = None if gaps is None else np.array(gaps, float), Position(**record["position"])
    return Run(state, best, progress, (losses,), control_variate, position, gaps)


class Bar:
    """A bar of tqdm that says what a fit is doing, from its first second.

    It shows nothing where tqdm is not installed or no bar is asked for.
    """

    def __init__(self, settings: FitOptions) -> None:
        self._bar: Any = None
        if not settings.progress_bar:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=settings.max_steps)
        self._bar.set_postfix_str("finding a start")

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, progress: Progress, rule: Rule) -> None:
        """Show what is left of the steps, which may go on from a checkpoint."""
        if self._bar is None:
            return
        done = len(progress.looks) * rule.chunk_size
        # Steps of an earlier run do not count in the time of a step.
        self._bar.initial = self._bar.n = self._bar.last_print_n = done
        self._bar.total = rule.num_chunks * rule.chunk_size
        self._bar.set_postfix_str("compiling")

    def show(self, progress: Progress, rule: Rule) -> None:
        """Show how far the fit is, and what was seen last."""
        look = progress.looks[-1] if progress.looks else progress.start
        if self._bar is None or look is None:
            return
        phase: str = progress.phase
        if progress.start is not None and phase != "done":
            phase = f"round {len(progress.rounds) + 1}"
        text = f"{phase}, loss {look.loss:.4f}"
        if np.isfinite(look.discrepancy):
            text += f", discrepancy² {look.discrepancy:.2g} ± {look.discrepancy_error:.1g}"
        steps = len(progress.looks) * rule.chunk_size
        # The bar of a fit that is done is full.
        if progress.phase == "done":
            self._bar.total = steps
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(steps - self._bar.n)
