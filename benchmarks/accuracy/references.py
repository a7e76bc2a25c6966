"""Reference draws of the posteriors, with their convergence diagnostics."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from benchmarks.accuracy.posterior import Posterior

__all__ = [
    "CACHE_VERSION",
    "QUICK",
    "Piece",
    "Reference",
    "Sizes",
    "are_trusted",
    "kept",
    "kept_numbers",
    "load_reference",
    "location_and_spread",
    "nuts_pieces",
    "path_of",
    "seven_digits",
    "widened",
    "write_whole",
]

T = TypeVar("T")
CACHE_VERSION = 2  # raise it when a model or a sampler changes
_SEED = 20_200_519
_NUM_CHAINS = 8  # half of them for the truth, half for the floor
_LARGEST_RHAT = 1.01
_SMALLEST_ESS = 1_000
# Where few excursions reach a tail, standard deviations of two halves differ by more than a limit
# of 10 % allows, with effective draws of the mean in plenty. Chains go on, up to so many pieces,
# until the two are as close as those of so few normal draws: five errors, 5 % for 10 000.
_LARGEST_GAP, _MOST_PIECES = 5.0, 8


class Sizes(NamedTuple):
    """Numbers of draws.

    Attributes:
        num_draws: draws in each of the two sets of a distance.
        num_pairs: pairs of sets that a distance is averaged over.
        num_warmup: warm-up steps of NUTS.
    """

    num_draws: int = 2_000
    num_pairs: int = 5
    num_warmup: int = 1_000


QUICK = Sizes(num_draws=200, num_pairs=1, num_warmup=100)


@dataclass(frozen=True)
class Reference:
    """Draws from the true posterior, as the posterior summarizes them.

    Attributes:
        truth: draws that guides are compared with, (num_pairs · num_draws, k).
        other: as many independent draws from other chains, for the sampling floor.
        rhat: largest split R̂ over the coordinates; 1 for exact draws.
        ess: smallest effective sample size; the number of draws for exact ones.
        seconds: elapsed seconds of the sampling, warm-up and compilation included.
        gradients: gradients of the model that NUTS took in all chains, warm-up included; NaN for
            exact draws.
    """

    truth: Array
    other: Array
    rhat: float
    ess: float
    seconds: float
    gradients: float = np.nan

    @property
    def trusted(self) -> bool:
        """True if the chains agree and there are enough independent draws."""
        return are_trusted(self.rhat, self.ess)


def are_trusted(rhat: float, ess: float) -> bool:
    """Whether draws with this largest R̂ and smallest effective sample size are a reference."""
    return rhat < _LARGEST_RHAT and ess >= _SMALLEST_ESS


def load_reference(posterior: Posterior, sizes: Sizes, folder: Path | None) -> Reference:
    """Reference draws, loaded from the folder or computed.

    Args:
        posterior: posterior to draw from.
        sizes: numbers of draws.
        folder: folder that keeps draws, one ``.npz`` for each posterior; None keeps nothing.

    Returns:
        The reference; check ``trusted`` before use.
    """
    start = time.perf_counter()

    def compute() -> dict[str, Any]:
        draw = _draw_exactly if posterior.target.exact is not None else _draw_by_nuts
        found = draw(posterior, sizes)
        return vars(replace(found, seconds=round(time.perf_counter() - start, 1)))

    path = path_of(posterior, folder, CACHE_VERSION, jax.__version__, *sizes)
    values = kept(path, compute)
    scalars = {name: float(values[name]) for name in ("rhat", "ess", "seconds", "gradients")}
    return Reference(jnp.asarray(values["truth"]), jnp.asarray(values["other"]), **scalars)


def path_of(posterior: Posterior, folder: Path | None, *settings: Any) -> Path | None:
    """The file of draws by these settings from this posterior; None without a folder."""
    if folder is None:
        return None
    return folder / f"{posterior.target.name}-{_fingerprint(posterior, settings)}.npz"


def kept(path: Path | None, compute: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Arrays by name, read from the file if it exists, else computed and written to it."""
    if path is not None and path.exists():
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    values = compute()
    if path is not None:
        write_whole(path, lambda partial: np.savez(partial, **values))
    return values


def kept_numbers(
    path: Path | None, kind: Callable[..., T], compute: Callable[[], T], known: bool
) -> T | None:
    """A dataclass of numbers, read from a JSON file if it exists, else computed and written to it.

    None is returned where it does not exist and only ``known`` numbers are asked for.
    """
    path = path and path.with_suffix(".json")
    if path is not None and path.exists():
        return kind(**json.loads(path.read_text()))
    if known:
        return None
    found = compute()
    if path is not None:
        text = json.dumps({name: seven_digits(value) for name, value in vars(found).items()})
        write_whole(path, lambda partial: partial.write_text(text + "\n"))
    return found


def seven_digits(value: Any) -> Any:
    """Numbers with the digits that a moment of some thousand draws may need, as JSON has them."""
    if isinstance(value, int):
        return value
    return (
        [float(f"{x:.7g}") for x in np.asarray(value)] if np.ndim(value) else float(f"{value:.7g}")
    )


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name and rename it, so that no half-written one is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}{path.suffix}")
    write(partial)
    partial.replace(path)


def _draw_exactly(posterior: Posterior, sizes: Sizes) -> Reference:
    target, total = posterior.target, 2 * sizes.num_pairs * sizes.num_draws
    if target.exact is None or posterior.summary is not None:
        raise ValueError(f"{target.name}: expected NUTS for a summary; got exact draws")
    truth, other = jnp.split(target.exact(random.key(_SEED), total), 2)
    return Reference(truth, other, rhat=1.0, ess=float(total), seconds=np.nan)


