"""A round of a method whose clients have models only while they do something: what an engine then does.

The method sees a cohort of these clients and their peers; what becomes of their state, of what they received and of who
is in quarantine is written back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kinfolk.cohort import visit
from kinfolk.cohort.cohort import Cohort
from kinfolk.peers.base import Peers
from kinfolk.peers.visit import returned, visiting

CPU = torch.device("cpu")


def asked(t: int, method: Any, cohort: Cohort, state: Any, peers: Peers, places: Tensor | None) -> Any:
    """The state after what the method asks clients ahead of round t, for which they need no models of their own, and
    after all clients have been told what came of it.

    places: the cohort's ids [m] on the CPU; None: all clients have models.
    """
    if not hasattr(method, "ask"):
        return state
    news = False

    def ask(guests: Cohort, state: Any, peers: Peers) -> Any:
        nonlocal news
        found = method.ask(t, guests, state, peers, few=places is not None)
        news = found is not state
        return found

    if places is None:
        state = ask(cohort, state, peers)
    else:
        drawn = method.asked(t, state, cohort.seed, peers.n, CPU)
        if drawn is not None and not drawn.numel():
            return state
        state = _with(ask, t, cohort, state, peers, _rows(places, drawn), models=False)
    return method.tell(cohort, state) if news else state


def stepped(t: int, method: Any, cohort: Cohort, state: Any, peers: Peers, places: Tensor | None) -> Any:
    """The state after round t with models for the clients that take part in it and for no others.

    places: as above.
    """
    if places is None:
        return method.step(t, cohort, state, peers)
    drawn = method.visitors(t, cohort.seed, peers.n, CPU)
    if cohort.round.evaluate:
        cohort.round.before_mixing = visit.evaluate(cohort, state.model, common=False).accuracy

    def step(guests: Cohort, state: Any, peers: Peers) -> Any:
        return method.step(t, guests, state, peers)

    return _with(step, t, cohort, state, peers, _rows(places, drawn), models=True)


def _rows(places: Tensor, drawn: Tensor | None) -> Tensor:
    """[k] where in places [m] the ids drawn [*] are, None for all."""
    return torch.arange(places.numel()) if drawn is None else torch.nonzero(torch.isin(places, drawn)).flatten()


def _with(
    work: Callable[[Cohort, Any, Peers], Any],
    t: int,
    cohort: Cohort,
    state: Any,
    peers: Peers,
    rows: Tensor,
    models: bool,
) -> Any:
    """What becomes of the state of all when `work` is done by the clients in rows [k] alone."""
    here = rows.to(cohort.device, non_blocking=True)
    guests = visit.visit(cohort, rows, here, models)
    absent = None if cohort.round.everybody else cohort.round.absent[here]
    guests.begin(absent, models and cohort.round.evaluate and rows.numel() > 0, None, t)
    guests.round.quarantined = cohort.round.quarantined[here]
    theirs = visiting(peers, guests, here)
    state = visit.merged(state, work(guests, visit.rows_of(state, here), theirs), here)
    returned(peers, theirs, here)
    cohort.round.quarantined[here] = guests.round.quarantined
    if cohort.round.before_mixing is not None and guests.round.before_mixing is not None:
        cohort.round.before_mixing[here] = guests.round.before_mixing
    cohort.weights = state.model.expand(len(cohort), -1)
    return state
