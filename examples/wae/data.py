"""Images for the Wasserstein autoencoder: digits, MNIST, faces, or a folder of pictures.

All images are bytes of shape (images, height, width, channels), converted batch by batch.
"""

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random
from PIL import Image, UnidentifiedImageError
from sklearn.datasets import fetch_openml, load_digits, load_sample_images
from sklearn.model_selection import train_test_split

MNIST_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
IMAGE_SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
CELEBA_CROP = 140  # pixels of the aligned 178 x 218 pictures that show the face
SIDE = 64  # of color images, in pixels
TEST_SHARE = 0.1


class Images(NamedTuple):
    """A data set.

    Attributes:
        name: name of the data set, for titles.
        train: training images as bytes, (n, height, width, channels).
        test: test images, likewise.
        train_labels: classes, (n,); None if unknown.
        test_labels: likewise.
    """

    name: str
    train: np.ndarray
    test: np.ndarray
    train_labels: np.ndarray | None
    test_labels: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of one image."""
        return self.train.shape[1:]

    @property
    def is_binary(self) -> bool:
        """True if gray values are probabilities of binary pixels."""
        return self.shape[2] == 1


def load_images(dataset: str, folder: Path | None = None, limit: int | None = None) -> Images:
    """The images of a data set.

    Args:
        dataset: ``digits``, ``patches``, ``mnist``, ``celeba``, or a folder of idx files or of
            pictures.
        folder: folder with the files of ``mnist`` or ``celeba``. Without it MNIST is downloaded.
        limit: largest number of training images; the first ones are taken.

    Raises:
        ValueError: if the data set is unknown, or a file is missing or broken.
    """
    if dataset == "digits":
        images = _digits()
    elif dataset == "patches":
        images = _patches()
    elif dataset == "mnist":
        images = read_mnist(folder) if folder else _download_mnist()
    elif dataset == "celeba":
        if folder is None:
            raise ValueError(
                "data: expected the folder with the aligned pictures of CelebA; got none. Get them "
                "from its authors, whose license does not let others hand them on, and give "
                "--data FOLDER"
            )
        images = read_pictures(folder, limit, crop=CELEBA_CROP)
    else:
        path = Path(dataset)
        if not path.is_dir():
            raise ValueError(
                "dataset: expected digits, patches, mnist, celeba or a folder; got "
                f"{dataset!r}. Give the path of a folder of idx files or of pictures"
            )
        has_idx = any("idx3-ubyte" in file.name for file in path.iterdir())
        images = read_mnist(path) if has_idx else read_pictures(path, limit)
    if limit is not None:
        labels = images.train_labels
        labels = None if labels is None else labels[:limit]
        images = images._replace(train=images.train[:limit], train_labels=labels)
    return images


def to_batch(key: Array, pixels: Array, is_binary: bool) -> Array:
    """Network inputs from bytes: random binary pixels, or colors in [0, 1]."""
    if not is_binary:
        return pixels / jnp.float32(255)
    # Sixteen random bits per pixel cost half as much as a uniform number. 255 is white except once
    # in 65 536 times.
    bits = random.bits(key, pixels.shape, jnp.uint16)
    return (bits < pixels.astype(jnp.uint16) * 257).astype(jnp.float32)


def binarize_once(images: np.ndarray, seed: int = 0) -> np.ndarray:
    """Random binary images as floats, the same in every run."""
    drawn = np.random.default_rng(seed).random(images.shape, np.float32)
    return (drawn < images / np.float32(255)).astype(np.float32)


def _digits() -> Images:
    """The 1797 handwritten digits that come with scikit-learn, 8 x 8 pixels of 17 greys."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = np.round(pixels.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    parts = train_test_split(
        pixels, labels.astype(np.int32), test_size=297, random_state=0, stratify=labels
    )
    return Images("digits", *parts)


def _patches(count: int = 6_000, side: int = 16) -> Images:
    """Squares of the two photographs that come with scikit-learn, labeled by photograph.

    Test images come from the right fifth of each photograph, which no training image touches.
    """
    generator = np.random.default_rng(0)
    parts: list[list[np.ndarray]] = [[], []]
    for picture in load_sample_images().images:
        border = round(0.8 * picture.shape[1])
        for part, half, number in zip(
            parts,
            (picture[:, :border], picture[:, border:]),
            (count // 2, count // 12),
            strict=True,
        ):
            top, left = (generator.integers(0, n - side + 1, number) for n in half.shape[:2])
            squares = zip(top, left, strict=True)
            part.append(np.stack([half[t : t + side, c : c + side] for t, c in squares]))
    labels = [np.repeat(np.arange(2, dtype=np.int32), len(part[0])) for part in parts]
    train, test = (np.concatenate(part) for part in parts)
    return Images("patches", train, test, *labels)


def _download_mnist() -> Images:
    """MNIST, downloaded by scikit-learn, which keeps it in its own folder."""
    try:
        found = fetch_openml("mnist_784", version=1, as_frame=False, parser="liac-arff")
    except Exception as error:
        # Causes range from a missing network to a half-written file in the cache.
        raise ValueError(
            f"mnist: expected a download by scikit-learn; got {type(error).__name__}: {error}. "
            "Give the folder of the four idx files by --data FOLDER"
        ) from error
    pixels = found.data.reshape(-1, 28, 28, 1).astype(np.uint8)
    labels = found.target.astype(np.int32)
    return Images("MNIST", pixels[:60_000], pixels[60_000:], labels[:60_000], labels[60_000:])


def read_mnist(folder: Path) -> Images:
    """MNIST, or other data in its format, from four idx files, compressed or not.

    Raises:
        ValueError: if a file is missing or broken, or the shapes of images and labels do not match.
    """
    train, train_labels, test, test_labels = (
        read_idx(_find_idx(Path(folder), name)) for name in MNIST_FILES
    )
    for images, labels in ((train, train_labels), (test, test_labels)):
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{folder}: expected images (n, height, width) with labels (n,); got shapes "
                f"{images.shape} and {labels.shape}"
            )
    if train.shape[1:] != test.shape[1:]:
        raise ValueError(
            f"{folder}: expected test images of the size of training images, {train.shape[1:]}; "
            f"got {test.shape[1:]}"
        )
    train_labels, test_labels = (a.astype(np.int32) for a in (train_labels, test_labels))
    return Images("MNIST", train[..., None], test[..., None], train_labels, test_labels)


