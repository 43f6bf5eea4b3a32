"""Images turned on top of any split: what is turned, who knows of it, and what is carried along."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import UserError
from kinfolk.assembly import load_split
from kinfolk.cohort.visit import _some
from kinfolk.config import Config, read
from kinfolk.data.partition import SPLITS, Labels, set_apart, turned

OUTSIDE = {"new_clients": 3, "validation_clients": 2}


def experiment(rotate: str | None, seed: int = 0, **data: Any) -> Config:
    chosen = {"split": {"kind": "iid"}, **OUTSIDE, **data}
    return read(tiny_experiment(data=chosen | ({} if rotate is None else {"rotate": rotate}), run={"seed": seed}))


def writers(count: int) -> Labels:
    return Labels(np.arange(6 * count) % 3, np.zeros(0, np.int64), 3, np.repeat(np.arange(count), 6))


@pytest.mark.parametrize("rotate", ["clients", "samples"])
def test_every_image_is_the_plain_one_turned_by_its_domain(rotate: str) -> None:
    plain, found = (kinfolk.load_federation(experiment(how)) for how in (None, rotate))
    assert found.domains == 4
    for name, part in found.parts().items():
        assert part.domains is not None
        assert part.domains.shape == part.y.shape
        assert torch.equal(part.y, plain.parts()[name].y)
        for image, before, turns in zip(part.x, plain.parts()[name].x, part.domains.tolist()):
            assert torch.equal(image, torch.rot90(before, turns, (1, 2)))
    assert plain.domains == 0
    assert all(part.domains is None for part in plain.parts().values())


def test_across_clients_each_has_one_angle_and_angles_are_as_frequent_as_can_be() -> None:
    data = kinfolk.load_federation(experiment("clients"))
    assert data.clusters is not None
    known = torch.cat([data.clusters, data.outside["validation"], data.outside["newcomers"]])
    assert sorted(known.bincount().tolist()) == [3, 3, 3, 4]
    for name, clusters in (("train", data.clusters), ("test", data.clusters), *data.outside.items()):
        part = data.parts()[name]
        assert torch.equal(part.domains, torch.repeat_interleave(clusters, part.sizes))


def test_inside_clients_all_angles_are_mixed_and_nobody_is_in_a_cluster() -> None:
    data = kinfolk.load_federation(experiment("samples", global_test=40))
    assert data.clusters is None
    assert not data.outside
    assert all(own.unique().tolist() == [0, 1, 2, 3] for own in data.train.domains.split(data.train.sizes.tolist()))
    shares = torch.cat([part.domains for part in data.parts().values()]).bincount() / sum(
        part.y.numel() for part in data.parts().values()
    )
    assert float((shares - 0.25).abs().max()) < 0.06
    assert data.common is not None
    assert data.common.domains.unique().tolist() == [0, 1, 2, 3]


def test_an_image_stands_the_same_way_wherever_it_is_held() -> None:
    """Test samples that iid shares between clients, and the same set under another split."""
    one = load_split(experiment("samples"))[1]
    other = load_split(experiment("samples", split={"kind": "dirichlet", "alpha": 0.5}))[1]
    assert one.sample_turns is not None
    assert one.sample_turns.tolist() == other.sample_turns.tolist()
    assert one.sample_turns.tolist() != load_split(experiment("samples", seed=1))[1].sample_turns.tolist()


def test_writers_of_a_set_are_turned_each_as_one_and_set_apart_with_their_angle() -> None:
    split = turned(SPLITS["by-user"](min_samples=2).divide(writers(12), 12, None, None, 3), "clients", 72, 3)
    angle = dict(zip(split.users.tolist(), split.quarter_turns.tolist()))
    assert sorted(angle.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    apart = set_apart(split, 3, 3, 3)
    for some in (apart, apart.validation, apart.newcomers):
        assert some.clusters.tolist() == some.quarter_turns.tolist() == [angle[user] for user in some.users.tolist()]
    assert apart.cluster_names == ["0°", "90°", "180°", "270°"]


def test_domains_go_wherever_the_samples_go() -> None:
    data = kinfolk.load_federation(experiment("samples"))
    rows = torch.tensor([5, 2])
    part = data.select(rows).train
    expected = [data.train.domains[data.train.places(torch.tensor([row]))] for row in (5, 2)]
    assert torch.equal(part.domains, torch.cat(expected))
    assert torch.equal(data.to(torch.device("cpu"), torch.float64).newcomers.domains, data.newcomers.domains)
    assert torch.equal(data.pooled().train.domains, data.train.domains)
    guests = _some(data.train, rows, rows)  # a visit keeps all samples and looks at some
    assert torch.equal(guests.domains[guests.places(torch.arange(2))], part.domains)


def test_data_of_ones_own_have_the_domains_of_their_clusters() -> None:
    data = make_federation([3, 2], clusters=[1, 0])
    assert data.train.domains.tolist() == [1, 1, 1, 0, 0]
    assert data.domains == 2
    assert make_federation([3, 2]).train.domains is None


def test_the_rotation_split_and_rotated_clients_know_the_same_things() -> None:
    data = kinfolk.load_federation(read(tiny_experiment()))
    assert torch.equal(data.train.domains, torch.repeat_interleave(data.clusters, data.train.sizes))


def test_runs_without_it_keep_their_names() -> None:
    assert "rotate" not in read(tiny_experiment()).sections()["data"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rotate": "clients", "split": {"kind": "rotation"}}, "turns images itself"),
        ({"rotate": "samples", "split": {"kind": "rotation"}}, "turns images itself"),
        ({"rotate": "clients", "split": {"kind": "alpha"}}, "in clusters already; use 'samples'"),
        ({"rotate": "clients", "global_test": 10}, "have their images turned, so no test set fits all"),
        ({"rotate": "samples", "features": "scattering"}, "images as they are"),
        ({"rotate": "writers"}, "data.rotate"),
    ],
)
def test_what_cannot_be_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        kinfolk.load_federation(experiment(**{"rotate": None, **changes}))
    assert "\n" not in str(caught.value)
