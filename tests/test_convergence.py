"""``fit``: the discrepancy against its definition, the stopping rule, and all that can fail."""

import json
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from doubles import GaussianScore
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

from numpyro_kscore import Implicit, ImplicitELBO, convergence, fit, stein_discrepancy
from numpyro_kscore.checkpoint import load_checkpoint, save_checkpoint
from numpyro_kscore.chunks import parameter_slots
from numpyro_kscore.discrepancy import masked_stein_discrepancy
from numpyro_kscore.stopping import Progress, Row, Rule, advance, step_sizes, verdict, window_gain

KEY = random.key(0)
DATA = jnp.array([1.0, -1.0])
# Of the posterior of `model`, which is Gaussian with independent coordinates.
MEAN, SD = np.array([0.8, -0.8]), 0.2**0.5
QUICK = {"max_steps": 600, "chunk_size": 20, "progress_bar": False}


def model(data):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(len(data)), 1.0).to_event(1))
    numpyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=data)


def guide(data):
    loc = numpyro.param("loc", jnp.zeros(2))
    sd = numpyro.param("sd", jnp.full(2, 0.1), constraint=constraints.softplus_positive)
    numpyro.sample("z", dist.Normal(loc, sd).to_event(1))


def make_svi(step_size=5e-2, guide=guide, model=model, num_particles=8):
    return SVI(model, guide, optax.adam(step_size), Trace_ELBO(num_particles=num_particles))


def quiet_fit(*args, **kwargs):
    """A fit that is cut short on purpose: what it warns of is not what the test is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(*args, **kwargs)


@pytest.fixture(scope="module")
def whole():
    """One uninterrupted fit, for several tests to look at."""
    return fit(make_svi(), KEY, DATA, **QUICK)


def same(a, b):
    """Whether two results are equal, to the last bit."""

    def bits(x):
        typed = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(random.key_data(x) if typed else x)

    left, right = (jax.tree.map(bits, (r.params, r.state, r.losses)) for r in (a, b))
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert repr(a.info) == repr(b.info)


def test_results_can_be_pickled(whole):
    restored = pickle.loads(pickle.dumps(whole))
    same(restored, whole)
    assert restored.info.reason == whole.info.reason
    assert type(restored) is type(whole)


# --- The discrepancy ------------------------------------------------------------------------------


def imq(x, y, h):
    return (1 + np.sum((x - y) ** 2) / h**2) ** -0.5


def defined_discrepancy(x, s):
    """The U-statistic of the Stein operator's kernel, derivatives by central differences."""
    n, d = x.shape
    covariance = np.cov(x.T, bias=True).reshape(d, d)
    root = np.linalg.cholesky(covariance)
    z, s = np.linalg.solve(root, (x - x.mean(0)).T).T, s @ root
    distances = np.linalg.norm(z[:, None] - z[None], axis=2)
    h = np.median(distances[np.triu_indices(n, 1)])
    step, eye = 1e-4, np.eye(d)
    kernel, phi = np.zeros((n, n)), np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            a, b = z[i], z[j]
            phi[i, j] = imq(a, b, h)
            kernel[i, j] = phi[i, j] * s[i] @ s[j]
            for k in range(d):
                e = step * eye[k]
                kernel[i, j] += s[i, k] * (imq(a, b + e, h) - imq(a, b - e, h)) / (2 * step)
                kernel[i, j] += s[j, k] * (imq(a + e, b, h) - imq(a - e, b, h)) / (2 * step)
                corners = imq(a + e, b + e, h) - imq(a + e, b - e, h)
                corners += imq(a - e, b - e, h) - imq(a - e, b + e, h)
                kernel[i, j] += corners / (4 * step**2)
    return kernel.sum() / (d * phi.sum()), kernel / (d * phi.sum() / (n * (n - 1)))


