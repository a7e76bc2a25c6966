"""The posteriors and the figures of the accuracy benchmark are right."""

import csv
from dataclasses import replace

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from numpyro.infer import init_to_feasible
from numpyro.infer.util import initialize_model, potential_energy

from benchmarks.accuracy import posterior_accuracy as accuracy
from benchmarks.accuracy import report, tables
from benchmarks.accuracy.guides import METHODS
from benchmarks.accuracy.moments import load_moments
from benchmarks.accuracy.posteriors import POSTERIORS, SUITES, make_posterior
from benchmarks.accuracy.references import QUICK, Reference, load_reference, path_of

mpl.use("Agg")

LOCAL = [name for name in POSTERIORS if name != "waveform"]
SPLITS = {  # a flat unconstrained draw as the sites of the model
    "linear": lambda u: {"variance": u[0], "weights": u[1:]},
    "funnel": lambda u: {"v": u[0], "x": u[1:]},
    "dirichlet": lambda u: {"shares": u},
    "rates": lambda u: {"rates": u},
}


def test_there_are_enough_posteriors():
    assert len(SUITES["familiar"]) >= 22
    assert len(SUITES["harder"]) >= 20
    assert SUITES["familiar"] + SUITES["harder"] == SUITES["all"]
    assert len(SUITES["textbook"]) == 20
    assert len(set(POSTERIORS)) == len(POSTERIORS)
    with pytest.raises(ValueError, match="expected a posterior among banana, .* got 'bananas'"):
        make_posterior("bananas")


@pytest.mark.slow  # half a minute together: every model is compiled
@pytest.mark.parametrize("name", LOCAL)
def test_posterior_is_finite_and_its_draws_are_flattened(name):
    posterior = make_posterior(name)
    target = posterior.target
    info = initialize_model(
        jax.random.key(0), target.model, init_strategy=init_to_feasible(), model_args=target.args
    )
    unconstrained = info.param_info.z
    potential, gradient = jax.value_and_grad(info.potential_fn)(unconstrained)
    assert np.isfinite(potential)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    # Back from constrained values come the unconstrained ones, site after site.
    sites = info.postprocess_fn(unconstrained)
    draws = {name: sites[name][None] for name in target.supports()}
    expected = np.concatenate([np.ravel(unconstrained[name]) for name in target.supports()])
    np.testing.assert_allclose(target.unconstrained(draws)[0], expected, rtol=1e-4, atol=1e-5)
    assert posterior.summarize(draws).shape[0] == 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in ("linear", "dirichlet", "rates") else n
        for n in SPLITS
    ],
)
@pytest.mark.thorough
def test_exact_draws_are_of_the_posterior(name):
    """Stein's identities E s = 0 and E u sᵀ = -I, for s the gradient of the model's density."""
    target, num_draws = make_posterior(name).target, 100_000
    u = target.exact(jax.random.key(1), num_draws)
    density = lambda u: -potential_energy(target.model, target.args, {}, SPLITS[name](u))  # noqa: E731
    s = np.asarray(jax.jit(jax.vmap(jax.grad(density)))(u), np.float64)
    u = np.asarray(u, np.float64)
    u = u - np.median(u, axis=0)
    for products, expected in ((s, 0.0), (u * s, -1.0), (u * np.roll(s, 1, axis=1), 0.0)):
        error = products.std(0) / num_draws**0.5
        # The tails of the funnel are those of a log-normal: its own products have none.
        assert np.all(np.abs(products.mean(0) - expected) < 4.5 * error)
        if name != "funnel":
            assert np.all(error < 0.1 * max(1, s.std(0).max()))


