"""Measurements on an accelerator: the table behind docs/performance, "On an accelerator".

    python -m benchmarks.speed.accelerator --csv benchmarks/results/performance_gpu.csv
        [--only products ...] [--quick]

A row is written as soon as it is measured, with the name of the device in it; the same command goes
on where it was stopped, and one on another device adds its rows. A part that does not fit into
memory says so in its row. On a machine without an accelerator it measures the CPU.

| part | question |
|---|---|
| products | How fast is a product with the Gram operator by matrices, by tiles, by the kernel? |
| kernel | Is the kernel right on this device? Errors against float64 |
| tilings | Which sizes of tiles suit the kernel? |
| fits | How long is a fit by 100 ν-steps? |
| steps | How long is an SVI step, against ``Trace_ELBO``? |
| many | How long are many posteriors in one program, and are they as good as alone? |
| precision | What do coarse products lose, against the statistical error? |
| large | What do fits to 1e5 and 1e6 samples take? |
| wae | How long is an epoch of the autoencoder, by estimator? (images are noise: times only) |
| cpu | From which size on is the accelerator faster than the CPU of its machine? |
| devices | What do two devices save? |
"""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.speed import gram, growth, many_posteriors, precision, step_time
from benchmarks.speed.large_n import bananas, score_of_bananas
from benchmarks.speed.measuring import (
    Row,
    device_name,
    iterated,
    make_parser,
    minimum_seconds,
    rounded,
    write_csv,
)
from numpyro_kscore import ScoreEstimator
from numpyro_kscore._util.precision import products_in
from numpyro_kscore._util.sharding import check_sharding
from numpyro_kscore.estimators import RandomFeatures, Subset
from numpyro_kscore.kernels import CurlFree, Diagonal, Kernel, Matern, _device
from numpyro_kscore.kernels import _pairwise as pairwise
from numpyro_kscore.kernels._gram import make_gram
from numpyro_kscore.regularizers import NuMethod

Case = tuple[str, Callable[[], Row]]

# Float32 operations a second without tensor cores, from the makers' data sheets.
PEAK_FLOPS = {"H100": 67e12, "H200": 67e12, "GH200": 67e12, "A100": 19.5e12, "A6000": 38.7e12}
EVERY = float("inf")
PATHS = {"matrix": (EVERY, EVERY), "tiles": (0, EVERY), "kernel": (0, 0)}
# The largest bare product, whose square matrix must be in memory: 4.3 GB.
MOST_SQUARE = 32768
COLUMNS = ("device", "part", "case", "ms", "seconds", "compile, s", "Tflop/s",
           "share of bare products", "share of float32 bound", "against", "times as long", "error",
           "other error", "path", "failed", "JAX")  # fmt: skip
# Operations in one timed loop.
LOOP_OPERATIONS = 2e12
PRECISIONS = ("float32", "tensorfloat32")


def flops(n: int, dim: int, path: str) -> float:
    """Operations of a product with a curl-free IMQ kernel (docs/scaling)."""
    return float(n) ** 2 * (6 * dim + 5 if path == "matrix" else 8 * dim + 21)


def peak() -> float:
    """Float32 operations a second of this device; NaN where they are not known here."""
    names = [name for name in PEAK_FLOPS if name in device_name()]
    return PEAK_FLOPS[max(names, key=len)] if names else float("nan")


@contextlib.contextmanager
def forced(path: str) -> Iterator[None]:
    """Sums over pairs take this path wherever they can."""
    cached, fewest = PATHS[path]
    jax.clear_caches()
    with (
        mock.patch.object(pairwise, "CACHED_PAIRS", cached),
        mock.patch.object(_device, "FEWEST_PAIRS", fewest),
    ):
        yield
    jax.clear_caches()


def product(n: int, dim: int, path: str, how: str, budget: float) -> Row:
    """One product, repeated in a compiled loop as a solver repeats it."""
    points, v = gram.problem(n, dim)
    with forced(path):
        direct = jnp.asarray(False)
        s = pairwise.squared_distances(points, points, direct) if path == "matrix" else None
        operator = jax.jit(
            lambda x, s: make_gram(CurlFree(), x, s, jnp.ones(()), dim, False, precision=how)
        )(points, s)
        count = int(np.clip(LOOP_OPERATIONS / flops(n, dim, path), 1, 100))
        if budget < 1:
            count = min(count, 3)
        run = {"ours": partial(iterated(lambda g, v: g @ v, count), operator, v.T)}
        if n <= MOST_SQUARE:
            with products_in(how):
                bare = iterated(gram.bare_products, count)
                run["bare"] = partial(bare, (points.T, jnp.ones((n, n))), v.T)
                times = minimum_seconds(run, budget)
        else:
            times = minimum_seconds(run, budget, fewest=1)
        taken = ("matrix", "tiles", "kernel")[int(operator.path)]
    seconds = times["ours"] / count
    rate = flops(n, dim, path) / seconds
    return {
        "path": taken,
        "ms": 1e3 * seconds,
        "share of bare products": times.get("bare", float("nan")) / times["ours"],
        "Tflop/s": rate / 1e12,
        "share of float32 bound": rate / peak(),
    }


