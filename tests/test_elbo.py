"""``ImplicitELBO``: gradients against closed forms, NumPyro's contract, posteriors, misuse."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from compiling import quick_jit
from doubles import GaussianScore
from jax import lax, random
from jax.example_libraries import stax
from numpyro import handlers
from numpyro.contrib.module import flax_module
from numpyro.distributions import constraints
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoGuideList
from numpyro.primitives import mutable
from scipy import stats

from numpyro_kscore import (
    AutoImplicit,
    CurlFree,
    Dense,
    Diagonal,
    Gaussian,
    Implicit,
    ImplicitELBO,
    NuMethod,
    ScoreEstimator,
    Tikhonov,
)

pytestmark = pytest.mark.quick_compilation

KEY = random.key(0)
# Plumbing runs at this size and in one dimension, un-jitted, so that the estimator compiles once.
FEW = 16


def draw_noise(dim, name="noise"):
    return numpyro.sample(
        name, dist.Normal(jnp.zeros(dim), 1.0).to_event(1), infer={"is_auxiliary": True}
    )


def standard_model(dim=1):
    def model():
        numpyro.sample("z", dist.Normal(jnp.zeros(dim), 1.0).to_event(1))

    return model


def affine_guide(dim=1):
    """z = loc + sd ε."""

    def guide(*args):
        loc = numpyro.param("loc", jnp.full(dim, 0.5))
        sd = numpyro.param("sd", jnp.full(dim, 0.7), constraint=constraints.positive)
        numpyro.sample("z", Implicit(loc + sd * draw_noise(dim), event_dim=1))

    return guide


AFFINE = {"loc": jnp.full(1, 0.5), "sd": jnp.full(1, 0.7)}


def loss_and_gradient(model, guide, params, elbo, *args, key=KEY):
    return jax.value_and_grad(lambda p: elbo.loss(key, p, model, guide, *args))(params)


def quick_loss_and_gradient(model, guide, params, elbo, *args):
    return quick_jit(lambda p: loss_and_gradient(model, guide, p, elbo, *args))(params)


def assert_close(actual, expected, rtol=1e-5, atol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected
    )


def is_finite(tree):
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))


# ------------------------------------------------- gradients: a posterior with a closed-form KL

DESIGN = jnp.array([[1.0, 0.5, -0.3], [0.0, 1.0, 0.8], [0.7, -1.0, 0.2]])
PRIOR_MEAN, PRIOR_SD = jnp.array([0.0, 0.0, 0.3]), jnp.array([2.0, 2.0, 0.8])
NOISE_SD = 0.7
OBSERVED = jnp.array([1.0, -0.5, 2.0])
PARAMS = {
    "loc": jnp.array([0.3, -0.6, 0.5]),
    "sd": jnp.array([0.4, 0.9, 0.6]),
    "shift": jnp.array(0.4),
}


def linear_model(data):
    """Linear in (weights, log scale): all is Gaussian in unconstrained coordinates."""
    weights = numpyro.sample("weights", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.3, 0.8))
    shift = numpyro.param("shift", 0.0)
    mean = DESIGN @ jnp.append(weights, jnp.log(scale)) + shift
    numpyro.sample("data", dist.Normal(mean, NOISE_SD).to_event(1), obs=data)


def linear_guide(data):
    loc = numpyro.param("loc", PARAMS["loc"])
    sd = numpyro.param("sd", PARAMS["sd"], constraint=constraints.positive)
    u = loc + sd * draw_noise(3)
    numpyro.sample("weights", Implicit(u[:2], event_dim=1))
    numpyro.sample("scale", Implicit(jnp.exp(u[2])))


def exact_negative_elbo(params, data=OBSERVED):
    """KL(N(loc, sd²) ‖ posterior) - log evidence: Gaussian integrals written out."""
    loc, sd = params["loc"], params["sd"]
    prior = 0.5 * ((loc - PRIOR_MEAN) ** 2 + sd**2) / PRIOR_SD**2 + jnp.log(PRIOR_SD)
    residual = data - DESIGN @ loc - params["shift"]
    squares = jnp.sum(residual**2) + jnp.sum(DESIGN**2 @ sd**2)
    likelihood = 0.5 * squares / NOISE_SD**2 + 3 * jnp.log(NOISE_SD)
    # 2π: three for the prior and three for the data, less three for the entropy.
    return jnp.sum(prior - jnp.log(sd) - 0.5) + likelihood + 1.5 * jnp.log(2 * jnp.pi)


EXACT = {"mean": PARAMS["loc"], "sd": PARAMS["sd"]}


def gradients_over_keys(elbo, num_keys):
    # With an estimate, the loop is worth compiling well.
    compile_ = quick_jit if isinstance(elbo.estimator, GaussianScore) else jax.jit

    @compile_
    def run(keys):
        one = lambda key: loss_and_gradient(  # noqa: E731
            linear_model, linear_guide, PARAMS, elbo, OBSERVED, key=key
        )
        return lax.map(one, keys)

    return run(random.split(random.key(1), num_keys))


def test_gradient_with_the_exact_score_is_the_closed_form():
    elbo = ImplicitELBO(64, estimator=GaussianScore(**EXACT), base=None)
    losses, gradients = gradients_over_keys(elbo, 500)
    exact_value, exact = quick_jit(jax.value_and_grad(exact_negative_elbo))(PARAMS)
    for name, values in gradients.items():
        standard_error = np.std(values, axis=0) / np.sqrt(500)
        # Five standard errors; and they are small enough to see an error of a few per cent.
        assert np.all(np.abs(np.mean(values, axis=0) - exact[name]) < 5 * standard_error), name
        assert np.linalg.norm(standard_error) < 0.02 * np.linalg.norm(exact[name]), name
    # The reported loss is about right too: its entropy is made unbiased for Gaussians.
    standard_error = np.std(losses) / np.sqrt(500)
    assert abs(np.mean(losses) - exact_value) < 5 * standard_error + 0.02


@pytest.fixture(scope="module")
def relative_bias():
    """Bias of the mean gradient at 32 particles, over its norm, with the standard error."""
    exact = quick_jit(jax.grad(exact_negative_elbo))(PARAMS)
    exact = np.concatenate([exact["loc"], exact["sd"]])
    results = {}
    for debias in ("jackknife", None):
        _, gradients = gradients_over_keys(ImplicitELBO(32, debias=debias), 1000)
        values = np.concatenate([gradients["loc"], gradients["sd"]], axis=1)
        error = np.sqrt(np.sum(np.var(values, axis=0)) / 1000)
        bias = np.linalg.norm(values.mean(0) - exact)
        results[debias] = (bias / np.linalg.norm(exact), error / np.linalg.norm(exact))
    return results


def test_estimated_gradient_is_close_to_the_closed_form(relative_bias):
    # Measured: 0.075 with standard error 0.011 at n = 32, then 0.048 at 64 and 0.036 at 128: what
    # the jackknife leaves dies out as well. Four standard errors above the first.
    bias, error = relative_bias["jackknife"]
    assert error < 0.015
    assert bias < 0.12


def test_jackknife_reduces_the_bias(relative_bias):
    # Measured: from 0.110 to 0.054, each with standard error 0.011.
    (corrected, error), (plain, plain_error) = relative_bias["jackknife"], relative_bias[None]
    assert plain - corrected > 3 * np.hypot(error, plain_error)
    assert corrected < 0.6 * plain


def test_forward_and_reverse_mode_agree():
    elbo = ImplicitELBO(FEW)

    def loss(params):
        return elbo.loss(KEY, params, linear_model, linear_guide, OBSERVED)

    @quick_jit
    def differentiate(params):
        return jax.jacfwd(loss)(params), jax.jacrev(loss)(params)

    forward, reverse = differentiate(PARAMS)
    assert_close(forward, reverse, rtol=1e-4, atol=1e-4)
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(reverse))


# ------------------------------------------------------------------------------ cost of a step


@pytest.mark.parametrize("vectorize", [True, False])
def test_one_value_and_gradient_of_the_model_a_step(vectorize):
    """The likelihood's two products with the data, forward and backward, appear once each."""
    rows = 37  # no other dimension of the program is a multiple of it
    features = random.normal(KEY, (rows, 2))

    def model(targets):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("targets", dist.Normal(features @ z, 1.0).to_event(1), obs=targets)

    elbo = ImplicitELBO(FEW, estimator=GaussianScore(), vectorize_particles=vectorize)
    svi = SVI(model, affine_guide(2), optax.adam(1e-2), elbo)
    targets = features @ jnp.ones(2)
    state = svi.init(KEY, targets)
    program = jax.jit(svi.update).lower(state, targets).compile().as_text()
    types = dict(re.findall(r"(%[\w.-]+) = (\w+\[[\d,]*\])", program))
    products = [
        (result, *(types.get(name, "") for name in re.findall(r"%[\w.-]+", operands)))
        for result, operands in re.findall(r" = (\w+\[[\d,]*\])\S* dot\((.*?)\)", program)
    ]
    with_data = [product for product in products if re.search(rf"\b{rows}\b", str(product))]
    assert len(with_data) == 2, products


