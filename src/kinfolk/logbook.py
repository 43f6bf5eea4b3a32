"""What is put down of every round: who mixed with whom, what the method notes, metrics; and who is told of it.

On a GPU a round is put down while the next ones are being computed: working out a row of metrics and writing it takes
longer than launching a round, and the GPU would have nothing to do. What was found is copied behind the round's own
work (see `parcel`) and put down when it has come. Rounds stay in order, and one parcel at a time is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kinfolk import engines, records
from kinfolk.findings import Later, Results
from kinfolk.metrics import Edges
from kinfolk.parcel import Parcel
from kinfolk.runs.folder import RunFolder

FETCH_ROUNDS = 16  # rounds between fetching who mixed with whom from the device

Row = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A round that has not been put down yet."""

    t: int
    parcel: Parcel
    write: Later[Row | None]  # puts it down, once; the row of metrics, if it was evaluated


class Logbook:
    """Of one run. Whatever ends the run inside `with`, rounds that were done are put down first."""

    def __init__(
        self,
        engine: engines.Engine,
        folder: RunFolder,
        truth: records.Truth,
        method: Any,
        told: Callable[[int, Row | None], None],
        seconds: Callable[[], float],
        late: bool | None = None,
    ) -> None:
        """told(t, row) hears of every round; seconds() since the start of the run; late: whether rounds are put down
        while later ones are being computed, None: on a GPU."""
        self.engine, self.folder, self.truth, self.method = engine, folder, truth, method
        self.told, self.seconds = told, seconds
        self.late = engine.shards[0].cohort.device.type == "cuda" if late is None else late
        self.results: Results | None = None  # of the last evaluation put down
        self._waiting: deque[Entry] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            return
        try:
            self._put_down_all()
        except BaseException as failure:  # why the run ends matters more
            error.add_note(f"nor could the rounds before it be put down: {failure!r}")

    def add(self, t: int, evaluate: bool) -> None:
        """Round t has been launched: take from the engine what it finds, before the next round changes it."""
        if seen := engines.seen(self.engine):  # rare, and watching has made Python wait for the device already
            self.folder.append_similarity(t, seen)
        parcel = Parcel(self.late)
        write: Later[Row | None] = _nothing
        if evaluate or t % FETCH_ROUNDS == 0:
            self._put_down_all()
            write = self._evaluated(t, parcel) if evaluate else self._mixed(parcel)
            parcel.send()
        self._waiting.append(Entry(t, parcel, write))
        if not self.late:
            self._put_down_all()

    def catch_up(self) -> None:
        """Put down the rounds whose parcels have come."""
        while self._waiting and self._waiting[0].parcel.arrived:
            self._put_down()

    def flush(self) -> None:
        """Put down everything so far, for a checkpoint."""
        self._put_down_all()
        parcel = Parcel(self.late)
        write = self._log(parcel)
        parcel.send()
        write()

    def _put_down_all(self) -> None:
        while self._waiting:
            self._put_down()

    def _put_down(self) -> None:
        self._waiting[0].parcel.wait()  # whoever is interrupted in this still has the round
        entry = self._waiting.popleft()
        try:
            self.told(entry.t, entry.write())
        except BaseException:  # nobody is told of later rounds when this one could not be put down
            self._waiting.clear()
            raise

    def _log(self, parcel: Parcel) -> Later[Edges]:
        """Notes, and who mixed with whom, of the rounds since the last time; the edges of the last of them."""
        notes, edges = engines.notes(self.engine, parcel), engines.edges(self.engine, parcel)

        def write() -> Edges:
            self.folder.append_rounds(notes())
            last = Edges.none()
            for t, last in edges():
                self.folder.graph.add(t, last.client, last.neighbor, last.weight)
            return last

        return write

    def _mixed(self, parcel: Parcel) -> Later[None]:
        log = self._log(parcel)

        def write() -> None:
            log()

        return write

    def _evaluated(self, t: int, parcel: Parcel) -> Later[Row]:
        log, results = self._log(parcel), engines.evaluated(self.engine, parcel)
        # These look at the engine, which is at a later round when the row is written. Most runs have none of them.
        more = records.promised(self.engine) | records.outside(self.engine) | records.of_method(self.engine)

        def write() -> Row:
            seconds, edges = self.seconds(), log()
            self.results = results()
            row = records.measure(t, self.results, edges, self.truth, self.method, seconds) | more
            self.folder.append_metrics(row)
            return row

        return write


def _nothing() -> None:
    """Of a round that was neither evaluated nor fetched."""
