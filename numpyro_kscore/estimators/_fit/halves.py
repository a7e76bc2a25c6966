"""Two halves of samples: what is fitted to one is judged at the other."""

from __future__ import annotations

import numpy as np

__all__ = ["deal"]

# Blocks of samples in each half (docs/accuracy).
BLOCKS = 25


def deal(num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two halves of equal size: blocks of the samples in turn, single ones if they are few.

    Neighbors in a chain resemble each other. Dealt one by one, each sample would find near copies
    of itself in the other half, which make too little regularization look good. Samples that come
    sorted, or in batches, look alike in both halves.
    """
    m = num_samples // 2
    ends = np.round(np.linspace(0, m, min(m, BLOCKS) + 1)).astype(int)
    pairs = list(zip(ends[:-1], ends[1:], strict=True))
    first = [np.arange(2 * start, start + end) for start, end in pairs]
    second = [np.arange(start + end, 2 * end) for start, end in pairs]
    return np.concatenate(first), np.concatenate(second)