@pytest.mark.parametrize("dim", [1, 3])
def test_discrepancy_is_its_definition(x64, dim):
    rng = np.random.default_rng(dim)
    x = rng.normal(size=(12, dim)) @ rng.normal(size=(dim, dim)) + 5.0
    s = rng.normal(size=(12, dim))
    expected, kernel = defined_discrepancy(x, s)
    found = stein_discrepancy(x, s)
    np.testing.assert_allclose(found.value, expected, rtol=1e-6)
    n, rows = 12, kernel.sum(1) / 11
    pairs = kernel[~np.eye(n, dtype=bool)]
    variance = 4 * rows.var(ddof=1) / n - 2 * pairs.var() / n**2
    variance = max(variance, 2 * pairs.var() / n**2)
    np.testing.assert_allclose(found.standard_error, variance**0.5, rtol=1e-6)


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_discrepancy_is_the_squared_shift_and_its_error_is_right(shift):
    """Draws of N(0, AAᵀ) against scores of a Gaussian shifted by so many sd in every coordinate."""
    mixing = jnp.array([[1.0, 0.0], [30.0, 2.0]])

    def estimate(key):
        z = random.normal(key, (200, 2))
        return stein_discrepancy(z @ mixing.T, jnp.linalg.solve(mixing.T, (shift - z).T).T)

    found = jax.lax.map(estimate, random.split(KEY, 200))
    values = np.asarray(found.value)
    # Unbiased: the mean lies within three of its standard errors.
    assert abs(values.mean() - shift**2) < 3 * values.std() / 200**0.5 + 0.01 * shift**2
    # Cautious near zero, where the statistic is degenerate; elsewhere right.
    ratio = np.sqrt(np.mean(np.square(found.standard_error))) / values.std()
    assert 0.9 < ratio < (1.4 if shift == 0 else 1.15)


def test_draws_that_are_not_valid_count_in_no_pair():
    x = random.normal(KEY, (200, 2))
    valid = jnp.arange(200) >= 40
    x = jnp.where(valid[:, None], x, x[-1])
    found = masked_stein_discrepancy(x, -x, valid)
    assert abs(found.value) < 4 * found.standard_error
    # Pairs of a draw and its copy would swamp the rest.
    counted = masked_stein_discrepancy(x, -x, jnp.ones(200, bool))
    assert counted.value > 4 * found.standard_error
    assert jnp.isnan(masked_stein_discrepancy(x, -x, jnp.arange(200) < 2).value)


def test_discrepancy_refuses_what_it_cannot_use():
    x = jnp.ones((4, 2))
    with pytest.raises(ValueError, match=r"samples: expected at least 3 rows; got shape \(2, 2\)"):
        stein_discrepancy(x[:2], x[:2])
    with pytest.raises(ValueError, match=r"scores: expected shape \(4, 2\).*got \(3, 2\)"):
        stein_discrepancy(x, x[:3])
    with pytest.raises(TypeError, match="scores: expected an array of float32 or float64"):
        stein_discrepancy(x, x.astype(int))


# --- The rule, on traces made by hand ---------------------------------------------------------

RULE = Rule(chunk_size=10, num_chunks=100, tol=0.1, patience=3, dim=2)


def follow(discrepancies, losses=None, rule=RULE, error=1e-3, rng=None):
    """Take in a trace with noise until the fit is done or the trace is."""
    rng = rng or np.random.default_rng(0)
    losses = np.zeros(len(discrepancies)) if losses is None else losses
    progress = Progress()
    for smoothed, loss in zip(discrepancies, losses, strict=True):
        if progress.phase == "done":
            break
        smoothed, loss = smoothed + error * rng.normal(), loss + error * rng.normal()
        progress = advance(progress, Row(smoothed, error, loss, error, 0, 1, 0, 0), rule)
    return progress


