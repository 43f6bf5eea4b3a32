"""The peers of a few clients that take part in a round."""

from __future__ import annotations

import copy

from torch import Tensor

from kinfolk.peers.base import Host, Peers


def visiting(peers: Peers, host: Host, here: Tensor) -> Peers:
    """What the clients in rows here [k] of a cohort, hosted by `host`, see of everybody. `returned` is to follow."""
    guests = copy.copy(peers)
    guests.host = host
    guests.ledger = peers.ledger[:, here]
    return guests


def returned(peers: Peers, guests: Peers, here: Tensor) -> None:
    """Enter what the clients in rows here [k] received in the ledger of all; calls to the server count on."""
    peers.ledger[:, here] = guests.ledger
    peers._means = guests._means
