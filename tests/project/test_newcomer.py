"""A newcomer: a copy of the repository, a new environment, the README's lines, models of their own.

Every script is a new process in which nothing is compiled, away from the repository.
"""

import json
import os
import re
import time

import pytest

from support.documentation import ROOT, blocks
from support.environments import environment, install, run

pytestmark = pytest.mark.slow

COUNTS = """
import json

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import SVI
from numpyro_kscore import AutoImplicit, ImplicitELBO, diagnose, fit

rng = np.random.default_rng(0)
x = rng.normal(size=(20_000, 3)).astype(np.float32)
truth = np.array([0.5, -0.3, 0.2])
y = rng.poisson(np.exp(0.4 + x @ truth))


def model(x, y):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    slopes = numpyro.sample("slopes", dist.Normal(jnp.zeros(3), 2.0).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=500):
        x = numpyro.subsample(x, event_dim=1)
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Poisson(jnp.exp(intercept + x @ slopes)), obs=y)


guide = AutoImplicit(model)
svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO())
result = fit(svi, random.key(0), x, y)
slopes = guide.sample_posterior(random.key(1), result.params, sample_shape=(1_000,))["slopes"]
verdict = diagnose(svi, result, x, y).verdict
error = float(np.max(np.abs(slopes.mean(0) - truth)))
print(json.dumps({"verdict": verdict, "error": error}))
"""

MIXTURE = """
import json

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import SVI
from numpyro_kscore import AutoImplicit, ImplicitELBO, diagnose, fit

rng = np.random.default_rng(0)
x = np.concatenate([rng.normal(-2, 1, 60), rng.normal(3, 1, 90)]).astype(np.float32)


def model(x):
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    low = numpyro.sample("low", dist.Normal(0.0, 5.0))
    step = numpyro.sample("step", dist.HalfNormal(5.0))
    component = dist.Normal(jnp.stack([low, low + step]), 1.0)
    weights = dist.Categorical(probs=jnp.stack([share, 1 - share]))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.MixtureSameFamily(weights, component), obs=x)


guide = AutoImplicit(model)
svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO())
result = fit(svi, random.key(0), x)
draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(1_000,))
verdict = diagnose(svi, result, x).verdict
print(json.dumps({"verdict": verdict, "error": abs(float(draws["share"].mean()) - 0.4)}))
"""

DROPOUT = """
import json

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import SVI, Predictive
from numpyro_kscore import Implicit, ImplicitELBO, fit

rng = np.random.default_rng(0)
y = rng.normal([1.0, -1.0], 0.5, size=(30, 2)).astype(np.float32)


def model(y):
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 3.0).to_event(1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y)


def guide(y):
    hidden = 32
    unit = dist.Normal(jnp.zeros(4), 1.0).to_event(1)
    noise = numpyro.sample("noise", unit, infer={"is_auxiliary": True})
    kept = dist.Bernoulli(0.9).expand([hidden]).to_event(1)
    mask = numpyro.sample("mask", kept, infer={"is_auxiliary": True})
    first = numpyro.param("first", lambda key: 0.5 * random.normal(key, (4, hidden)))
    second = numpyro.param("second", lambda key: 0.3 * random.normal(key, (hidden, 2)))
    shift = numpyro.param("shift", jnp.zeros(2))
    numpyro.sample("mean", Implicit(jnp.tanh(noise @ first) * mask @ second + shift, event_dim=1))


svi = SVI(model, guide, numpyro.optim.Adam(1e-2), ImplicitELBO(128))
result = fit(svi, random.key(0), y)
predictive = Predictive(guide, params=result.params, num_samples=1_000)
mean = predictive(random.key(1), y)["mean"]
error = float(np.max(np.abs(mean.mean(0) - y.mean(0))))
print(json.dumps({"error": error, "sd": mean.std(0).tolist()}))
"""


# What a script sees of its caller's surroundings.
PLAIN = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """The Python of a new environment, and a copy of the repository installed as README says."""
    folder = tmp_path_factory.mktemp("user")
    copy = ROOT
    if (ROOT / ".git").exists():
        copy = folder / "numpyro_kscore"
        run("git", "clone", "--quiet", str(ROOT), str(copy))
    return environment(folder / "venv", str(copy)), copy


def children_seconds():
    return os.times().children_user + os.times().children_system


def test_first_lines_of_the_readme(user, tmp_path):
    """They run after the README's installation, within the seconds of a core that it states."""
    python, copy = user
    page = (copy / "README.md").read_text()
    stated = re.search(r"\babout (\d+) seconds on one core\b", page)
    assert stated
    first = blocks(page)[0].code + "assert draws['mean'].shape == (1_000,)\n"
    start = children_seconds()
    run(python, "-c", first, cwd=tmp_path, env=PLAIN)
    # Twice as slow a machine is no error.
    assert children_seconds() - start < 2 * int(stated[1])


def run_model(python, script, folder):
    """The last line that a script prints; no fit may warn."""
    printed = run(python, "-W", "error::UserWarning", "-c", script, cwd=folder, env=PLAIN)
    return json.loads(printed.splitlines()[-1])


def test_a_regression_in_minibatches(user, tmp_path):
    found = run_model(user[0], COUNTS, tmp_path)
    # Errors of maximum likelihood are some .005 here; five of them.
    assert found["error"] < 0.025
    assert found["verdict"] != "bad"


def test_a_mixture(user, tmp_path):
    found = run_model(user[0], MIXTURE, tmp_path)
    assert found["error"] < 0.12
    assert found["verdict"] == "good"


def test_a_guide_with_dropout(user, tmp_path):
    found = run_model(user[0], DROPOUT, tmp_path)
    # The posterior's standard deviation is .5/√30 = .091; limits a few times those of a fit.
    assert found["error"] < 0.3 * 0.091
    assert all(abs(sd / 0.091 - 1) < 0.25 for sd in found["sd"])


def test_the_tour(user, tmp_path):
    """The tour runs with the extra that the page names."""
    python, copy = user
    page = (copy / "docs" / "tour.md").read_text()
    assert '".[examples]"' in page
    install(python, f"{copy}[examples]")
    code = "import matplotlib\nmatplotlib.use('Agg')\n" + "\n".join(b.code for b in blocks(page))
    start = time.perf_counter()
    printed = run(python, "-c", code, cwd=tmp_path, env=PLAIN)
    assert "verdict: good" in printed
    assert "verdict: bad" in printed
    assert time.perf_counter() - start < 300