def _find_idx(folder: Path, name: str) -> Path:
    for suffix in ("-ubyte", "-ubyte.gz"):
        if (folder / (name + suffix)).exists():
            return folder / (name + suffix)
    raise ValueError(
        f"{folder}: expected the file {name}-ubyte or {name}-ubyte.gz; got a folder without. All "
        f"of {', '.join(MNIST_FILES)} are needed"
    )


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes from an idx file: magic number, sizes and data, big-endian.

    Raises:
        ValueError: if the file is broken or holds something else.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, ndim = struct.unpack(">HBB", data[:4])
        shape = struct.unpack(f">{ndim}I", data[4 : 4 + 4 * ndim])
    except (OSError, EOFError, struct.error, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise ValueError(
            f"{path}: expected an idx file; got one that cannot be read "
            f"({type(error).__name__}: {error}). Fetch it again"
        ) from error
    if (zero, kind) != (0, 8):
        raise ValueError(
            f"{path}: expected an idx file of bytes, which starts with 00 00 08; got "
            f"{data[:3].hex(' ')}"
        )
    content = data[4 + 4 * ndim :]
    if len(content) != np.prod(shape, dtype=int):
        raise ValueError(
            f"{path}: expected {np.prod(shape, dtype=int)} bytes for shape {shape}; got "
            f"{len(content)}. Fetch the file again"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_pictures(folder: Path, limit: int | None = None, crop: int | None = None) -> Images:
    """Color images from a folder: a centered square of each, at 64 x 64 pixels.

    The last tenth, in the order of the names, are test images. Pictures in several folders are
    labeled by folder and shuffled first.

    Args:
        folder: folder to search, with all its sub-folders.
        limit: largest number of training images.
        crop: side of the square; by default the largest that fits.

    Raises:
        ValueError: if there are fewer than two pictures, or one cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"data: expected a folder of pictures; got {str(folder)!r}")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if len(paths) < 2:
        raise ValueError(
            f"{folder}: expected two pictures at least ({', '.join(sorted(IMAGE_SUFFIXES))}); got "
            f"{len(paths)}"
        )
    num_test = max(1, round(TEST_SHARE * len(paths)))
    train, test = paths[:-num_test], paths[-num_test:]
    classes = sorted({path.parent for path in paths})
    if len(classes) > 1:
        # In sorted order all test images would come from the last folder.
        shuffled = np.random.default_rng(0).permutation(len(paths))
        train, test = ([paths[i] for i in part] for part in np.split(shuffled, [-num_test]))
    train = train[:limit]
    labels = [None, None]
    if len(classes) > 1:
        labels = [
            np.array([classes.index(p.parent) for p in part], np.int32) for part in (train, test)
        ]
    return Images(folder.name, _pictures(train, crop), _pictures(test, crop), *labels)


def _pictures(paths: Sequence[Path], crop: int | None) -> np.ndarray:
    return np.stack([_picture(path, crop) for path in paths])


def _picture(path: Path, crop: int | None) -> np.ndarray:
    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(
            f"{path}: expected a picture; got a file that cannot be read ({error}). Remove it, or "
            "fetch it again"
        ) from error
    side = min(crop or max(picture.size), *picture.size)
    left, top = ((size - side) // 2 for size in picture.size)
    # Crop first, because resizing a box of a picture uses pixels outside it.
    square = picture.crop((left, top, left + side, top + side))
    resized = square.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(resized, np.uint8)


def grid_of(images: Array | np.ndarray, columns: int) -> np.ndarray:
    """One picture of images (n, height, width, channels) in [0, 1], row by row with gaps."""
    images = np.clip(np.asarray(images, np.float32), 0, 1)
    blank = 0.0 if images.shape[3] == 1 else 1.0  # both are drawn as white
    gap = 1 + images.shape[1] // 32
    framed = np.pad(images, ((0, 0), (gap, 0), (gap, 0), (0, 0)), constant_values=blank)
    rows = len(images) // columns
    height, width, channels = framed.shape[1:]
    tiles = framed[: rows * columns].reshape(rows, columns, height, width, channels)
    picture = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * height, columns * width, channels)
    return picture[..., 0] if channels == 1 else picture
