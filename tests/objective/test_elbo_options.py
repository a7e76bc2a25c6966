"""Options of ``ImplicitELBO``, the particles that count, and the blocks that are estimated."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from jax.sharding import NamedSharding, PartitionSpec
from numpyro.infer import SVI
from numpyro.primitives import mutable
from scipy import stats

from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO, ScoreEstimator
from numpyro_kscore._model.layout import default_num_particles
from numpyro_kscore.estimators import Median, Subset
from numpyro_kscore.regularizers import NuMethod
from numpyro_kscore.sliced import SlicedScoreMatching
from support.compiling import quick_jit
from support.doubles import GaussianScore

KEY = random.key(0)
AUXILIARY = {"is_auxiliary": True}
LOC, SD = jnp.full(2, 0.5), jnp.full(2, 0.7)
PARAMS = {"loc": LOC, "sd": SD}
EXACT = GaussianScore(mean=0.5, sd=0.7)  # of either coordinate


def model():
    numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("b", dist.Normal(0.0, 1.0))


def make_guide(implicit="ab"):
    """a and b are N(loc, sd²) and independent; some of them are known by draws only."""

    def guide():
        loc, sd = numpyro.param("loc", LOC), numpyro.param("sd", SD)
        for k, name in enumerate("ab"):
            if name in implicit:
                noise = numpyro.sample(f"{name}_noise", dist.Normal(0.0, 1.0), infer=AUXILIARY)
                numpyro.sample(name, Implicit(loc[k] + sd[k] * noise))
            else:
                numpyro.sample(name, dist.Normal(loc[k], sd[k]))

    return guide


def loss_and_gradient(elbo, some_model=model, guide=None, params=PARAMS):
    guide = make_guide() if guide is None else guide
    return jax.value_and_grad(lambda p: elbo.loss(KEY, p, some_model, guide))(params)


def recorder(some_model=model, guide=None, **options):
    """Loss, gradient, and the input and output of each map over the particles."""
    walks = []

    def record(fn, xs):
        ys = jax.vmap(fn)(xs)
        walks.append((xs, lax.stop_gradient(ys)))
        return ys

    elbo = ImplicitELBO(vectorize_particles=record, **options)
    return quick_jit(lambda p: (*loss_and_gradient(elbo, some_model, guide, p), walks))


def recorded(some_model=model, guide=None, params=PARAMS, **options):
    return recorder(some_model, guide, **options)(params)


def trace(elbo, guide, some_model=model):
    """Trace the loss, which raises errors without compiling anything."""
    jax.eval_shape(lambda p: elbo.loss(KEY, p, some_model, guide), PARAMS)


# ----------------------------------------------------------------------------------- options


def test_defaults_are_those_documented():
    elbo = ImplicitELBO()
    assert elbo.estimator == ScoreEstimator(
        regularizer=NuMethod(45), bandwidth=Median(0.8), standardize="full", base=None
    )
    settings = elbo.settings
    assert (settings.base, settings.debias, settings.clip) == ("model", "jackknife", 4.0)
    assert elbo.vectorize_particles is True
    assert elbo.forward_mode_differentiation is False
    dims = (1, 20, 63, 64, 1000)
    assert [default_num_particles(d, has_local=False) for d in dims] == [128, 160, 504, 512, 512]
    assert [default_num_particles(d, has_local=True) for d in dims] == [128, 128, 252, 256, 256]


@pytest.mark.parametrize("base", ["model", "moments", "gaussian", None])
def test_the_base_is_taken_from_the_objective(base):
    estimator = ScoreEstimator(base="gaussian")
    elbo = ImplicitELBO(estimator=estimator, base=base)
    assert elbo.settings.base == base
    assert elbo.estimator.base == ("gaussian" if base == "gaussian" else None)
    network = SlicedScoreMatching((8,))
    if base in ("model", "moments"):
        with pytest.raises(ValueError, match=f"with SlicedScoreMatching.*got '{base}'"):
            ImplicitELBO(estimator=network, base=base)
    else:
        assert ImplicitELBO(estimator=network, base=base).settings.base == base
    assert ImplicitELBO(estimator=network).settings.base == network.base


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (SlicedScoreMatching((8,)), r"debias: expected None with SlicedScoreMatching\(\).*Leave"),
        (ScoreEstimator(subset=Subset(4)), "debias: expected None with a subset.*got 'jackknife'"),
    ],
    ids=["network", "subset"],
)
def test_an_estimator_without_a_jackknife_has_none_by_default_and_refuses_one(estimator, message):
    assert ImplicitELBO(estimator=estimator).settings.debias is None
    assert ImplicitELBO(estimator=estimator, debias=None).settings.debias is None
    with pytest.raises(ValueError, match=message):
        ImplicitELBO(estimator=estimator, debias="jackknife")
    assert ImplicitELBO(debias="jackknife").settings == ImplicitELBO().settings
    assert ImplicitELBO(debias=None).settings.debias is None


def test_the_ends_of_what_is_allowed():
    assert ImplicitELBO(2).num_particles == 2
    assert ImplicitELBO(1, aggregate="rows").num_particles == 1
    assert ImplicitELBO(2, clip=None).settings.clip is None
    for error, message, options in (
        (ValueError, "num_particles: .*at least 2; got 1", {"num_particles": 1}),
        (
            ValueError,
            "num_particles: .*at least 1; got 0",
            {"num_particles": 0, "aggregate": "rows"},
        ),
        (TypeError, "aggregate: expected the name of a plate or None; got 3", {"aggregate": 3}),
        (TypeError, "num_particles: expected an integer; got 2.0", {"num_particles": 2.0}),
        (TypeError, "estimator: expected a ScoreEstimator or .*; got 3", {"estimator": 3}),
        (ValueError, "base: expected one of.*'model'.*got 'student'", {"base": "student"}),
        (ValueError, "debias: expected one of.*got True", {"debias": True}),
        (ValueError, "(?s)vectorize_particles.*boolean or a call", {"vectorize_particles": 2}),
        (ValueError, "clip: expected a positive finite number; got 0", {"clip": 0}),
    ):
        with pytest.raises(error, match=message):
            ImplicitELBO(**options)


def test_sharded_particles_are_evaluated_at_once():
    mesh = jax.make_mesh((1,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("particles"))
    elbo = ImplicitELBO(8, sharding=sharding, estimator=GaussianScore())
    assert elbo.estimator.sharding == elbo.settings.sharding == sharding
    trace(elbo, make_guide())
    network = ImplicitELBO(sharding=sharding, estimator=SlicedScoreMatching((8,)))
    assert network.settings.sharding == sharding
    for vectorize in (False, lambda fn, xs: jax.vmap(fn)(xs)):
        assert ImplicitELBO(vectorize_particles=vectorize).settings.sharding is None
        with pytest.raises(ValueError, match="vectorize_particles: expected True with sharding"):
            ImplicitELBO(sharding=sharding, vectorize_particles=vectorize)


@pytest.mark.thorough
def test_moments_need_more_draws_than_dimensions():
    """Only estimated dimensions count: two, or one if the other's density is known."""
    message = "num_particles: expected at least 4 with base='moments'.*2 numbers.*got 3"

    def joint_guide():
        loc, sd = numpyro.param("loc", LOC), numpyro.param("sd", SD)
        noise = numpyro.sample("noise", dist.Normal(jnp.zeros(2), 1.0).to_event(1), infer=AUXILIARY)
        numpyro.sample("a", Implicit(loc[0] + sd[0] * noise[0]))
        numpyro.sample("b", Implicit(loc[1] + sd[1] * noise @ jnp.ones(2)))

    def elbo(count, base="moments", **options):
        return ImplicitELBO(count, base=base, estimator=GaussianScore(), debias=None, **options)

    with pytest.raises(ValueError, match=message):
        trace(elbo(3), joint_guide)
    trace(elbo(4), joint_guide)
    trace(elbo(2, base="model"), joint_guide)
    trace(elbo(3), make_guide("b"))
    with pytest.raises(ValueError, match=r"expected at least 3 .*1 numbers of \['b'\]; got 2"):
        trace(elbo(2), make_guide("b"))

    def rows(parts=("z",)):
        with numpyro.plate("rows", 6):
            for name in parts:
                numpyro.sample(name, dist.Normal(0.0, 1.0), infer={"implicit": True})

    # The rows of an aggregate count as draws.
    trace(elbo(2, aggregate="rows"), rows, rows)
    with pytest.raises(ValueError, match="expected at least 3"):
        trace(elbo(2), rows, rows)


