import numpy as np
import pytest

from kinfolk import metrics
from kinfolk.metrics import Edges, choice, cluster_ari, helped_and_hurt, matching, overlaps, spread


def edges(*pairs: tuple[int, int]) -> Edges:
    client, neighbor = (np.array(column, dtype=np.int64) for column in zip(*pairs))
    return Edges(client, neighbor, np.ones(client.size))


def test_spread_is_mean_deviation_and_the_worst_tenth() -> None:
    found = spread(np.array([0.1, 0.3] + [0.8] * 18))
    assert found["accuracy"] == pytest.approx((0.4 + 18 * 0.8) / 20)
    assert found["worst10"] == pytest.approx(0.2)
    assert found["std"] == pytest.approx(np.std([0.1, 0.3] + [0.8] * 18))


def test_clients_without_a_test_set_do_not_count() -> None:
    assert spread(np.array([0.5, np.nan, 1.0]))["accuracy"] == pytest.approx(0.75)
    assert np.isnan(spread(np.array([np.nan]))["accuracy"])


def test_precision_and_recall_of_neighbors() -> None:
    clusters = np.array([0, 0, 0, 1, 1, 2])
    found = matching(edges((0, 1), (0, 3), (1, 0), (1, 2), (3, 0), (1, 2)), clusters)
    # precision: client 0 1/2, client 1 2/2 (an edge twice is one neighbor), client 3 0/1; the others have no neighbors
    assert found["neighbor_precision"] == pytest.approx((0.5 + 1 + 0) / 3)
    # recall: 1/2, 2/2, 0/2, 0/1, 0/1; client 5 has no kin and is left out
    assert found["neighbor_recall"] == pytest.approx((0.5 + 1) / 5)
    assert found["neighbor_precision_client0"] == 0.5
    assert found["neighbor_recall_client0"] == 0.5


def test_a_client_is_not_its_own_neighbor() -> None:
    assert np.isnan(matching(edges((0, 0)), np.array([0, 0]))["neighbor_precision"])


def test_edges_of_lists_skip_the_padding() -> None:
    found = Edges.of_lists(np.array([[2, -1], [-1, -1], [0, 1]]))
    assert found.client.tolist() == [0, 2, 2]
    assert found.neighbor.tolist() == [2, 0, 1]


def test_helped_and_hurt_need_more_than_one_standard_error() -> None:
    local = np.array([0.50, 0.50, 0.50, 0.50])
    error = 0.05  # about sqrt(.25 / 100)
    accuracy = local + np.array([0.9, 1.2, -1.2, -0.9]) * error
    assert helped_and_hurt(accuracy, local, np.full(4, 100)) == (0.25, 0.25)


def test_equal_and_perfect_clients_are_neither_helped_nor_hurt() -> None:
    ones = np.ones(3)
    assert helped_and_hurt(ones, ones, np.full(3, 10)) == (0.0, 0.0)


def test_the_rand_index_compares_partitions_whatever_their_numbers() -> None:
    true = np.array([0, 0, 1, 1, 2, 2])
    assert cluster_ari(np.array([5, 5, 0, 0, 3, 3]), true) == 1
    assert cluster_ari(np.zeros(6, dtype=int), true) == 0
    assert 0 < cluster_ari(np.array([0, 0, 1, 1, 1, 1]), true) < 1


def test_peers_are_counted_once_and_their_labels_compared() -> None:
    labels = np.array([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
    found = choice(edges((0, 1), (0, 1), (0, 2), (1, 0), (1, 1)), labels)
    assert found["neighbors"] == pytest.approx(3 / 3)  # 2, 1 (not itself) and 0
    assert found["label_overlap"] == pytest.approx(((0.75 + 0.0) / 2 + 0.75) / 2)  # the third has no peers


def test_where_all_have_the_same_labels_overlap_says_nothing() -> None:
    assert "label_overlap" not in choice(edges((0, 1)), np.full((2, 4), 0.25))


@pytest.mark.parametrize("few", [0, 2000])
def test_pairs_are_each_once_in_order_and_never_of_one_client(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FEW", few)
    numbers = np.random.default_rng(0).integers(0, 40, (2, 2000))
    client, neighbor = Edges(*numbers, np.ones(2000)).pairs
    expected = sorted({(a, b) for a, b in numbers.T.tolist() if a != b})
    assert list(zip(client.tolist(), neighbor.tolist())) == expected
    assert Edges.none().pairs[0].size == 0


def test_the_overlap_of_all_pairs_is_that_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.random.default_rng(1).dirichlet(np.ones(7), 30)
    monkeypatch.setattr(metrics, "TOGETHER", 500)
    found = metrics.all_overlaps(labels)
    assert found is not None
    each = [[np.minimum(a, b).sum() for b in labels] for a in labels]
    assert found == pytest.approx(np.array(each))
    client, neighbor = np.divmod(np.arange(900), 30)
    assert overlaps(labels, client, neighbor).tolist() == found.ravel().tolist()
    some = edges((0, 1), (0, 2), (3, 1))
    assert choice(some, labels, found) == choice(some, labels)
    monkeypatch.setattr(metrics, "FEW", 29)
    assert metrics.all_overlaps(labels) is None
