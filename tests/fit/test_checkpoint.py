"""Checkpoints of other fits, damaged ones, and those not written to the end."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from numpyro.infer import SVI, Trace_ELBO

from numpyro_kscore import fit
from numpyro_kscore._fit.checkpoint import load_checkpoint, save_checkpoint
from support.fits import DATA, KEY, QUICK, guide, make_svi, model, quiet_fit


def test_foreign_and_damaged_checkpoints_are_refused(monkeypatch, tmp_path):
    quick = {**QUICK, "criterion": "loss", "max_steps": 40}
    path = tmp_path / "fit.npz"
    quiet_fit(make_svi(), KEY, DATA, checkpoint=path, **quick)
    good = path.read_bytes()
    with pytest.raises(ValueError, match=r"expected a fit with tol = 0.5; got one with 0.1"):
        fit(make_svi(), KEY, DATA, checkpoint=path, tol=0.5, **quick)
    with pytest.raises(ValueError, match="expected a fit with rng_key"):
        fit(make_svi(), random.key(1), DATA, checkpoint=path, **quick)
    with pytest.raises(ValueError, match="expected the state of this model, guide and optimizer"):
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
    with pytest.raises(ValueError, match="expected a file in an existing folder"):
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