def test_no_retrace_over_steps():
    traces = {"model": 0, "guide": 0}

    def model():
        traces["model"] += 1
        numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))

    def guide():
        traces["guide"] += 1
        return affine_guide()()

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(model, guide, optax.adam(1e-2), elbo)
    update = jax.jit(svi.update)
    state, _ = update(svi.init(KEY))
    after_one_step = dict(traces)
    for _ in range(3):
        state, loss = update(state)
    assert traces == after_one_step
    assert np.isfinite(loss)


def test_default_number_of_particles_follows_the_dimension():
    class SeenError(Exception):
        pass

    def stop(fn, xs):
        raise SeenError(jax.tree.leaves(xs)[0].shape[0])

    elbo = ImplicitELBO(vectorize_particles=stop)
    for dim, expected in ((1, 128), (40, 320), (1000, 512)):
        params = {"loc": jnp.zeros(dim), "sd": jnp.ones(dim)}
        with pytest.raises(SeenError) as seen:
            elbo.loss(KEY, params, standard_model(dim), affine_guide(dim))
        assert seen.value.args == (expected,)


# --------------------------------------------------------------------------- NumPyro's contract


@pytest.mark.parametrize("progress_bar", [True, False])
def test_svi_run(progress_bar, capsys):
    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(standard_model(), affine_guide(), optax.adam(5e-2), elbo)
    result = svi.run(KEY, 60, progress_bar=progress_bar)
    assert result.losses.shape == (60,)
    # From KL(N(.5, .49) ‖ N(0, 1)) = 0.227 to the minimum, 0 up to the noise of the estimate.
    assert np.abs(result.params["loc"]) < 0.25
    assert np.all(np.isfinite(result.losses))
    assert ("100%" in capsys.readouterr().err) == progress_bar


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-2),
        optax.chain(optax.clip(1.0), optax.sgd(1e-2)),
        numpyro.optim.Adam(1e-2),
        numpyro.optim.ClippedAdam(1e-2),
    ],
)
def test_optimizers_and_updates(optimizer):
    svi = SVI(standard_model(), affine_guide(), optimizer, ImplicitELBO(FEW))
    state = svi.init(KEY)
    new_state, loss = svi.update(state)
    assert_close(svi.evaluate(state), loss)
    stable_state, stable_loss = svi.stable_update(state)
    assert_close(stable_loss, loss)
    before, after = svi.get_params(state), svi.get_params(new_state)
    assert_close(svi.get_params(stable_state), after)
    assert after["loc"] != before["loc"]
    assert after["sd"] != before["sd"]


