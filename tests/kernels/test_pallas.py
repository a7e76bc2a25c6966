"""The GPU's kernel, interpreted on a CPU or lowered without a device, against definitions."""

import contextlib
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from benchmarks.speed.chip_code import triton_text
from numpyro_kscore import ScoreEstimator, pytree
from numpyro_kscore._util.compiling import forget_programs
from numpyro_kscore._util.precision import full_precision
from numpyro_kscore._util.sharding import check_sharding
from numpyro_kscore.estimators import Landmarks, RandomFeatures, Subset
from numpyro_kscore.kernels import (
    CurlFree,
    Diagonal,
    Gaussian,
    Matern,
    Profile,
    RadialProfile,
    RationalQuadratic,
    _device,
    multi_bandwidth,
)
from numpyro_kscore.kernels import _pairwise as pairwise
from numpyro_kscore.kernels._gram import make_gram
from numpyro_kscore.kernels._pairwise import Expansion
from numpyro_kscore.kernels._pallas import Tiling, field_on_chip, tiling_for
from numpyro_kscore.regularizers import NuMethod
from numpyro_kscore.solvers import Recursion
from support import oracle
from support.compiling import quick_jit

TILING = Tiling(rows=32, columns=16, warps=4, stages=2, splits=2)
# Sums of 130 terms of mixed sign in float32: 130 roundings of 6e-8, and some cancellation.
TOLERANCE = 1e-5
THREE_SCALES = multi_bandwidth(Gaussian(), (0.5, 1.0, 2.0))


def user_written(s):
    return jnp.exp(1 - jnp.sqrt(1 + s))


@pytree
class Rates(RadialProfile):
    """The mean of Gaussians of several rates, (k,)."""

    rates: jax.Array

    def __call__(self, s):
        return jnp.mean(jnp.exp(-self.rates * s[..., None]), axis=-1)


