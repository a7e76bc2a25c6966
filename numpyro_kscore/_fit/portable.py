"""Fitted guides as files that need neither their model nor its data.

A file is a zip archive: what the guide draws, as a JSON text, and the program that draws it, with
the fitted parameters inside, as ``jax.export`` writes it. Nothing in it is executed as Python.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, export
from numpyro.infer import SVI

from numpyro_kscore._model.particles import DRAWS_AT_ONCE, draw_many
from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.keys import check_key, key_apart
from numpyro_kscore.diagnostics._fitted import FittedGuide, fitted_guide

# The version of files, which grows when code of one version cannot read those of another.
FORMAT = 1
# Devices that the program is written for.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
HEADER, PROGRAM = "guide.json", "guide.stablehlo"
INSTALL = (
    "save_guide, load_guide: expected flatbuffers, in which JAX writes programs; got none "
    'installed. Run: pip install "numpyro-kscore[portable]"'
)


class PortableGuide(NamedTuple):
    """A fitted guide without its model.

    Attributes:
        sites: shape and dtype of one draw of every latent and deterministic site, by name.
        batch: number of draws that the program makes at once.
        program: compiled at its first call, from the words of a random key to draws.
    """

    sites: dict[str, jax.ShapeDtypeStruct]
    batch: int
    program: Callable[[Array], dict[str, Array]]

    def sample_posterior(
        self, rng_key: Array, sample_shape: tuple[int, ...] = ()
    ) -> dict[str, Array]:
        """Draws of the latent and deterministic sites, with leading dimensions ``sample_shape``.

        Args:
            rng_key: random key of JAX's default kind, ``threefry2x32``.
            sample_shape: leading dimensions.

        Raises:
            TypeError: for anything but such a key, and a tuple of integers.
            ValueError: for negative dimensions.

        Cost: draws are made in batches, so a few take as long as 256.
        """
        check_key("rng_key", rng_key, "sample_shape")
        _check_shape(sample_shape)
        count = math.prod(sample_shape)
        # One batch is made for no draws too, since it says what types they have.
        num_batches = max(1, -(-count // self.batch))
        words = [_words(key_apart(rng_key, k)) for k in range(num_batches)]
        found = [self.program(two) for two in words]
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts)[:count], *found)
        return {
            name: joined[name].reshape(*sample_shape, *site.shape)
            for name, site in self.sites.items()
        }


def _check_shape(sample_shape: Any) -> None:
    if isinstance(sample_shape, dict):
        raise TypeError(
            "sample_shape: expected a tuple of counts; got a dict. A loaded guide has its "
            "parameters already: sample_posterior(rng_key, sample_shape)"
        )
    if not isinstance(sample_shape, tuple | list):
        raise TypeError(
            f"sample_shape: expected a tuple of counts; got {sample_shape!r}. For n draws it is "
            "(n,)"
        )
    for count in sample_shape:
        check_count("sample_shape", count, 0)


def _words(key: Array) -> Array:
    """The two words of a key."""
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if words.shape != (2,):
        raise TypeError(
            "rng_key: expected one key of two words, as jax.random.key(0, impl='threefry2x32') "
            f"makes; got shape {words.shape}"
        )
    return words


def save_guide(path: str | Path, svi: SVI, result: Any, *args: Any, **kwargs: Any) -> Path:
    """Write a fitted guide to a file that draws without its model and without pickle.

    Args:
        path: of the file, which is replaced if it exists.
        svi: model and guide; the loss may be any.
        result: what ``svi.run`` or :func:`~numpyro_kscore.fit` returned.
        *args: arguments of the model, as in the fit.
        **kwargs: keyword arguments of the model.

    Returns:
        The path.

    Raises:
        TypeError: see :func:`~numpyro_kscore.evaluate_guide`.
        ValueError: see there; and for a path that is a folder.
        FileNotFoundError: if the folder of the file does not exist.
        ImportError: without flatbuffers.

    The file has the parameters, and of the data only what draws are computed from, such as the
    bounds of a support or the features behind a deterministic site.

    Example::

        from numpyro_kscore import load_guide, save_guide

        path = save_guide("posterior.guide", svi, result, y)
        sorted(load_guide(path).sites)  # ["loc", "scale"]
    """
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"path: expected a file; got {target}, a folder. Add a name to it")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"path: expected a file in a folder that exists; got {target}, and no folder "
            f"{target.parent}. Make it first"
        )
    fitted = fitted_guide(svi, result, args, kwargs, jax.random.key(0))
    words = jax.ShapeDtypeStruct((2,), jnp.uint32)
    exported = export.export(jax.jit(partial(_draw, fitted)), platforms=PLATFORMS)(words)
    try:
        program = bytes(exported.serialize())
    except ImportError as error:
        raise ImportError(INSTALL) from error
    drawn = jax.eval_shape(partial(_draw, fitted), words)
    header = {
        "format": FORMAT,
        "jax": jax.__version__,
        "batch": DRAWS_AT_ONCE,
        "sites": {name: [site.shape[1:], site.dtype.name] for name, site in drawn.items()},
    }
    # The file is written under another name and renamed, so that no half of one is left.
    part = target.with_name(target.name + ".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(HEADER, json.dumps(header, indent=1))
        archive.writestr(PROGRAM, program)
    return part.replace(target)


def _draw(fitted: FittedGuide, words: Array) -> dict[str, Array]:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    draws = draw_many(key, fitted.program, fitted.layout, DRAWS_AT_ONCE)
    return fitted.target.constrain(draws)


def load_guide(path: str | Path) -> PortableGuide:
    """Read a guide that :func:`save_guide` wrote.

    Args:
        path: of the file.

    Returns:
        The guide, which draws by :meth:`PortableGuide.sample_posterior`.

    Raises:
        ValueError: for another file, one that is damaged, or one of a version that is not known
            here.
        FileNotFoundError: if there is no such file.
        ImportError: without flatbuffers.

    Example::

        from numpyro_kscore import load_guide, save_guide

        path = save_guide("posterior.guide", svi, result, y)
        posterior = load_guide(path)  # in another program, without model and data
        posterior.sample_posterior(random.key(2), (1000,))["scale"]  # (1000,)
    """
    written_by, batch, sites, program = _read(Path(path))
    try:
        exported = export.deserialize(bytearray(program))
    except ImportError as error:
        raise ImportError(INSTALL) from error
    except Exception as error:
        if written_by == jax.__version__:
            raise _damaged(path, error) from error
        raise ValueError(
            f"path: expected a program that JAX {jax.__version__} reads; got one by JAX "
            f"{written_by} in {path} ({error}). Install that version, or save it anew"
        ) from error
    return PortableGuide(sites, batch, jax.jit(exported.call))


def _read(path: Path) -> tuple[str, int, dict[str, jax.ShapeDtypeStruct], bytes]:
    """JAX's version, the batch size, the sites and the program in a file of the known format."""
    if path.is_dir():
        raise ValueError(f"path: expected a file that save_guide wrote; got {path}, a folder")
    # A file that is missing is named by what opens it.
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(f"path: expected a file that save_guide wrote; got {path}")
        try:
            with zipfile.ZipFile(file) as archive:
                held = json.loads(archive.read(HEADER))
                found = held["format"]
                if found == FORMAT:
                    sites = {
                        name: jax.ShapeDtypeStruct(tuple(shape), dtype)
                        for name, (shape, dtype) in held["sites"].items()
                    }
                    return held["jax"], held["batch"], sites, archive.read(PROGRAM)
        except OSError:
            raise
        except Exception as error:
            # A damaged archive raises anything from zlib.error to KeyError.
            raise _damaged(path, error) from error
    raise ValueError(
        f"path: expected format {FORMAT}; got {found} in {path}. Read it with "
        "the version of numpyro-kscore that wrote it, or save it anew"
    )


def _damaged(path: str | Path, error: Exception) -> ValueError:
    return ValueError(
        f"path: expected a file that save_guide wrote; got {path}, which is damaged or of another "
        f"kind ({type(error).__name__}: {error}). Save it anew"
    )
