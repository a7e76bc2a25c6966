"""Structures of Hessians, and factors by them, against dense matrices."""

from types import SimpleNamespace

import numpy as np
import pytest

from numpyro_kscore._starts.laplace import triangle_at, triangle_of
from numpyro_kscore._starts.recovery import Recovery
from numpyro_kscore._starts.sparsity import Structure, blocks_at, find_structure, is_right, misses

RNG = np.random.default_rng(0)


def of_pairs(size, pairs):
    """A positive definite matrix with numbers at pairs of places."""
    matrix = np.zeros((size, size))
    for i, j in pairs:
        matrix[i, j] = matrix[j, i] = 0.3 * RNG.normal()
    return matrix + np.diag(np.abs(matrix).sum(axis=1) + 1)


def crossed():
    """Ninety persons who answer all ten questions, and a mean of all."""
    persons, questions = np.arange(90), np.arange(90, 100)
    pairs = [(p, q) for p in persons for q in questions]
    return of_pairs(101, pairs + [(k, 100) for k in range(100)])


def ratings():
    """Four hundred persons who rate eight of 120 films, and a mean of all."""
    rng = np.random.default_rng(5)
    pairs = [(p, 400 + f) for p in range(400) for f in rng.choice(120, 8, replace=False)]
    return of_pairs(521, pairs + [(k, 520) for k in range(520)])


def nested():
    """Pupils' classes in thirty schools of one to four, with a mean of all."""
    pairs, size = [], 1
    for k in range(30):
        school, classes = size, range(size + 1, size + 2 + k % 4)
        pairs += [(0, school)] + [(school, one) for one in classes]
        size = classes[-1] + 1
    return of_pairs(size, pairs)


def band():
    """A series, each of whose 200 values depends on the two before."""
    return of_pairs(200, [(k, k - lag) for lag in (1, 2) for k in range(lag, 200)])


def grid():
    """A map of 14 by 14 squares, each of which depends on its neighbors."""
    at = np.arange(196).reshape(14, 14)
    across = zip(at[:, 1:].ravel(), at[:, :-1].ravel(), strict=True)
    down = zip(at[1:].ravel(), at[:-1].ravel(), strict=True)
    return of_pairs(196, [*across, *down])


def dense():
    rng = np.random.default_rng(1)
    factor = rng.normal(size=(30, 30))
    return factor @ factor.T + np.eye(30)


# A matrix, the most products that give all of it, and the most numbers of its factor.
MATRICES = {
    "crossed": (crossed, 12, 2_000),
    "ratings": (ratings, 30, 70_000),
    "nested": (nested, 12, 1_200),
    "band": (band, 20, 8_000),
    "grid": (grid, 60, 25_000),
    "dense": (dense, 30, 900),
    "diagonal": (lambda: np.diag(np.arange(1.0, 41.0)), 1, 100),
}


@pytest.fixture(scope="module", params=MATRICES)
def found(request):
    make, most_products, most_numbers = MATRICES[request.param]
    matrix = make()
    size = len(matrix)
    # Among latents that are held, and in another order.
    others = RNG.permutation(size + 2)[:size]
    whole = np.eye(size + 2)
    whole[np.ix_(others, others)] = matrix

    def products(points, vectors):
        assert vectors.shape[1] == points.shape[1] == size + 2
        return vectors @ whole

    structure = find_structure(products, np.zeros((2, size + 2)), others)
    return matrix, others, products, structure, most_products, most_numbers


def test_few_products_give_every_number(found):
    matrix, others, products, structure, most_products, _ = found
    assert len(structure.seeds) <= most_products
    blocks = blocks_at(structure, products, np.zeros((1, len(matrix) + 2)), others)
    for vector in RNG.normal(size=(3, len(matrix))):
        np.testing.assert_allclose(blocks.times(structure, vector), matrix @ vector, rtol=1e-9)


def test_a_triangle_is_a_factor_of_the_inverse(found):
    matrix, others, products, structure, _, most_numbers = found
    blocks = blocks_at(structure, products, np.zeros((1, len(matrix) + 2)), others)
    triangle = triangle_of(blocks, structure.places)
    columns = triangle.times(np.eye(len(matrix))).T
    np.testing.assert_allclose(columns @ columns.T, np.linalg.inv(matrix), rtol=1e-8, atol=1e-10)
    volume = -0.5 * np.linalg.slogdet(matrix)[1]
    assert np.sum(np.log(triangle.diagonal)) == pytest.approx(volume, rel=1e-9)
    numbers = triangle.leaves.size + triangle.borders.size + triangle.core.size
    assert numbers <= most_numbers


