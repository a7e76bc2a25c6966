"""Regression data from local files, OpenML or scikit-learn, with random splits."""

from pathlib import Path
from typing import NamedTuple

import numpy as np


class Split(NamedTuple):
    """Standardized training and test data.

    Attributes:
        x: training inputs, (N, d).
        y: training targets, (N,).
        x_test: test inputs.
        y_test: test targets.
        unit: standard deviation of the training targets before standardization.
        rounding: standard deviation of the rounding of the targets, standardized.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    unit: float
    rounding: float


def load(name: str) -> tuple[str, np.ndarray, np.ndarray]:
    """The name of a data set, its inputs (N, d) and targets (N,).

    Args:
        name: ``diabetes``; a file of numbers with the target in the last column, separated by
            blanks, commas or tabs; or ``openml:ID``.

    Raises:
        ValueError: if a file is not a table of numbers.
    """
    # Scikit-learn takes seconds to import, and files do not need it.
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        data = load_diabetes()
        return name, data.data, data.target
    if name.startswith("openml:"):
        from sklearn.datasets import fetch_openml

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
    """Nine tenths of the rows for training and one for tests, standardized by the training rows.

    Rows are those of scikit-learn's ``train_test_split(test_size=0.1, random_state=seed)``.
    """
    order = np.random.RandomState(seed).permutation(len(x))
    test, train = np.split(order, [-(-len(x) // 10)])
    center, spread = x[train].mean(0), x[train].std(0)
    spread[spread == 0] = 1.0
    middle, unit = y[train].mean(), y[train].std() or 1.0
    columns = [
        (x[train] - center) / spread,
        (y[train] - middle) / unit,
        (x[test] - center) / spread,
        (y[test] - middle) / unit,
    ]
    # Rounding to multiples of a step is uniform noise, of standard deviation step/√12.
    step = np.min(np.diff(np.unique(y[train])), initial=np.inf)
    rounding = step / 12**0.5 / unit if np.isfinite(step) else 0.0
    rest = float(unit), float(rounding)
    return Split(*(column.astype(np.float32) for column in columns), *rest)