@pytest.mark.parametrize("flat_from", [5, 10, 20])
@pytest.mark.parametrize("signal", ["discrepancy", "loss"])
def test_the_search_ends_soon_after_the_trace_is_flat(flat_from, signal):
    falling = np.maximum(1 - np.arange(40) / flat_from, 0) + 0.5
    level = np.full(40, 0.5)
    both = (falling, None) if signal == "discrepancy" else (level, falling)
    progress = follow(*both)
    assert progress.cause == "plateau"
    assert flat_from <= progress.settle_from <= 1.6 * flat_from + 8
    assert progress.settle_length == progress.settle_from


def test_the_search_goes_on_while_either_signal_falls():
    progress = follow(np.full(100, 0.5), 100 - np.arange(100.0))
    assert (progress.cause, progress.settle_from, progress.settle_length) == ("budget", 40, 60)
    assert progress.phase == "done"
    converged, reason, advice = verdict(progress, RULE, interrupted=False)
    assert not converged
    assert "still improving" in reason
    assert "max_steps" in advice


def test_changes_too_small_to_matter_do_not_prolong_the_search():
    loss = np.linspace(0, -0.5 * RULE.dim * RULE.tol**2, 40)  # over the whole trace, not a window
    assert follow(np.full(40, 0.5), loss, error=1e-6).settle_from == 8


def test_below_tol_settles_once_the_loss_is_flat():
    low = np.full(100, RULE.tol**2 / 4)
    progress = follow(low)
    assert (progress.cause, progress.settle_from, progress.settle_length) == ("tol", 6, 6)
    assert (progress.phase, len(progress.rows)) == ("done", 12)
    assert follow(low, 100 - np.arange(100.0)).cause == "budget"
    # An error as large as tol² proves nothing.
    assert follow(low, error=RULE.tol**2).cause == "plateau"


def test_noise_alone_stops_within_a_few_looks():
    starts = [
        follow(np.full(100, 0.5), error=0.3, rng=np.random.default_rng(seed)).settle_from
        for seed in range(50)
    ]
    assert np.median(starts) <= 12


def test_window_gain_against_plain_formulas():
    rng = np.random.default_rng(1)
    values, errors = rng.normal(size=9), np.full(9, 0.5)
    gain = window_gain(values, errors, 4)
    before, after = values[1:5], values[5:]
    np.testing.assert_allclose(gain.value, before.mean() - after.mean())
    # Scattered more than their errors say, they are as good as their scatter.
    wide = 10 * values
    gain = window_gain(wide, errors, 4)
    expected = np.sqrt((wide[1:5].var(ddof=1) + wide[5:].var(ddof=1)) / 4)
    np.testing.assert_allclose(gain.standard_error, expected)
    # One that is known to nothing changes nothing.
    broken, unsure = values.copy(), errors.copy()
    broken[6], unsure[6] = 1e6, 1e9
    kept = np.delete(values[5:], 1).mean()
    np.testing.assert_allclose(
        window_gain(broken, unsure, 4).value, before.mean() - kept, rtol=1e-6
    )


def test_step_sizes_fall_to_zero_along_a_cosine():
    progress = Progress(rows=(None,) * 4, phase="settle", settle_from=4, settle_length=2)
    first = step_sizes(progress, RULE)
    second = step_sizes(progress._replace(rows=(None,) * 5), RULE)
    expected = 0.5 * (1 + np.cos(np.pi * np.arange(20) / 20))
    np.testing.assert_allclose(np.concatenate([first, second]), expected)
    np.testing.assert_array_equal(step_sizes(Progress(recoveries=2), RULE), 0.25)


def test_a_run_away_is_called_and_the_state_before_it_kept():
    def row(spread, log_density, loss):
        return Row(0.5, 0.01, loss, 0.01, log_density, 0.1, spread, 0)

    good = [row(0.0, -1.0, 5.0 - k) for k in range(4)]
    progress = Progress()
    for look in [*good, *(row(0.5 * k, -5.0 * k, 3.0 + k) for k in range(1, 9))]:
        progress = advance(progress, look, RULE)
        if progress.phase == "done":
            break
    assert (progress.cause, progress.best, len(progress.rows)) == ("runaway", 3, 7)
    assert "ran away" in verdict(progress, RULE, interrupted=False)[1]
    # A guide that starts narrow grows too, and the density at it falls, but not in vain.
    progress = Progress()
    for k in range(8):
        progress = advance(progress, row(0.5 * k, -5.0 * k, -k), RULE)
    assert progress.phase == "search"


