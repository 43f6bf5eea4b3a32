"""Who may still release something: an account of every client's releases, written down before they leave.

A charge is on the disk when `charge` returns, so a process that is killed at any moment has charged at least what it
released. A line of the file (see journal.py) is one charge:

    {"release": "seed 0, round 3", "clients": "ff80", "mechanism": {...}}

`clients` are bits of the list that the last line with clients in full gave. A line that was cut off is not counted: its
`charge` had not returned, so nothing left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfolk.errors import UserError
from kinfolk.privacy.accounting import (
    RECORD,
    Accountant,
    Adjacency,
    Mechanism,
    Sampling,
    check_budget,
    cost,
    merge,
    within,
)
from kinfolk.privacy.guarantee import Guarantee
from kinfolk.privacy.journal import FORMAT, VERSION, Journal

_MANY = 2**62
KINDS = 8  # different mechanisms that a client's state has room for
_SAMPLINGS: tuple[Sampling, ...] = ("none", "poisson", "without-replacement")
_ADJACENCIES: tuple[Adjacency, ...] = ("replace-one", "add-remove")

History = tuple[Mechanism, ...]


class Ledger:
    """What the clients `ids` [m] have released so far, and their budgets.

    epsilon, delta: budgets, one for all or one for each. path: the file, none for an account in memory, or an open
    journal that several ledgers of one process share; data: what the releases are about (a hash of the data), which a
    file has to agree with.
    simulated: the noise is a function of the seed. A release that is repeated under its old name, after a resume, then
    brings the same bits once more and costs nothing; with real noise it costs as much as the first time.
    nominal: count releases instead of epsilon, up to this many (for a paper's own formula).
    """

    def __init__(
        self,
        ids: Tensor | Sequence[int],
        epsilon: float | Tensor,
        delta: float | Tensor,
        *,
        simulated: bool,
        path: Path | Journal | None = None,
        data: str = "",
        accountant: Accountant = "best",
        nominal: int | None = None,
    ) -> None:
        self.ids = torch.as_tensor(ids, dtype=torch.int64).cpu().numpy()
        self.epsilon, self.delta = (self._spread(value) for value in (epsilon, delta))
        for pair in np.unique(np.stack([self.epsilon, self.delta], axis=1), axis=0).tolist():
            check_budget(*pair)
        self.simulated, self.accountant, self.nominal, self.data = simulated, accountant, nominal, data
        self._histories: list[History] = [()]
        self._known: dict[History, int] = {(): 0}
        self._at = np.zeros(self.ids.size, dtype=np.int64)  # which history each client has
        self._steps: dict[tuple[int, Mechanism], tuple[int, int, int]] = {}
        self._kinds: dict[tuple[History, Mechanism], int] = {}  # other releases, and the one that is counted
        self._reached: dict[tuple[int, float, float], _Reach] = {}
        # What is known of each client's next releases: of this kind, so many fit and so many do not.
        self._kind = np.full(self.ids.size, -1)
        self._safe, self._least = np.zeros(self.ids.size, dtype=np.int64), np.full(self.ids.size, _MANY)
        self._granted: dict[str, np.ndarray] = {}  # release -> [m] who was charged for it
        self._file = Journal(path) if isinstance(path, Path) else path
        try:
            if self._file is not None:
                self._replay(self._file)
        except BaseException:
            self.close()
            raise

    def _spread(self, value: float | Tensor) -> np.ndarray:
        array = torch.as_tensor(value, dtype=torch.float64).cpu().numpy()
        return np.broadcast_to(array, self.ids.shape).copy()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the file."""
        if self._file is not None:
            self._file.close()

    # -- charging ------------------------------------------------------------------------------------------------

    def charge(
        self,
        release: str,
        mechanisms: Mechanism | Sequence[Mechanism],
        clients: Tensor | None = None,
        which: Tensor | None = None,
    ) -> Tensor:
        """Charge clients for what they are about to release; [m] bool: who may, on the device of `clients`.

        release: its name, unlike that of any other (seed and round in it); clients [m] bool: who wants to, default all;
        which [m]: the mechanism of each, if there are several. Call it before the release is made: who is refused must
        not send, and nothing may be sent if this raises.
        """
        several = [mechanisms] if isinstance(mechanisms, Mechanism) else list(mechanisms)
        for one in several:
            if one.unit != RECORD:
                raise UserError(f"the ledger counts {RECORD}, not {one.unit}")
        wanted = np.ones(self.ids.size, dtype=bool) if clients is None else clients.detach().cpu().numpy().astype(bool)
        numbers = np.zeros(self.ids.size, dtype=np.int64) if which is None else which.cpu().numpy()
        already = self._granted.get(release, np.zeros_like(wanted)) if self.simulated else np.zeros_like(wanted)
        after, may = self._after(several, numbers, wanted & ~already)
        if self._file is not None and may.any():
            masks = [may & (numbers == number) for number in range(len(several))]
            lines = [_charge_line(release, one, mask) for one, mask in zip(several, masks) if mask.any()]
            self._write(self._file, lines)
        self._at = np.where(may, after, self._at)
        if self.simulated:
            self._granted[release] = already | may
        result = torch.from_numpy(may | (already & wanted))
        return result if clients is None else result.to(clients.device)

    def affordable(self, mechanisms: Mechanism | Sequence[Mechanism], which: Tensor | None = None) -> Tensor:
        """[m] bool: whose budget has room for this (arguments as for `charge`); nothing is charged."""
        several = [mechanisms] if isinstance(mechanisms, Mechanism) else list(mechanisms)
        numbers = np.zeros_like(self._at) if which is None else which.cpu().numpy()
        return torch.from_numpy(self._after(several, numbers, np.ones(self.ids.size, dtype=bool))[1])

    def repeats(self, release: str) -> bool:
        """Whether a release of that name was granted before and would bring the same bits once more."""
        return release in self._granted and bool(self._granted[release].any())

    def refuse_if_spent(self, mechanisms: Mechanism | Sequence[Mechanism], which: Tensor | None = None) -> None:
        """An error if nobody can release anything any more, as in a run that is resumed after its end."""
        if self.ids.size and not bool(self.affordable(mechanisms, which).any()):
            spent = float(self.spent().max())
            raise UserError(
                f"the privacy budget is spent: the clients have released epsilon {spent:.4g} of {self.epsilon.max():g} "
                f"at delta {self.delta.max():.3g}, and one more release would exceed it"
            )

    def _after(
        self, mechanisms: list[Mechanism], which: np.ndarray, wanted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The histories [m] clients would have, and who may of those who want to [m]; like clients are one case."""
        after, may = self._at.copy(), np.zeros_like(wanted)
        rows = np.flatnonzero(wanted)
        pairs, members = np.unique(np.stack([self._at, which], axis=1)[rows], axis=0, return_inverse=True)
        steps = [self._step(at, mechanisms[number]) for at, number in pairs.tolist()]
        later, kind, count = np.array(steps, dtype=np.int64).reshape(-1, 3)[members.reshape(-1)].T
        if self.nominal is None:
            granted = self._fits(rows, kind, count)
        else:
            granted = np.array([_count(history) for history in self._histories])[later] <= self.nominal
        after[rows[granted]], may[rows] = later[granted], granted
        return after, may

    def _step(self, at: int, mechanism: Mechanism) -> tuple[int, int, int]:
        """The history after one more charge, its kind (what else there is, and of what more), and how many of these."""
        if (at, mechanism) not in self._steps:
            history = merge([*self._histories[at], mechanism])
            single = merge([replace(mechanism, releases=1)])[0]
            others = tuple(one for one in history if replace(one, releases=1) != single)
            kind = self._kinds.setdefault((others, single), len(self._kinds))
            self._steps[at, mechanism] = self._number(history), kind, _count(history) - _count(others)
        return self._steps[at, mechanism]

    def _fits(self, rows: np.ndarray, kind: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Whether the clients in these rows can afford `count` releases of a kind."""
        new = rows[self._kind[rows] != kind]
        self._safe[new], self._least[new] = 0, _MANY
        self._kind[rows] = kind
        granted: np.ndarray = count <= self._safe[rows]
        unknown = np.flatnonzero(~granted & (count < self._least[rows]))
        here = rows[unknown]
        keys = np.stack([kind[unknown], count[unknown], self.epsilon[here], self.delta[here]], axis=1)
        cases, members = np.unique(keys, axis=0, return_inverse=True)
        kinds = list(self._kinds)
        found = np.zeros((len(cases), 2), dtype=np.int64)
        for number, (which, wanted, epsilon, delta) in enumerate(cases.tolist()):
            reach = self._reached.setdefault((int(which), epsilon, delta), _Reach())
            others, single = kinds[int(which)]
            fits = partial(self._within, others, single, epsilon, delta)
            reach.allows(int(wanted), fits)
            found[number] = reach.safe, _MANY if reach.least is None else reach.least
        self._safe[here], self._least[here] = found[members.reshape(-1)].T
        granted[unknown] = count[unknown] <= self._safe[here]
        return granted

    def _within(self, others: History, single: Mechanism, epsilon: float, delta: float, count: int, fine: bool) -> bool:
        return within([*others, replace(single, releases=count)], epsilon, delta, self.accountant, fine)

    def _number(self, history: History) -> int:
        if history not in self._known:
            self._known[history] = len(self._histories)
            self._histories.append(history)
        return self._known[history]

    # -- looking -------------------------------------------------------------------------------------------------

    def history(self, row: int) -> History:
        """What the client in this row has released."""
        return self._histories[int(self._at[row])]

    def releases(self) -> Tensor:
        """[m] how many releases each client was charged for."""
        counts = np.array([_count(history) for history in self._histories])
        return torch.from_numpy(counts[self._at])

    def spent(self) -> Tensor:
        """[m] float64: the accounted epsilon of each client at its delta."""
        keys = np.stack([self._at, self.delta], axis=1)
        cases, members = np.unique(keys, axis=0, return_inverse=True)
        found = [cost(self._histories[int(at)], delta, self.accountant).epsilon for at, delta in cases.tolist()]
        return torch.from_numpy(np.array(found, dtype=np.float64)[members.reshape(-1)])

    def guarantee(self, row: int | None = None, nominal: float | None = None, gaps: Sequence[str] = ()) -> Guarantee:
        """What is promised to the client in this row, or to the one that has spent most."""
        chosen = int(self.spent().argmax()) if row is None else row
        return Guarantee.of(
            self.history(chosen), float(self.delta[chosen]), simulated=self.simulated, accountant=self.accountant,
            nominal=nominal, gaps=gaps,
        )  # fmt: skip

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> Tensor:
        """[m, 8, 4] float64 for a checkpoint: each client's mechanisms and their releases; zeros for none."""
        table = np.zeros((len(self._histories), KINDS, 4))
        for number in np.unique(self._at).tolist():
            history = self._histories[number]
            if len(history) > KINDS:
                raise UserError(
                    f"a client has released things in {len(history)} different ways; at most {KINDS} are kept"
                )
            for place, one in enumerate(history):
                code = _SAMPLINGS.index(one.sampling) + 3 * _ADJACENCIES.index(one.adjacency)
                table[number, place] = one.noise_multiplier, one.rate, code, one.releases
        return torch.from_numpy(table[self._at])

    def restore(self, state: Tensor) -> None:
        """Take over a checkpoint's state; where the file and the checkpoint differ, the larger count holds."""
        rows, members = np.unique(state.cpu().numpy(), axis=0, return_inverse=True)
        saved = [merge([_decoded(*entry) for entry in row.tolist() if entry[3] > 0]) for row in rows]
        pairs, members = np.unique(np.stack([self._at, members.reshape(-1)], axis=1), axis=0, return_inverse=True)
        joined = [self._number(_larger(self._histories[a], saved[b])) for a, b in pairs.tolist()]
        self._at = np.array(joined, dtype=np.int64)[members.reshape(-1)]

    def _replay(self, file: Journal) -> None:
        """Count what the file holds for our clients, and name them as those of the lines to come."""
        place = {client: row for row, client in enumerate(self.ids.tolist())}
        listed: list[int] = []
        for line in file.lines:
            if "mechanism" not in line:
                if (line["simulated"], line["data"]) != (self.simulated, self.data):
                    raise UserError(f"the privacy ledger {file.path} is about other data or another kind of noise")
                listed = line["clients"]
                continue
            bits = np.unpackbits(np.frombuffer(bytes.fromhex(line["clients"]), dtype=np.uint8))[: len(listed)]
            mask = np.zeros(self.ids.size, dtype=bool)
            mask[[place[client] for client in np.array(listed)[bits > 0].tolist() if client in place]] = True
            mechanism = Mechanism(**line["mechanism"])
            before = self._at.copy()
            for number in np.unique(before[mask]).tolist():
                self._at[mask & (before == number)] = self._number(merge([*self._histories[number], mechanism]))
            if self.simulated:
                self._granted[line["release"]] = self._granted.get(line["release"], np.zeros_like(mask)) | mask
        file.listed = file.listed or listed
        self._write(file, [])

    def _write(self, file: Journal, lines: list[dict[str, Any]]) -> None:
        """Append lines about our clients, whose names come first if the lines before were about others."""
        ids = self.ids.tolist()
        if file.listed != ids:
            kind = {"format": FORMAT, "version": VERSION, "simulated": self.simulated, "data": self.data}
            lines = [{**kind, "clients": ids}, *lines]
        if lines:
            file.write(lines)
            file.listed = ids


class _Reach:
    """How many releases of one kind fit into a budget, found out by doubling and halving as far as it is asked."""

    def __init__(self) -> None:
        self.safe = 0  # so many fit
        self.least: int | None = None  # so many do not
        self.doubtful: int | None = None  # so many do not by a coarse look

    def allows(self, count: int, fits: Any) -> bool:
        if count <= self.safe:
            return True
        if self.least is not None and count >= self.least:
            return False
        ahead = 2 * count if self.doubtful is None else (count + self.doubtful) // 2
        if ahead > count:
            if fits(ahead, False):
                self.safe = ahead
                return True
            self.doubtful = ahead
        if fits(count, True):
            self.safe = count
            return True
        self.least = count
        return False


def _charge_line(release: str, mechanism: Mechanism, mask: np.ndarray) -> dict[str, Any]:
    plain = {
        "noise_multiplier": mechanism.noise_multiplier, "rate": mechanism.rate, "sampling": mechanism.sampling,
        "adjacency": mechanism.adjacency, "releases": mechanism.releases,
    }  # fmt: skip
    return {"release": release, "clients": np.packbits(mask).tobytes().hex(), "mechanism": plain}


def _count(history: History) -> int:
    return sum(one.releases for one in history)


def _decoded(multiplier: float, rate: float, code: float, releases: float) -> Mechanism:
    adjacency, sampling = divmod(int(code), 3)
    return Mechanism(multiplier, rate, _SAMPLINGS[sampling], _ADJACENCIES[adjacency], releases=int(releases))


def _larger(one: History, other: History) -> History:
    """For each mechanism the larger number of releases."""
    counts: dict[Mechanism, int] = {}
    for entry in (*one, *other):
        single = replace(entry, releases=1)
        counts[single] = max(counts.get(single, 0), entry.releases)
    return merge([replace(single, releases=count) for single, count in counts.items()])
