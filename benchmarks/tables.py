"""The tables of README.md, from the results: printed, or with --write put between their marks in README.md."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kinfolk.report.speed import figure

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
NOTHING = "–"
Row = dict[str, Any]
OLD_NAMES = {"mlp": "M", "linear": "L"}  # of jobs in results of version 0.1


def read(name: str, folder: Path) -> list[Row]:
    """The results of one program on every device it ran on; another CPU's may be called NAME-cpu-WORD.json."""
    paths = [path for device in ("cpu", "cuda") for path in sorted(folder.glob(f"{name}-{device}*.json"))]
    return [json.loads(path.read_text()) for path in paths]


def training(results: Sequence[Row]) -> str:
    rows = []
    for result in results:
        for row in result["rows"]:
            target = row.get("target")
            rows.append([
                result["facts"]["device"], OLD_NAMES.get(row["job"], row["job"]), row.get("precision", "float32"),
                f"{figure(row['plain_loop_s'])} s", f"{figure(row['kinfolk_s'])} s", f"{figure(row['ratio'])}×",
                f"≥ {target:g}×" if target else NOTHING,
                percent(row.get("of_product_peak")), percent(row.get("of_copy_peak")),
                f"{figure(row['warm_up_s'])} s" if "warm_up_s" in row else NOTHING,
                f"{row['difference']:.0e}" if "difference" in row else NOTHING,
            ])  # fmt: skip
    heads = ["device", "job", "precision", "plain loop", "kinfolk", "ratio", "target", "of product peak",
             "of copy peak", "warm-up", "difference"]  # fmt: skip
    return markdown(heads, rows)


def peaks(results: Sequence[Row]) -> str:
    heads = ["device", "float32", "tf32", "bf16", "copy"]
    rows = []
    for result in results:
        found = result["peaks"]
        flops = [f"{found[name] / 1e12:.3g} TFLOP/s" if name in found else NOTHING for name in heads[1:4]]
        rows.append([result["facts"]["device"], *flops, f"{found['copy'] / 1e9:.3g} GB/s"])
    return markdown(heads, rows)


def scale(results: Sequence[Row]) -> str:
    rows = []
    for result in results:
        device = result["facts"]["device"]
        for row in result["rows"]:
            rows.append([
                device, f"{row['clients']:,}", figure(row["us_per_client_round"]), f"{row['time_ratio']}×",
                f"{row['peak_in_models']}",
            ])  # fmt: skip
        if loop := result.get("plain_loop_us_per_client_round"):
            rows.append([device, "plain loop", figure(loop), NOTHING, NOTHING])
    heads = ["device", "clients", "µs per client and round", "of n = 100", "peak, in n·d·4 bytes, without the data"]
    return markdown(heads, rows)


def experiments(results: Sequence[Row]) -> str:
    parts = ["train", "judge", "match_mix", "evaluate", "log", "checkpoint"]
    rows = []
    for result in results:
        for row in result["rows"]:
            rows.append([
                result["facts"]["device"], f"{row['experiment']} ({row['data']})", f"{row['clients']:,}",
                f"{row['rounds']}", row["precision"], row["preset"], f"{figure(row['wall_s'])} s",
                f"{figure(row['rounds_s'])} s", f"{figure(row['training_and_evaluation_s'])} s",
                percent(row["beside_them"]), f"{figure(1e3 * row['round_s'])} ms",
                percent(row["beside_them_in_a_round"]), *(percent(row["share"][part]) for part in parts),
            ])  # fmt: skip
    heads = ["device", "experiment", "clients", "rounds", "precision", "preset", "all", "its rounds",
             "training and evaluation alone", "beside them", "a round", "beside them in a round",
             "taken apart: train", "judge by loss", "match and mix",
             "evaluate", "log", "checkpoint"]  # fmt: skip
    return markdown(heads, rows)


def large(results: Sequence[Row]) -> str:
    rows = [
        [
            result["facts"]["device"], f"{row['clients']:,}", row["precision"], f"{len(row['round_s'])}",
            f"{figure(row['us_per_client_round'])}", f"{row['models_GB']} GB", f"{row['data_GB']} GB",
            f"{row['peak_GB']} GB",
        ]
        for result in results for row in result["rows"]
    ]  # fmt: skip
    heads = ["device", "clients", "precision", "rounds", "µs per client and round", "models", "data", "peak memory"]
    return markdown(heads, rows)