def products(quick: bool) -> Iterator[Case]:
    """All paths at sizes around the crossover, and large sizes by the kernel."""
    sizes = [(n, d) for n in (1024, 2048, 4096, 8192, 16384, 32768) for d in (2, 16, 64)]
    sizes += [(131072, 16)]
    for n, d in [(256, 3)] if quick else sizes:
        for path in PATHS:
            if path == "kernel" and jax.default_backend() != "gpu":
                continue
            if path == "matrix" and n > 16384:  # three matrices of n² numbers
                continue
            for how in PRECISIONS[:1] if quick else PRECISIONS:
                yield (
                    f"{n} x {d} {path} {how}",
                    partial(product, n, d, path, how, 0.1 if quick else 1),
                )


def kernel_errors(quick: bool) -> Iterator[Case]:
    """Errors of the kernel alone, relative to the field in float64 on the CPU."""
    from numpyro_kscore.kernels._pallas import field_on_chip

    interpret = jax.default_backend() != "gpu"

    def measure(n: int, dim: int, kernel: Kernel, how: str) -> Row:
        points, v = gram.problem(n, dim)
        with products_in(how):
            run = jax.jit(partial(field_on_chip, interpret=interpret))
            found = np.asarray(run(kernel, points, v, None, points))
        x, c = (np.asarray(a, float) for a in (points, v))
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            expansion = pairwise.Expansion(jnp.asarray(x), jnp.asarray(c), None)
            exact = np.asarray(pairwise.field(kernel, expansion, jnp.asarray(x)))
        return {"error": float(np.linalg.norm(found - exact) / np.linalg.norm(exact))}

    for n, dim in [(100, 4)] if quick else [(3000, 2), (3000, 16), (3001, 33), (3000, 64)]:
        for kernel in (CurlFree(),) if quick else (CurlFree(), Diagonal(), CurlFree(Matern(2.5))):
            for how in PRECISIONS[:1] if quick else PRECISIONS:
                name = f"{type(kernel).__name__} {type(kernel.profile).__name__}"
                yield f"{n} x {dim} {name} {how}", partial(measure, n, dim, kernel, how)


def tilings(quick: bool) -> Iterator[Case]:
    """Times of the kernel alone; interpreted, and so meaningless, where there is no GPU."""
    from numpyro_kscore.kernels._pallas import Tiling, field_on_chip

    interpret = jax.default_backend() != "gpu"
    if interpret and not quick:
        return

    def measure(n: int, dim: int, how: str, tiling: Any) -> Row:
        points, v = gram.problem(n, dim)
        with products_in(how):
            run = jax.jit(
                lambda x, c: field_on_chip(
                    CurlFree(), x, c, None, x, tiling=tiling, interpret=interpret
                )
            )
            times = minimum_seconds({"kernel": partial(run, points, v)}, 0.2, fewest=1)
        return {"ms": 1e3 * times["kernel"]}

    shapes = [
        (r, c, w, s) for r in (32, 64, 128) for c in (32, 64) for w in (4, 8) for s in (1, 2, 3)
    ]
    for n, dim in [(64, 2)] if quick else [(32768, 16), (32768, 64)]:
        for how in PRECISIONS[:1] if quick else PRECISIONS:
            for shape in shapes[:1] if quick else shapes:
                tiling = Tiling(*shape, splits=1)
                yield f"{n} x {dim} {how} {tiling[:4]}", partial(measure, n, dim, how, tiling)


def fits(quick: bool) -> Iterator[Case]:
    """Whole fits, compiled as a whole."""
    estimator = ScoreEstimator(regularizer=NuMethod(100))
    for n, dim in [(128, 3)] if quick else [(1024, 16), (4096, 16), (32768, 16), (32768, 64)]:
        yield f"{n} x {dim}", partial(growth.fit_row, "100 ν-steps", n, dim, estimator, 0.2)