def test_init_params_are_taken():
    svi = SVI(standard_model(), affine_guide(), optax.sgd(0.0), ImplicitELBO(FEW))
    init_params = {"loc": jnp.array([3.0]), "sd": jnp.array([0.2])}
    state, _ = svi.update(svi.init(KEY, init_params=init_params))
    # Up to the map of a positive parameter to the real line and back.
    assert_close(svi.get_params(state), init_params)


def test_old_style_keys_are_accepted():
    params = loss_and_gradient(
        standard_model(), affine_guide(), AFFINE, ImplicitELBO(FEW), key=random.PRNGKey(0)
    )
    assert is_finite(params)


def test_a_parameter_that_model_and_guide_share_gets_both_gradients():
    def model(data):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        shared = numpyro.param("shared", jnp.ones(1))
        numpyro.sample("data", dist.Normal(shared, 1.0).to_event(1), obs=data)
        numpyro.factor("tilt", z.sum())

    def guide(data):
        shared = numpyro.param("shared", jnp.ones(1))
        numpyro.sample("z", Implicit(shared + draw_noise(1), event_dim=1))

    elbo = ImplicitELBO(FEW, estimator=GaussianScore(mean=jnp.ones(1), sd=jnp.ones(1)))
    _, gradient = quick_loss_and_gradient(
        model, guide, {"shared": jnp.ones(1)}, elbo, jnp.full(1, 3.0)
    )
    # From the guide E[(ŝ_q - s_p)] = E[(1 - z) - (1 - z)] = 0, from the model 1 - 3.
    assert_close(gradient["shared"], jnp.array([-2.0]))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(3)(x)))


def guide_with_flax():
    network = flax_module("network", Network(), input_shape=(2,))
    numpyro.sample("z", Implicit(network(draw_noise(2)), event_dim=1))


def guide_with_stax():
    network = numpyro.module("network", stax.serial(stax.Dense(3), stax.Tanh, stax.Dense(1)), (2,))
    numpyro.sample("z", Implicit(network(draw_noise(2)), event_dim=1))


