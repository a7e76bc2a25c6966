"""Long runs of NUTS as references of large posteriors, and short ones by its defaults as rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import random
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from benchmarks.accuracy.large.compared import LargePosterior
from benchmarks.accuracy.references import Piece, kept_numbers, nuts_pieces, path_of
from benchmarks.accuracy.targets import Draws

__all__ = ["LONG", "QUICK", "Lengths", "LongRun", "draw_reference", "draw_rival"]

_CACHE_VERSION = 2  # raise it when a model or the sampler changes
_SEED = 20_260_601
_LARGEST_RHAT = 1.01
_ENOUGH = 400  # effective draws that a user needs


@dataclass(frozen=True)
class Lengths:
    """Numbers of draws of each chain.

    Attributes:
        num_warmup: warm-up steps of a reference.
        piece: draws between two looks at a reference.
        most: pieces after which a reference ends without what it is for.
        effective: draws of every scale, effective ones of all chains, that end a reference.
        rival_warmup: the most warm-up steps of a rival.
        rival_piece, rival_pieces: draws of a piece of the one chain of a rival, and their number.
        num_chains: chains of a reference.
    """

    num_warmup: int = 700
    piece: int = 250
    most: int = 16
    effective: int = 1_000
    rival_warmup: int = 500
    rival_piece: int = 100
    rival_pieces: int = 5
    num_chains: int = 4


LONG = Lengths()
QUICK = Lengths(50, 25, 1, 1, 50, 25, 1, 2)


@dataclass(frozen=True)
class LongRun:
    """A run of NUTS: moments of each compared coordinate, scales first, and what they took.

    Attributes:
        mean, sd, ess, rhat: moments, effective draws and split R̂ of coordinates, (k,) each.
        num_scales: how many coordinates are scales.
        num_chains, num_draws: chains, and draws of each.
        warmup_cpu, draws_cpu: seconds of CPU of all chains, those of compilation with the warm-up.
        gradients: of the density, in all chains.
    """

    mean: np.ndarray
    sd: np.ndarray
    ess: np.ndarray
    rhat: np.ndarray
    num_scales: int
    num_chains: int
    num_draws: int
    warmup_cpu: float
    draws_cpu: float
    gradients: float

    @property
    def scale_ess(self) -> float:
        """Effective draws of the worst scale."""
        return float(self.ess[: self.num_scales].min())

    @property
    def cpu_of_enough(self) -> float:
        """Seconds of CPU for 400 effective draws of the worst scale, by one chain."""
        return self.warmup_cpu / self.num_chains + self.draws_cpu * _ENOUGH / self.scale_ess

    def is_trusted(self, effective: float) -> bool:
        """Whether chains agree and every scale has so many effective draws."""
        return bool(self.rhat.max() < _LARGEST_RHAT) and self.scale_ess >= effective

    def describe(self) -> str:
        """One line."""
        return (
            f"R-hat {self.rhat.max():.4f}, effective draws of scales {self.scale_ess:.0f}, "
            f"of effects {self.ess[self.num_scales :].min():.0f}, CPU {self.warmup_cpu:.0f} s + "
            f"{self.draws_cpu:.0f} s, {self.cpu_of_enough:.0f} s for {_ENOUGH}, "
            f"{self.gradients:.3g} gradients"
        )


def draw_reference(
    posterior: LargePosterior, lengths: Lengths, folder: Path | None, known: bool = False
) -> LongRun | None:
    """The reference, from the folder or computed; None if only ``known`` ones are wanted."""
    settings = (lengths.num_warmup, lengths.piece, lengths.most, lengths.effective)

    def compute() -> LongRun:
        with jax.enable_x64(True):
            whitened = posterior.for_nuts()
            pieces = nuts_pieces(
                whitened, random.key(_SEED), lengths.num_warmup, lengths.piece,
                lengths.num_chains, posterior.chain_method,
            )  # fmt: skip
            return _gather(pieces, whitened, lengths.most, lengths.effective)

    return _load(posterior, folder, ("reference", *settings), compute, known)


def draw_rival(
    posterior: LargePosterior, lengths: Lengths, folder: Path | None, known: bool = False
) -> LongRun | None:
    """A short run of one chain of NUTS with its defaults on the model as it is written."""
    num_warmup = min(lengths.rival_warmup, posterior.rival_warmup)
    settings = (num_warmup, lengths.rival_piece, lengths.rival_pieces)
    plain = replace(posterior, target=replace(posterior.target, nuts_model=None, from_nuts=_same))
    plain = replace(plain, float64=False, accept=0.8, dense_mass=False)

    def compute() -> LongRun:
        pieces = nuts_pieces(
            plain, random.key(_SEED), num_warmup, lengths.rival_piece, 1, "sequential"
        )
        return _gather(pieces, plain, lengths.rival_pieces, np.inf)

    return _load(plain, folder, ("rival", *settings), compute, known)


def _load(
    posterior: LargePosterior,
    folder: Path | None,
    settings: tuple[Any, ...],
    compute: Callable[[], LongRun],
    known: bool,
) -> LongRun | None:
    """The run in the folder; computed and written to it where it is not there, unless ``known``."""

    def read(**values: Any) -> LongRun:
        return LongRun(**{n: np.array(x) if isinstance(x, list) else x for n, x in values.items()})

    path = path_of(posterior, folder, _CACHE_VERSION, *settings)
    return kept_numbers(path, read, compute, known)


def _gather(
    pieces: Iterator[Piece], posterior: LargePosterior, most: int, effective: float
) -> LongRun:
    """Take pieces of chains until every scale has so many effective draws, at most ``most``."""
    warmup = next(pieces)
    found: list[Piece] = []
    while True:
        found.append(next(pieces))
        draws = np.concatenate([piece.draws for piece in found], 1)
        cpu = [piece.cpu for piece in found]
        # The first piece compiles, for as long as it takes longer than the others.
        compiling = max(0.0, cpu[0] - float(np.mean(cpu[1:]))) if len(cpu) > 1 else 0.0
        run = LongRun(
            mean=draws.mean((0, 1)),
            sd=draws.std((0, 1)),
            ess=np.asarray(effective_sample_size(draws)),
            rhat=np.asarray(split_gelman_rubin(draws)),
            num_scales=posterior.num_scales,
            num_chains=draws.shape[0],
            num_draws=draws.shape[1],
            warmup_cpu=warmup.cpu + compiling,
            draws_cpu=sum(cpu) - compiling,
            gradients=warmup.gradients + sum(piece.gradients for piece in found),
        )
        print(f"{posterior.target.name}: {run.describe()}", flush=True)
        if len(found) >= most or run.is_trusted(effective):
            return run


def _same(draws: Draws) -> Draws:
    return draws
