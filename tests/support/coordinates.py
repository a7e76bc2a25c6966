"""LatentCoordinates of a model's latents, from what tests know by name."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_kscore._model.coordinates import LatentCoordinates
from numpyro_kscore._transports.centering import Centering
from support.compiling import quick_jit


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


def densities(target, flat):
    """Unconstrained values at coordinates, and two log densities there that are to be equal.

    One is that of the values plus the log determinant of their derivative, the other the target's.
    """

    @quick_jit
    def evaluate(flat):
        expected = target.plain.log_density(target.unconstrained(flat))
        expected += jnp.linalg.slogdet(jax.jacfwd(target.unconstrained)(flat))[1]
        return target.unconstrained(flat), expected, target.log_density(flat)

    return evaluate(flat)