def test_large_parameters_cost_the_reported_loss_no_digits():
    def model(weight):
        numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        w = numpyro.param("w", jnp.asarray(weight))
        # Nothing but a gradient of one.
        numpyro.factor("f", w - lax.stop_gradient(w))

    losses = []
    for weight in (0.0, 1e8):
        loss, gradient = loss_and_gradient(
            lambda weight=weight: model(weight),
            affine_guide(),
            {**AFFINE, "w": jnp.asarray(weight)},
            ImplicitELBO(FEW),
        )
        assert float(gradient["w"]) == pytest.approx(-1.0)
        losses.append(float(loss))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("guide", [guide_with_flax, guide_with_stax])
def test_network_parameters_in_the_guide_are_learned(guide):
    svi = SVI(standard_model(), guide, optax.sgd(0.1), ImplicitELBO(FEW))
    state = svi.init(KEY)
    before, after = svi.get_params(state), svi.get_params(svi.update(state)[0])
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert len(jax.tree.leaves(changed)) == 4
    assert all(jax.tree.leaves(changed))


def test_network_parameters_in_the_model_are_learned():
    inputs = random.normal(KEY, (5, 2))

    def model(targets):
        network = flax_module("network", Network(), input_shape=(2,))
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        mean = network(inputs)[:, 0] + z
        numpyro.sample("targets", dist.Normal(mean, 1.0).to_event(1), obs=targets)

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(model, affine_guide(), optax.sgd(0.1), elbo)
    state = svi.init(KEY, jnp.arange(5.0))
    before = svi.get_params(state)["network$params"]
    after, _ = quick_jit(svi.update)(state, jnp.arange(5.0))
    after = svi.get_params(after)["network$params"]
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert all(jax.tree.leaves(changed))


# ----------------------------------------------------------------------------- mutable state


def counting_guide(data):
    state = mutable("guide_state", {"steps": jnp.array(0), "average": jnp.zeros(())})
    state["steps"] = state["steps"] + 1
    state["average"] = 0.5 * state["average"] + 0.5 * jnp.mean(data)
    affine_guide()()


def counting_model(data):
    state = mutable("model_state", {"average": jnp.zeros(()), "latent": jnp.zeros(())})
    z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
    state["average"] = 0.5 * state["average"] + 0.5 * jnp.mean(data)
    state["latent"] = z[0]
    numpyro.sample("data", dist.Normal(z, 1.0), obs=data)


@pytest.mark.parametrize("vectorize", [True, False])
def test_mutable_state_of_guide_and_model_is_updated(vectorize):
    elbo = ImplicitELBO(256, estimator=GaussianScore(), vectorize_particles=vectorize)
    svi = SVI(counting_model, counting_guide, optax.sgd(0.0), elbo)
    data = jnp.array([1.0, 3.0])
    state = svi.init(KEY, data)
    update = quick_jit(svi.update)
    for _ in range(3):
        state, loss = update(state, data)
    assert np.isfinite(loss)
    guide_state, model_state = (state.mutable_state[k] for k in ("guide_state", "model_state"))
    # Setting up runs guide and model once, before the three steps.
    assert guide_state["steps"] == 4
    assert_close(guide_state["average"], 2 * (1 - 0.5**4))
    assert_close(model_state["average"], 2 * (1 - 0.5**4))
    # An average over 256 particles of N(.5, .49): five standard errors.
    assert abs(model_state["latent"] - 0.5) < 5 * 0.7 / np.sqrt(256)


def test_nested_mutable_state():
    def guide():
        state = mutable("state", {"inner": {"steps": jnp.zeros(())}})
        state["inner"]["steps"] = state["inner"]["steps"] + 1.0
        affine_guide()()

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(standard_model(), guide, optax.sgd(0.0), elbo)
    state = svi.init(KEY)
    update = quick_jit(svi.update)
    for _ in range(2):
        state, _ = update(state)
    assert state.mutable_state["state"]["inner"]["steps"] == 3


def test_batch_normalization_in_the_model():
    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)

    inputs = jnp.array([[1.0], [3.0]])

    def model():
        network = flax_module("network", Normalized(), input_shape=(2, 1), mutable=["batch_stats"])
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        numpyro.sample("data", dist.Normal(network(inputs) + z, 1.0).to_event(2), obs=inputs)

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(model, affine_guide(), optax.sgd(0.0), elbo)
    state, _ = quick_jit(svi.update)(svi.init(KEY))
    (mean,) = [leaf for path, leaf in jax.tree.leaves_with_path(state.mutable_state)
               if "mean" in str(path)]  # fmt: skip
    # The inputs' mean is 2, and the initial running mean 0; two updates at weight 0.1.
    assert_close(mean, jnp.array([2 * (1 - 0.9**2)]))


# ---------------------------------------------------------------------- dtypes and evaluation


