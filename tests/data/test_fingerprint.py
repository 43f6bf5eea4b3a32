from dataclasses import replace

import torch

from conftest import make_federation
from kinfolk import Federation
from kinfolk.data.fingerprint import fingerprint


def changed(data: Federation) -> dict[str, Federation]:
    """The same federation with one thing changed."""
    train, labels = data.train.x.clone(), data.test.y.clone()
    train[0, 0] += 1e-3
    labels[0] = (labels[0] + 1) % 3
    assert data.clusters is not None
    return {
        "a training input": replace(data, train=replace(data.train, x=train)),
        "a test label": replace(data, test=replace(data.test, y=labels)),
        "who holds them": replace(data, train=replace(data.train, sizes=data.train.sizes.flip(0))),
        "the clusters": replace(data, clusters=1 - data.clusters),
        "more samples": replace(data, common=data.test.select(torch.tensor([0]))),
        "more classes": replace(data, classes=4),
    }


def test_the_same_data_have_the_same_fingerprint_whatever_they_are_called() -> None:
    data = make_federation([4, 5], clusters=[0, 1])
    again = replace(make_federation([4, 5], clusters=[0, 1]), name="other", notes=["a note"])
    assert fingerprint(data) == fingerprint(again)
    assert fingerprint(data).items() >= {"clients": 2, "classes": 3, "input_shape": [6]}.items()


def test_every_change_of_the_data_changes_the_fingerprint() -> None:
    data = make_federation([4, 5], clusters=[0, 1])
    found = {what: fingerprint(other) for what, other in {"nothing": data, **changed(data)}.items()}
    assert len({tuple(map(str, each.items())) for each in found.values()}) == len(found)


def test_samples_of_every_type_and_an_empty_part_have_a_fingerprint() -> None:
    data = make_federation([4, 5], tests=0)
    short = replace(data, train=replace(data.train, x=data.train.x.to(torch.bfloat16)))
    assert fingerprint(short)["sum"] != fingerprint(data)["sum"]