def ragged(results: Sequence[Row]) -> str:
    rows = [
        [
            result["facts"]["device"], row["job"], f"{row['smallest']} to {row['largest']}",
            figure(row["equal_us_per_sample"]), figure(row["ragged_us_per_sample"]), f"{row['ratio']}×",
            f"≤ {row['target']:g}×",
        ]
        for result in results for row in result["rows"]
    ]  # fmt: skip
    heads = ["device", "job", "samples of a client", "equal, µs per sample", "ragged, µs per sample", "ratio", "target"]
    return markdown(heads, rows)


def private(results: Sequence[Row]) -> str:
    rows = [
        [
            result["facts"]["device"], row["net"], f"{row['clients']} × {row['samples']}",
            f"{figure(row['opacus_s'])} s", f"{figure(row['kinfolk_s'])} s", f"{figure(row['ratio'])}×",
            f"≥ {row['target']:g}×" if row["target"] else NOTHING, f"{row['difference']:.0e}",
        ]
        for result in results for row in result["rows"]
    ]  # fmt: skip
    heads = ["device", "net", "clients × samples", "Opacus", "kinfolk", "ratio", "target", "difference"]
    return markdown(heads, rows)


def domains(results: Sequence[Row]) -> str:
    rows = [
        [
            result["facts"]["device"], row["job"], f"{row['in_a_round']} of {row['clients']}",
            f"{figure(row['fedavg_ms'])} ms", f"{figure(row['fedcg_ms'])} ms", f"{row['ratio']}×",
            f"≤ {row['target']:g}×", f"{figure(row['finding_s'])} s",
        ]
        for result in results for row in result["rows"]
    ]  # fmt: skip
    heads = ["device", "job", "clients in a round", "FedAvg", "FedCG", "ratio", "target", "first round"]
    return markdown(heads, rows)


def curves(results: Sequence[Row]) -> str:
    heads = ["device", "clients", "rounds", "precision", "apart on average", "at most", "at the end", "seeds"]
    rows = []
    for result in results:
        for row in result["compared"]:
            apart = [f"{row['apart_mean']:.2f}", f"{row['apart_most']:.2f}", f"{row['last']:+.2f}"]
            between = f"{row['seeds_deviation']:.2f}" if "seeds_deviation" in row else NOTHING
            run = [result["facts"]["device"], f"{result['clients']:,}", str(result["rounds"])]
            rows.append([*run, row["precision"], *apart, between])
    return markdown(heads, rows)


def facts(name: str, results: Sequence[Row]) -> str:
    """What the numbers were measured on."""
    lines = []
    for result in results:
        known = result["facts"]
        commit = f" ({known['commit']})" if known.get("commit") else ""
        lines.append(
            f"- {known['device']}: torch {known['torch']}, Python {known['python']}, {known['threads']} threads, "
            f"kinfolk {known['kinfolk']}{commit}, {known['measured'][:10]}, `{known['command']}`"
        )
    return "\n".join(lines) if lines else f"Not measured yet: `python benchmarks/{name}.py`."


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {  # mark -> program, table
    "training": ("training", training),
    "peaks": ("training", peaks),
    "scale": ("scale", scale),
    "panm_scale": ("panm-scale", scale),
    "experiments": ("experiments", experiments),
    "large": ("large", large),
    "ragged": ("ragged", ragged),
    "dp": ("dp", private),
    "domains": ("domains", domains),
    "curves": ("curves", curves),
}


def table(mark: str, folder: Path = RESULTS) -> str:
    """The table for a mark with the facts below it."""
    program, write = TABLES[mark]
    results = [result for result in read(program, folder) if mark != "peaks" or "peaks" in result]
    known = facts(program, results)
    return f"{write(results)}\n\n{known}" if results else known


def fill(text: str, folder: Path = RESULTS) -> str:
    """README.md with every table between its marks, `<!-- table: NAME -->` and `<!-- end -->`."""
    pattern = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{table(found[2], folder)}\n{found[3]}", text)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{figure(100 * share)} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--write", action="store_true", help="put them into README.md")
    options = parser.parse_args()
    if options.write:
        README.write_text(fill(README.read_text(), options.results))
        print(README)
        return
    for mark in TABLES:
        print(f"{mark}\n\n{table(mark, options.results)}\n")


if __name__ == "__main__":
    main()