@pytest.mark.thorough
def test_increments_and_path_are_one_posterior():
    """The densities differ by the constant Jacobian of Euler's map, along any path."""
    target = make_posterior("diffusion").target
    increments = jax.random.normal(jax.random.key(2), (3, 100))
    path = target.from_nuts({"increments": increments})["path"]
    x, paths = np.zeros(3), []
    for noise in np.asarray(increments, np.float64).T:
        x = x + 0.1 * (x - x**3) + 0.1 * noise
        paths.append(x)
    np.testing.assert_allclose(path, np.transpose(paths), atol=1e-5)
    energies = [
        [potential_energy(model, target.args, {}, {site: row}) for row in rows]
        for model, site, rows in (
            (target.model, "path", path),
            (target.nuts_model, "increments", increments),
        )
    ]
    difference = np.subtract(*energies)
    np.testing.assert_allclose(difference, 100 * np.log(0.1), rtol=1e-4)


def test_networks_that_differ_by_order_and_sign_are_one_function():
    posterior = make_posterior("bnn")
    rng = np.random.default_rng(3)
    draws = {
        name: rng.normal(size=(2, 8)).astype(np.float32) for name in ("slopes", "shifts", "heights")
    }
    order, sign = rng.permutation(8), np.where(np.arange(8) % 2, 1, -1)
    mirrored = {name: (sign * value)[:, order] for name, value in draws.items()}
    offset = {"offset": np.array([0.5, -1.0], np.float32)}
    predictions = posterior.summarize(draws | offset)
    x = np.linspace(-2.5, 2.5, 21)
    hidden = np.tanh(x[:, None, None] * draws["slopes"] + draws["shifts"])
    expected = (hidden * draws["heights"]).sum(-1).T + offset["offset"][:, None]
    np.testing.assert_allclose(predictions, expected, atol=1e-5)
    np.testing.assert_allclose(posterior.summarize(mirrored | offset), expected, atol=1e-5)


def make_reference(rng, num_draws=1_000):
    truth, other = rng.normal([1, -2, 0], [1, 5, 0.1], (2, num_draws, 3)).astype(np.float32)
    return Reference(jnp.asarray(truth), jnp.asarray(other), 1.0, 8_000.0, 0.0)


@pytest.mark.parametrize("heavy_tails", [False, True])
def test_figures_of_known_draws(heavy_tails):
    reference = make_reference(np.random.default_rng(4))
    truth = np.asarray(reference.truth, np.float64)
    draws = truth * [1.3, 1.0, 0.8] + [0.0, 1.0, 0.0]
    if heavy_tails:
        quartiles = [np.percentile(x, [25, 50, 75], axis=0) for x in (truth, draws)]
        (center, spread), (center_q, spread_q) = ((q[1], q[2] - q[0]) for q in quartiles)
        unit = spread / 1.349
    else:
        center, spread, center_q, spread_q = (
            truth.mean(0),
            truth.std(0),
            draws.mean(0),
            draws.std(0),
        )
        unit = spread
    row = accuracy.measure(jnp.asarray(draws, jnp.float32), reference, heavy_tails, 2)
    assert (row["dim"], row["finite"]) == (3, 1)
    np.testing.assert_allclose(
        row["mean_error"], (np.abs(center_q - center) / unit).max(), rtol=1e-3
    )
    np.testing.assert_allclose(row["sd_low"], (spread_q / spread).min(), rtol=1e-3)
    np.testing.assert_allclose(row["sd_high"], (spread_q / spread).max(), rtol=1e-3)
    # Draw by draw, the second set is at a known distance in every direction: no sorting needed.
    shift = np.asarray(reference.truth) + 10 * unit.astype(np.float32) * np.array([1, 0, 0])
    far = accuracy.measure(jnp.asarray(shift, jnp.float32), reference, heavy_tails, 2)
    directions = np.random.default_rng(0).normal(size=(200_000, 3))
    mean_cosine = np.abs(directions[:, 0] / np.linalg.norm(directions, axis=1)).mean()
    floor = accuracy.mean_distance(
        (reference.other - center) / unit, (reference.truth - center) / unit, 2
    )
    np.testing.assert_allclose(far["distance"] * floor, 10 * mean_cosine, rtol=0.1)


