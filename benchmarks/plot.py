"""Time per client and round against the number of clients, from the results of `scale.py`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent / "results"
DEVICES = {"cpu": ("CPU", "#1f6f8b"), "cuda": ("GPU", "#b5442e")}


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of `scale.py` that are there, by device."""
    paths = {device: folder / f"scale-{device}.json" for device in DEVICES}
    return {device: json.loads(path.read_text()) for device, path in paths.items() if path.exists()}


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    for device, result in results.items():
        word, color = DEVICES[device]
        clients = [row["clients"] for row in result["rows"]]
        times = [row["us_per_client_round"] for row in result["rows"]]
        axes.plot(clients, times, "o-", color=color, label=f"kinfolk, {word}: {result['facts']['device']}")
        if loop := result.get("plain_loop_us_per_client_round"):
            axes.axhline(loop, color=color, linestyle="--", linewidth=1, label=f"plain loop over clients, {word}")
    axes.set(xscale="log", yscale="log", xlabel="clients", ylabel="µs per client and round")
    axes.set_title("A round of random gossip, MLP 784-64-10, 20 samples each", loc="left", fontsize=10)
    axes.grid(which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--out", type=Path, default=None, help="default: scale.png beside them")
    options = parser.parse_args()
    results = read(options.results)
    if not results:
        raise SystemExit(f"no scale-cpu.json or scale-cuda.json in {options.results}: run benchmarks/scale.py")
    path = options.out or options.results / "scale.png"
    draw(results, path)
    print(path)


if __name__ == "__main__":
    main()