def steps(quick: bool) -> Iterator[Case]:
    """Steps of SVI, 200 in a program."""

    def measure(dim: int, particles: int) -> Row:
        times = step_time.compare(step_time.gaussian, (dim,), particles, 1 if quick else 10)
        (scan, _) = times.values()
        ours, theirs = scan["ImplicitELBO"].min(), scan["Trace_ELBO"].min()
        return {"ms": 1e3 * ours, "against": "Trace_ELBO",
                "times as long": ours / theirs}  # fmt: skip

    for dim in (3,) if quick else (10, 100, 1000):
        for particles in (8,) if quick else (64, 512):
            yield f"d = {dim}, {particles} particles", partial(measure, dim, particles)


def many(quick: bool) -> Iterator[Case]:
    """A thousand posteriors."""
    sizes = many_posteriors.QUICK if quick else {
        "number": many_posteriors.NUMBER, "steps": many_posteriors.STEPS,
        "particles": many_posteriors.PARTICLES, "alone": many_posteriors.ALONE,
    }  # fmt: skip
    number, num_steps, particles, alone = sizes.values()

    def measure(count: int) -> Row:
        found = many_posteriors.rows(count, num_steps, particles, alone if count == number else 0)
        row = {name: found[0][f"{column}, s"] for name, column in
               (("seconds", "run"), ("compile, s", "compile"))}  # fmt: skip
        if len(found) == 1:
            return row | {"error": found[0]["error of means, median"]}
        # Of the same few data sets, in one program and alone.
        few, own = (part["error of means, median"] for part in found[1:])
        return row | {"error": few, "against": "alone", "other error": own}

    for count in (number,) if quick else (1, 100, number):
        yield f"{count} posteriors, {num_steps} steps", partial(measure, count)


def coarse(quick: bool) -> Iterator[Case]:
    """Errors of estimates by products of this device, relative to those in float32."""

    def measure(n: int, dim: int, num_steps: int, how: str) -> Row:
        x = bananas(random.key(0), n, dim)
        found = {
            name: ScoreEstimator(regularizer=NuMethod(num_steps), precision=name)
            .at_samples(x)
            .scores
            for name in ("float32", how)
        }
        exact = found["float32"]
        errors = {"error": precision.relative(found[how], exact), "against": "statistical error"}
        return errors | {"other error": precision.relative(score_of_bananas(x), exact)}

    for n, dim in [(128, 2)] if quick else [*precision.SIZES, (8192, 16)]:
        for num_steps in (30,) if quick else precision.NUM_STEPS:
            for how in ("tensorfloat32", "bfloat16"):
                case = f"{n} x {dim}, {num_steps} ν-steps, {how}"
                yield case, partial(measure, n, dim, num_steps, how)


def large(quick: bool) -> Iterator[Case]:
    """Very many samples, in one fit each, compilation apart."""
    dim = 16
    estimators = {
        "all pairs, 100 ν-steps": ScoreEstimator(regularizer=NuMethod(100)),
        "operator of 2048": ScoreEstimator(subset=Subset(2048)),
        "2048 features": ScoreEstimator(features=RandomFeatures()),
    }

    def measure(n: int, estimator: ScoreEstimator) -> Row:
        x = bananas(random.key(0), n, dim)
        fit = jax.jit(lambda x: estimator.fit(x))
        start = time.perf_counter()
        compiled = fit.lower(x).compile()
        compilation = time.perf_counter() - start
        start = time.perf_counter()
        score = jax.block_until_ready(compiled(x))
        seconds = time.perf_counter() - start
        y = bananas(random.key(1), 1000, dim)
        error = float(jnp.mean((score(y) - score_of_bananas(y)) ** 2))
        return {"path": score.info.path_name, "seconds": seconds,
                "compile, s": compilation, "error": error}  # fmt: skip

    for n in (3000,) if quick else (100_000, 1_000_000):
        for name, estimator in list(estimators.items())[: 1 if quick else None]:
            # Half a day on a CPU.
            if n * n > 1e11 and "all" in name and jax.default_backend() == "cpu":
                continue
            yield f"{n}, {name}", partial(measure, n, estimator)


