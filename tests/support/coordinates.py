"""LatentCoordinates of a model's latents, from what tests know by name."""

import jax.numpy as jnp
import numpy as np

from numpyro_kscore._model.coordinates import LatentCoordinates
from numpyro_kscore._transports.centering import Centering


def coordinates_of(values, centerings, sizes=None, sized=()):
    """The coordinates of latents of the shapes of some values, with centering by name."""
    shapes = tuple((name, np.shape(value)) for name, value in values.items())
    columns = []
    for name, shape in shapes:
        ones = np.stack([np.ones(shape), np.zeros(shape), np.zeros(shape)])
        given = jnp.stack([jnp.asarray(a) for a in centerings.get(name, ones)])
        columns.append(given.reshape(3, -1))
    centering = Centering(*jnp.concatenate(columns, axis=1))
    return LatentCoordinates(centering, sizes, shapes, tuple(centerings), tuple(sized))