def test_default_numbers_of_particles():
    """The draws of all rows count for an aggregate."""

    def rows(size):
        def guide():
            with numpyro.plate("rows", size):
                numpyro.sample("z", dist.Normal(0.0, 1.0), infer={"implicit": True})

        return guide

    def count(fn, xs):
        first = jax.tree.leaves(xs)[0]
        counts.append(first.shape[0] if first.ndim == 1 else None)
        raise StopIteration

    found = []
    for some_model, guide, aggregate in (
        (model, make_guide("a"), None),
        (model, make_guide(""), None),
        (rows(30), rows(30), None),
        (rows(30), rows(30), "rows"),
        (rows(200), rows(200), "rows"),
    ):
        counts = []
        elbo = ImplicitELBO(
            aggregate=aggregate, estimator=GaussianScore(), vectorize_particles=count
        )
        with pytest.raises(StopIteration):
            trace(elbo, guide, some_model)
        found += counts
    # Rows are estimated one by one, in one dimension each.
    assert found == [128, 128, 128, 5, 1]


def test_a_single_particle_is_drawn_once():
    """No other particle could replace it, so draws are not checked first."""

    def rows():
        loc = numpyro.param("loc", LOC)
        with numpyro.plate("rows", 6):
            noise = numpyro.sample("noise", dist.Normal(0.0, 1.0), infer=AUXILIARY)
            numpyro.sample("z", Implicit(loc[0] + noise))

    def rows_model():
        with numpyro.plate("rows", 6):
            numpyro.sample("z", dist.Normal(0.0, 1.0))

    def count(fn, xs):
        calls.append(fn)
        return jax.vmap(fn)(xs)

    for num_particles, expected in ((1, 2), (2, 3)):
        calls = []
        options = {"aggregate": "rows", "estimator": GaussianScore()}
        trace(ImplicitELBO(num_particles, vectorize_particles=count, **options), rows, rows_model)
        assert len(calls) == expected