def problem(n, m, dim):
    """Points, coefficients and rows in units of their typical distance, and a weight of ζ."""
    draws = np.random.default_rng(dim).normal(size=(2 * n + m, dim)).astype(np.float32)
    x, c, y = np.split(draws, [n, 2 * n])
    x, y = x / np.float32(np.sqrt(2 * dim)), y / np.float32(np.sqrt(2 * dim))
    # Rows that coincide with points, as all do in a Gram product.
    return x, c, np.concatenate([x[: m // 2], y[m // 2 :]]), np.float32(0.7)


def in_float64(kernel, x, c, y, a):
    with jax.enable_x64(True):
        expansion = Expansion(*(jnp.asarray(v, float) for v in (x, c, a)))
        field = quick_jit(partial(pairwise.field, kernel))
        return np.asarray(field(expansion, jnp.asarray(y, float)))


def relative(value, expected):
    return np.linalg.norm(value - expected) / np.linalg.norm(expected)


@partial(jax.jit, static_argnames="tiling")
@full_precision
def interpreted(kernel, x, c, y, a, tiling=TILING):
    return field_on_chip(kernel, x, c, a / x.shape[0], y, tiling=tiling, interpret=True)


@pytest.mark.parametrize("dim", [1, 3, 17])
@pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
@pytest.mark.thorough
def test_kernel_equals_the_definition(curl_free, dim):
    kernel = CurlFree() if curl_free else Diagonal()
    x, c, y, a = problem(130, 75, dim)
    reference = oracle.Kernel(curl_free, oracle.imq())
    x64, c64, y64 = (v.astype(float) for v in (x, c, y))
    expected = reference.apply(y64, x64, c64) + float(a) * reference.zeta(y64, x64)
    assert relative(interpreted(kernel, x, c, y, a), expected) < TOLERANCE


@pytest.mark.parametrize(
    "kernel",
    [
        CurlFree(Matern(2.5)),
        CurlFree(RationalQuadratic(1.5)),
        CurlFree(THREE_SCALES),
        CurlFree(Profile(user_written)),
        Diagonal(Matern(1.5)),
    ],
    ids=lambda kernel: type(kernel.profile).__name__,
)
@pytest.mark.thorough
def test_any_profile(kernel):
    x, c, y, a = problem(70, 40, 5)
    value = interpreted(kernel, x, c, y, a)
    assert relative(value, in_float64(kernel, x, c, y, a)) < TOLERANCE


@pytest.mark.thorough
def test_parts_of_a_field():
    """Coefficients alone, and ζ alone; one program for all points."""
    x, c, y, a = problem(70, 40, 4)
    tiling = TILING._replace(splits=1)
    run = quick_jit(partial(field_on_chip, CurlFree(), x, y=y, tiling=tiling, interpret=True))
    both = run(coefficients=c, each=a / 70)
    np.testing.assert_allclose(
        run(coefficients=c, each=None) + run(coefficients=None, each=a / 70), both, atol=1e-5
    )


def test_a_batch_is_its_members():
    x, c, y, a = problem(40, 33, 4)
    scales = jnp.asarray([1.0, 1.5])
    batch = jax.vmap(lambda f: interpreted(CurlFree(), f * x, c, y, a))(scales)
    for value, f in zip(batch, scales, strict=True):
        np.testing.assert_allclose(value, interpreted(CurlFree(), f * x, c, y, a), rtol=1e-6)


def test_what_is_not_finite_shows():
    """Also in the field of a diagonal kernel, which sees a point only through its distance."""
    x, c, y, a = problem(40, 33, 4)
    x[7] = np.nan
    assert not np.isfinite(interpreted(Diagonal(), x, c, y, a)).any()


@pytest.mark.parametrize("count", [(100, 3000), (32768, 32768), (64, 10**6)])
def test_sizes_of_tiles(count):
    tiling = tiling_for(*count)
    assert all(size & (size - 1) == 0 for size in tiling[:3])
    assert min(tiling.rows, tiling.columns) >= 16
    groups = -(-count[0] // tiling.rows)
    assert groups * tiling.splits >= min(256, count[1] // (8 * tiling.columns))


@contextlib.contextmanager
def with_an_h100():
    """JAX lowers for a GPU it is told of, without one at hand; newer versions ask which."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def lowered(fn, *arguments):
    """The text of a program for CUDA."""
    with with_an_h100():
        return jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("dim", "precision"), [(2, "float32"), (16, "tensorfloat32"), (64, "bfloat16")]
)
def test_lowers_for_cuda(dim, precision):
    x, c, y, a = problem(200, 100, dim)
    with jax.default_matmul_precision(precision):
        text = lowered(partial(field_on_chip, CurlFree()), x, c, a / 200, y)
    assert text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(("precision", "full"), [("float32", 4), ("tensorfloat32", 1)])
def test_full_products_are_three_passes_of_tensor_cores(precision, full):
    """The products take twice the time without tensor cores, and five times in 64 dimensions."""
    program = triton_text(16, TILING, precision)
    assert program.count("tt.dot") == 4
    assert program.count("inputPrecision = tf32x3") == full
    assert program.count("inputPrecision = tf32 ") == 4 - full


def test_lowers_where_double_precision_is_on(x64):
    x, c, y, a = problem(200, 100, 16)
    text = lowered(partial(field_on_chip, CurlFree()), x, c, a / np.float32(200), y)
    assert text.count("__gpu$xla.gpu.triton") == 1


def test_lowers_with_any_profile_and_in_a_batch():
    x, c, y, a = problem(200, 100, 8)
    for profile in (Matern(2.5), THREE_SCALES, Profile(user_written), RationalQuadratic(0.7)):
        text = lowered(
            jax.vmap(partial(field_on_chip, CurlFree(profile), y=y)),
            *(jnp.stack([v, v]) for v in (x, c, a / 200)),
        )
        assert text.count("__gpu$xla.gpu.triton") == 1


# The dispatcher. A GPU is pretended, and where a program of it must run, its kernel is interpreted.


@pytest.fixture
def gpu(monkeypatch):
    """JAX's default backend seems to be a GPU, and everything is streamed."""
    monkeypatch.setattr(_device, "_gpu_is_default", lambda: True)
    monkeypatch.setattr(_device, "FEWEST_PAIRS", 400)
    monkeypatch.setattr(pairwise, "CACHED_PAIRS", 400)
    trials = _device._lowers
    trials.cache_clear()
    forget_programs()
    yield
    trials.cache_clear()
    forget_programs()


@pytest.fixture
def interpreting(gpu, monkeypatch):
    """Programs take the GPU's branch, in which the kernel is interpreted."""
    kernel = partial(field_on_chip, tiling=TILING, interpret=True)
    monkeypatch.setattr("numpyro_kscore.kernels._pallas.field_on_chip", kernel)
    monkeypatch.setattr(_device, "_lowers", lambda *_: True)
    monkeypatch.setattr(lax, "platform_dependent", lambda *operands, cuda, default: cuda(*operands))


def estimator(**options):
    options = {"base": None, "bandwidth": 1.0, "standardize": "none"} | options
    return ScoreEstimator(regularizer=NuMethod(20), solver=Recursion(), **options)


@pytest.mark.thorough
def test_without_a_gpu_nothing_is_imported(monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    monkeypatch.setattr(pairwise, "CACHED_PAIRS", 400)
    monkeypatch.setattr(_device, "FEWEST_PAIRS", 400)
    monkeypatch.delitem(sys.modules, "numpyro_kscore.kernels._pallas")
    forget_programs()
    x = problem(64, 2, 3)[0]
    assert estimator().fit(x).info.path_name == "tiles"
    assert "numpyro_kscore.kernels._pallas" not in sys.modules
    forget_programs()


@pytest.mark.thorough
def test_a_fit_on_the_chip_is_that_in_tiles(interpreting, monkeypatch):
    x, _, y, _ = problem(100, 31, 5)

    def evaluate(x, y):
        score = estimator().fit(x)
        return score.info, score.at_samples, score(y)

    info, *found = jax.jit(evaluate)(x, y)
    assert info.path_name == "kernel"
    monkeypatch.setattr(_device, "_gpu_is_default", lambda: False)
    forget_programs()
    info, *in_tiles = jax.jit(evaluate)(x, y)
    assert info.path_name == "tiles"
    for value, expected in zip(found, in_tiles, strict=True):
        assert relative(value, expected) < 1e-4  # 20 ν-steps amplify roundings


@pytest.mark.thorough
def test_derivatives_are_those_of_tiles(interpreting, monkeypatch):
    x, c, y, a = problem(64, 32, 5)

    def field(x, c, y):
        return pairwise.field(CurlFree(), Expansion(x, c, a), y)

    evaluate = jax.jit(field)
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(field(*args))), (0, 1, 2)))
    value, found = evaluate(x, c, y), gradient(x, c, y)
    monkeypatch.setattr(_device, "_gpu_is_default", lambda: False)
    forget_programs()
    in_tiles = evaluate(x, c, y)
    assert 0 < relative(value, in_tiles) < TOLERANCE, "other roundings, so another program"
    for one, other in zip(found, gradient(x, c, y), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_far_clusters_take_tiles(interpreting):
    """An expanded square would lose the distances within a cluster, as the kernel's does."""
    x, c, y, _ = problem(64, 32, 5)
    for points in (x, y):
        points[::2] += 100.0
    expansion = Expansion(x, c, None)
    assert pairwise.path(CurlFree(), expansion, y) == _device.TILES
    expected = in_float64(CurlFree(), x, c, y, np.float32(0))
    assert relative(jax.jit(partial(pairwise.field, CurlFree()))(expansion, y), expected) < 1e-4
    alone = field_on_chip(CurlFree(), x, c, None, y, tiling=TILING, interpret=True)
    assert relative(alone, expected) > 1e-3


def test_on_the_cpu_of_a_machine_with_a_gpu(gpu):
    """The platform is that of the program, not of the machine."""
    x, c, y, _ = problem(64, 32, 5)
    expansion = Expansion(x, c, None)
    with with_an_h100():
        assert _device.suits_kernel(CurlFree(), expansion, y)  # remembered

    def run(expansion, y):
        field = pairwise.field(CurlFree(), expansion, y)
        return field, pairwise.path(CurlFree(), expansion, y)

    assert "__gpu$xla.gpu.triton" in lowered(run, expansion, y)
    value, path = jax.jit(run)(expansion, y)
    assert path == _device.TILES
    assert relative(value, in_float64(CurlFree(), x, c, y, np.float32(0))) < TOLERANCE


def test_devices_that_share_rows_take_the_kernel(gpu):
    sharding = NamedSharding(jax.make_mesh((1,), ("samples",)), PartitionSpec("samples"))
    x, c, _, _ = problem(64, 2, 5)
    gram = make_gram(CurlFree(), x, None, jnp.ones(()), 5, False, sharding=check_sharding(sharding))
    with with_an_h100(), jax.default_matmul_precision(gram.precision):
        assert _device.suits_kernel(CurlFree(), Expansion(x, c, None), x)  # remembered
    traced = jax.jit(lambda v: gram @ v).trace(c.T)
    assert "platform_index" in str(traced.jaxpr)


def test_falls_back_to_tiles(gpu, monkeypatch):
    """Tiles are used if Pallas, its Triton backend or its rule for an operation is missing."""
    x, c, y, _ = problem(64, 32, 5)
    suits = partial(_device.suits_kernel, expansion=Expansion(x, c, None), y=y)
    # Sorting: what Triton surely cannot do inside a kernel.
    odd = Profile(lambda s: jnp.exp(-jnp.sort(s)))
    with with_an_h100():
        assert suits(CurlFree())
        assert not suits(CurlFree(odd))
    for missing in ("jax.experimental.pallas", "jax.experimental.pallas.triton"):
        _device._lowers.cache_clear()
        with monkeypatch.context() as patch, with_an_h100():
            patch.delitem(sys.modules, "numpyro_kscore.kernels._pallas")
            patch.delattr("numpyro_kscore.kernels._pallas")
            patch.delattr(missing)
            patch.setitem(sys.modules, missing, None)
            assert not suits(CurlFree())
    _device._lowers.cache_clear()


def test_what_the_kernel_is_not_for(interpreting):
    x, c, y, _ = problem(64, 32, 5)
    kernel, expansion = CurlFree(), Expansion(x, c, None)
    assert _device.suits_kernel(kernel, expansion, y)
    assert not _device.suits_kernel(kernel, expansion, y[:2])  # few pairs
    wide = [np.ones((64, 65), np.float32)] * 2
    assert not _device.suits_kernel(kernel, Expansion(*wide, None), wide[0])
    with jax.enable_x64(True):
        assert not _device.suits_kernel(kernel, expansion, jnp.asarray(y, float))
    # A mixture takes arrays apart; a profile of a user's own may keep one.
    two = multi_bandwidth(Gaussian(), (1.0, 2.0))
    mixture = type(two)(two.profiles, jnp.asarray([0.5, 0.5]), jnp.asarray([1.0, 2.0]))
    assert _device.suits_kernel(CurlFree(mixture), expansion, y)
    assert not _device.suits_kernel(CurlFree(Rates(jnp.asarray([0.5, 2.0]))), expansion, y)


@pytest.mark.thorough
def test_paths_are_reported():
    x = problem(64, 2, 3)[0]
    assert estimator().fit(x).info.path_name == "matrix"
    assert estimator(landmarks=Landmarks(4)).fit(x).info.path_name == "matrix"
    assert estimator(features=RandomFeatures(32)).fit(x).info.path_name == "matrix"
    assert jax.vmap(lambda x: estimator().at_samples(x).info.path)(np.stack([x, x])).shape == (2,)


def test_the_path_of_a_subset_is_that_of_the_pass(interpreting):
    x = problem(100, 2, 5)[0]
    assert estimator(subset=Subset(16)).fit(x).info.path_name == "kernel"
