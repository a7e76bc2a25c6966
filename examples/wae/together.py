"""Several runs that differ in seed and weight only, trained in one program.

On an accelerator a step of one autoencoder waits for launches most of its time, and several at once
take little more. On a CPU they take as long as one after the other.
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

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
    done = [len(first_state(autoencoder, images, path)[1]) for autoencoder, path in runs]
    failed: list[Path] = []
    # Runs that are as far as each other are in one program.
    order = sorted(range(len(runs)), key=done.__getitem__)
    for epochs, group in itertools.groupby(order, key=done.__getitem__):
        if epochs < num_epochs:
            failed += _train([runs[k] for k in group], images, num_epochs, every)
    if failed:
        raise FloatingPointError(
            f"training: expected finite losses; got others in {', '.join(map(str, failed))}. Take "
            "a smaller learning rate"
        )


def _train(
    runs: Sequence[tuple[Autoencoder, Path]], images: Images, num_epochs: int, every: int
) -> list[Path]:
    """Train runs that are equally far; the checkpoints of those that were not finite."""
    first = runs[0][0]
    starts = [first_state(autoencoder, images, path) for autoencoder, path in runs]
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[start[0] for start in starts])
    losses = np.stack([start[1] for start in starts])
    seconds = np.stack([start[2] for start in starts])
    keys = jnp.stack([random.fold_in(random.key(a.settings.seed), 1) for a, _ in runs])
    weights = jnp.asarray([a.settings.weight for a, _ in runs])
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
            for k, (autoencoder, path) in enumerate(runs):
                if np.isfinite(losses[k]).all():
                    own = jax.tree.map(lambda leaf: leaf[k], state)  # noqa: B023 (used at once)
                    save_state(path, autoencoder.settings, images, own, losses[k], seconds[k])
    return [path for k, (_, path) in enumerate(runs) if not np.isfinite(losses[k]).all()]
