"""What a server sees of all clients at once."""

import torch

from conftest import make_cohort, make_federation
from kinfolk.peers.base import Peers
from kinfolk.peers.faults import Faults
from kinfolk.peers.inprocess import InProcess


def peers_of(faults: Faults | None = None) -> Peers:
    cohort = make_cohort(make_federation([5] * 6), lambda: torch.nn.Linear(6, 3))
    return Peers(6, cohort, InProcess(), faults)


def test_gather_brings_everybody_with_their_facts_and_counts_a_model_up_and_one_down() -> None:
    peers = peers_of()
    values = torch.arange(12.0).view(6, 2)
    ids, rows, facts = peers.gather(1, values, sizes=torch.arange(6) + 10)
    assert ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(rows, values)
    assert facts["sizes"].tolist() == [10, 11, 12, 13, 14, 15]
    assert peers.models_received.tolist() == [2] * 6
    assert peers.bytes_received.tolist() == [2 * 2 * 4] * 6  # the facts are not counted


def test_gather_leaves_out_who_is_absent_in_quarantine_or_not_heard() -> None:
    peers = peers_of(Faults(loss=0.6))
    values = torch.arange(6.0)[:, None]
    lost = peers.faults.lost(3, 3, torch.full((6,), 6), torch.arange(6))
    assert lost.tolist() == [True, False, True, False, False, True]
    peers.host.round.absent[1] = True  # type: ignore[attr-defined]
    peers.host.round.quarantined[3] = True  # type: ignore[attr-defined]
    ids, rows, _ = peers.gather(3, values)
    heard = [i for i in range(6) if not lost[i] and i not in (1, 3)]
    assert ids.tolist() == heard
    assert rows.flatten().tolist() == heard
    assert peers.models_received.tolist() == [2 if i in heard else 0 for i in range(6)]


def test_gather_and_mean_can_be_called_in_the_same_round() -> None:
    peers = peers_of()
    values = torch.arange(6.0)[:, None]
    first = peers.gather(1, values)[1]
    mean = peers.mean(1, values + 1, torch.ones(6))
    second = peers.gather(1, values + 2)[1]
    assert torch.equal(first + 2, second)
    assert mean.tolist() == [3.5]
