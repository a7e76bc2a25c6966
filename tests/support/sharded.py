"""Programs that test_sharding.py runs in their own processes: JAX counts its devices once.

``devices [everything]`` compares forced devices with one, ``process I ADDRESS FOLDER`` is one of
two that fit together until the second dies, ``alone ADDRESS`` waits for one that never comes.
"""

import json
import os
import sys
from functools import partial

# Only algebra is checked, so programs need not be fast: most of the time would be compilation.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
NUM_DEVICES = 2
if __name__ == "__main__":
    forced = f" --xla_force_host_platform_device_count={NUM_DEVICES}" * (sys.argv[1] == "devices")
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), FLAGS + forced])
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "XLA_FLAGS": flags}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from numpyro_kscore import Implicit, ImplicitELBO, ScoreEstimator  # noqa: E402
from numpyro_kscore._util.sharding import check_sharding  # noqa: E402
from numpyro_kscore.estimators import Landmarks, Median  # noqa: E402
from numpyro_kscore.kernels import CurlFree  # noqa: E402
from numpyro_kscore.kernels import _pairwise as pairwise  # noqa: E402
from numpyro_kscore.kernels._gram import make_gram  # noqa: E402
from numpyro_kscore.regularizers import NuMethod, Tikhonov  # noqa: E402

NUM_STEPS = 30


def draw_samples(n=60):
    """A banana with rows in no order."""
    x = np.random.default_rng(0).normal(size=(n, 3))
    x[:, 1] += 2 * x[:, 0] ** 2
    return x


def layout():
    """Rows over all devices, on the axes ``jax.make_mesh`` makes by default."""
    mesh = jax.make_mesh((jax.device_count(),), ("samples",))
    return NamedSharding(mesh, P("samples"))


def difference(tree, reference):
    """Largest difference of two trees of numbers, each leaf over its largest entry."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    worst = [np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b)) for a, b in leaves]
    return float(max(worst))


def pair(compute):
    """The difference of ``compute(sharding)`` on all devices from what it is on one."""
    return difference(compute(layout()), compute(None))


def fit_and_choose(sharding, **options):
    """Fit in the samples' own units, unless told otherwise: landmarks are standardized below."""
    options = {"base": None, "bandwidth": 4.0, "standardize": "none"} | options

    @jax.jit
    def evaluate(x):
        score = ScoreEstimator(sharding=sharding, **options).fit(x)
        return score.at_samples, score(x[:7] + 0.1), score.info.selection

    *values, selected = evaluate(draw_samples(59))  # one short of an even number
    assert 0 < selected.column, "the base alone would be no estimate"
    return values, selected.loss[:, 1:]


def estimator(sharding=None, **options):
    return ScoreEstimator(regularizer=NuMethod(NUM_STEPS), base=None, sharding=sharding, **options)


def of_process():
    """The estimator of processes: devices of one process cover the ways to standardize."""
    return estimator(bandwidth=1.0, standardize="none")


def landmarks(sharding):
    return estimator(sharding, landmarks=Landmarks(12)).fit(draw_samples()).at_samples


def jackknife(sharding, **options):
    x = draw_samples()
    return estimator(sharding, **options).at_samples(x, -x, debias="jackknife").residual


def derivatives(sharding):
    def total(x, lam):
        score = ScoreEstimator(regularizer=Tikhonov(lam), base=None, sharding=sharding).fit(x)
        return jnp.sum(jnp.sin(score.at_samples))

    return jax.jit(jax.grad(total, (0, 1)))(jnp.asarray(draw_samples(24)), 0.01)


def model(data):
    scale = numpyro.param("scale", jnp.asarray(1.5))
    z = numpyro.sample("z", dist.Normal(0, scale).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(z[0] + z[1] ** 2, 1).expand(data.shape).to_event(1), obs=data)


