"""Fits by the defaults on fifty posteriors, most of them from posteriordb, as the user has them.

    python -m benchmarks.accuracy.posteriordb --path FOLDER [--csv FILE] [--targets dogs ...]
        [--seeds 0 1 2] [--diagnose] [--check] [--precision float32] [--quick]

FOLDER has ``data.npz``, data as ``posterior/field``, and ``references.npz``, for each posterior the
``names`` of its unconstrained coordinates, their ``mean`` and ``sd``, two ``sets`` of standardized
draws, and the ``floor``, their sliced Wasserstein distance. Small posteriors come first.

Draws are compared in unconstrained coordinates, in standard deviations of the reference: ``W`` is
the sliced Wasserstein distance over its floor, ``mean`` the largest error of a mean, ``low`` and
``high`` the extreme ratios of standard deviations. A fit is right if no mean is off by more than
0.15 and all ratios are within 0.9 and 1.1. It is wrong and called good if it is not right, and
``fit`` has neither a doubt nor a warning, and k̂ is at most 0.7. CPU seconds include compilation;
those of the weights are of ``log_evidence``. A model that fails is a row with its error.

Models run in float64 if their specification says that float32 needs care: regressions on nearly
collinear columns, and a Gaussian process whose jitter is 1e-10. All others run in float32, as users
have it. ``--precision`` takes one for all.

``--check`` fits nothing. It tells whether each model is that of the reference, by Stein's
identities at the reference draws x in float64: E ∂ᵢ log p = 0 and E (xᵢ - E xᵢ) ∂ᵢ log p = -1. The
largest error over its standard error is printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import init_to_feasible
from numpyro.infer.util import potential_energy

from benchmarks.accuracy.outcomes import SAID, classify, fit_as_users_do, report
from benchmarks.accuracy.posteriordb_models import PROGRAMS, Program
from benchmarks.accuracy.report import within_limits
from examples.common.output import output_file
from examples.common.tables import Row, fill

COLUMNS = ("dim", "precision", "W", "mean", "low", "high", "right", "outcome", *SAID, "error")
NUM_DRAWS, BLOCK, NUM_DIRECTIONS = 10_000, 2_000, 200
LARGEST_T = 4.5  # of at most 180 means


class Reference(NamedTuple):
    """The reference of a posterior of d coordinates.

    Attributes:
        mean: of the reference draws, (d,).
        sd: their standard deviations, (d,).
        sets: standardized draws, (2, n, d).
        floor: the sliced Wasserstein distance of two sets.
    """

    mean: np.ndarray
    sd: np.ndarray
    sets: np.ndarray
    floor: float


class Folder:
    """Data and references of a folder.

    Raises:
        ValueError: if a file is missing.
    """

    def __init__(self, path: Path) -> None:
        for name in ("data.npz", "references.npz"):
            if not (path / name).is_file():
                raise ValueError(f"--path: expected a folder with {name}; got {path}")
        self.data_file, self.references = (
            np.load(path / "data.npz"),
            np.load(path / "references.npz"),
        )
        sizes = {
            key.removesuffix("/names"): len(self.references[key])
            for key in self.references.files
            if key.endswith("/names")
        }
        self.names = sorted(set(sizes) & set(PROGRAMS), key=lambda name: (sizes[name], name))

    def data(self, name: str) -> dict[str, np.ndarray]:
        """Arrays of a posterior, by the name of the model's argument."""
        start = f"{name}/"
        found = [key for key in self.data_file.files if key.startswith(start)]
        return {key.removeprefix(start): self.data_file[key] for key in found}

    def reference(self, name: str) -> Reference:
        """The reference of a posterior, in float64."""
        fields = (self.references[f"{name}/{field}"].astype(float) for field in Reference._fields)
        mean, sd, sets, floor = fields
        return Reference(mean, sd, sets, float(floor))


# --- Comparison -----------------------------------------------------------------------------------


def sliced_wasserstein(x: np.ndarray, y: np.ndarray) -> float:
    """Mean distance of projections in fixed directions of as many draws, (n, d) each."""
    directions = np.random.default_rng(0).normal(size=(NUM_DIRECTIONS, x.shape[1]))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    x, y = (np.sort(draws @ directions.T, axis=0) for draws in (x, y))
    return float(np.abs(x - y).mean())