def test_float64(x64):
    elbo = ImplicitELBO(FEW, estimator=ScoreEstimator(regularizer=Tikhonov(1e-2)), debias=None)
    svi = SVI(standard_model(), affine_guide(), optax.adam(1e-2), elbo)
    state, loss = quick_jit(svi.update)(svi.init(KEY))
    assert loss.dtype == jnp.float64
    for value in svi.get_params(state).values():
        assert value.dtype == jnp.float64


def test_ways_to_go_through_the_particles_agree():
    calls = []

    def in_turn(fn, xs):
        calls.append(jax.tree.leaves(xs)[0].shape[0])
        return lax.map(fn, xs, batch_size=4)

    results = []
    for vectorize in (True, False, in_turn):
        elbo = ImplicitELBO(FEW, estimator=GaussianScore(), vectorize_particles=vectorize)
        results.append(quick_loss_and_gradient(standard_model(), affine_guide(), AFFINE, elbo))
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert_close(results[2], results[0], rtol=1e-4, atol=1e-4)
    assert set(calls) == {FEW}


def looping_model(data):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
    double = lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, 2.0 * c[1]), (0, z))[1]
    numpyro.sample("data", dist.Normal(double + numpyro.param("shift", 0.1), 1.0), obs=data)


def test_forward_mode_for_models_with_loops():
    def unrolled_model(data):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        numpyro.sample("data", dist.Normal(2.0 * z + numpyro.param("shift", 0.1), 1.0), obs=data)

    data = jnp.ones(1)
    states = []
    for model, forward in ((looping_model, True), (unrolled_model, False)):
        elbo = ImplicitELBO(FEW, estimator=GaussianScore(), forward_mode_differentiation=forward)
        svi = SVI(model, affine_guide(), optax.sgd(0.1), elbo)
        update = functools.partial(svi.update, forward_mode_differentiation=forward)
        state, loss = quick_jit(update)(svi.init(KEY, data), data)
        states.append((svi.get_params(state), loss))
    assert_close(states[0], states[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("base", "debias", "estimator"),
    [
        (None, "jackknife", ScoreEstimator(regularizer=NuMethod(50))),
        ("gaussian", None, ScoreEstimator()),
        ("model", "jackknife", ScoreEstimator(Diagonal(Gaussian()), Tikhonov(1e-2))),
        ("model", None, ScoreEstimator(CurlFree(), Tikhonov(1e-2), Dense(), bandwidth=1.5)),
        ("model", None, ScoreEstimator(standardize="none", normalize=False)),
    ],
)
def test_every_base_and_estimator(base, debias, estimator):
    elbo = ImplicitELBO(FEW, base=base, debias=debias, estimator=estimator)
    loss, gradient = quick_loss_and_gradient(standard_model(), affine_guide(), AFFINE, elbo)
    # KL(N(.5, .49) ‖ N(0, 1)) has gradient .5 in loc and .7 - 1/.7 in sd; 16 draws scatter loc's
    # by .25, and every estimate pushes sd the right way.
    assert is_finite((loss, gradient))
    assert abs(gradient["loc"] - 0.5) < 5 * 0.25
    assert gradient["sd"] < 0.5


@pytest.mark.parametrize("num_particles", [2, 9])
def test_few_and_odd_numbers_of_particles(num_particles):
    elbo = ImplicitELBO(num_particles)
    assert is_finite(quick_loss_and_gradient(standard_model(), affine_guide(), AFFINE, elbo))


# ------------------------------------------------------------------------------- on average


def test_subsampled_observations_give_the_full_gradient_on_average():
    data, num_keys = jnp.linspace(-1.0, 2.0, 12), 3000

    def model():
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        with numpyro.plate("rows", 12, subsample_size=4):
            batch = numpyro.subsample(data, event_dim=0)
            numpyro.sample("y", dist.Normal(z + numpyro.param("shift", 0.3), 1.5), obs=batch)

    estimator = GaussianScore(mean=AFFINE["loc"], sd=AFFINE["sd"])
    elbo = ImplicitELBO(FEW, estimator=estimator, base=None)
    params = {**AFFINE, "shift": jnp.array(0.3)}

    @quick_jit
    @jax.vmap
    def gradients(key):
        return jax.grad(lambda p: elbo.loss(key, p, model, affine_guide()))(params)

    # KL(N(loc, sd²) ‖ p) with all twelve rows: precision 12/1.5² from the data, and 1 more for z.
    misfit = (12 * (0.5 + 0.3) - jnp.sum(data)) / 1.5**2
    exact = {
        "loc": misfit + 0.5,
        "shift": misfit,
        "sd": 0.7 * (1 + 12 / 1.5**2) - 1 / 0.7,
    }
    for name, values in gradients(random.split(KEY, num_keys)).items():
        standard_error = np.std(values) / np.sqrt(num_keys)
        assert standard_error < 0.05
        assert abs(np.mean(values) - exact[name]) < 5 * standard_error


@pytest.mark.parametrize("dim", [2, 10])
def test_reported_loss_at_the_posterior_is_minus_log_evidence(dim):
    """log p(y, z) - log q(z) is the log evidence at every z, so that no optimisation enters."""
    root = np.linalg.cholesky(0.5 * np.eye(dim) + 0.5)

    def model():
        white = numpyro.sample("z", dist.Normal(jnp.zeros(dim), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(root @ white, 0.5).to_event(1), obs=jnp.ones(dim))

    precision = np.eye(dim) + root.T @ root / 0.25
    covariance = np.linalg.inv(precision)
    mean = covariance @ root.T @ np.ones(dim) / 0.25

    factor = np.linalg.cholesky(covariance)

    def guide():
        numpyro.sample("z", Implicit(mean + factor @ draw_noise(dim), event_dim=1))

    marginal = stats.multivariate_normal(np.zeros(dim), root @ root.T + 0.25 * np.eye(dim))
    evidence = marginal.logpdf(np.ones(dim))
    elbo = ImplicitELBO(64, estimator=GaussianScore())
    run = quick_jit(lambda keys: lax.map(lambda key: elbo.loss(key, {}, model, guide), keys))
    losses = run(random.split(KEY, 40))
    # The entropy estimate scatters by sqrt((1.6 + d/2)/n), as it says, and the mean log joint
    # density by sqrt(d/2n); the bias left by the 32 sets behind the correction is in there.
    entropy_sd, joint_sd = np.sqrt((1.6 + dim / 2) / 64), np.sqrt(dim / 128)
    standard_error = (entropy_sd + joint_sd) / np.sqrt(32)
    assert abs(np.mean(losses) + evidence) < 4 * standard_error
    assert np.std(losses) < 1.5 * (entropy_sd + joint_sd)


# ------------------------------------------------------------------------------------ misuse


def first_loss(model, guide):
    return ImplicitELBO(FEW, estimator=GaussianScore()).loss(KEY, {}, model, guide)


def test_discrete_latents_are_refused():
    def model():
        numpyro.sample("kind", dist.Bernoulli(0.5))

    with pytest.raises(ValueError, match=r"(?s)expected continuous.*got discrete \['kind'\].*Sum"):
        first_loss(model, model)


def test_latents_the_guide_lacks_are_named():
    def guide():
        draw_noise(1)

    with pytest.raises(ValueError, match=r"(?s)expected a sample site.*got none for \['z'\]"):
        first_loss(standard_model(), guide)


def test_deterministic_sites_are_no_draws():
    def guide():
        numpyro.deterministic("z", draw_noise(1))

    with pytest.raises(ValueError, match=r"(?s)expected.*got.*'z'.*use Implicit"):
        first_loss(standard_model(), guide)


def test_unmarked_noise_is_named():
    def guide():
        noise = numpyro.sample("noise", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        numpyro.sample("z", Implicit(noise, event_dim=1))

    with pytest.raises(ValueError, match=r"(?s)expected only.*got \['noise'\].*Mark.*is_auxiliary"):
        first_loss(standard_model(), guide)


def test_wrong_shapes_are_refused():
    def guide():
        numpyro.sample("z", Implicit(draw_noise(2), event_dim=1))

    with pytest.raises(ValueError, match=r"expected shape \(1,\) at site 'z'.*got \(2,\)"):
        first_loss(standard_model(), guide)


def test_unconstrained_values_of_a_wrong_shape_are_refused():
    """They would be taken for several copies of the latent, and give a wrong posterior."""

    def model():
        numpyro.sample("z", dist.Gamma(2.0, 1.0))

    def guide():
        noise = draw_noise(3)
        numpyro.sample("z", Implicit(jnp.exp(noise[0]), unconstrained=noise))

    with pytest.raises(ValueError, match=r"(?s)expected.*shape \(\).*got \(3,\)"):
        first_loss(model, guide)


def rows_model(size=10, subsample_size=3):
    with numpyro.plate("rows", size, subsample_size=subsample_size):
        numpyro.sample("z", dist.Normal(0.0, 1.0))


def test_subsampled_rows_with_noise_outside_the_plate_are_refused():
    """The entropy of rows that are not drawn is known only if rows are independent."""

    def guide():
        noise = draw_noise(3)
        with numpyro.plate("rows", 10, subsample_size=3):
            numpyro.sample("z", Implicit(noise))

    with pytest.raises(ValueError, match=r"(?s)expected.*own.*got 'z' in plate 'rows'.*3 of 10"):
        first_loss(rows_model, guide)


def test_plates_of_the_guide_are_those_of_the_model():
    def without_plate():
        numpyro.sample("z", dist.Normal(jnp.zeros(3), 1.0))

    def other_size():
        rows_model(size=20)

    def only_in_the_guide():
        numpyro.sample("z", dist.Normal(jnp.zeros(3), 1.0))

    with pytest.raises(ValueError, match=r"(?s)expected 'z' in plate 'rows'.*3 of 10.*outside"):
        first_loss(rows_model, without_plate)
    with pytest.raises(ValueError, match=r"(?s)expected 'z' in plate 'rows'.*3 of 10.*3 of 20"):
        first_loss(rows_model, other_size)
    with pytest.raises(ValueError, match=r"(?s)expected 'z' outside.*plate 'rows'.*3 of 10"):
        first_loss(only_in_the_guide, rows_model)


def test_global_sites_computed_from_drawn_rows_are_refused():
    def model():
        rows_model()
        numpyro.sample("g", dist.Normal(0.0, 1.0))

    def guide():
        with numpyro.plate("rows", 10, subsample_size=3):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("g", Implicit(jnp.sum(z) + draw_noise(1)[0]))

    with pytest.raises(ValueError, match=r"(?s)expected.*not to depend.*got \['g'\].*'z'.*'rows'"):
        first_loss(model, guide)


def test_explicit_sites_without_differentiable_draws_are_refused():
    def model():
        numpyro.sample("z", dist.VonMises(0.0, 1.0))

    with pytest.raises(ValueError, match=r"(?s)expected draws that are diff.*'z' from VonMises"):
        first_loss(model, model)


def test_models_without_latents_are_refused():
    def model():
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=1.0)

    with pytest.raises(ValueError, match=r"(?s)expected at least one latent.*got none"):
        first_loss(model, lambda: None)


def constant_guide():
    numpyro.sample("z", dist.Delta(numpyro.param("z_value", jnp.zeros(1)), event_dim=1))


def constant_implicit_guide():
    numpyro.sample("z", Implicit(numpyro.param("z_value", jnp.zeros(1)), event_dim=1))


@pytest.mark.parametrize(
    "guide", [constant_guide, constant_implicit_guide, AutoDelta(standard_model())]
)
def test_guides_without_noise_are_refused(guide):
    """A point has no entropy: the fit would be the posterior's mode, and nothing would tell."""
    svi = SVI(standard_model(), guide, optax.adam(1e-2), ImplicitELBO(FEW))
    state = svi.init(KEY)
    with pytest.raises(ValueError, match=r"(?s)expected.*got.*'z'"):
        svi.update(state)


def test_a_point_beside_an_implicit_guide_is_refused():
    """Draws on a line in the plane have no density there: the other site's fit would be wrong."""

    def model():
        numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("b", dist.Normal(0.0, 1.0))

    guide = AutoGuideList(model)
    guide.append(AutoImplicit(handlers.block(model, hide=["b"])))
    guide.append(AutoDelta(handlers.block(model, hide=["a"]), prefix="point"))
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(FEW, estimator=GaussianScore()))
    state = svi.init(KEY)
    with pytest.raises(ValueError, match=r"(?s)expected.*got.*'b'"):
        svi.update(state)


def test_scaled_guide_sites_are_refused():
    """A scale on a guide's site weights its entropy, which this objective does not do."""

    def guide():
        with handlers.scale(scale=0.1):
            affine_guide()()

    with pytest.raises(ValueError, match=r"(?s)expected.*got.*'z'.*scale"):
        first_loss(standard_model(), guide)


@pytest.mark.parametrize(
    "elbo",
    [Trace_ELBO(), TraceMeanField_ELBO(), TraceGraph_ELBO(), RenyiELBO(num_particles=2)],
    ids=lambda elbo: type(elbo).__name__,
)
def test_other_objectives_refuse_implicit_guides(elbo):
    svi = SVI(standard_model(), affine_guide(), optax.adam(1e-2), elbo)
    state = svi.init(KEY)
    with pytest.raises(NotImplementedError, match=r"(?s)expected.*got.*ImplicitELBO"):
        svi.update(state)


# ------------------------------------------------------------------------ numerical trouble


def model_that_breaks(value, where=0.5):
    def model():
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        numpyro.factor("trouble", jnp.sum(jnp.where(z > where, value, 0.0)))

    return model


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0.5, -np.inf], ids=["some", "all"])
def test_bad_densities_leave_parameters_finite(value, where):
    model = model_that_breaks(value, where)
    svi = SVI(model, affine_guide(), optax.adam(1e-2), ImplicitELBO(FEW))
    state = svi.init(KEY)
    new_state, loss = svi.update(state)
    assert np.isnan(loss)
    assert is_finite(svi.get_params(new_state))
    stable_state, loss = svi.stable_update(state)
    assert np.isnan(loss)
    assert_close(svi.get_params(stable_state), svi.get_params(state), rtol=0, atol=0)


