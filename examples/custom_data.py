"""Bring your own data: one training set and one test set per client, as arrays or as torch Datasets.

Here twelve sites measure the same two quantities, but half of the sites have a sensor mounted upside down.
Run it with: python examples/custom_data.py
"""

import numpy as np
import torch
from torch.utils.data import TensorDataset

import kinfolk

SITES = 12
rng = np.random.default_rng(0)


def measurements(site: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points around two centers; the label says which, and sites 6 to 11 see everything mirrored."""
    labels = rng.integers(0, 2, count)
    points = rng.normal(size=(count, 2)) + np.where(labels[:, None] == 1, 1.2, -1.2)
    return (points if site < 6 else -points).astype(np.float32), labels


def as_dataset(arrays: tuple[np.ndarray, np.ndarray]) -> TensorDataset:
    return TensorDataset(torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1]))


if __name__ == "__main__":
    train = [measurements(site, 8) for site in range(SITES)]
    test = [measurements(site, 200) for site in range(SITES)]
    mounted = [0] * 6 + [1] * 6  # only for measuring: leave it out if you do not know

    data = kinfolk.Federation.from_arrays(train, test, clusters=mounted, name="sensors")
    same = kinfolk.Federation.from_datasets([as_dataset(a) for a in train], [as_dataset(a) for a in test], mounted)
    assert torch.equal(data.train.x, same.train.x)  # both ways hold the same samples

    experiment = {
        "name": "sensors",
        "model": {"name": "linear"},
        "training": {"epochs": 2, "batch_size": 4, "lr": 0.05},
        "method": {"name": "random", "neighbors": 3},
        "run": {"rounds": 20},
    }
    comparison = kinfolk.compare(experiment, ["random", "fedavg"], data=data)
    for row in comparison.rows:
        helped = (
            "" if row.helped is None else f", helped {100 * row.helped:.0f} % of the sites, hurt {100 * row.hurt:.0f} %"
        )
        print(f"{row.method:>7}: accuracy {100 * row.accuracy:.1f} %{helped}")