def compare(reference: Reference, draws: np.ndarray) -> Row:
    """Figures of draws (n, d), n at least the size of a set; NaN if one is not finite."""
    if not np.isfinite(draws).all():
        return dict.fromkeys(("W", "mean", "low", "high"), float("nan"))
    z = (draws - reference.mean) / reference.sd
    size = reference.sets.shape[1]
    blocks = z[: len(z) // size * size].reshape(-1, size, z.shape[1])
    distances = [sliced_wasserstein(b, reference.sets[i % 2]) for i, b in enumerate(blocks)]
    spread = z.std(0)
    figures = (np.mean(distances) / reference.floor, np.abs(z.mean(0)).max(), *_ends(spread))
    return {
        name: float(f"{value:.5g}")
        for name, value in zip(("W", "mean", "low", "high"), figures, strict=True)
    }


def _ends(values: np.ndarray) -> tuple[float, float]:
    return values.min(), values.max()


def supports(program: Program, data: dict[str, Any]) -> dict[str, Any]:
    """Supports of compared sites, with their shapes; None is that of a deterministic one."""
    # ImproperUniform sites cannot be sampled, so every site gets an admissible value.
    seeded = handlers.seed(program.model, random.key(0))
    model = handlers.substitute(seeded, substitute_fn=init_to_feasible())
    trace = handlers.trace(model).get_trace(**data)
    latents = {
        name: (site["fn"].support, jnp.shape(site["value"]))
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    names = program.compared or tuple(latents)
    return {n: latents.get(n, (None, jnp.shape(trace[n]["value"]))) for n in names}


def to_columns(draws: dict[str, Array], sites: dict[str, Any]) -> np.ndarray:
    """Compared coordinates, (n, d), of draws of the sites."""
    columns = [
        np.asarray(draws[name] if support is None else biject_to(support).inv(draws[name]))
        for name, (support, _) in sites.items()
    ]
    return np.concatenate([c.reshape(len(c), -1) for c in columns], axis=1).astype(float)


# --- The check ------------------------------------------------------------------------------------


def check(folder: Folder, name: str) -> float:
    """The largest error of Stein's identities, over its standard error."""
    program, reference = PROGRAMS[name], folder.reference(name)
    with jax.enable_x64(True):
        data = {field: jnp.asarray(value) for field, value in folder.data(name).items()}
        sites = supports(program, data)
        shapes = {
            site: shape if support is None else biject_to(support).inverse_shape(shape)
            for site, (support, shape) in sites.items()
        }
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes.values()])

        def to_latents(columns: Array) -> dict[str, Array]:
            parts = zip(shapes.items(), jnp.split(columns, ends[:-1]), strict=True)
            return program.to_latents({s: p.reshape(shape) for (s, shape), p in parts}, **data)

        def log_density(columns: Array) -> Array:
            density = -potential_energy(program.model, (), data, to_latents(columns))
            if program.compared is None:
                return density
            # Compared values have the density of the latents times the volume of the map.
            flat = lambda c: jnp.concatenate([jnp.ravel(v) for v in to_latents(c).values()])  # noqa: E731
            return density + jnp.linalg.slogdet(jax.jacobian(flat)(columns))[1]

        z = reference.sets.reshape(-1, reference.sets.shape[2])
        x = jnp.asarray(reference.mean + reference.sd * z)
        gradients = jax.jit(partial(jax.lax.map, jax.grad(log_density), batch_size=100))(x)
    scores = np.asarray(gradients) * reference.sd
    products = np.concatenate([scores, (z - z.mean(0)) * scores + 1], axis=1)
    return float(np.abs(products.mean(0) / (products.std(0) / len(z) ** 0.5)).max())


def run_check(folder: Folder, names: Sequence[str]) -> int:
    """Print a line for each posterior; the number of models that are not the reference's."""
    wrong = 0
    for name in names:
        t = check(folder, name)
        wrong += not t <= LARGEST_T
        word = "agrees" if t <= LARGEST_T else "DIFFERS"
        print(f"{name:26} largest |t| {t:8.2f}   {word}", flush=True)
        jax.clear_caches()
    return wrong


# --- The table ------------------------------------------------------------------------------------


