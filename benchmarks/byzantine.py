"""Every rule of aggregation against every attack, on the digits: what the honest clients still reach.

Two settings. `alike`: 40 clients with samples of the same kind, gossip with ten random peers. `clusters`: 40 clients in
four groups whose images are turned differently, PANM, which looks for its kin and averages with five of them. Accuracy
is that of the honest clients' own models on their own test samples, mean over clients and seeds. Beside every table
stands what each client reaches alone (`local`): with attackers about, learning together can be worse than that.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import facts

import kinfolk
from kinfolk.aggregation import Inbox, make

DOCS = Path(__file__).parents[1] / "docs" / "results" / "byzantine"
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "sign-flip": {"attack_scale": 10.0},
    "label-flip": {},
    "gaussian": {"attack_scale": 1.0},
    "ipm": {"attack_scale": 10.0},
    "alie": {"attack_scale": 1.5},
    "mimic": {},
    "nan": {},
    "free-rider": {},
    "gaming": {"attack_scale": 10.0},
}
RULES = ("mean", "median", "trimmed-mean", "krum", "m-krum", "clipping", "balance", "ubar")
BYZANTINE = ("trimmed-mean", "krum", "m-krum", "clipping")  # rules that are told how many to reckon with
DATA = {"name": "digits", "clients": 40, "train": 30, "test": 10}
SETTINGS: dict[str, dict[str, Any]] = {
    "alike": {"data": {**DATA, "split": {"kind": "iid"}}, "method": {"name": "random", "neighbors": 10}},
    "clusters": {
        "data": {**DATA, "split": {"kind": "rotation", "clusters": 4}},
        "method": {"name": "panm", "neighbors": 5, "candidates": 10, "discover_rounds": 15},
    },
}
TABLES = (("alike", 0.2, 3), ("alike", 0.3, 4), ("clusters", 0.2, 2))  # setting, share of attackers, byzantine
COMMON = {
    "model": {"name": "mlp", "hidden": 32, "layers": 1},
    "training": {"epochs": 2, "batch_size": 10, "lr": 0.05},
}


def measure(setting: str, share: float, byzantine: int, rule: str, attack: str, seed: int, rounds: int) -> float:
    """Mean accuracy of the honest clients after the last round; rule `local`: each alone."""
    sections = {"name": "byzantine", **COMMON, **SETTINGS[setting]}
    sections["run"] = {"rounds": rounds, "evaluate_every": rounds, "seed": seed, "device": "cpu"}
    if attack != "none":
        sections["faults"] = {"attackers": share, "attack": attack, **ATTACKS[attack]}
    if rule == "local":
        sections["method"] = {"name": "local"}
    else:
        sections["aggregation"] = {"rule": rule} | ({"byzantine": byzantine} if rule in BYZANTINE else {})
    with tempfile.TemporaryDirectory() as folder:
        return kinfolk.run(sections, out=Path(folder) / "run").accuracy


def all_rows(seeds: int, rounds: int) -> list[dict[str, Any]]:
    """One row for each table, rule, attack and seed, with a line of progress for each rule."""
    rows: list[dict[str, Any]] = []
    started, total = time.perf_counter(), len(TABLES) * (len(RULES) * len(ATTACKS) + 1) * seeds
    for setting, share, byzantine in TABLES:
        for rule in ("local", *RULES):
            for attack in ATTACKS if rule != "local" else ("none",):
                for seed in range(seeds):
                    accuracy = measure(setting, share, byzantine, rule, attack, seed, rounds)
                    rows.append({
                        "setting": setting, "attackers": share, "rule": rule, "attack": attack, "seed": seed,
                        "accuracy": round(accuracy, 6),
                    })  # fmt: skip
            spent = time.perf_counter() - started
            left = spent / len(rows) * (total - len(rows))
            print(f"{setting} {share:.0%} {rule}: {len(rows)} of {total} runs, {left:.0f} s left", file=sys.stderr)
    return rows


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run."""
    with open(path, newline="", encoding="utf-8") as file:
        return [row | {k: float(row[k]) for k in ("attackers", "accuracy")} for row in csv.DictReader(file)]


def mean(rows: list[dict[str, Any]], **where: Any) -> float:
    """Mean accuracy over the rows with these values, in per cent."""
    return 100 * statistics.mean(row["accuracy"] for row in rows if all(row[k] == v for k, v in where.items()))