@pytest.mark.parametrize(
    ("smoothed", "error", "words"),
    [(0.25, 0.01, "0.5 sd from the model"), (0.25, 0.08, "too noisy to tell"), (0.1, 0.01, None)],
)
def test_a_doubtful_end_is_reported(smoothed, error, words):
    looks = [Row(smoothed, error, 0.0, 0.1, 0, 1, 0, 0)] * 100
    progress = Progress()
    while progress.phase != "done":
        progress = advance(progress, looks[0], RULE)
    converged, reason, advice = verdict(progress, RULE, interrupted=False)
    assert converged
    assert bool(advice) == (words is not None)
    assert words is None or words in reason


# --- Fits -----------------------------------------------------------------------------------------


def test_fit_stops_early_at_the_posterior(whole):
    info = whole.info
    assert info.converged
    assert info.steps < QUICK["max_steps"]
    assert info.steps == len(whole.losses) == info.trace_steps[-1]
    assert info.skipped == info.recoveries == 0
    # 8 particles a step, averaged by the settling: a twentieth of a standard deviation.
    np.testing.assert_allclose(whole.params["loc"], MEAN, atol=0.05 * SD)
    np.testing.assert_allclose(whole.params["sd"], SD, rtol=0.05)
    np.testing.assert_array_less(info.discrepancy[-1], 5 * info.discrepancy_error[-1])
    assert info.discrepancy[0] > 5 * info.discrepancy_error[0]
    info.raise_if_failed()


def test_old_style_keys_are_taken(whole):
    """As most NumPyro programs have them: words, with an axis of their own."""
    result = fit(make_svi(), random.PRNGKey(0), DATA, **QUICK)
    np.testing.assert_array_equal(result.losses, whole.losses)
    assert repr(result.info) == repr(whole.info)


def test_the_state_holds_the_parameters_and_goes_on(whole):
    svi = make_svi()
    result = quiet_fit(svi, KEY, DATA, init_state=whole.state, **{**QUICK, "max_steps": 20})
    np.testing.assert_allclose(result.params["loc"], whole.params["loc"], atol=0.1 * SD)
    held = svi.get_params(whole.state)
    jax.tree.map(np.testing.assert_array_equal, held, whole.params)


def test_the_search_takes_the_steps_of_svi_run(whole):
    """Until the step size falls; compiled into another program, which rounds otherwise."""
    plain = make_svi().run(KEY, 60, DATA, progress_bar=False, stable_update=True)
    np.testing.assert_allclose(whole.losses[:60], plain.losses, rtol=1e-5)


def test_all_chunks_are_one_program(monkeypatch):
    runs = []

    def counted(data):
        runs.append(None)
        return model(data)

    result = quiet_fit(make_svi(model=counted), KEY, DATA, criterion="loss", **QUICK)
    assert len(result.info.trace) > 10
    assert len(runs) == 3  # to initialise, to count latents, and to compile


@pytest.mark.parametrize("criterion", ["stein", "loss"])
def test_what_matters_grows_with_the_latents(monkeypatch, criterion):
    """½ d tol² nats, whatever a fit looks at."""

    class SeenError(Exception):
        pass

    def see(*settings):
        raise SeenError(Rule(*settings).least_loss)

    monkeypatch.setattr("numpyro_kscore.convergence.Rule", see)
    with pytest.raises(SeenError) as caught:
        fit(make_svi(), KEY, DATA, criterion=criterion, tol=0.2)
    assert caught.value.args[0] == pytest.approx(0.5 * 2 * 0.2**2)