@pytest.mark.parametrize("vectorize", [True, False])
def test_particles_in_turn_are_one_at_a_time(vectorize):
    """Least memory: the model never sees an array of all particles."""

    def marked_model():
        numpyro.factor("mark", jnp.tan(numpyro.sample("a", dist.Normal(0.0, 1.0))))
        numpyro.sample("b", dist.Normal(0.0, 1.0))

    elbo = ImplicitELBO(7, estimator=GaussianScore(), vectorize_particles=vectorize)
    program = jax.make_jaxpr(lambda p: elbo.loss(KEY, p, marked_model, make_guide()))(PARAMS)
    assert set(re.findall(r"f32\[(\d*)\] = tan ", str(program))) == {"7" if vectorize else ""}


def test_aggregates_are_of_one_plate_and_depend_on_nothing():
    def rows_model():
        g = numpyro.sample("g", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 6):
            numpyro.sample("z", dist.Normal(g, 1.0))

    def known():
        with numpyro.plate("rows", 6):
            numpyro.sample("z", dist.Normal(0.0, 1.0))

    def on_a_global():
        loc = numpyro.param("loc", LOC)
        g = numpyro.sample("g", dist.Normal(loc[0], 1.0))
        with numpyro.plate("rows", 6):
            noise = numpyro.sample("noise", dist.Normal(0.0, 1.0), infer=AUXILIARY)
            numpyro.sample("z", Implicit(g + noise))

    def nested():
        with numpyro.plate("columns", 2, dim=-2), numpyro.plate("rows", 6, dim=-1):
            numpyro.sample("z", dist.Normal(0.0, 1.0), infer={"implicit": True})

    elbo = ImplicitELBO(4, aggregate="rows", estimator=GaussianScore())
    message = r"aggregate: expected sites in plate 'rows' alone.*got \['z'\]"
    with pytest.raises(ValueError, match=message):
        trace(elbo, on_a_global, rows_model)
    with pytest.raises(ValueError, match=message):
        trace(elbo, nested, nested)
    with pytest.raises(ValueError, match=message):
        trace(elbo, known, known)
    with pytest.raises(ValueError, match=r"aggregate: expected a plate.*got 'rows'.*are \[\]"):
        trace(elbo, make_guide())


