"""Samples and particles over several devices and processes, against one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from numpyro_kscore import ImplicitELBO, ScoreEstimator
from support.sharded import draw_samples, of_process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "sharded.py"
# Sums in another order differ by about eps √n = 2e-15, and a filter of at most 50 steps amplifies
# an error of its target by at most g(0), some thousands.
TOLERANCE = 1e-11


def start(*arguments):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | settings,
    )


def finish(process, timeout=300):
    """Output and error output of a process; one that hangs is killed, and fails the test."""
    try:
        return process.communicate(timeout=timeout)
    finally:
        process.kill()


def free_address():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def on_two_devices(question):
    out, err = finish(start("devices", question))
    assert out, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.thorough
def test_two_devices_share_work_and_memory():
    shares = on_two_devices("shares")
    # Half of the products, and the work on columns that both devices do.
    assert 0.45 < shares["work"] < 0.6
    # Half of the Krylov basis and of all other vectors, and the vectors a product gathers.
    assert 0.45 < shares["memory"] < 0.6


@pytest.mark.slow
def test_two_devices_equal_one():
    """Fit and selection in tiles with odd n, landmarks, derivatives, and an objective.

    The quick tests are that of two processes, below, and that of the layout of an objective's
    particles on one device, in test_elbo_options.
    """
    differences = on_two_devices("differences")
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.thorough
def test_processes_give_the_numbers_of_one_and_end_with_the_other(tmp_path, x64):
    address = free_address()
    both = [start("process", str(index), address, str(tmp_path)) for index in range(2)]
    (out, err), _ = (finish(process) for process in both)
    found = np.concatenate([np.load(tmp_path / f"{index}.npy") for index in range(2)])
    x = draw_samples()
    expected = of_process().fit(x).at_samples
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())
    assert out, err
    assert "error" in json.loads(out.splitlines()[-1])


# It is jax.distributed that ends it.
@pytest.mark.slow
def test_a_process_that_never_comes_ends_in_an_error():
    process = start("alone", free_address())
    _, err = finish(process, timeout=60)
    assert process.returncode != 0
    assert "DEADLINE_EXCEEDED" in err


def one_device(*names):
    return NamedSharding(jax.make_mesh((1,), ("samples",)), P(*names))


def test_what_is_no_layout_of_rows_is_refused():
    with pytest.raises(TypeError, match="expected None or NamedSharding"):
        ScoreEstimator(sharding=one_device("samples").mesh)
    for names in ((), (None, "samples")):
        with pytest.raises(ValueError, match="divides rows and nothing else"):
            ScoreEstimator(sharding=one_device(*names))
    with pytest.raises(ValueError, match="expected True with sharding"):
        ImplicitELBO(8, vectorize_particles=False, sharding=one_device("samples"))