def test_independent_draws_are_at_the_floor_and_bad_ones_nowhere():
    reference = make_reference(np.random.default_rng(5))
    again = accuracy.measure(reference.other, reference, False, 2)
    assert again["distance"] == pytest.approx(1.0, abs=1e-6)
    broken = accuracy.measure(reference.other.at[7, 1].set(jnp.inf), reference, False, 2)
    assert broken["finite"] == 0
    assert all(np.isnan(broken[name]) for name in ("distance", "mean_error", "sd_low", "sd_high"))


def row(target, method, seed, distance, mean=0.05, low=0.95, high=1.02, **more):
    names = {"target": target, "method": method, "seed": seed, "num_steps": 20}
    figures = dict(zip(accuracy.FIGURES, (distance, mean, low, high), strict=True))
    costs = {"seconds": 2.0, "cpu_seconds": more.get("seconds", 2.0) / 2, "gradients": 1e6}
    return names | {"dim": 2, "finite": 1, "ending": "plateau"} | figures | costs | more


def test_tables_of_the_documentation():
    rows = [
        row("a", "AutoImplicit", 0, 1.0),
        row("a", "AutoImplicit", 1, 1.2, mean=0.2, low=0.91),
        row("a", "AutoIAFNormal", 0, 0.8),
        row("a", "reference again", 0, 1.0, gradients=4e5),
        row("b", "AutoImplicit", 0, 2.0, high=1.3),
        row("b", "AutoIAFNormal", 0, 250.0, high=1.3),
        row("b", "reference again", 0, 1.0, gradients=float("nan")),
    ]
    assert tables.posterior_table(rows, ["a", "b"])[2:] == [
        "| a | 2 | 1.10 | **0.20** | 0.91–1.02 | 1 | 1000 k | 0.80 | 400 k |",
        "| b | 2 | 2.00 | 0.05 | **0.95–1.30** | 1 | 1000 k | 250 |  |",
    ]
    assert tables.summary_table(rows, ["a", "b"])[2:] == [
        "| AutoImplicit | 1 of 2 | 1 | 1.50 | 2 |",
        "| AutoIAFNormal | 1 of 2 | 1 | 125 | 2 |",
    ]


def test_verdict_names_every_miss():
    nan = float("nan")
    rows = [
        row("a", "AutoImplicit", 0, 1.0),
        row("a", "AutoImplicit", 1, 1.1, low=0.91, seconds=4.0),
        row("a", "AutoBNAFNormal", 0, 0.97, seconds=10.0),
        row("a", "AutoMultivariateNormal", 0, 1.0),
        row("a", "reference again", 0, 0.5),
        row("b", "AutoImplicit", 0, 2.0, high=1.11),
        row("b", "AutoMultivariateNormal", 0, 1.9),
        row("b", "AutoIAFNormal", 0, 1.8),
        row("c", "AutoImplicit", 0, 1.2),
        row("c", "AutoImplicit", 1, nan, nan, nan, nan),
        row("c", "AutoMultivariateNormal", 0, 5.0),
        row("d", "AutoImplicit", 0, 9.0, 0.6, ending="budget"),
        row("d", "AutoImplicit", 1, 9.0, 0.6, ending="plateau, far"),
        row("d", "AutoImplicit", 2, 9.0, 0.6, diagnosis="bad"),
        row("d", "AutoImplicit", 3, 9.0, 0.6, diagnosis="cannot tell"),
        row("d", "AutoImplicit", 4, 9.0, 0.4, ending="tol"),
    ]
    found = report.over_seeds(rows)
    assert found["a", "AutoImplicit"].distance == pytest.approx(1.05)
    assert found["a", "AutoImplicit"].sd_low == 0.91
    assert found["a", "AutoImplicit"].seconds == 3.0
    lines = report.verdict(rows)
    assert [line.partition(": ")[2] for line in lines[:3]] == [
        "mean within 0.15 sd, sd ratios 0.9 to 1.1: 1 of 4; not b, c, d",
        "2 of 4; not b, c",
        "2 of 3; not c",
    ]
    assert lines[3].startswith(
        "time on 1 posteriors: 3 s, AutoBNAFNormal 10 s; on the CPU 2 s and 5 s"
    )
    assert lines[4:] == [
        "right, of all seeds: 3 of 10; not b (0), c (1), d (0), d (1), d (2), d (3), d (4)",
        "every mean within 0.5 sd, or the fit is reported: 8 of 10; not c (1), d (3)",
    ]
    printed = report.table(found, (*METHODS, report.FLOOR))
    assert len(printed) == 1 + len(found)


