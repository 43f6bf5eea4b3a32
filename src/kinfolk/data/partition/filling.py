"""Filling clients of given sizes from label priors while every class has a finite stock.

The process: pick a random client that is not full, draw a class from its prior, give it an unused sample of
that class; if the class is used up draw again; if every class of its prior is used up take any class that is
left. Done literally this is a loop over all samples, which can run forever on a small prior. Here the whole
sequence is drawn at once and repaired each time a class runs out, which happens at most once per class.
"""

import numpy as np
import numpy.typing as npt

from kinfolk.data.partition.base import Ints, generator

Floats = npt.NDArray[np.float64]

NEGLIGIBLE = 1e-12  # a class with less prior than this is not worth waiting for


def fill(prior: Floats, sizes: Ints, stock: Ints, seed: int, purpose: str) -> tuple[Ints, int]:
    """Draw how many samples of each class every client gets.

    prior: [n, C]; sizes: [n], in all at most the stock; stock: [C].
    Returns counts [n, C], and the number of clients that had to take classes outside their prior.
    """
    clients, classes = prior.shape
    if not sizes.any():  # nothing to draw, and perhaps nothing left to draw from
        return np.zeros((clients, classes), dtype=np.int64), 0
    client, chance = _sequence(sizes, seed, purpose)
    available = stock > 0
    chosen, outside = _draw(prior, available, client, chance)
    beside = set(client[outside].tolist())
    for event in range(classes):
        finished, position = _first_exhausted(chosen, stock, available)
        if finished < 0:
            break
        available[finished] = False
        late = position + 1 + np.flatnonzero(chosen[position + 1 :] == finished)
        if late.size:
            again = generator(seed, f"{purpose}/again", event).random(late.size)
            chosen[late], outside = _draw(prior, available, client[late], again)
            beside.update(client[late][outside].tolist())
    counts = np.bincount(client * classes + chosen, minlength=clients * classes)
    return counts.reshape(clients, classes), len(beside)


def _sequence(sizes: Ints, seed: int, purpose: str) -> tuple[Ints, Floats]:
    """Who is served when, and a uniform draw for each serving.

    A client is served at the arrivals of its own Poisson process. Merged over clients that is a uniform
    choice among the clients that are not full, yet every client's draws depend on its own id only.
    """
    times, chances = [], []
    for client, size in enumerate(sizes):
        draws = generator(seed, f"{purpose}/fill", client)
        times.append(np.cumsum(draws.exponential(size=size)))
        chances.append(draws.random(size))
    order = np.argsort(np.concatenate(times), kind="stable")
    return np.repeat(np.arange(len(sizes)), sizes)[order], np.concatenate(chances)[order]


def _draw(
    prior: Floats, available: npt.NDArray[np.bool_], client: Ints, chance: Floats
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.bool_]]:
    """A class for each entry of `client`: from its prior, or any available one where the prior is used up.

    Drawing from the prior restricted to what is available is the same as drawing again until it is. Also says
    which entries were drawn outside the prior.
    """
    classes = prior.shape[1]
    weight = np.where(available & (prior > NEGLIGIBLE), prior, 0.0)
    dry = weight.sum(1) == 0
    weight[dry] = available
    ladder = np.cumsum(weight, axis=1)
    ladder /= ladder[:, -1:]
    # One search for all: client i's ladder stands at height i, and the factor keeps i + chance below i + 1.
    steps = (ladder + np.arange(len(prior))[:, None]).ravel()
    found = np.searchsorted(steps, client + chance * (1 - 1e-9), side="right") - client * classes
    return found.astype(np.int16), dry[client]  # 16 bits: numpy sorts them by radix


def _first_exhausted(chosen: npt.NDArray[np.int16], stock: Ints, available: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """The available class that runs out first, and the position of its last sample; (-1, -1): none does."""
    by_class = np.argsort(chosen, kind="stable")
    wanted = np.bincount(chosen, minlength=len(stock))
    begins = np.cumsum(wanted) - wanted
    ending = np.flatnonzero(available & (wanted >= stock))
    if not ending.size:
        return -1, -1
    positions = by_class[begins[ending] + stock[ending] - 1]
    first = int(np.argmin(positions))
    return int(ending[first]), int(positions[first])
