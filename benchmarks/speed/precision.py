"""Error of an estimate from coarse matrix products, whose rounding is emulated on any machine.

    python -m benchmarks.speed.precision [--csv FILE] [--quick]

A Krylov space takes products with the Gram operator. Here the operands of these products are
rounded to the mantissa of a coarse hardware format, ten bits for tensorfloat32 and seven for
bfloat16, and multiplied in float32, as that hardware does. Errors are relative to the estimate in
float32; the last column is the statistical error of that estimate on the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from benchmarks.speed.large_n import bananas, score_of_bananas
from benchmarks.speed.measuring import Row, run_table
from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels._gram import Gram
from numpyro_kscore.regularizers import NuMethod

SIZES = ((128, 2), (128, 10), (512, 16), (1024, 64))
NUM_STEPS = (30, 50, 100)
MANTISSAS = {"tensorfloat32": 10, "bfloat16": 7}
FLOAT32_BITS = 23


def shortened(a: Array, bits: int) -> Array:
    """``a`` rounded to ``bits`` bits of mantissa."""
    unit = 1 << (FLOAT32_BITS - bits)
    whole = lax.bitcast_convert_type(a, jnp.int32)
    return lax.bitcast_convert_type((whole + unit // 2) & -unit, jnp.float32)


def coarse(bits: int) -> Callable[[Gram, Array], Array]:
    """``Gram._product`` with rounded operands, unless the operator asks for float32."""
    exact = Gram._product

    def product(a: Array, b: Array) -> Array:
        return shortened(a, bits) @ shortened(b, bits)

    def multiply(gram: Gram, v: Array) -> Array:
        if gram.precision == "float32":
            return exact(gram, v)
        x, weights = gram.points.T, gram.weights
        points = jnp.concatenate([x, jnp.ones_like(x[:1])])
        lifted = jnp.concatenate([v, -jnp.sum(x * v, axis=0, keepdims=True)])
        sums = product(points, weights.outer * product(lifted.T, points))
        return product(v, weights.inner) + x * sums[-1:] - sums[:-1]

    return multiply


def relative(a: Array, b: Array) -> float:
    """Norm of the difference divided by the norm of b."""
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def rows(quick: bool) -> Iterator[Row]:
    """All rows of the benchmark."""
    for n, dim in SIZES[:2] if quick else SIZES:
        x = bananas(random.key(0), n, dim)
        for num_steps in NUM_STEPS[:1] if quick else NUM_STEPS:
            estimator = ScoreEstimator(regularizer=NuMethod(num_steps))
            exact = estimator.at_samples(x).scores
            row: Row = {"n": n, "d": dim, "ν-steps": num_steps}
            for name, bits in MANTISSAS.items():
                jax.clear_caches()
                with mock.patch.object(Gram, "_product", coarse(bits)):
                    row[name] = relative(estimator.at_samples(x).scores, exact)
            jax.clear_caches()
            row["statistical"] = relative(score_of_bananas(x), exact)
            yield row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the rows and write them."""
    run_table(__doc__, rows, arguments)


if __name__ == "__main__":
    main()
