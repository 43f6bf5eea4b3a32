"""Choices of peers by their names, and lists of peers filled up with strangers: parts that several methods use."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kinfolk.cohort.cohort import Cohort
from kinfolk.matching import cost
from kinfolk.matching.lists import choose, pack
from kinfolk.methods.backbone import Backbone
from kinfolk.methods.choice import Anybody, Choice
from kinfolk.methods.friends import Contribution, Friends
from kinfolk.peers.base import Peers

Kind = Literal["random", "afind"]
WHOLE = Backbone("full")


def choice(kind: Kind, count: int, backbone: Backbone = WHOLE) -> Choice:
    """random: `count` peers at random; afind: as AFIND+ chooses, with its own defaults."""
    return Anybody(count) if kind == "random" else Friends(Contribution(), backbone)


def nominal(kind: Kind, count: int, rounds: int, n: int) -> cost.Cost:
    """What such a choice costs in so many rounds."""
    if kind == "random":
        return cost.gossip(n, count, rounds)
    return cost.afind(n, Friends(Contribution(), WHOLE).exchanges, rounds)


def fill(t: int, cohort: Cohort, peers: Peers, known: Tensor, count: int) -> Tensor:
    """The ids known [m, *] (-1: none; at most `count`) first, then reachable peers at random: [m, count]."""
    strangers = peers.sample(t, count, exclude=known)
    strangers = choose(cohort.seed, "strangers", t, cohort.ids, strangers, count)  # as drawn they are in no fair order
    both = torch.cat([known, strangers], dim=1)
    return pack(both >= 0, both, count)
