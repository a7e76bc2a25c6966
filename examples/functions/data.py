"""Regression data from local files, OpenML or scikit-learn, with random splits."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.datasets import fetch_openml, load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler


class Split(NamedTuple):
    """Standardized training and test data.

    Attributes:
        x: training inputs, (N, d).
        y: training targets, (N,).
        x_test: test inputs.
        y_test: test targets.
        unit: standard deviation of the training targets before standardization.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    unit: float


def load(name: str) -> tuple[str, np.ndarray, np.ndarray]:
    """The name of a data set, its inputs (N, d) and targets (N,).

    Args:
        name: ``diabetes``; a file of numbers with the target in the last column, separated by
            blanks, commas or tabs; or ``openml:ID``.

    Raises:
        ValueError: if a file is not a table of numbers.
    """
    if name == "diabetes":
        data = load_diabetes()
        return name, data.data, data.target
    if name.startswith("openml:"):
        data = fetch_openml(data_id=int(name.removeprefix("openml:")), as_frame=False)
        return name, np.asarray(data.data, float), np.asarray(data.target, float)
    path = Path(name)
    text = path.read_text().replace(",", " ")
    try:
        table = np.loadtxt(text.splitlines(), ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path}: expected a table of numbers; got {error}") from error
    if table.shape[1] < 2:
        raise ValueError(f"{path}: expected inputs and a target; got {table.shape[1]} column(s)")
    return path.stem, table[:, :-1], table[:, -1]


def split(x: np.ndarray, y: np.ndarray, seed: int) -> Split:
    """Nine tenths of the rows for training and one for tests, standardized by the training rows."""
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.1, random_state=seed)
    inputs = StandardScaler().fit(x_train)
    target = StandardScaler().fit(y_train[:, None])
    columns = [
        inputs.transform(x_train),
        target.transform(y_train[:, None])[:, 0],
        inputs.transform(x_test),
        target.transform(y_test[:, None])[:, 0],
    ]
    unit = float(target.scale_[0])
    return Split(*(column.astype(np.float32) for column in columns), unit)
