"""Figures of an autoencoder: reconstructions, samples, and the distribution of codes."""

from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from jax import random

from examples.wae.data import Images, grid_of
from examples.wae.metrics import CODES, draw_codes, held_out_batch
from examples.wae.training import Autoencoder, Trained

COLUMNS, ROWS = 10, 6
GRAY = {"cmap": "gray_r", "vmin": 0, "vmax": 1}


def reconstructions(
    autoencoder: Autoencoder, params: dict[str, Any], images: Images
) -> tuple[np.ndarray, np.ndarray]:
    """Two pictures: test images with reconstructions below, and decoded draws of the prior."""
    x = held_out_batch(images, COLUMNS * ROWS // 2)
    # If there are fewer test images than places, they are repeated.
    x = x[np.arange(COLUMNS * ROWS // 2) % len(x)]
    codes = draw_codes(random.key(5), autoencoder, params, x)
    decode = jax.jit(lambda p, z: jax.nn.sigmoid(autoencoder.decode(p, z)))
    both = np.stack([np.asarray(x), np.asarray(decode(params, codes))])
    # Pairs of rows: (2, rows, columns, ...) -> (rows, 2, columns, ...).
    both = both.reshape(2, ROWS // 2, COLUMNS, *images.shape).swapaxes(0, 1)
    z = autoencoder.prior(params).sample(random.key(6), (COLUMNS * ROWS,))
    made_up = decode(params, z)
    return grid_of(both.reshape(-1, *images.shape), COLUMNS), grid_of(made_up, COLUMNS)


def plot_run(
    path: Path, autoencoder: Autoencoder, trained: Trained, images: Images, title: str
) -> None:
    """Plot reconstructions, samples, the aggregate posterior and the loss into one file."""
    params = trained.params
    rebuilt, made_up = reconstructions(autoencoder, params, images)
    x = held_out_batch(images, CODES)
    codes = np.asarray(draw_codes(random.key(2), autoencoder, params, x))
    draws = np.asarray(autoencoder.prior(params).sample(random.key(7), (len(codes),)))
    labels = None if images.test_labels is None else images.test_labels[: len(codes)]
    figure, panels = plt.subplots(2, 3, figsize=(13, 8), layout="constrained")
    for panel, picture, name in (
        (panels[0, 0], rebuilt, "test images, reconstructions below"),
        (panels[0, 1], made_up, "decoded draws of the prior"),
    ):
        panel.imshow(picture, **GRAY)
        panel.set(title=name, xticks=[], yticks=[])
    plot_losses(panels[0, 2], trained)
    plot_pairs(panels[1, 0], codes, draws, labels)
    plot_marginals(panels[1, 1], codes, draws)
    plot_spectrum(panels[1, 2], codes, draws)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_losses(panel: Any, trained: Trained) -> None:
    """Plot the objective over epochs."""
    panel.plot(np.arange(1, len(trained.losses) + 1), trained.losses, "k-")
    panel.set(title="objective, an estimate", xlabel="epoch", ylabel="per image")
    panel.grid(alpha=0.3)


def plot_pairs(panel: Any, codes: np.ndarray, draws: np.ndarray, labels: np.ndarray | None) -> None:
    """Plot the two most variable coordinates of codes, by class, over draws of the prior."""
    first, second = np.argsort(codes.std(0))[::-1][:2] if codes.shape[1] > 1 else (0, 0)
    panel.scatter(draws[:, first], draws[:, second], s=4, c="0.8")
    panel.scatter(codes[:, first], codes[:, second], s=4, c=labels, cmap="tab10", alpha=0.6)
    panel.set(
        title="codes; gray: draws of the prior", aspect="equal",
        xlabel=f"coordinate {first + 1}", ylabel=f"coordinate {second + 1}",
    )  # fmt: skip


def plot_marginals(panel: Any, codes: np.ndarray, draws: np.ndarray) -> None:
    """Plot a histogram of each coordinate of the codes, and of draws of the prior in black."""
    reach = max(4.0, float(np.quantile(np.abs(draws), 0.999)))
    edges = np.linspace(-reach, reach, 41)
    for values, style in ((draws, {"color": "k", "alpha": 0.3}), (codes, {"color": "C0"})):
        for column in values.T[:32]:
            panel.hist(column, edges, histtype="step", density=True, lw=0.8, **style)
    panel.set(title="each coordinate; black: draws of the prior", xlabel="value", ylabel="density")


def plot_spectrum(panel: Any, codes: np.ndarray, draws: np.ndarray) -> None:
    """Plot eigenvalues of the covariances of codes and of equally many draws of the prior."""
    for name, values, style in (
        ("codes", codes, {"marker": ".", "ms": 3}),
        ("draws of the prior", draws, {"color": "k", "ls": "--"}),
    ):
        eigenvalues = np.linalg.eigvalsh(np.atleast_2d(np.cov(values.T)))[::-1]
        panel.plot(np.arange(1, len(eigenvalues) + 1), eigenvalues, label=name, **style)
    panel.set(title="covariance of the codes", xlabel="eigenvalue")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend()