def test_double_precision(x64):
    quick = {**QUICK, "max_steps": 100, "criterion": "loss"}
    result = quiet_fit(make_svi(), KEY, DATA.astype(float), **quick)
    assert result.params["loc"].dtype == result.losses.dtype == jnp.float64
    assert np.all(np.isfinite(result.losses))


def test_implicit_elbo():
    """Noise with a mean and sd, and the score of a Gaussian for it, which compiles quickly."""

    def implicit_guide(data):
        loc = numpyro.param("loc", jnp.zeros(1))
        sd = numpyro.param("sd", jnp.full(1, 0.1), constraint=constraints.softplus_positive)
        normal = dist.Normal(jnp.zeros(1), 1.0).to_event(1)
        noise = numpyro.sample("noise", normal, infer={"is_auxiliary": True})
        numpyro.sample("z", Implicit(loc + sd * noise, 1))

    elbo = ImplicitELBO(16, estimator=GaussianScore(), debias=None)
    svi = SVI(model, implicit_guide, optax.adam(5e-2), elbo)
    result = fit(svi, KEY, DATA[:1], **QUICK)
    assert result.info.converged
    np.testing.assert_allclose(result.params["loc"], MEAN[:1], atol=0.1 * SD)
    np.testing.assert_allclose(result.params["sd"], SD, rtol=0.1)


def test_a_fit_that_is_cut_short_says_so():
    with pytest.warns(UserWarning, match="not converged: still improving.*Try a larger max_steps"):
        result = fit(make_svi(1e-3), KEY, DATA, criterion="loss", **QUICK)
    assert not result.info.converged
    with pytest.raises(FloatingPointError, match="expected convergence; got none"):
        result.info.raise_if_failed()


def test_a_point_needs_the_loss_as_its_criterion():
    def point(data):
        numpyro.sample("z", dist.Delta(numpyro.param("loc", jnp.zeros(2)), event_dim=1))

    svi = make_svi(guide=point)
    with pytest.raises(ValueError, match="got a point without any") as caught:
        fit(svi, KEY, DATA, **QUICK)
    assert any("criterion='loss'" in note for note in caught.value.__notes__)
    result = fit(svi, KEY, DATA, criterion="loss", **QUICK)
    assert result.info.converged
    assert np.all(np.isnan(result.info.discrepancy))
    np.testing.assert_allclose(result.params["loc"], MEAN, atol=1e-2)


# --- Numbers that are not finite ------------------------------------------------------------------


def test_bad_steps_are_skipped_and_counted():
    def fragile(data):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=data)
        numpyro.factor("hole", jnp.where(z[0] > 1.9, jnp.nan, 0.0))

    svi = make_svi(model=fragile)
    result = quiet_fit(svi, KEY, DATA, criterion="loss", **QUICK)
    assert result.info.skipped == np.sum(np.isnan(result.losses)) > 0
    assert result.info.recoveries == 0
    assert np.all(np.isfinite(result.params["loc"]))


class Broken:
    """The compiled chunk, which says of some of its calls that they went wrong."""

    def __init__(self, monkeypatch, bad):
        self.sizes, self.keys = [], []
        make = convergence.make_chunk

        def wrapped(*args):
            chunk = make(*args)

            def call(state, sizes):
                self.sizes.append(float(sizes[0]))
                self.keys.append(np.asarray(random.key_data(state.rng_key)))
                found = chunk(state, sizes)
                is_bad = len(self.sizes) - 1 in bad
                # A step that is not undone would be seen in the result.
                spoilt = jax.tree.map(lambda a: a * jnp.nan, found.losses)
                found = found._replace(losses=spoilt) if is_bad else found
                return found._replace(finite=found.finite & (not is_bad))

            return call

        monkeypatch.setattr(convergence, "make_chunk", wrapped)