def test_infinite_gradients_count_as_bad():
    def model():
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        # Finite everywhere, with an infinite derivative below 0.5.
        numpyro.factor("root", jnp.sum(jnp.sqrt(jnp.maximum(z - 0.5, 0.0))))

    loss, gradient = loss_and_gradient(model, affine_guide(), AFFINE, ImplicitELBO(FEW))
    assert np.isnan(loss)
    assert is_finite(gradient)


def test_bad_particles_contribute_nothing_to_model_parameters():
    def model(trouble):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        shift = numpyro.param("shift", jnp.array(0.3))
        # NaN above z = .5 only, and so is the derivative: a NaN in the branch of a where that is
        # not taken would spoil the good particles' derivatives as well.
        root = jnp.sqrt(jnp.where(trouble, 0.5 - z, 1.0))
        numpyro.factor("f", jnp.sum(shift * (1.0 + 0.0 * root)))

    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    params = {**AFFINE, "shift": jnp.array(0.3)}
    _, gradient = loss_and_gradient(model, affine_guide(), params, elbo, True)
    # d/dshift of -log p is -1 at every good particle.
    assert_close(gradient["shift"], -1.0)


def test_infinite_draws_leave_parameters_finite():
    def guide():
        sd = numpyro.param("sd", jnp.full(1, 0.7))
        numpyro.sample("z", Implicit(jnp.expm1(300.0 * sd * draw_noise(1)), event_dim=1))

    svi = SVI(standard_model(), guide, optax.adam(1e-2), ImplicitELBO(FEW))
    state = svi.init(KEY)
    new_state, loss = svi.update(state)
    assert np.isnan(loss)
    assert is_finite(svi.get_params(new_state))
    stable_state, _ = svi.stable_update(state)
    assert_close(svi.get_params(stable_state), svi.get_params(state), rtol=0, atol=0)