@pytest.mark.thorough
def test_reference_is_kept_and_belongs_to_its_settings(tmp_path):
    posterior = make_posterior("rates")
    first = load_reference(posterior, QUICK, tmp_path)
    (file,) = tmp_path.iterdir()
    stamp = file.stat().st_mtime_ns
    again = load_reference(posterior, QUICK, tmp_path)
    np.testing.assert_array_equal(again.truth, first.truth)
    np.testing.assert_array_equal(again.other, first.other)
    assert (again.rhat, again.ess, again.seconds) == (first.rhat, first.ess, first.seconds)
    assert np.isnan(again.gradients)  # NUTS took none for exact draws
    load_reference(posterior, QUICK._replace(num_draws=100), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert file.stat().st_mtime_ns == stamp


def test_moments_outlive_draws_and_machines(tmp_path):
    """Data that another machine rounds otherwise are the same data; other data are not."""
    posterior = make_posterior("rates")
    counts, exposures = posterior.target.args

    def with_data(counts):
        return replace(posterior, target=replace(posterior.target, args=(counts, exposures)))

    names = {path_of(with_data(array), tmp_path).name for array in (counts, counts * (1 + 1e-6))}
    assert len(names) == 1
    assert path_of(with_data(counts[::-1]), tmp_path).name not in names


@pytest.mark.thorough
def test_moments_are_drawn_once(tmp_path):
    posterior = make_posterior("rates")
    assert load_moments(posterior, QUICK, tmp_path, known=True) is None
    first = load_moments(posterior, QUICK, tmp_path)
    assert load_moments(posterior, QUICK, tmp_path, known=True) == first
    draws = load_reference(posterior, QUICK, None).truth
    figures = first.compare(draws, posterior.heavy_tails)
    np.testing.assert_allclose(list(figures.values()), [0, 1, 1], atol=1e-5)


def run(arguments, capsys):
    accuracy.main(["--quick", *arguments])
    return capsys.readouterr().out


def check_run(arguments, folder, monkeypatch, capsys):
    table, figure = folder / "table.csv", folder / "figure.png"
    arguments = [*arguments, "--csv", str(table), "--cache", str(folder / "references")]
    printed = run([*arguments, "--figure", str(figure)], capsys)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["finite"] == "1" for row in rows)
    assert figure.stat().st_size > 10_000
    # A second run computes nothing and says the same.
    monkeypatch.setattr(accuracy, "measure", None)
    assert run(arguments, capsys) == printed
    return rows, printed


@pytest.mark.slow
def test_quick_run_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NUMPYRO_KSCORE_DATA", raising=False)
    arguments = ["--targets", "rates", "waveform", "--methods", "AutoNormal"]
    rows, printed = check_run(arguments, tmp_path, monkeypatch, capsys)
    assert len(rows) == 2  # the reference's own among them
    assert "waveform is left out: expected the path" in printed


@pytest.mark.slow
def test_quick_run_of_every_method(tmp_path, monkeypatch, capsys):
    arguments = ["--targets", "eight_schools", "bnn", "--seeds", "0", "1", "--methods", *METHODS]
    rows, printed = check_run(arguments, tmp_path, monkeypatch, capsys)
    assert len(rows) == 2 * (2 * len(METHODS) + 1)
    assert "at most 10 % behind AutoMultivariateNormal" in printed