def test_a_bad_chunk_is_undone(monkeypatch):
    calls = Broken(monkeypatch, bad={2, 3})
    with pytest.warns(UserWarning, match=r"not finite 2 time\(s\)"):
        result = fit(make_svi(), KEY, DATA, **QUICK)
    assert calls.sizes[:6] == [1, 1, 1, 0.5, 0.25, 0.25]
    assert len({key.tobytes() for key in calls.keys[2:5]}) == 3
    assert result.info.recoveries == 2
    assert np.all(np.isfinite(result.losses))
    np.testing.assert_allclose(result.params["loc"], MEAN, atol=0.1 * SD)


def test_giving_up_returns_the_best_state(monkeypatch):
    Broken(monkeypatch, bad=range(3, 100))
    with pytest.warns(UserWarning, match="after 60 steps numbers were not finite"):
        result = fit(make_svi(), KEY, DATA, **QUICK)
    assert (result.info.steps, result.info.converged, result.info.best_step) == (60, False, 60)


def test_a_model_that_is_never_finite_raises():
    def hopeless(data):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.factor("nan", jnp.nan * z.sum())

    with pytest.raises(FloatingPointError, match="expected finite losses.*init_params"):
        fit(make_svi(model=hopeless), KEY, DATA, criterion="loss", **QUICK)


# --- Interruption and checkpoints -----------------------------------------------------------------


def interrupt_after(monkeypatch, count):
    """Ctrl-C right after a checkpoint has been written so many times."""
    calls = []

    def save(*args):
        save_checkpoint(*args)
        calls.append(None)
        if len(calls) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(convergence, "save_checkpoint", save)