# --------------------------------------------------------------------------------- particles


def test_draws_that_are_not_finite_are_replaced_by_their_neighbors():
    """The last good draw before, or else the first, stands in; no bad draw is differentiated."""

    def guide():
        loc, sd = numpyro.param("loc", LOC), numpyro.param("sd", SD)
        for k, name in enumerate("ab"):
            z = sd[k] * numpyro.sample(f"{name}_noise", dist.Normal(0.0, 1.0), infer=AUXILIARY)
            # Infinite for the first draws and some others.
            numpyro.sample(name, Implicit(loc[k] + z * jnp.where(abs(z) > 0.75, jnp.inf, 1.0)))

    loss, gradient, walks = recorded(
        guide=guide, num_particles=12, base=None, estimator=EXACT, debias=None
    )
    (noise, probed), (kept, _), _ = walks
    good = np.isfinite(probed).all(axis=1)
    first = np.argmax(good)
    source = [max([j for j in range(i + 1) if good[j]], default=first) for i in range(12)]
    # Both rules apply.
    assert first > 1
    assert not good[first:].all()
    for name in noise:
        np.testing.assert_array_equal(kept[name], noise[name][np.array(source)])
    assert np.isnan(loss)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_good_particles_have_the_whole_weight():
    """One of two has it all, for known and unknown densities; with none nothing moves."""

    def broken_model():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("b", dist.Normal(0.0, 1.0))
        limit = numpyro.param("limit", 0.5)
        numpyro.factor("trouble", jnp.where(a > limit, jnp.nan, 0.0))

    run = recorder(broken_model, make_guide("b"), num_particles=2, base=None, estimator=EXACT)
    loc, sd = np.asarray(LOC), np.asarray(SD)
    for limit, number in ((0.5, 1), (-np.inf, 0)):
        loss, gradient, walks = run({**PARAMS, "limit": np.float32(limit)})
        assert np.isnan(loss)
        z = np.asarray(walks[0][1])
        good = z[z[:, 0] <= limit]
        assert len(good) == number
        noise = (good - loc) / sd
        # d(log q - log p) along the draw, or ŝ_q - s_p.
        direction = good - np.array([0.0, 1.0]) * noise / sd
        np.testing.assert_allclose(gradient["loc"], direction.sum(axis=0), rtol=1e-4)
        known = number * np.array([1.0, 0.0]) / sd
        np.testing.assert_allclose(
            gradient["sd"], (direction * noise).sum(axis=0) - known, rtol=1e-4
        )


def test_parameters_of_the_model():
    """The mean of -∂ log p; derivatives that are infinite count as nothing."""

    def observed_model():
        model()
        shift = numpyro.param("shift", jnp.zeros(3))
        # Its derivative is infinite at 0, its value is not.
        numpyro.factor("rooted", jnp.sqrt(numpyro.param("root", jnp.zeros(()))))
        numpyro.sample("y", dist.Normal(shift, 2.0).to_event(1), obs=jnp.arange(3.0))

    params = {**PARAMS, "shift": jnp.array([0.3, -0.5, 1.0]), "root": jnp.zeros(())}
    loss, gradient, _ = recorded(observed_model, params=params, num_particles=4, estimator=EXACT)
    assert np.isfinite(loss)
    np.testing.assert_allclose(gradient["shift"], (params["shift"] - np.arange(3.0)) / 4, rtol=1e-5)
    assert gradient["root"] == 0


def test_mutable_values_of_particles():
    """Floating-point values are averaged over the particles; others are those of the first."""

    def guide():
        state = mutable("state", {"mean": jnp.zeros(3), "count": jnp.zeros(2, int)})
        make_guide()()
        noise = numpyro.sample("more", dist.Normal(jnp.zeros(3), 1.0).to_event(1), infer=AUXILIARY)
        state["mean"] = noise
        state["count"] = jnp.floor(1e3 * noise[:2]).astype(int)

    def guide_with_state():
        return elbo.loss_with_mutable_state(KEY, state, model, guide)

    state = {"loc": LOC, "sd": SD, "state": {"mean": jnp.zeros(3), "count": jnp.zeros(2, int)}}
    walks = []

    def record(fn, xs):
        walks.append(jax.vmap(fn)(xs))
        return walks[-1]

    elbo = ImplicitELBO(5, estimator=EXACT, base=None, vectorize_particles=record)
    kept, values = quick_jit(
        lambda: (guide_with_state()["mutable_state"]["state"], walks[1].mutable["state"])
    )()
    np.testing.assert_allclose(kept["mean"], np.mean(values["mean"], axis=0), rtol=1e-6)
    np.testing.assert_array_equal(kept["count"], values["count"][0])
    assert len(np.unique(values["count"], axis=0)) == 5