def table(rows: list[dict[str, Any]], setting: str, share: float) -> str:
    """Rules by attacks, in Markdown; below it the best rule against each attack and what it keeps."""
    here = {"setting": setting, "attackers": share}
    cells = {(r, a): mean(rows, **here, rule=r, attack=a) for r in RULES for a in ATTACKS}
    alone, undisturbed = mean(rows, **here, rule="local"), cells["mean", "none"]
    best = {a: max(RULES, key=lambda rule: cells[rule, a]) for a in ATTACKS}
    lines = ["| rule | " + " | ".join(ATTACKS) + " | worst |", "|---" * (len(ATTACKS) + 2) + "|"]
    for rule in RULES:
        values = [cells[rule, attack] for attack in ATTACKS]
        marked = [f"**{v:.1f}**" if best[a] == rule else f"{v:.1f}" for a, v in zip(ATTACKS, values)]
        lines.append(f"| {rule} | " + " | ".join(marked) + f" | {min(values):.1f} |")
    kept = [f"{100 * cells[best[a], a] / undisturbed:.0f} %" for a in ATTACKS]
    lines.append("| best, of the mean undisturbed | " + " | ".join(kept) + " | |")
    least = min(100 * cells[best[a], a] / undisturbed for a in ATTACKS)
    steady = max(RULES, key=lambda rule: min(cells[rule, a] for a in ATTACKS))
    worst = min(cells[steady, a] for a in ATTACKS)
    return "\n".join(lines) + (
        f"\n\nAlone (`local`) a client reaches {alone:.1f}. The best rule against each attack keeps at least "
        f"{least:.0f} % of {undisturbed:.1f}. The rule with the best worst case is `{steady}`: {worst:.1f}, "
        f"{100 * worst / undisturbed:.0f} %.\n"
    )


def costs(clients: int = 100, peers: int = 10, numbers: int = 100_000, times: int = 9) -> str:
    """What one averaging of many clients takes with each rule, in Markdown."""
    source = torch.Generator().manual_seed(0)
    models = torch.randn(clients, numbers, generator=source)
    rows = torch.stack([torch.randperm(clients, generator=source)[:peers] for _ in range(clients)])

    def judged(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(clients), torch.ones(rows.shape)

    rules = {name: make({"rule": name} | ({"byzantine": 3} if name in BYZANTINE else {})) for name in RULES}
    taken: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(times):  # in turns, so that a busy machine hurts all
        for name, rule in rules.items():
            inbox = Inbox(models, models, rows, losses=judged, absent=torch.zeros(clients, dtype=torch.bool))
            start = time.perf_counter()
            rule.combine(inbox)
            taken[name].append(time.perf_counter() - start)
    least = {name: min(seconds) for name, seconds in taken.items()}
    lines = ["| rule | milliseconds | times the mean |", "|---|---|---|"]
    lines += [f"| {name} | {1000 * s:.0f} | {s / least['mean']:.1f} |" for name, s in least.items()]
    told = f"One averaging of {clients} clients with {peers} peers each, models of {numbers:,} numbers, one thread"
    return "\n".join([f"{told}; the fastest of {times}. UBAR without its forward passes.", "", *lines, ""])


TITLES = {
    "alike": "clients alike, gossip with ten random peers",
    "clusters": "four groups, PANM with five neighbors",
}


def page(rows: list[dict[str, Any]], seeds: int, rounds: int) -> str:
    known = facts(torch.device("cpu"))
    scales = ", ".join(f"{name} {v['attack_scale']:g}" for name, v in ATTACKS.items() if "attack_scale" in v)
    parts = [
        "# Rules against attacks",
        "",
        "Made by `benchmarks/byzantine.py`; every run is in [byzantine.csv](byzantine.csv). Embedded digits, 40 "
        f"clients with 30 training and 10 test samples each, an MLP with 32 hidden units, {rounds} rounds, {seeds} "
        "seeds. Accuracy in per cent of the honest clients, mean over clients and seeds; in column `none` nobody "
        f"attacks and all clients count. Bold: the best rule against an attack. Scales: {scales}. `mimic` copies the "
        "first honest client, `gaming` pursues a drawn one. Differences of about a point are chance: a seed has 280 to "
        "400 test samples.",
        "",
        f"```\npython benchmarks/byzantine.py --seeds {seeds} --rounds {rounds}\n```",
        "",
        f"kinfolk {known['kinfolk']}, torch {known['torch']}, Python {known['python']}, {known['device']}, "
        f"one thread, {known['measured'][:10]}.",
        "",
    ]
    for setting, share, byzantine in TABLES:
        parts += [f"## {share:.0%} attackers: {TITLES[setting]}".replace("%", " %"), ""]
        parts += [f"`byzantine = {byzantine}` where a rule has it.", "", table(rows, setting, share)]
    parts += ["## What the rules cost", "", costs()]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--page", action="store_true", help="only write README.md, from the runs in byzantine.csv")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder for README.md and byzantine.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the steps are small
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "byzantine.csv"
    if not options.page:
        rows = all_rows(options.seeds, options.rounds)
        with open(kept, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    text = page(read(kept), options.seeds, options.rounds)
    (options.out / "README.md").write_text(text, encoding="utf-8")
    print(options.out / "README.md")


if __name__ == "__main__":
    main()