def test_an_interrupted_fit_goes_on_to_the_last_bit(monkeypatch, tmp_path, whole):
    path = tmp_path / "fit.npz"
    chunks = whole.info.steps // QUICK["chunk_size"]
    stops = [1, chunks // 2 + 1, chunks - 1]  # the first chunk, after the search, before the last
    done = 0
    for stop in stops:
        interrupt_after(monkeypatch, stop - done)
        partial = fit(make_svi(), KEY, DATA, checkpoint=path, **QUICK)
        assert partial.info.reason == f"interrupted after {20 * stop} steps"
        np.testing.assert_array_equal(partial.losses, whole.losses[: 20 * stop])
        done = stop
    monkeypatch.setattr(convergence, "save_checkpoint", save_checkpoint)
    same(fit(make_svi(), KEY, DATA, checkpoint=path, **QUICK), whole)
    # Of a fit that has ended only the result is read.
    monkeypatch.setattr(convergence, "save_checkpoint", None)
    same(fit(make_svi(), KEY, DATA, checkpoint=path, **QUICK), whole)
    assert [p.name for p in tmp_path.iterdir()] == ["fit.npz"]
    with np.load(path, allow_pickle=False) as kept:
        assert json.loads(kept["header"].tobytes())["record"]["progress"]["phase"] == "done"


def test_foreign_and_damaged_checkpoints_are_refused(monkeypatch, tmp_path):
    quick = {**QUICK, "criterion": "loss", "max_steps": 40}
    path = tmp_path / "fit.npz"
    quiet_fit(make_svi(), KEY, DATA, checkpoint=path, **quick)
    good = path.read_bytes()
    with pytest.raises(ValueError, match=r"expected a fit with tol = 0.5; got one with 0.1"):
        fit(make_svi(), KEY, DATA, checkpoint=path, tol=0.5, **quick)
    with pytest.raises(ValueError, match="expected a fit with rng_key"):
        fit(make_svi(), random.key(1), DATA, checkpoint=path, **quick)
    with pytest.raises(ValueError, match="expected the state of this model, guide and optimiser"):
        fit(SVI(model, guide, optax.sgd(1e-2), Trace_ELBO()), KEY, DATA, checkpoint=path, **quick)

    other = tmp_path / "other.npz"
    np.savez(other, a=np.ones(3))
    harmful = tmp_path / "pickled.npz"
    np.savez(harmful, header=np.array([object()], dtype=object))
    cut = tmp_path / "cut.npz"
    cut.write_bytes(good[: len(good) // 2])
    flipped = tmp_path / "flipped.npz"
    middle = good.index(b"series.npy") + 160
    flipped.write_bytes(good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :])
    empty = tmp_path / "empty.npz"
    empty.touch()
    for bad in (other, harmful, cut, flipped, empty):
        message = "expected a file written by fit; got .*" + re.escape(bad.name)
        with pytest.raises(ValueError, match=message):
            fit(make_svi(), KEY, DATA, checkpoint=bad, **quick)
    with pytest.raises(ValueError, match="expected a file in a folder that is there"):
        fit(make_svi(), KEY, DATA, checkpoint=tmp_path / "none" / "fit.npz", **quick)


def test_a_failed_write_leaves_the_old_file(monkeypatch, tmp_path):
    path = tmp_path / "fit.npz"
    tree = {"a": jnp.arange(3.0), "half": jnp.ones(2, jnp.bfloat16), "key": random.key(7)}
    save_checkpoint(path, tree, {"n": 0.1}, np.arange(2.0))
    before = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", fail)
        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(path, tree, {}, np.zeros(0))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["fit.npz"]
    restored, record, series = load_checkpoint(path, tree)
    assert record == {"n": 0.1}
    np.testing.assert_array_equal(series, [0, 1])
    np.testing.assert_array_equal(random.key_data(restored["key"]), random.key_data(tree["key"]))
    assert restored["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(restored["a"], tree["a"])


# --- The interface --------------------------------------------------------------------------------


def test_the_progress_bar_shows_loss_and_discrepancy(capsys):
    quiet_fit(make_svi(), KEY, DATA, **{**QUICK, "max_steps": 40, "progress_bar": True})
    shown = capsys.readouterr().err
    assert "40/40" in shown
    assert "loss" in shown
    assert "discrepancy²" in shown


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_steps": 0}, ValueError, "max_steps: expected an integer of at least 5; got 0"),
        ({"chunk_size": 2.5}, TypeError, "chunk_size: expected an integer"),
        ({"tol": 0.0}, ValueError, "tol: expected a positive finite number"),
        ({"patience": 0}, ValueError, "patience: expected an integer of at least 1"),
        ({"criterion": "elbo"}, ValueError, "criterion: expected one of 'stein', 'loss'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        fit(make_svi(), KEY, DATA, **settings)


def test_an_aggregate_needs_the_loss_as_its_criterion():
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(aggregate="rows"))
    with pytest.raises(ValueError, match="criterion: expected 'loss' for an objective with aggreg"):
        fit(svi, KEY, DATA)


def test_what_is_no_svi_is_refused():
    with pytest.raises(TypeError, match="svi: expected an SVI of numpyro.infer; got 'svi'"):
        fit("svi", KEY, DATA)
    with pytest.raises(TypeError, match=r"rng_key: expected a random key such as .*; got 0"):
        fit(make_svi(), 0, DATA)
    svi = SVI(model, guide, numpyro.optim.Minimize(), Trace_ELBO())
    with pytest.raises(TypeError, match="state holds the parameters.*got Minimize"):
        fit(svi, KEY, DATA)


@pytest.mark.parametrize(
    "optimizer", [numpyro.optim.ClippedAdam(1e-2), optax.chain(optax.clip(1.0), optax.adam(0.1))]
)
def test_parameters_are_found_in_any_optimiser(optimizer):
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    state = svi.init(KEY, DATA)
    leaves = jax.tree.leaves(state.optim_state)
    wanted = jax.tree.leaves(svi.optim.get_params(state.optim_state))
    slots = parameter_slots(svi, state.optim_state)
    for slot, value in zip(slots, wanted, strict=True):
        assert leaves[slot] is value
