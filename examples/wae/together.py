"""Several runs that differ in seed and weight only, trained in one program.

On an accelerator a step of one autoencoder waits for launches most of its time, and several at once
take little more. On a CPU they take as long as one after the other.
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from tqdm import tqdm

from examples.wae.data import Images
from examples.wae.training import Autoencoder, first_state, make_pass, save_state

__all__ = ["train_together"]


def train_together(
    runs: Sequence[tuple[Autoencoder, Path]],
    images: Images,
    num_epochs: int,
    every: int = 50,
) -> None:
    """Train all runs, each from its checkpoint, to what :func:`train` would make of it.

    Random numbers are those of ``train``; sums are rounded differently.

    Args:
        runs: autoencoders, whose settings differ in seed and weight only, and their checkpoints.
        images: training images.
        num_epochs: total number of epochs, including those in a checkpoint; runs that have as
            many are left alone.
        every: epochs between two writes.

    Raises:
        ValueError: for settings that differ in more, or a checkpoint of other settings.
        FloatingPointError: if the loss of a run is not finite; the others are trained nevertheless.
    """
    alike = {a.settings._replace(seed=0, weight=1.0) for a, _ in runs}
    if len(alike) > 1:
        raise ValueError(
            f"runs: expected settings that differ in seed and weight; got {len(alike)} kinds. "
            "Train each kind by itself"
        )
    started = [_Run(*run, *first_state(run[0], images, run[1])) for run in runs]
    started.sort(key=_Run.num_epochs)
    failed: list[Path] = []
    # Runs that are as far as each other are in one program.
    for done, group in itertools.groupby(started, key=_Run.num_epochs):
        if done < num_epochs:
            failed += _train(list(group), images, num_epochs, every)
    if failed:
        raise FloatingPointError(
            f"training: expected finite losses; got others in {', '.join(map(str, failed))}. Take "
            "a smaller learning rate"
        )


class _Run(NamedTuple):
    """A run as its checkpoint has it."""

    autoencoder: Autoencoder
    path: Path
    state: Any
    losses: np.ndarray
    seconds: np.ndarray

    def num_epochs(self) -> int:
        return len(self.losses)


def _train(runs: Sequence[_Run], images: Images, num_epochs: int, every: int) -> list[Path]:
    """Train runs that are equally far; the checkpoints of those that were not finite."""
    first = runs[0].autoencoder
    settings = [run.autoencoder.settings for run in runs]
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[run.state for run in runs])
    losses = np.stack([run.losses for run in runs])
    seconds = np.stack([run.seconds for run in runs])
    keys = jnp.stack([random.fold_in(random.key(each.seed), 1) for each in settings])
    weights = jnp.asarray([each.weight for each in settings])
    one = make_pass(first.svi.update, images, first.settings.batch_size)
    each = jax.vmap(one, in_axes=(0, 0, None, 0))
    epoch = jax.jit(
        lambda state, number, pixels: each(
            state, jax.vmap(lambda key: random.fold_in(key, number))(keys), pixels, weights
        ),
        donate_argnums=0,
    )
    pixels = jnp.asarray(images.train)
    bar = tqdm(range(losses.shape[1], num_epochs), unit="epoch", desc=f"{len(runs)} runs")
    for number in bar:
        start = time.perf_counter()
        state, loss = epoch(state, number, pixels)
        losses = np.column_stack([losses, np.asarray(loss)])
        share = (time.perf_counter() - start) / len(runs)
        seconds = np.column_stack([seconds, np.full(len(runs), share)])
        bar.set_postfix(loss=f"{np.nanmean(losses[:, -1]):.3f}")
        if number == num_epochs - 1 or (number + 1) % every == 0:
            for k, run in enumerate(runs):
                if np.isfinite(losses[k]).all():
                    own = jax.tree.map(lambda leaf: leaf[k], state)  # noqa: B023 (used at once)
                    save_state(run.path, settings[k], images, own, losses[k], seconds[k])
    return [run.path for run, each in zip(runs, losses, strict=True) if not np.isfinite(each).all()]