def guide(data):
    matrix = numpyro.param("matrix", jnp.asarray([[1.0, 0.3], [0.2, 0.7]]))
    noise = dist.Normal(0, 1).expand([2]).to_event(1)
    eps = numpyro.sample("eps", noise, infer={"is_auxiliary": True})
    numpyro.sample("z", Implicit(jnp.tanh(matrix @ eps), 1))


def objective(sharding):
    """The loss of particles and its gradient in guide and model."""
    elbo = ImplicitELBO(16, estimator=estimator(bandwidth=Median(0.8)), sharding=sharding)
    params = {"matrix": jnp.asarray([[1.0, 0.3], [0.2, 0.7]]), "scale": jnp.asarray(1.5)}
    data = jnp.asarray(draw_samples()[:, 0])
    loss = partial(elbo.loss, jax.random.key(0))
    run = jax.jit(jax.value_and_grad(lambda p: loss(p, model, guide, data)))
    return run(params)


def share_of_work():
    """Operations of a device in a product with all pairs, over those of one device alone."""

    def flops(sharding):
        def product(x):
            gram = make_gram(CurlFree(), x, None, jnp.ones(()), 3, False, sharding=sharding)
            return gram @ x.T

        x = jnp.asarray(draw_samples(512))
        return jax.jit(product).lower(x).compile().cost_analysis()["flops"]

    return flops(check_sharding(layout())) / flops(None)


def share_of_memory():
    """Temporary memory of a fit in tiles on a device, over that of one device alone.

    Without a local shape, for which each device holds the pairs of up to 512 samples.
    """

    def size(sharding):
        run = jax.jit(lambda x: estimator(sharding, standardize="full").fit(x).at_samples)
        x = jax.ShapeDtypeStruct((2**12, 8), float)
        return run.lower(x).compile().memory_analysis().temp_size_in_bytes

    return size(layout()) / size(None)


def use_tiles():
    pairwise.CACHED_PAIRS, pairwise.TILE_ROWS, pairwise.TILE_COLUMNS = 400, 8, 16
    jax.clear_caches()


def shares():
    """Work and memory of one of two devices."""
    work = share_of_work()
    use_tiles()
    return {"work": work, "memory": share_of_memory()}


def differences():
    """Every comparison by name; the last ones in tiles."""
    found = {
        "objective": pair(objective),
        "jackknife": pair(jackknife),
        "derivatives": pair(derivatives),
    }
    use_tiles()
    halves = partial(jackknife, landmarks=Landmarks(12))
    with_base = partial(fit_and_choose, base="gaussian", bandwidth="median", standardize="full")
    return found | {
        "selection": pair(fit_and_choose),
        "landmarks": pair(landmarks),
        "halves": pair(jackknife),
        "tiles": pair(derivatives),
        "few": pair(halves),
        "gaussian base": pair(with_base),
    }


def join(index, address, initialization_timeout=60):
    jax.distributed.initialize(
        address,
        2,
        index,
        initialization_timeout=initialization_timeout,
        heartbeat_timeout_seconds=20,
    )


def one_of_two(index, address, folder):
    """Fit samples half of which are here; then the other process goes."""
    join(index, address)
    x, sharding = draw_samples(), layout()
    half = len(x) // 2
    own = jax.make_array_from_process_local_data(sharding, x[half * index : half * (index + 1)])
    fit = of_process().fit
    score = fit(own)
    (shard,) = score.at_samples.addressable_shards
    np.save(f"{folder}/{index}.npy", shard.data)
    if index == 1:
        os._exit(0)
    while True:
        try:
            jax.block_until_ready(fit(own).at_samples)
        except ValueError as error:
            print(json.dumps({"error": str(error)}))
            break
    # What is left of the cluster waits for the other at exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "devices":
        print(json.dumps(shares() if arguments == ["shares"] else differences()))
    elif mode == "process":
        one_of_two(int(arguments[0]), *arguments[1:])
    else:
        join(0, arguments[0], initialization_timeout=2)