def test_collapsed_guides_and_duplicates_are_finite():
    collapsed = {"loc": jnp.full(1, 0.5), "sd": jnp.zeros(1)}
    loss, gradient = loss_and_gradient(
        standard_model(), affine_guide(), collapsed, ImplicitELBO(FEW)
    )
    assert is_finite((loss, gradient))
    # All particles at 0.5 move together, towards the mode.
    assert_close(gradient["loc"], jnp.array([0.5]), rtol=1e-2)

    def two_points():
        loc, sd = numpyro.param("loc", jnp.zeros(1)), numpyro.param("sd", jnp.ones(1))
        numpyro.sample("z", Implicit(loc + sd * jnp.sign(draw_noise(1)), event_dim=1))

    assert is_finite(loss_and_gradient(standard_model(), two_points, AFFINE, ImplicitELBO(FEW)))


@pytest.mark.parametrize("scale", [1e6, 1e-6])
def test_units_of_a_latent_do_not_matter(scale):
    """The loss of a model in other units is the same, and the gradient its inverse."""

    def model(scale):
        numpyro.sample("z", dist.Normal(jnp.zeros(1), scale).to_event(1))

    results = []
    for unit in (1.0, scale):
        params = {name: unit * value for name, value in AFFINE.items()}
        loss, gradient = loss_and_gradient(model, affine_guide(), params, ImplicitELBO(FEW), unit)
        results.append((loss, jax.tree.map(lambda g, unit=unit: g * unit, gradient)))
    assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------- under JAX


def test_no_tracer_leaks():
    with jax.checking_leaks():
        elbo = ImplicitELBO(FEW, estimator=GaussianScore())
        svi = SVI(counting_model, counting_guide, optax.adam(1e-2), elbo)
        data = jnp.array([1.0, 3.0])
        _, loss = jax.jit(svi.update)(svi.init(KEY, data), data)
    assert np.isfinite(loss)


def test_the_first_call_may_come_from_a_compiled_program():
    """Nothing of a program that is being traced may stay behind in an automatic guide."""
    guide = AutoImplicit(standard_model(2))
    elbo = ImplicitELBO(FEW, estimator=GaussianScore())
    svi = SVI(standard_model(2), guide, optax.adam(1e-2), elbo)
    init, update = quick_jit(svi.init), quick_jit(svi.update)
    losses = [update(init(key))[1] for key in random.split(KEY, 2)]
    assert np.all(np.isfinite(losses))
