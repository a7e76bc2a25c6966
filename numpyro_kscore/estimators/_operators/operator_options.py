"""Options that take the place of all samples: landmarks, a subset of them, random features."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._util.checks import check_count, check_positive, is_concrete
from numpyro_kscore._util.keys import check_key
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore.kernels import _pairwise as pairwise


@pytree
class RowSelection:
    """A selection of samples by one of count, fraction and indices: see :class:`Landmarks`."""

    count: int | None = static(default=None)
    fraction: float | None = static(default=None)
    indices: Any = None
    key: Any = None

    # Name of the estimator's argument.
    argument: ClassVar[str] = "rows"

    def __post_init__(self) -> None:
        # The entries of a list would be leaves of their own.
        if isinstance(self.indices, list | tuple):
            object.__setattr__(self, "indices", np.asarray(self.indices))
        if self.count is not None:
            check_count("count", self.count)
        if self.fraction is not None:
            check_positive("fraction", self.fraction)
            if self.fraction > 1:
                raise ValueError(f"fraction: expected a number in (0, 1]; got {self.fraction}")
        given = {"count": self.count, "fraction": self.fraction, "indices": self.indices}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(
                f"{self.argument}: expected one of count, fraction and indices; got "
                f"{' and '.join(names) or 'none of them'}"
            )
        if self.indices is not None and self.key is not None:
            raise ValueError("key: expected None with indices; got a key. Drop one of the two")

    def check(self, num_samples: int) -> int:
        """Number of rows among ``num_samples`` samples.

        Raises:
            ValueError: for more rows than samples, or indices that are concrete and repeated or
                out of range.
            TypeError: for indices that are not integers, or a key that is not a random key.
        """
        if self.indices is not None:
            size = self._check_indices(num_samples)
        elif self.fraction is not None:
            # Rounding of fraction · n must not add a row.
            size = math.ceil(self.fraction * num_samples - 1e-9)
        else:
            size = int(self.count)  # type: ignore[arg-type]
        # Keys are checked here: at construction a tree of the same structure may hold anything.
        if self.key is not None:
            check_key(f"{self.argument}.key", self.key)
        if size > num_samples:
            raise ValueError(
                f"{self.argument}: expected at most as many as there are samples, {num_samples}; "
                f"got {size}. Use {self.argument}=None for all of them"
            )
        return size

    def _check_indices(self, num_samples: int) -> int:
        indices = self.indices if isinstance(self.indices, jax.Array) else np.asarray(self.indices)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise TypeError(f"indices: expected integers; got dtype {indices.dtype}")
        if indices.ndim != 1 or indices.shape[0] < 1:
            raise ValueError(f"indices: expected shape (m,) with m >= 1; got {indices.shape}")
        if is_concrete(indices):
            values = np.asarray(indices)
            if values.min() < 0 or values.max() >= num_samples:
                raise ValueError(
                    f"indices: expected values in [0, {num_samples}); got values from "
                    f"{values.min()} to {values.max()}"
                )
            if np.unique(values).size < values.size:
                repeated = values.size - np.unique(values).size
                raise ValueError(f"indices: expected distinct values; got {repeated} repeated")
        return int(indices.shape[0])

    def select(self, num_samples: int) -> jax.Array:
        """Rows of the samples, shape (m,)."""
        size = self.check(num_samples)
        if self.indices is not None:
            return jnp.asarray(self.indices)
        if self.key is not None:
            return jax.random.choice(self.key, num_samples, (size,), replace=False)
        return jnp.asarray((2 * np.arange(size) + 1) * num_samples // (2 * size))


@pytree
class Landmarks(RowSelection):
    """The samples an estimate is a combination of. Give one of count, fraction and indices.

    Args:
        count: number of landmarks.
        fraction: the fraction of the samples, in (0, 1], rounded up.
        indices: rows of the samples, distinct integers, shape (m,). A leaf.
        key: random key; with it ``count`` or ``fraction`` draw without replacement, without it they
            take evenly spaced rows. A leaf.

    Raises:
        TypeError: for a count that is not an integer.
        ValueError: for none or several of count, fraction and indices, a key with indices, and a
            count or a fraction out of range; at a fit, see :meth:`check`.

    Example::

        from numpyro_kscore.estimators import Landmarks
        from numpyro_kscore.regularizers import NuMethod

        landmarks = Landmarks(20, key=random.key(0))
        score = ScoreEstimator(regularizer=NuMethod(45), landmarks=landmarks).fit(samples)
        score(samples[:5])  # (5, 2)
    """

    argument = "landmarks"

    def check(self, num_samples: int) -> int:
        """Number of landmarks; a ``ValueError`` also for more than a dense matrix allows."""
        size = super().check(num_samples)
        if size**2 > pairwise.CACHED_PAIRS:
            raise ValueError(
                f"landmarks: expected at most {int(pairwise.CACHED_PAIRS**0.5)}, whose matrix is "
                f"factorized; got {size}"
            )
        return size


@pytree
class Subset(RowSelection):
    """The samples that the Gram operator is averaged over. Give one of count, fraction and indices.

    Args:
        count: number of samples, such as 2048: with more, weaker regularization is possible.
        fraction: as for :class:`Landmarks`, and so are errors.
        indices: rows of the samples, distinct integers, shape (b,). A leaf.
        key: as for :class:`Landmarks`. A leaf.

    Example::

        from numpyro_kscore.estimators import Subset
        from numpyro_kscore.regularizers import NuMethod

        subset = Subset(50, key=random.key(0))
        score = ScoreEstimator(regularizer=NuMethod(45), subset=subset).fit(samples)
        score(samples[:5])  # (5, 2)
    """

    argument = "subset"


@pytree
class RandomFeatures:
    """Random Fourier features in place of a curl-free kernel: for samples without number.

    The estimate is the gradient of a combination of cosines and sines at random frequencies, whose
    kernel is the given one on average (docs/theory). One pass over the samples gives all a fit
    needs, so they may also come in batches: :meth:`ScoreEstimator.init_stream`.

    Args:
        num_features: m, even: a cosine and a sine for each of m/2 frequencies.
        key: random key of the frequencies; None is ``jax.random.key(0)``. A leaf.
        operator_samples: how many samples the m by m second-moment matrix is averaged over: evenly
            spaced, the first ones of a stream, or all if None. The divergence term, which carries
            most of the noise, is always that of all samples.

    Example::

        from numpyro_kscore.estimators import RandomFeatures
        from numpyro_kscore.regularizers import NuMethod

        features = RandomFeatures(256, key=random.key(0))
        score = ScoreEstimator(regularizer=NuMethod(45), features=features).fit(samples)
        score(samples[:5])  # (5, 2)
    """

    num_features: int = static(default=2048)
    key: Any = None
    operator_samples: int | None = static(default=2**16)

    def __post_init__(self) -> None:
        check_count("num_features", self.num_features, 2)
        if self.num_features % 2:
            raise ValueError(
                f"num_features: expected an even number, a cosine and a sine for each frequency; "
                f"got {self.num_features}"
            )
        if self.operator_samples is not None:
            check_count("operator_samples", self.operator_samples, 2)
