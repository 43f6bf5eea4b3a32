"""Pictures from plain arrays: they are written, show what they should, and their layouts make sense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kinfolk.errors import UserError
from kinfolk.report.figures import (
    COLOURS,
    Line,
    Panel,
    expected,
    heat_picture,
    line_picture,
    similarity_picture,
    topology_picture,
)
from kinfolk.report.layout import components, layout


def pixels(path: str) -> np.ndarray:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def has(picture: np.ndarray, colour: str) -> bool:
    """Whether some pixels have just this colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return bool((np.abs(picture.astype(int) - wanted).sum(axis=2) < 6).sum() > 20)


def ring(n: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(n)
    return at + start, (at + 1) % n + start


def test_lines_have_their_colours_and_a_legend() -> None:
    x = np.arange(1, 6)
    lines = [Line("a", x, np.array([x, x + 1.0]), COLOURS[0]), Line("b", x, np.array([x * 2.0]), COLOURS[1], "--")]
    line_picture([[Panel("left", "round", "accuracy, %", lines), Panel("right", "round", "loss", lines[:1])]],
                 Path("lines.png"), "Two lines")  # fmt: skip
    found = pixels("lines.png")
    assert found.shape[1] > found.shape[0]
    assert has(found, COLOURS[0])
    assert has(found, COLOURS[1])
    assert not has(found, COLOURS[2])


def test_points_stand_at_their_values() -> None:
    lines = [Line("a", np.array([8.0, 20.0]), np.array([[1.0, 2.0], [3.0, 2.0]]), COLOURS[2])]
    line_picture([[Panel("", "clients", "accuracy, %", lines)]], Path("points.png"), "Points", points=True)
    assert has(pixels("points.png"), COLOURS[2])


def test_a_heat_map_orders_the_clients_by_cluster() -> None:
    """Two clusters, interleaved: ordered, the picture has two bright blocks on its diagonal."""
    clusters = np.arange(20) % 2
    together = (clusters[:, None] == clusters[None]).astype(float)
    heat_picture([("kin", together, clusters)], Path("heat.png"), "Heat", "weight")
    bright = pixels("heat.png").astype(int)[:, :, 0] > 230  # cividis ends in yellow, and paper is white
    bright &= pixels("heat.png")[:, :, 2] < 120
    rows, columns = np.nonzero(bright[:, : bright.shape[1] * 5 // 6])  # without the colour bar
    middle = [(rows.min() + rows.max()) / 2, (columns.min() + columns.max()) / 2]
    quarters = [
        [((rows < middle[0]) == a) & ((columns < middle[1]) == b) for b in (True, False)] for a in (True, False)
    ]
    counts = np.array([[part.sum() for part in row] for row in quarters])
    assert counts[0, 0] > 1000
    assert counts[1, 1] > 1000
    assert counts[0, 1] + counts[1, 0] < 0.05 * counts.sum()


def test_a_topology_shows_kin_and_strangers_apart() -> None:
    a, b = (np.concatenate(both) for both in zip(ring(5), ring(5, 5)))
    clusters = np.repeat([0, 1], 5)
    topology_picture([("apart", a, b, clusters)], Path("apart.png"), "Apart")
    mixed = np.append(a, 0), np.append(b, 7)
    topology_picture([("mixed", *mixed, clusters), ("apart", a, b, clusters)], Path("both.png"), "Both")
    assert pixels("both.png").shape[1] > pixels("apart.png").shape[1]


def test_six_panels_stand_in_two_rows() -> None:
    a, b = ring(4)
    panels = [(str(i), a, b, np.zeros(4, dtype=int)) for i in range(6)]
    topology_picture(panels[:3], Path("three.png"), "Three")
    topology_picture(panels, Path("six.png"), "Six")
    three, six = pixels("three.png"), pixels("six.png")
    assert six.shape[1] == three.shape[1]
    assert six.shape[0] > 1.5 * three.shape[0]


def test_similarities_are_drawn_as_two_groups() -> None:
    values = np.concatenate([np.linspace(0.1, 0.3, 20), np.linspace(0.7, 0.9, 10)])
    similarity_picture([("client 0", values, values > 0.5, values > 0.5)], Path("two.png"), "Two", "similarity")
    found = pixels("two.png")
    assert has(found, "#000000")
    similarity_picture(
        [("alike", np.ones(9), np.ones(9, bool), np.ones(9, bool))], Path("one.png"), "One", "similarity"
    )


def test_what_a_gaussian_puts_into_a_bin() -> None:
    values = np.array([1.0, 2.0, 3.0])
    x = np.linspace(-5, 9, 4001)
    share = expected(x, values, 0.5)
    assert share is not None
    assert share.sum() * (x[1] - x[0]) / 0.5 == pytest.approx(1, abs=1e-6)
    assert x[share.argmax()] == pytest.approx(2, abs=1e-2)
    one_deviation = expected(np.array([2.0]), values, 2 * values.std())
    assert one_deviation == pytest.approx([0.6826895], abs=1e-6)
    assert expected(x, np.ones(5), 0.5) is None
    assert expected(x, np.ones(1), 0.5) is None


def test_a_picture_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(UserError, match=r"nowhere/a.png cannot be written"):
        line_picture([[Panel("", "", "", [Line("a", np.arange(2), np.ones((1, 2)), COLOURS[0])])]],
                     Path("nowhere/a.png"), "A")  # fmt: skip


# -- where nodes stand -------------------------------------------------------------------------------------------


def test_components_are_named_after_their_smallest_member() -> None:
    a, b = np.array([0, 2, 3]), np.array([1, 3, 4])
    assert components(a, b, 6).tolist() == [0, 0, 2, 2, 2, 5]
    assert components(np.array([], int), np.array([], int), 3).tolist() == [0, 1, 2]


def test_a_chain_is_one_component_however_its_edges_are_ordered() -> None:
    order = np.random.default_rng(0).permutation(50)
    assert set(components(order[:-1], order[1:], 50).tolist()) == {0}


def test_parts_do_not_overlap_and_neighbors_stand_close() -> None:
    edges = [ring(8), ring(8, 8), ring(5, 16), (np.array([21]), np.array([22]))]
    a, b = (np.concatenate(both) for both in zip(*edges))
    where, part = layout(a, b, 24), components(a, b, 24)
    assert np.isfinite(where).all()
    discs = []
    for label in np.unique(part):
        spots = where[part == label]
        middle = spots.mean(axis=0)
        discs.append((middle, np.linalg.norm(spots - middle, axis=1).max()))
    for i, (one, reach) in enumerate(discs):
        for other, far in discs[i + 1 :]:
            assert np.linalg.norm(one - other) > 0.9 * (reach + far)
    linked = np.linalg.norm(where[a[:8]] - where[b[:8]], axis=1)
    across = np.linalg.norm(where[np.arange(4)] - where[np.arange(4) + 4], axis=1)
    assert linked.max() < across.min()


def test_edges_pull_wherever_the_nodes_begin() -> None:
    order = np.random.default_rng(1).permutation(16)
    a, b = (order[end] for end in ring(16))
    where = layout(a, b, 16)
    linked = np.linalg.norm(where[a] - where[b], axis=1)
    everybody = np.linalg.norm(where[:, None] - where[None], axis=2)[np.triu_indices(16, 1)]
    assert linked.mean() < 0.6 * everybody.mean()


def test_the_layout_is_the_same_every_time() -> None:
    a, b = ring(12)
    assert np.array_equal(layout(a, b, 12), layout(a, b, 12))


def test_a_line_of_one_point_is_a_dot() -> None:
    line = Line("a", np.array([1.0]), np.array([[5.0]]), COLOURS[0])
    line_picture([[Panel("", "round", "accuracy, %", [line])]], Path("dot.png"), "One point")
    marked = (np.abs(pixels("dot.png").astype(int) - [0x00, 0x72, 0xB2]).sum(axis=2) < 6).sum(axis=1)
    assert len(np.flatnonzero(np.diff(np.flatnonzero(marked)) > 1)) == 1  # the dot, and the legend's line
