"""The package as a user has it: built, put into an empty environment, and used there."""

import json
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from support.environments import environment, run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

# Run in the new environment, away from the repository.
USE = """
import json, time
import numpyro, numpyro.infer.autoguide
start = time.process_time()
import numpyro_kscore
seconds = time.process_time() - start

import jax
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro_kscore import AutoImplicit, ImplicitELBO, ScoreEstimator

for name in numpyro_kscore.__all__:
    getattr(numpyro_kscore, name)

def model():
    numpyro.sample("x", dist.Normal(0, 1))

guide = AutoImplicit(model)
svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO(16))
result = svi.run(jax.random.key(0), 5, progress_bar=False)
draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(40,))
assert ScoreEstimator().fit(draws["x"][:, None]).info.converged

messages = {}
numpyro_kscore.diagnostics.pareto_smooth(draws["x"])
for name in ("to_arviz", "plots", "learn_prior", "sliced", "refine"):
    try:
        if name == "to_arviz":
            numpyro_kscore.to_arviz(svi, result)
        elif name == "plots":
            numpyro_kscore.diagnostics.plot_pairs(jax.random.normal(jax.random.key(2), (20, 2)))
        elif name == "refine":
            numpyro_kscore.refine(svi, result)
        elif name == "learn_prior":
            from numpyro_kscore.functions import learn_prior
            points = jax.numpy.zeros((2, 1))
            learn_prior(jax.random.key(0), lambda key, points: points[:, 0], points, jitter=1.0)
        else:
            from numpyro_kscore.sliced import SlicedScoreMatching
            SlicedScoreMatching().fit(jax.random.key(0), draws["x"][:, None])
        messages[name] = None
    except ImportError as error:
        messages[name] = str(error)
print(json.dumps({"version": numpyro_kscore.__version__, "seconds": seconds, "messages": messages}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel made of an sdist, as on an index, and the sdist."""
    folder = tmp_path_factory.mktemp("built")
    python = environment(folder / "builder", "build")
    run(python, "-m", "build", "--outdir", str(folder), str(ROOT))
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_archives_hold_the_package_and_nothing_else(built):
    wheel, sdist = built
    modules = (ROOT / "numpyro_kscore").rglob("*.py")
    expected = {path.relative_to(ROOT).as_posix() for path in modules}
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == expected | {"numpyro_kscore/py.typed"}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert expected | {"README.md", "LICENSE", "pyproject.toml"} <= inside
    assert not [name for name in inside if "_build" in name or "__pycache__" in name]


def test_a_wheel_works_with_the_run_time_dependencies_only(built, tmp_path):
    wheel, _ = built
    python = environment(tmp_path / "user", str(wheel))
    found = json.loads(run(python, "-c", textwrap.dedent(USE), cwd=tmp_path).splitlines()[-1])
    assert f"-{found['version']}-" in wheel.name
    assert found["seconds"] < 0.3
    for name, message in found["messages"].items():
        assert message is not None, name
        assert "pip install" in message, (name, message)
