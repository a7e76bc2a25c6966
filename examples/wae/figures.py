"""Figures of an autoencoder: reconstructions, samples, and the distribution of codes."""

from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from jax import random
from scipy.stats import norm

from examples.wae.data import Images, grid_of
from examples.wae.metrics import CODES, draw_codes, held_out_batch
from examples.wae.training import Autoencoder, Trained

COLUMNS, ROWS = 10, 6
GREY = {"cmap": "gray_r", "vmin": 0, "vmax": 1}


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
    z = random.normal(random.key(6), (COLUMNS * ROWS, autoencoder.settings.latent_dim))
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
    labels = None if images.test_labels is None else images.test_labels[: len(codes)]
    figure, panels = plt.subplots(2, 3, figsize=(13, 8), layout="constrained")
    for panel, picture, name in (
        (panels[0, 0], rebuilt, "test images, reconstructions below"),
        (panels[0, 1], made_up, "decoded draws of the prior"),
    ):
        panel.imshow(picture, **GREY)
        panel.set(title=name, xticks=[], yticks=[])
    plot_losses(panels[0, 2], trained)
    plot_pairs(panels[1, 0], codes, labels)
    plot_marginals(panels[1, 1], codes)
    plot_spectrum(panels[1, 2], {"codes": codes})
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_losses(panel: Any, trained: Trained) -> None:
    """Plot the objective over epochs."""
    panel.plot(np.arange(1, len(trained.losses) + 1), trained.losses, "k-")
    panel.set(title="objective, an estimate", xlabel="epoch", ylabel="per image")
    panel.grid(alpha=0.3)


def plot_pairs(panel: Any, codes: np.ndarray, labels: np.ndarray | None) -> None:
    """Plot the two most variable coordinates of codes, by class, with circles of the prior."""
    first, second = np.argsort(codes.std(0))[::-1][:2] if codes.shape[1] > 1 else (0, 0)
    panel.scatter(codes[:, first], codes[:, second], s=4, c=labels, cmap="tab10", alpha=0.6)
    angle = np.linspace(0, 2 * np.pi, 200)
    for radius in (1, 2, 3):
        panel.plot(radius * np.cos(angle), radius * np.sin(angle), "k-", lw=0.6)
    panel.set(
        title="codes; circles: 1, 2, 3 sd of the prior", aspect="equal",
        xlabel=f"coordinate {first + 1}", ylabel=f"coordinate {second + 1}",
    )  # fmt: skip


def plot_marginals(panel: Any, codes: np.ndarray) -> None:
    """Plot a histogram of each coordinate of the codes, with the prior's density."""
    edges = np.linspace(-4, 4, 41)
    for column in codes.T[:32]:
        panel.hist(column, edges, histtype="step", density=True, color="C0", alpha=0.4, lw=0.8)
    panel.plot(edges, norm.pdf(edges), "k-", label="prior")
    panel.set(title="each coordinate of the codes", xlabel="value", ylabel="density")
    panel.legend()


def plot_spectrum(panel: Any, codes: dict[str, np.ndarray]) -> None:
    """Plot eigenvalues of covariances of sets of codes, and of equally many draws of the prior."""
    shape = next(iter(codes.values())).shape
    prior = np.asarray(random.normal(random.key(7), shape))
    for name, values in {**codes, "draws of the prior": prior}.items():
        eigenvalues = np.linalg.eigvalsh(np.atleast_2d(np.cov(values.T)))[::-1]
        style = {"color": "k", "ls": "--"} if values is prior else {"marker": ".", "ms": 3}
        panel.plot(np.arange(1, len(eigenvalues) + 1), eigenvalues, label=name, **style)
    panel.set(title="covariance of the codes", xlabel="eigenvalue")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend()
