"""Sampling, pulling, averaging and the ledger, as a method sees them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kinfolk.peers.base import Peers
from kinfolk.peers.faults import Faults
from kinfolk.peers.inprocess import InProcess


class Host:
    """The little that peers know of a cohort."""

    def __init__(self, ids: Tensor, seed: int = 0) -> None:
        self.ids, self.seed = ids, seed
        self.quiet = torch.zeros(ids.numel(), dtype=torch.bool)
        self.gone = torch.zeros(ids.numel(), dtype=torch.bool)

    def silent(self) -> Tensor:
        return self.quiet | self.gone

    def away(self) -> Tensor:
        return self.gone


def peers_of(n: int, faults: Faults | None = None, seed: int = 0) -> Peers:
    return Peers(n, Host(torch.arange(n), seed), InProcess(), faults)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 30), count=st.integers(0, 12), extra=st.integers(0, 8), seed=st.integers(0, 99))
def test_sampled_peers_are_distinct_allowed_and_as_many_as_there_are(n: int, count: int, extra: int, seed: int) -> None:
    peers = peers_of(n, seed=seed)
    barred = torch.randint(-1, n, (n, extra), generator=torch.Generator().manual_seed(seed))
    chosen = peers.sample(1, count, exclude=barred)
    for i in range(n):
        row = [j for j in chosen[i].tolist() if j >= 0]
        free = set(range(n)) - {i} - set(barred[i].tolist())
        assert len(set(row)) == len(row) == min(count, len(free))
        assert set(row) <= free


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 25), groups=st.integers(1, 5), count=st.integers(1, 8), seed=st.integers(0, 99))
def test_sampling_within_a_label_stays_within_it(n: int, groups: int, count: int, seed: int) -> None:
    labels = torch.randint(groups, (n,), generator=torch.Generator().manual_seed(seed))
    barred = torch.randint(-1, n, (n, 2), generator=torch.Generator().manual_seed(seed + 1))
    chosen = peers_of(n, seed=seed).sample(3, count, exclude=barred, within=labels)
    for i in range(n):
        kin = {j for j in range(n) if labels[j] == labels[i]} - {i} - set(barred[i].tolist())
        row = [j for j in chosen[i].tolist() if j >= 0]
        assert len(row) == len(set(row)) == min(count, len(kin))
        assert set(row) <= kin


def test_every_peer_is_drawn_equally_often() -> None:
    peers = peers_of(9)
    exclude = torch.full((9, 1), 4)
    counts = torch.zeros(9)
    for t in range(4000):
        counts += torch.bincount(peers.sample(t, 3, exclude=exclude)[0], minlength=9)
    assert counts[0] == counts[4] == 0
    drawn = counts[[1, 2, 3, 5, 6, 7, 8]]
    assert (drawn - 4000 * 3 / 7).abs().max() < 5 * (4000 * 3 / 7 * 4 / 7) ** 0.5


def test_another_purpose_or_round_draws_others() -> None:
    peers = peers_of(50)
    assert not torch.equal(peers.sample(1, 5), peers.sample(2, 5))
    assert not torch.equal(peers.sample(1, 5), peers.sample(1, 5, purpose="else"))
    assert torch.equal(peers.sample(1, 5), peers.sample(1, 5))


def test_a_pull_brings_the_rows_that_were_published_and_counts_them() -> None:
    peers = peers_of(4)
    weights = torch.arange(12.0).view(4, 3)
    peers.host.quiet[2] = True  # type: ignore[attr-defined]
    peers.publish(1, weights=weights, other=weights.double())
    ids = torch.tensor([[1, 2], [0, -1], [3, 0], [2, -1]])
    pool = peers.pull(1, ids, ["weights", "other"])
    rows = pool.rows(ids)
    assert (rows >= 0).tolist() == [[True, False], [True, False], [True, True], [False, False]]
    assert torch.equal(pool["weights"][rows[2]], weights[[3, 0]])
    assert peers.models_received.tolist() == [1, 1, 2, 0]
    assert peers.bytes_received.tolist() == [36, 36, 72, 0]  # 3 numbers of 4 and of 8 bytes
    assert peers.peak_received.tolist() == [1, 1, 2, 0]


def test_what_was_not_published_this_round_cannot_be_pulled() -> None:
    peers = peers_of(3)
    peers.publish(1, weights=torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match="not published"):
        peers.pull(2, torch.tensor([[1], [2], [0]]))
    with pytest.raises(RuntimeError, match="not published"):
        peers.pull(1, torch.tensor([[1], [2], [0]]), ["update"])


def test_changing_a_published_tensor_is_noticed() -> None:
    peers = peers_of(3)
    weights = torch.zeros(3, 2)
    peers.publish(1, weights=weights)
    weights += 1
    with pytest.raises(RuntimeError, match="changed in place"):
        peers.pull(1, torch.tensor([[1], [2], [0]]))


def test_a_mean_is_weighted_and_leaves_out_the_silent() -> None:
    peers = peers_of(4)
    values = torch.tensor([[1.0, 0.0], [2.0, 4.0], [100.0, 100.0], [7.0, 1.0]])
    peers.host.quiet[2] = True  # type: ignore[attr-defined]
    mean = peers.mean(1, values, torch.tensor([1, 3, 5, 0]))
    assert mean.tolist() == pytest.approx([7 / 4, 12 / 4])
    assert peers.models_received.tolist() == [2, 2, 0, 0]  # one up, one down, as the papers count
    assert torch.isnan(peers.mean(1, values, torch.zeros(4))).all()


def test_lost_answers_are_about_as_many_as_asked_for_and_the_same_in_every_repeat() -> None:
    ids = torch.arange(60).expand(60, -1)
    answers = []
    for _ in range(2):
        peers = peers_of(60, Faults(loss=0.3))
        peers.publish(1, weights=torch.zeros(60, 1))
        answers.append(peers.pull(1, ids).rows(ids) >= 0)
    assert torch.equal(answers[0], answers[1])
    assert abs(answers[0].double().mean() - 0.7) < 0.04
    assert not torch.equal(answers[0], answers[0].T)  # lost one way does not mean lost the other way
    peers.publish(2, weights=torch.zeros(60, 1))
    assert not torch.equal(answers[0], peers.pull(2, ids).rows(ids) >= 0)


def test_an_absent_client_receives_nothing() -> None:
    peers = peers_of(3)
    peers.host.gone[0] = True  # type: ignore[attr-defined]
    peers.publish(1, weights=torch.zeros(3, 1))
    ids = torch.tensor([[1, 2], [0, 2], [0, 1]])
    assert (peers.pull(1, ids).rows(ids) >= 0).tolist() == [[False, False], [False, True], [False, True]]
    assert peers.models_received.tolist() == [0, 1, 1]


def test_churn_takes_clients_away_for_whole_spells() -> None:
    faults, ids = Faults(absent=0.2, absent_rounds=4), torch.arange(400)
    away = torch.stack([faults.away(0, t, ids) for t in range(1, 81)])  # [rounds, clients]
    assert abs(away.double().mean() - 0.2) < 0.03
    changes = (away[1:] != away[:-1]).double().mean()
    assert changes == pytest.approx(2 * 0.2 * 0.8 / 4, abs=0.02)  # it changes at the ends of spells only
    returns = (away[1:] != away[:-1]).any(dim=1)
    assert returns.all()  # clients have their own phase: somebody leaves or returns in every round
    assert not Faults().away(0, 1, ids).any()
