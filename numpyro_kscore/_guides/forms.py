"""The coordinates that a start was found in, as those of a guide's latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from numpyro_kscore._starts.couplings import Couplings
from numpyro_kscore._starts.gaussian_start import GaussianStart
from numpyro_kscore._tracing.coupling import Centering, Coupling, Form

__all__ = ["forms_of"]

Frozen = Callable[[str, np.ndarray], jax.Array]
Unpack = Callable[[Any], dict[str, Any]]


def forms_of(start: GaussianStart, unpack: Unpack, frozen: Frozen) -> dict[str, Form]:
    """The forms of the latents whose coordinate is not their unconstrained value.

    Args:
        start: what was found.
        unpack: flat coordinates (d,) as a dict of arrays.
        frozen: a parameter that is not fitted, from its name and value.
    """
    forms = {}
    if np.any(start.centering.degrees != 1):
        parts = [unpack(row) for row in frozen("centering", np.stack(start.centering))]
        for name, c in unpack(start.centering.degrees).items():
            if np.any(np.asarray(c) != 1):
                forms[name] = Form(Centering(*(part[name] for part in parts)))
    if start.couplings is not None:
        for name, couplings in _by_name(start.couplings, unpack, frozen).items():
            forms[name] = forms.get(name, Form())._replace(couplings=couplings)
        for name, basis in _bases(start.couplings, unpack, frozen).items():
            forms[name] = forms.get(name, Form())._replace(basis=basis)
    return forms


def _bases(found: Couplings, unpack: Unpack, frozen: Frozen) -> dict[str, jax.Array]:
    """The bases of latents that have one other than their elements, by name."""
    if found.basis is None:
        return {}
    basis, out = frozen("basis", found.basis), {}
    for name, rows in unpack(np.arange(len(basis))).items():
        block = np.ix_(np.ravel(rows), np.ravel(rows))
        if not np.array_equal(found.basis[block], np.eye(np.size(rows))):
            out[name] = basis[block].reshape(2 * np.shape(rows))
    return out


def _by_name(found: Couplings, unpack: Unpack, frozen: Frozen) -> dict[str, dict[str, Coupling]]:
    """Couplings by the names of latents, and of those that their sizes vary with."""
    rates = frozen("rates", found.rates)
    center = unpack(frozen("center", found.center))
    places = unpack(np.arange(len(found.center)))
    out: dict[str, dict[str, Coupling]] = {}
    for name, rows in places.items():
        for other, columns in places.items():
            block = np.ix_(np.ravel(rows), np.ravel(columns))
            if np.any(found.rates[block] != 0):
                shape = np.shape(rows) + np.shape(columns)
                coupling = Coupling(rates[block].reshape(shape), center[other])
                out.setdefault(name, {})[other] = coupling
    return out
