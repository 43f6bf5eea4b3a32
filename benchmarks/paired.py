"""How much better each row of a study is than one of its rows, paired by client and seed.

    python benchmarks/paired.py p4/partitions --against Local
    python benchmarks/paired.py p4/partitions data.clients=64 --out runs/p4 --against Local

Nothing is run: it reads the cells that `kinfolk reproduce` has finished, with the same settings and --out. A difference
is the mean over all clients of all seeds that both rows have, with its standard error; what is more than two of these
from zero has a star. Clients' results are compared at the last round.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from kinfolk.experiment import Result
from kinfolk.reproduce import Reproduction, look


@dataclass(frozen=True)
class Difference:
    """Of two rows in a column, in points."""

    mean: float
    error: float
    seeds: int

    def __str__(self) -> str:
        star = " *" if abs(self.mean) > 2 * self.error else ""
        return f"{self.mean:+.1f} ± {self.error:.1f} ({self.seeds}){star}"


def of_clients(result: Result, key: str) -> np.ndarray:
    """[n] in percent, NaN where a client has none."""
    return np.array([100 * float(row.get(key, np.nan)) for row in result.clients])


def difference(first: list[Result], second: list[Result], key: str = "accuracy") -> Difference | None:
    """first - second, which hold the same seeds in the same order."""
    pairs = list(zip(first, second, strict=True))
    gains = [of_clients(one, key) - of_clients(other, key) for one, other in pairs]
    known = np.concatenate(gains) if gains else np.zeros(0)
    known = known[np.isfinite(known)]
    if known.size < 2:
        return None
    return Difference(float(known.mean()), float(known.std(ddof=1) / known.size**0.5), len(pairs))


def table(study: Reproduction, against: str, key: str) -> list[list[str]]:
    """A line for each row, a cell for each column."""
    found: dict[tuple[str, str], dict[int, Result]] = {}
    for cell in study.cells:
        result = study.result(cell)
        if result is not None:
            found.setdefault((cell.row, cell.column), {})[cell.seed] = result
    lines = [["minus " + against, *study.study.columns]]
    for row in study.study.rows:
        if row == against:
            continue
        cells = []
        for column in study.study.columns:
            ours, theirs = found.get((row, column), {}), found.get((against, column), {})
            seeds = sorted(ours.keys() & theirs.keys())
            cells.append(difference([ours[s] for s in seeds], [theirs[s] for s in seeds], key))
        lines.append([row, *("–" if cell is None else str(cell) for cell in cells)])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("settings", nargs="*", help="as they were given to `kinfolk reproduce`")
    parser.add_argument("--against", default="Local", help="the row that others are compared with")
    parser.add_argument("--key", default="accuracy", help="a column of clients.csv")
    parser.add_argument("--out", help="as it was given to `kinfolk reproduce`")
    options = parser.parse_intermixed_args()
    study = look(options.study, options.settings, out=options.out)
    if options.against not in study.study.rows:
        raise SystemExit(f"no row '{options.against}' in this study: {', '.join(study.study.rows)}")
    lines = table(study, options.against, options.key)
    for number, line in enumerate(lines):
        print("| " + " | ".join(line) + " |")
        if number == 0:
            print("|" + "---|" * len(line))


if __name__ == "__main__":
    main()
