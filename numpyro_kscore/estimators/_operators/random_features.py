"""The option that replaces a kernel by random features."""

from __future__ import annotations

from typing import Any

from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.pytree import pytree, static

__all__ = ["RandomFeatures"]


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

    Raises:
        TypeError: for a count that is not an integer.
        ValueError: for a count below 2, or an odd ``num_features``.

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
