"""Guides in files: the same draws, in a process that has neither model nor data."""

import json
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_kscore import Implicit, ImplicitELBO, load_guide, save_guide

KEY = random.key(0)
ROWS = 50_000
PROGRAM = "guide.stablehlo"


def model(x):
    low = numpyro.sample("low", dist.Normal(0.0, 1.0))
    place = numpyro.sample("place", dist.Uniform(low, low + 2.0).expand([3]).to_event(1))
    numpyro.deterministic("total", place.sum() - 3 * low)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.Normal(low, 1.0), obs=x)


def guide(x):
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(4), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    low = numpyro.sample("low", Implicit(numpyro.param("loc", jnp.zeros(())) + 0.5 * noise[0]))
    numpyro.sample("place", Implicit(low + 2.0 * jax.nn.sigmoid(noise[1:]), 1))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("guides") / "guide.zip"
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    result = SVIRunResult({"loc": jnp.array(3.0)}, SVIState(None, None, KEY), jnp.zeros(1))
    save_guide(found, svi, result, jnp.zeros(ROWS))
    return found


def test_draws_are_the_guides(path):
    found = load_guide(path)
    assert {name: site.shape for name, site in found.sites.items()} == {
        "low": (), "place": (3,), "total": (),
    }  # fmt: skip
    draws = found.sample_posterior(random.key(1), (20, 50))
    assert draws["place"].shape == (20, 50, 3)
    low, place = np.ravel(draws["low"]), draws["place"].reshape(-1, 3)
    # Errors of a mean and of a standard deviation of 1000 draws, three times.
    assert abs(low.mean() - 3.0) < 3 * 0.5 / 1000**0.5
    assert abs(low.std() / 0.5 - 1.0) < 3 / 2000**0.5
    assert np.all((place > low[:, None]) & (place < low[:, None] + 2.0))
    np.testing.assert_allclose(np.ravel(draws["total"]), (place - low[:, None]).sum(1), atol=1e-4)
    assert len(np.unique(low)) == 1000


def test_one_draw_has_the_shape_of_the_site(path):
    assert load_guide(path).sample_posterior(KEY)["place"].shape == (3,)


@pytest.mark.thorough
def test_a_process_without_the_model_draws_the_same(path):
    program = (
        "import sys, jax; from numpyro_kscore import load_guide; "
        "print(load_guide(sys.argv[1]).sample_posterior(jax.random.key(5), (3,))['low'].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    here = load_guide(path).sample_posterior(random.key(5), (3,))["low"]
    np.testing.assert_allclose(json.loads(done.stdout), here, rtol=1e-6)


def test_the_data_are_not_in_the_file(path):
    assert path.stat().st_size < ROWS


@pytest.fixture
def changed(path, tmp_path):
    """A function that writes the file with another header or program, or none at all."""

    def write(**contents):
        with zipfile.ZipFile(path) as archive:
            kept = {"header": archive.read("guide.json"), "program": archive.read(PROGRAM)}
        names = {"header": "guide.json", "program": PROGRAM}
        with zipfile.ZipFile(tmp_path / "changed", "w") as archive:
            for part, content in (kept | contents).items():
                if content is not None:
                    archive.writestr(names[part], content)
        return tmp_path / "changed"

    return write


def header_of(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("guide.json"))


def test_other_files_and_versions_are_refused(path, changed, tmp_path):
    text = tmp_path / "text"
    text.write_text("no guide")
    with pytest.raises(ValueError, match="expected a file that save_guide wrote"):
        load_guide(text)
    newer = json.dumps({"format": 99})
    with pytest.raises(ValueError, match="expected format 1; got 99.*save it anew"):
        load_guide(changed(header=newer))
    older = json.dumps({**header_of(path), "jax": "0.1.2"})
    message = r"expected a program that JAX .* reads; got one by JAX 0\.1\.2.*Install that version"
    with pytest.raises(ValueError, match=message):
        load_guide(changed(header=older, program=b"no program"))


@pytest.mark.parametrize(
    "contents",
    [
        {"header": None},
        {"header": b"{"},
        {"header": b"\xff"},
        {"header": b"[]"},
        {"header": b"{}"},
        {"header": b'{"format": 1, "jax": "0.10", "batch": 256}'},
        {"program": None},
        {"program": b"no program"},
    ],
)
def test_damaged_contents_are_named(changed, contents):
    message = r"expected a file that save_guide wrote; got .*, which is damaged.*Save it anew"
    with pytest.raises(ValueError, match=message):
        load_guide(changed(**contents))


@pytest.mark.parametrize("name", ["guide.json", PROGRAM])
def test_damaged_bytes_are_named(path, tmp_path, name):
    """Some of the compressed bytes of each part."""
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(name).header_offset + 30 + len(name)
    content = bytearray(path.read_bytes())
    content[start + 10 : start + 60] = 50 * b"\xff"
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(ValueError, match=r"got .*, which is damaged"):
        load_guide(tmp_path / "damaged")


def test_paths_without_a_file(path, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        load_guide(tmp_path / "missing")
    with pytest.raises(ValueError, match="expected a file that save_guide wrote; got .*a folder"):
        load_guide(tmp_path)
    # Before anything is looked at, since a program takes long to make.
    with pytest.raises(FileNotFoundError, match=r"and no folder .*missing\. Make it first"):
        save_guide(tmp_path / "missing" / "guide.zip", None, None)
    with pytest.raises(ValueError, match="path: expected a file; got .*a folder"):
        save_guide(tmp_path, None, None)


def test_no_draws_have_shapes_too(path):
    draws = load_guide(path).sample_posterior(KEY, (2, 0))
    assert draws["place"].shape == (2, 0, 3)
    assert draws["place"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("sample_shape", "error", "message"),
    [
        (5, TypeError, r"expected a tuple of counts; got 5. For n draws it is \(n,\)"),
        (
            {"loc": 3.0},
            TypeError,
            "got a dict. A loaded guide has its parameters already: sample_p",
        ),
        ((2.5,), TypeError, "expected an integer; got 2.5"),
        ((-1,), ValueError, "expected an integer of at least 0; got -1"),
    ],
)
def test_shapes_that_are_none(path, sample_shape, error, message):
    with pytest.raises(error, match="^sample_shape: .*" + message):
        load_guide(path).sample_posterior(KEY, sample_shape)


def test_keys_of_other_kinds_are_refused(path):
    found = load_guide(path)
    with pytest.raises(TypeError, match="expected one key of two words"):
        found.sample_posterior(random.key(0, impl="rbg"))
    with pytest.raises(TypeError, match="expected one random key"):
        found.sample_posterior(0)