def test_triangles_are_solved_and_divided(found):
    matrix, others, products, structure, _, _ = found
    blocks = blocks_at(structure, products, np.zeros((1, len(matrix) + 2)), others)
    triangle = triangle_of(blocks, structure.places)
    vectors = RNG.normal(size=(2, len(matrix)))
    np.testing.assert_allclose(triangle.solve(triangle.times(vectors)), vectors, rtol=1e-7)
    back = triangle.solve_transposed(triangle.transposed(vectors))
    np.testing.assert_allclose(back, vectors, rtol=1e-7)
    again = triangle.followed_by(triangle.divided(triangle))
    np.testing.assert_allclose(again.times(vectors), triangle.times(vectors), rtol=1e-7)


def test_what_a_second_point_depends_on_is_found():
    """The product of two latents has no curvature where the others are zero."""
    size = 40
    pairs = band()[:size, :size]

    def products(points, vectors):
        return vectors @ (np.eye(size) + (pairs - np.diag(np.diag(pairs))) * points[0, 0])

    points = np.zeros((2, size))
    points[1, 0] = 1.0
    others = np.arange(size)
    structure = find_structure(products, points, others)
    vector = RNG.normal(size=size)
    blocks = blocks_at(structure, products, points[1:], others)
    np.testing.assert_allclose(
        blocks.times(structure, vector), products(points[1:], vector[None])[0], rtol=1e-9
    )


def test_latents_of_many_degrees_stay_out_of_the_core():
    """Sites seen in one to twenty of thirty years: the years are the core, and no site is."""
    rng = np.random.default_rng(2)
    pairs = [
        (year, site)
        for site in range(30, 630)
        for year in rng.choice(30, 1 + (site - 30) % 20, replace=False)
    ]
    matrix = of_pairs(630, pairs)

    def products(points, vectors):
        return vectors @ matrix

    structure = find_structure(products, np.zeros((2, 630)), np.arange(630))
    assert sorted(structure.core) == list(range(30))


def test_a_triangle_of_a_saddle_has_absolute_curvatures():
    """A leaf, and a core of two, whose dense matrices are known."""
    core, leaf, border = np.array([[2.0, 3.0], [3.0, 2.0]]), -0.5, np.array([0.2, 0.1])
    matrix = np.block([[np.array([[leaf]]), border[None]], [border[:, None], core]])
    structure = Structure(
        np.array([[0]]),
        np.array([1, 2]),
        SimpleNamespace(shape=(3, 3)),
        Recovery(np.eye(3), np.ravel),
        np.array([[0], [0], [0], [0]]),
        np.array([[3, 4, 5, 6, 7, 8], [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]]),
    )
    others = SimpleNamespace(
        structure=structure, products=lambda points, vectors: vectors @ matrix, indices=np.arange(3)
    )
    found = triangle_at(others, np.zeros((1, 3)))
    # Rows of the transpose's products are those of the factor.
    inverse = found.transposed(np.eye(3)) @ found.transposed(np.eye(3)).T
    rest = core - np.outer(border, border) / abs(leaf)
    units = np.sqrt(np.outer(np.diag(rest), np.diag(rest)))
    values, axes = np.linalg.eigh(rest / units)
    rest = units * (axes @ np.diag(np.abs(values)) @ axes.T)
    expected = np.block(
        [
            [np.array([[abs(leaf)]]), border[None]],
            [border[:, None], rest + np.outer(border, border) / abs(leaf)],
        ]
    )
    assert values[0] < 0
    np.testing.assert_allclose(np.linalg.inv(inverse), expected, atol=1e-9)


def test_a_structure_is_wrong_where_another_number_is_not_zero():
    def products(points, vectors):
        return np.stack([vectors[:, 0] + points[0, 0] * vectors[:, 1], vectors[:, 1]], 1)

    structure = find_structure(products, np.zeros((1, 2)), np.arange(2))
    assert is_right(structure, products, np.zeros(2), np.arange(2))
    assert not is_right(structure, products, np.ones(2), np.arange(2))


def test_numbers_that_are_zero_at_first_are_missed():
    """Distant times of a series depend on each other where it forgets little."""
    lags = np.abs(np.subtract.outer(np.arange(60), np.arange(60)))

    def products(points, vectors):
        return vectors @ (np.eye(60) + points[0, 0] ** lags)

    near, far = np.full((1, 60), 0.02), np.full((1, 60), 0.6)
    structure = find_structure(products, near, np.arange(60))
    assert structure.pattern.nnz < 60 * 13
    assert not misses(structure, products, near[0], np.arange(60))
    assert misses(structure, products, far[0], np.arange(60))
    both = find_structure(products, np.concatenate([far, near]), np.arange(60))
    assert not misses(both, products, far[0], np.arange(60))
