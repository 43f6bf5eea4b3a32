"""Your own arrays: what is taken as it is, what is converted, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import kinfolk
from conftest import tiny_experiment
from kinfolk import Federation, UserError

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.arange(6) % 3
PAIR = (X, Y)


def of(x: Any, y: Any = Y, **more: Any) -> Federation:
    """Two clients with these samples for training, and plain ones for testing."""
    plain = np.zeros((1, *np.shape(x)[1:]), dtype=np.float32)
    return Federation.from_arrays([(x, y)] * 2, [(plain, [0])] * 2, **more)


# -- inputs ------------------------------------------------------------------------------------------------------


TYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float64", ">f4"]


@pytest.mark.parametrize("kind", [*TYPES, ">i2"])
def test_inputs_of_every_type_become_float32_as_they_are(kind: str) -> None:
    x = X.astype(kind)
    data = of(x)
    assert data.train.x.dtype == torch.float32
    assert data.train.x[:6].numpy().tolist() == x.astype(np.float32).tolist()


def test_a_run_on_whole_numbers_is_that_on_the_same_floats() -> None:
    models = []
    for kind in (np.int16, np.float32):
        data = Federation.from_arrays([(X.astype(kind), Y)] * 3, [(X.astype(kind), Y)] * 3)
        models.append(kinfolk.run(tiny_experiment(run={"rounds": 1}), data=data).weights())
    assert torch.equal(*models)


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "backwards": lambda x: x[::-1],
    "one row backwards": lambda x: x[:1][::-1],
    "columns first": lambda x: np.asfortranarray(x),
    "every second": lambda x: x[::2],
    "columns of a table": lambda x: np.rec.fromarrays([x[:, 0], Y.astype("i1")])["f0"][:, None],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_arrays_may_lie_in_memory_as_they_like(view: Callable[[np.ndarray], np.ndarray]) -> None:
    x = view(X)
    data = of(x, view(Y[:, None])[:, 0])
    assert data.train.x[: len(x)].tolist() == x.tolist()


def test_an_array_that_cannot_be_written_is_taken_without_a_warning() -> None:
    x = X.copy()
    x.setflags(write=False)
    assert torch.equal(of(x).train.x, of(X).train.x)


def test_a_number_per_sample_is_one_feature() -> None:
    data = Federation.from_arrays([(X[:, 0], Y)] * 2, [(X[:2, 0], Y[:2])] * 2)
    assert data.input_shape == (1,)
    assert data.train.x[:6, 0].tolist() == X[:, 0].tolist()
    one = TensorDataset(torch.from_numpy(X[:, 0]), torch.from_numpy(Y))
    assert torch.equal(Federation.from_datasets([one] * 2, [one] * 2).train.x, data.train.x)


def test_a_client_may_have_nothing_to_test_on_whatever_shape_that_has() -> None:
    data = Federation.from_arrays([PAIR] * 3, [(X[:2], Y[:2]), ([], []), (np.zeros((0, 9)), [])])
    assert data.test.sizes.tolist() == [2, 0, 0]
    assert list(data.test.x.shape) == [2, 4]


# -- what is refused ---------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "other tests": (
        lambda: Federation.from_arrays([PAIR], [(X[:, :3], Y)]),
        r"client 0 test: inputs of shape \[3\], training has \[4\]",
    ),
    "beyond float32": (lambda: of(X.astype("f8") + 1e300), r"inputs hold up to 1e\+300, which float32 cannot"),
    "infinite": (lambda: of(X / np.float32(np.inf) + np.inf), "client 0 train: inputs hold NaN or infinite values"),
    "complex": (lambda: of(X + 1j), "inputs of type complex64, real numbers"),
    "complex tensor": (lambda: of(torch.zeros(6, 4) + 1j), "inputs of type torch.complex64, real numbers"),
    "texts": (lambda: of(X.astype(str)), "inputs of type <U"),
    "objects": (lambda: of(X.astype(object)), "inputs of type object, real numbers"),
    "ragged lists": (lambda: Federation.from_arrays([([[1.0], [1.0, 2.0]], [0, 1])], [PAIR]), "inputs that are no arr"),
    "fractions as labels": (lambda: of(X, Y + 0.5), r"client 0 train: labels such as 0\.5, whole numbers from 0 on"),
    "NaN as a label": (lambda: of(X, np.where(Y, Y, np.nan)), "labels such as nan"),
    "names as labels": (lambda: of(X, Y.astype(str)), "labels of type <U21, real numbers"),
    "numbers as labels": (
        lambda: of(X, Y + 10**12),
        "labels run up to 1,000,000,000,00.: number them",
    ),
    "one label for all": (lambda: of(X, 1), r"\[6, 4\] inputs but \[\] labels"),
    "a number for all": (lambda: Federation.from_arrays([(1.0, 1)], [PAIR]), r"\[\] inputs but \[\] labels"),
    "triples": (lambda: Federation.from_arrays([(X, Y, Y)], [PAIR]), "client 0 train is 3 things: a pair .*arrays is"),
    "data sets": (
        lambda: Federation.from_arrays([TensorDataset(torch.zeros(6, 4))] * 2, [PAIR] * 2),
        "client 0 train is of type TensorDataset.* Federation.from_datasets",
    ),
    "arrays alone": (lambda: Federation.from_arrays(X, X), "client 0 train is of type ndarray: a pair"),  # type: ignore[arg-type]
    "samples of three": (
        lambda: Federation.from_datasets([TensorDataset(*[torch.zeros(2)] * 3)], [TensorDataset(torch.zeros(2))]),
        r"client 0 train: a sample is 3 things, \(x, label\) is needed",
    ),
    "samples of many labels": (
        lambda: Federation.from_datasets([[(0.0, [0, 1])]], [[(0.0, 0)]]),
        r"client 0 train: a label of shape \[2\], one number",
    ),
    "samples of fractions": (lambda: Federation.from_datasets([[(0.0, 0.5)]], [[(0.0, 0)]]), "labels such as 0.5"),
    "samples of two shapes": (
        lambda: Federation.from_datasets([[([0.0], 0), ([0.0, 1.0], 0)]], [[([0.0], 0)]]),
        r"client 0 train: inputs of shapes \[1\] and \[2\]",
    ),
    "negative clusters": (lambda: of(X, clusters=[0, -1]), "clusters such as -1: every client needs one"),
    "parts of clusters": (lambda: of(X, clusters=[0, 0.5]), "clusters such as 0.5: every client needs one"),
    "no clusters": (lambda: of(X, clusters=[None, None]), "clusters such as None: every client needs one"),
    "a table of clusters": (lambda: of(X, clusters=[[0], [1]]), r"\[2, 1\] clusters for 2 clients"),
}


@pytest.mark.parametrize(("made", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_used_is_one_line(made: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        made()
    assert "\n" not in str(error.value)


# -- labels and clusters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float64", "float32", "int8", "uint16", ">i4"])
def test_whole_numbers_of_every_type_are_labels(kind: str) -> None:
    data = of(X, Y.astype(kind))
    assert data.train.y.dtype == torch.int64
    assert data.train.y.tolist() == Y.tolist() * 2


CLUSTERS: dict[str, tuple[Any, list[int], list[str]]] = {
    "small numbers": ([1, 0, 1], [1, 0, 1], []),
    "with a gap": ([2, 0, 2], [2, 0, 2], []),
    "a tensor": (torch.tensor([1, 0, 1]), [1, 0, 1], []),
    "whole floats": ([1.0, 0.0, 1.0], [1, 0, 1], []),
    "huge numbers": ([10**12, 7, 10**12], [1, 0, 1], ["clusters are counted from 0: 7 is 0, 1000000000000 is 1"]),
    "names": (["wrist", "ankle", "wrist"], [1, 0, 1], ["clusters are counted from 0: ankle is 0, wrist is 1"]),
}


@pytest.mark.parametrize(("clusters", "numbers", "notes"), CLUSTERS.values(), ids=CLUSTERS.keys())
def test_clusters_are_small_numbers_in_the_end(clusters: Any, numbers: list[int], notes: list[str]) -> None:
    data = Federation.from_arrays([PAIR] * 3, [PAIR] * 3, clusters=clusters)
    assert data.clusters is not None
    assert data.clusters.tolist() == numbers
    assert data.notes == notes
    assert data.train.domains is not None
    assert data.train.domains.tolist() == np.repeat(numbers, 6).tolist()