class Bench:
    """Computes the rows of the table."""

    def __init__(self, folder: Folder, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.reference = cache(folder.reference)

    def compute(self, target: str, seed: int) -> Row:
        """One row: a fit and its figures, or its error."""
        program, reference = PROGRAMS[target], self.reference(target)
        asked = self.options.precision
        double = program.float64 if asked == "rule" else asked == "float64"
        row: Row = dict.fromkeys(COLUMNS, "")
        row |= {"dim": len(reference.mean), "precision": "float64" if double else "float32"}
        try:
            with jax.enable_x64(double):
                row |= self._fit(program, target, seed)
        except Exception as error:  # the row of a model that fails
            row["error"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        row["outcome"] = classify(row)
        if row["mean"] != "":
            row["right"] = int(within_limits(row["mean"], row["low"], row["high"]))
        jax.clear_caches()
        summary = ", ".join(f"{n} {row[n]}" for n in ("W", "mean", "low", "high", "steps"))
        print(f"{target} ({seed}): {row['outcome']}; {row['error'] or summary}", flush=True)
        return row

    def _fit(self, program: Program, target: str, seed: int) -> Row:
        data = {name: jnp.asarray(value) for name, value in self.folder.data(target).items()}
        fit_key, draw_key = random.split(random.key(seed))
        steps = 80 if self.options.quick else 5_000
        fitted = fit_as_users_do(program.model, fit_key, data, steps, self.options.diagnose)
        draws = fitted.draw(draw_key, NUM_DRAWS, **data)
        columns = to_columns(draws, supports(program, data))
        return fitted.said | compare(self.reference(target), columns)


def make_example(path: Path) -> None:
    """Write a folder with one posterior: a regression with flat priors, and its exact draws."""
    rng = np.random.default_rng(0)
    features = np.column_stack([np.ones(40), rng.normal(size=40)])
    response = features @ [1.0, 2.0] + 0.5 * rng.normal(size=40)
    best, (squares,) = np.linalg.lstsq(features, response, rcond=None)[:2]
    # A flat prior of σ leaves an inverse gamma distribution of σ², given which β is Gaussian.
    sigma = np.sqrt(squares / 2 / rng.gamma((40 - 2 - 1) / 2, size=5 * BLOCK))
    noise = (
        rng.normal(size=(len(sigma), 2))
        @ np.linalg.cholesky(np.linalg.inv(features.T @ features)).T
    )
    x = np.column_stack([best + sigma[:, None] * noise, np.log(sigma)])
    z = (x - x.mean(0)) / x.std(0)
    sets = z[: 2 * BLOCK].reshape(2, BLOCK, 3)
    np.savez(path / "data.npz", **{"nes1972/features": features, "nes1972/response": response})
    known = {"names": np.array(["beta[0]", "beta[1]", "log(sigma)"]), "mean": x.mean(0)}
    known |= {"sd": x.std(0), "sets": sets, "floor": sliced_wasserstein(*sets)}
    np.savez(path / "references.npz", **{f"nes1972/{key}": value for key, value in known.items()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the models or fill the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--path", type=Path, help="folder with data.npz and references.npz")
    parser.add_argument("--csv", type=output_file, help="table to write, and to resume from")
    parser.add_argument("--targets", nargs="+", choices=PROGRAMS, metavar="TARGET")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--diagnose", action="store_true", help="add verdicts, slow")
    parser.add_argument("--check", action="store_true", help="compare densities, fit nothing")
    parser.add_argument("--precision", choices=("rule", "float32", "float64"), default="rule")
    parser.add_argument("--quick", action="store_true", help="an example of its own, few steps")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        if options.path is None:
            if not options.quick:
                parser.error("expected a folder in --path, or --quick; got neither")
            make_example(Path(made))
        try:
            folder = Folder(options.path or Path(made))
        except ValueError as error:
            parser.error(str(error))
        names = [n for n in folder.names if not options.targets or n in options.targets]
        if not names:
            parser.error(f"expected targets among {', '.join(folder.names)}; got others")
        if options.check:
            return int(run_check(folder, names) > 0)
        cells = [{"target": name, "seed": seed} for name in names for seed in options.seeds]
        print(f"{len(cells)} fits, from {names[0]} to {names[-1]}", flush=True)
        try:
            rows = fill(cells, Bench(folder, options).compute, COLUMNS, options.csv)
        except KeyboardInterrupt:
            print("stopped; finished rows are in the table")
            return 130
        print(*report(rows, "target"), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