def _draw_by_nuts(posterior: Posterior, sizes: Sizes) -> Reference:
    run_key, truth_key, other_key = random.split(random.key(_SEED), 3)
    num_samples = 2 * sizes.num_pairs * sizes.num_draws // _NUM_CHAINS * posterior.thinning
    with jax.enable_x64(posterior.float64):
        pieces = nuts_pieces(posterior, run_key, sizes.num_warmup, num_samples, _NUM_CHAINS)
        gradients, taken = next(pieces).gradients, []
        gap = _LARGEST_GAP / (sizes.num_pairs * sizes.num_draws) ** 0.5
        for piece in itertools.islice(pieces, _MOST_PIECES):
            gradients += piece.gradients
            taken.append(piece.draws)
            whole = np.concatenate(taken, axis=1)
            if _gap(whole, posterior.heavy_tails) < gap:
                break
    chains = whole[:, :: len(taken)]
    # One row a draw, chain after chain, so that halves are of different chains and the floor
    # includes the differences between chains.
    draws = jnp.asarray(chains.reshape(-1, chains.shape[-1]), jnp.float32)
    truth, other = jnp.split(draws, 2)
    return Reference(
        random.permutation(truth_key, truth),
        random.permutation(other_key, other),
        rhat=float(np.max(split_gelman_rubin(whole))),
        ess=float(np.min(effective_sample_size(whole))),
        seconds=np.nan,
        gradients=gradients,
    )


def _gap(chains: np.ndarray, heavy_tails: bool) -> float:
    """How far spreads of two halves of the chains differ at most, as a logarithm."""
    halves = (jnp.asarray(half.reshape(-1, half.shape[-1])) for half in np.split(chains, 2))
    first, second = (location_and_spread(half, heavy_tails)[1] for half in halves)
    return float(jnp.max(jnp.abs(jnp.log(first / second))))


def location_and_spread(draws: Array, heavy_tails: bool) -> tuple[Array, Array]:
    """Mean and sd of each coordinate; under heavy tails median and scaled interquartile range."""
    if not heavy_tails:
        return draws.mean(0), draws.std(0)
    low, middle, high = jnp.quantile(draws, jnp.array([0.25, 0.5, 0.75]), axis=0)
    return middle, (high - low) / 1.349  # that of a Gaussian with unit variance


class Piece(NamedTuple):
    """A part of all chains.

    Attributes:
        draws: summarized draws, (num_chains, draws, k) in float64.
        gradients: number of gradients they took.
        cpu: seconds of CPU.
    """

    draws: np.ndarray
    gradients: float
    cpu: float


def nuts_pieces(
    posterior: Posterior,
    key: Array,
    num_warmup: int,
    num_samples: int,
    num_chains: int,
    chain_method: str = "vectorized",
) -> Iterator[Piece]:
    """Chains that go on: first the warm-up, without draws, then piece after piece."""
    target, thinning = posterior.target, posterior.thinning
    if posterior.float64:
        target = replace(target, args=tuple(widened(array) for array in target.args))
        posterior = replace(posterior, target=target)
    mcmc = MCMC(
        NUTS(
            target.nuts_model or target.model,
            target_accept_prob=posterior.accept,
            dense_mass=posterior.dense_mass,
        ),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=chain_method,
        progress_bar=False,
    )
    # Thinned below, since MCMC would thin the numbers of steps too.
    begin = time.process_time()
    mcmc.warmup(key, *target.args, extra_fields=("num_steps",), collect_warmup=True)
    gradients = float(mcmc.get_extra_fields()["num_steps"].sum())
    yield Piece(np.empty((num_chains, 0, 0)), gradients, time.process_time() - begin)
    for number in itertools.count(1):
        begin = time.process_time()
        mcmc.run(random.fold_in(key, number), *target.args, extra_fields=("num_steps",))
        mcmc.post_warmup_state = mcmc.last_state
        gradients = float(mcmc.get_extra_fields()["num_steps"].sum())
        cpu = time.process_time() - begin
        draws = {
            name: values[:, ::thinning].reshape(-1, *values.shape[2:])
            for name, values in mcmc.get_samples(group_by_chain=True).items()
        }
        found = np.asarray(posterior.summarize(target.from_nuts(draws)), np.float64)
        yield Piece(found.reshape(num_chains, -1, found.shape[-1]), gradients, cpu)


def widened(array: Array) -> Array:
    """The array in double precision, if it has floating-point numbers and that is set."""
    return array.astype(float) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _fingerprint(posterior: Posterior, settings: tuple[Any, ...]) -> str:
    sampler = (posterior.thinning, posterior.accept, posterior.dense_mass, posterior.float64)
    data = [_coarse(np.asarray(array)) for array in posterior.target.args]
    return hashlib.sha256(repr((*settings, *sampler, *data)).encode()).hexdigest()[:12]


def _coarse(array: np.ndarray) -> tuple[Any, ...]:
    """The shape and two sums of an array, which hardly depend on how a machine rounds it."""
    if not np.issubdtype(array.dtype, np.number):
        return (array.shape, array.tobytes())
    numbers = np.nan_to_num(array.ravel().astype(float))
    size = np.abs(numbers).sum()
    direction = np.cos(np.arange(numbers.size))
    share = numbers @ direction / size if size else 0.0
    return (array.shape, f"{size:.4g}", round(1_000 * float(share)))