# ------------------------------------------------------------------------------------ blocks


@pytest.mark.parametrize(
    ("implicit", "base"),
    [("b", "model"), ("", "model"), pytest.param("b", None, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.thorough
def test_known_densities_are_differentiated_and_others_estimated(implicit, base):
    """Every draw has its gradient, with the exact score instead of an estimate."""
    loss, gradient, walks = recorded(
        guide=make_guide(implicit), num_particles=6, base=base, estimator=EXACT, clip=None
    )
    draws = walks[0][1]
    noise = (draws - LOC) / SD
    known = np.array([name not in implicit for name in "ab"])
    direction = draws - np.where(known, 0.0, noise / SD)
    np.testing.assert_allclose(gradient["loc"], direction.mean(axis=0), rtol=1e-4)
    expected = (direction * noise).mean(axis=0) - np.where(known, 1 / SD, 0.0)
    np.testing.assert_allclose(gradient["sd"], expected, rtol=1e-4)
    if not implicit:
        density = jax.scipy.stats.norm.logpdf
        terms = density(draws, LOC, SD) - density(draws)
        np.testing.assert_allclose(loss, jnp.mean(jnp.sum(terms, axis=1)), rtol=1e-5)


def test_the_reported_loss_knows_units():
    """Draws c times as far apart have an entropy that is higher by log c for each dimension."""
    results = []
    for c in (1.0, 5.0):
        params = {"loc": jnp.zeros(2), "sd": jnp.full(2, 0.7 * c)}
        loss, _, walks = recorded(
            params=params, num_particles=6, estimator=GaussianScore(), debias=None
        )
        results.append(loss + np.mean(np.sum(stats.norm.logpdf(walks[0][1]), axis=1)))
    assert results[1] - results[0] == pytest.approx(-2 * np.log(5.0), rel=1e-4)


@pytest.mark.thorough
def test_only_the_difference_to_the_model_is_clipped():
    def rows():
        loc, sd = numpyro.param("loc", LOC), numpyro.param("sd", SD)
        with numpyro.plate("rows", 6):
            noise = numpyro.sample("noise", dist.Normal(0.0, 1.0), infer=AUXILIARY)
            numpyro.sample("z", Implicit(loc[0] + sd[0] * noise))

    def rows_model():
        with numpyro.plate("rows", 6):
            numpyro.sample("z", dist.Normal(0.0, 1.0))

    @quick_jit
    def evaluate(params):
        def step(some_model, guide, **options):
            elbo = ImplicitELBO(8, estimator=GaussianScore(), clip=1e-6, **options)
            return loss_and_gradient(elbo, some_model, guide, params)[1]["loc"]

        steps = [step(model, make_guide(), base=base) for base in ("model", "moments", "gaussian")]
        return [*steps, step(rows_model, rows, aggregate="rows")]

    clipped, *others = (np.max(np.abs(step)) for step in evaluate(PARAMS))
    assert clipped < 1e-3
    assert min(others) > 1e-2


@pytest.mark.thorough
def test_one_network_for_a_block_of_several_sites():
    guide = AutoImplicit(model, hidden_dims=(4,), warm_start=False)
    elbo = ImplicitELBO(16, estimator=SlicedScoreMatching((8,)))
    svi = SVI(model, elbo.stateful(model, guide), optax.adam(1e-2), elbo)
    state = jax.eval_shape(svi.init, KEY)
    assert set(state.mutable_state["_numpyro_kscore_networks"]) == {"a"}
    updated, _ = jax.eval_shape(svi.update, state)
    assert jax.tree.structure(updated) == jax.tree.structure(state)
