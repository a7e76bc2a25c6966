"""Training states of autoencoders in a cache folder, and small ones for quick runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.common.tables import Row
from examples.wae.data import Images, load_images
from examples.wae.objectives import ESTIMATORS
from examples.wae.training import Autoencoder, Settings, Trained, train
from numpyro_kscore._fit.checkpoint import load_checkpoint

QUICK = {"estimator": "stein", "value": ESTIMATORS["stein"][2], "latent_dim": 2, "seed": 0}


def settings_of(cell: Row) -> Settings:
    """Settings of the training that a row of a table needs."""
    return Settings(cell["estimator"], cell["value"], cell["latent_dim"], seed=cell["seed"])


def state_file(cell: Row) -> str:
    """File name of a row's training state in the cache folder."""
    return f"{cell['estimator']}-{cell['value']:g}-{cell['latent_dim']}-{cell['seed']}.npz"


def load_trained(
    cache: Path, cell: Row, shape: tuple[int, int, int]
) -> tuple[Autoencoder, dict[str, Any], int]:
    """A row's autoencoder, its parameters from the cache folder and its number of epochs."""
    autoencoder = Autoencoder(settings_of(cell), shape)
    state, _, series = load_checkpoint(cache / state_file(cell), autoencoder.init())
    return autoencoder, autoencoder.svi.get_params(state), series.shape[1]


def train_state(
    images: Images, cache: Path, cell: Row, num_epochs: int
) -> tuple[Autoencoder, Trained]:
    """Train a row's autoencoder to ``num_epochs`` epochs in all, from its state if there is one.

    Raises:
        ValueError: if the state has more epochs already.
    """
    autoencoder, path = Autoencoder(settings_of(cell), images.shape), cache / state_file(cell)
    trained = train(autoencoder, images, num_epochs, path)
    if len(trained.losses) > num_epochs:
        raise ValueError(
            f"{path}: expected a run of at most {num_epochs} epochs; got one of "
            f"{len(trained.losses)}. Ask for fewer epochs first, or give another folder"
        )
    return autoencoder, trained


def quick_images() -> Images:
    """A few of scikit-learn's digits."""
    return load_images("digits", limit=256)


@contextmanager
def quick_states() -> Iterator[tuple[Images, Path]]:
    """Images and a temporary cache folder with the state of ``QUICK`` after one epoch."""
    images = quick_images()
    with TemporaryDirectory() as folder:
        train_state(images, Path(folder), QUICK, 1)
        yield images, Path(folder)