def wae(quick: bool) -> Iterator[Case]:
    """Epochs of 60 000 images in 128 dimensions, from steps on fewer."""
    from benchmarks.wae.table import PLAIN, measure_times
    from examples.wae.data import Images

    names = ("default", "nu") if quick else ("default", "nu", "kef-cg", "ssge", "stein", "ssm")
    latent_dim, count = (2, 128) if quick else (128, 12_800)

    def measure(name: str) -> Row:
        shape = (8, 8, 1) if quick else (28, 28, 1)
        noise = np.random.default_rng(0).integers(256, size=(count, *shape), dtype=np.uint8)
        images = Images("noise", noise, noise[:64], None, None)
        plain, row = measure_times(images, [name], latent_dim)
        assert plain["estimator"] == PLAIN
        return {"ms": row["ms_a_step"], "seconds": row["seconds_an_epoch"],
                "against": PLAIN, "times as long": row["ratio"]}  # fmt: skip

    for name in names:
        yield f"{name}, epoch", partial(measure, name)


def against_cpu(quick: bool) -> Iterator[Case]:
    """The same product on the CPU of this machine."""
    if jax.default_backend() == "cpu" and not quick:
        return
    cpu = jax.devices("cpu")[0]

    def measure(n: int, dim: int) -> Row:
        points, v = gram.problem(n, dim)
        count = int(np.clip(1e9 / flops(n, dim, "tiles"), 1, 100))
        runs = {}
        for name, device in (("here", jax.devices()[0]), ("CPU", cpu)):
            with jax.default_device(device):
                x, c = jax.device_put((points, v), device)
                operator = jax.jit(lambda x: _operator(x))(x)
                runs[name] = partial(iterated(lambda g, v: g @ v, count), operator, c.T)
        times = minimum_seconds(runs, 0.3)
        return {"ms": 1e3 * times["here"] / count, "against": "CPU",
                "times as long": times["here"] / times["CPU"]}  # fmt: skip

    for n, dim in [(64, 2)] if quick else [(2**k, d) for k in range(6, 14) for d in (2, 16, 128)]:
        yield f"{n} x {dim}", partial(measure, n, dim)


def _operator(x: Array) -> Any:
    """The Gram operator as a fit makes it."""
    n, dim = x.shape
    s = pairwise.squared_distances(x, x, pairwise.cancels(x)) if gram.is_cached(n) else None
    return make_gram(CurlFree(), x, s, jnp.ones(()), dim, False)


def devices(quick: bool) -> Iterator[Case]:
    """A product whose rows are divided over all devices, against one."""
    count = jax.device_count()
    if count == 1 and not quick:
        return

    def measure(n: int, dim: int) -> Row:
        points, v = gram.problem(n, dim)
        mesh = jax.make_mesh((count,), ("samples",))
        layout = check_sharding(NamedSharding(mesh, PartitionSpec("samples")))
        runs = {}
        for name, sharding in (("all", layout), ("one", None)):
            run = jax.jit(
                lambda x, v, sharding=sharding: (
                    make_gram(CurlFree(), x, None, jnp.ones(()), dim, False, sharding=sharding) @ v
                )
            )
            runs[name] = partial(run, points, v.T)
        times = minimum_seconds(runs, 0.5)
        return {"ms": 1e3 * times["all"], "against": "one device",
                "times as long": times["all"] / times["one"]}  # fmt: skip

    for n, dim in [(64, 2)] if quick else [(32768, 16), (131072, 16)]:
        yield f"{n} x {dim}, {count} devices", partial(measure, n, dim)


PARTS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "products": products,
    "kernel": kernel_errors,
    "tilings": tilings,
    "fits": fits,
    "steps": steps,
    "many": many,
    "precision": coarse,
    "large": large,
    "wae": wae,
    "cpu": against_cpu,
    "devices": devices,
}


def read_table(path: Path | None) -> list[Row]:
    """The rows that a file has already, as text."""
    if path is None or not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [dict(row) for row in csv.DictReader(file)]


def measured(case: Callable[[], Row]) -> Row:
    """The figures of a case; where the device ran out of memory, that."""
    try:
        return case()
    except jax.errors.JaxRuntimeError as error:
        return {"failed": str(error).partition("\n")[0][:80]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows that the file lacks, print them and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    table = read_table(options.csv)
    shared = {"device": device_name(), "JAX": jax.__version__}
    done = {(row["device"], row["part"], row["case"]) for row in table}
    for part in options.only:
        cases = list(PARTS[part](options.quick))
        for number, (name, case) in enumerate(cases, 1):
            if (shared["device"], part, name) in done:
                continue
            print(f"{part}, {number} of {len(cases)}: {name}", end="", flush=True)
            row = {**shared, "part": part, "case": name, **measured(case)}
            figures = [f"; {c} {rounded(row[c])}" for c in COLUMNS[3:-1] if c in row]
            print(*figures, sep="", flush=True)
            table.append(row)
            if options.csv:
                write_csv(options.csv, COLUMNS, table)


if __name__ == "__main__":
    main()
