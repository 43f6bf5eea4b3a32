"""Shards and alpha: pooled, disjoint, 80/20 inside each client."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

import kinfolk
from conftest import Command, tiny_experiment
from kinfolk.data.partition import (
    Alpha,
    Labels,
    Shards,
    Split,
    class_counts,
    constant_predictor_line,
    tuning_clients,
)
from kinfolk.data.partition.dealing import apportion, deal, deal_pooled
from kinfolk.data.partition.tasks import _shard_counts
from kinfolk.errors import UserError
from kinfolk.settings import build


def stocked(train: list[int], test: list[int]) -> Labels:
    return Labels(np.repeat(np.arange(len(train)), train), np.repeat(np.arange(len(test)), test), len(train))


EVEN = stocked([500] * 10, [100] * 10)


def everything(split: Split) -> np.ndarray:
    return np.concatenate(split.train + split.test)


def totals(split: Split, labels: Labels) -> np.ndarray:
    return class_counts(split.train, labels) + class_counts(split.test, labels)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 40), min_size=5, max_size=5).filter(any), min_size=1, max_size=6))
def test_a_stratified_share_is_within_one_of_proportional(rows) -> None:
    counts = np.array(rows)
    wanted = np.maximum(1, counts.sum(1) // 5)
    share = apportion(counts, wanted)
    assert (share.sum(1) == wanted).all()
    assert (share <= counts).all()
    assert (np.abs(share - counts * (wanted / counts.sum(1))[:, None]) < 1).all()


def test_dealing_starts_a_pile_again_only_when_all_of_it_is_given() -> None:
    parts = deal(np.array([[3], [3], [2]]), [np.array([4, 9, 2, 7, 5])])
    assert [part.tolist() for part in parts] == [[2, 4, 9], [4, 5, 7], [2, 9]]
    with pytest.raises(UserError, match="a client needs 3 samples of class 0, the set has 2"):
        deal(np.array([[3]]), [np.array([0, 1])])


def test_a_sample_used_again_keeps_its_role() -> None:
    train, test = np.array([[4], [4], [4]]), np.array([[1], [1], [1]])
    trained, tested, notes = deal_pooled(train, test, [np.arange(10)])
    assert not np.intersect1d(np.concatenate(trained), np.concatenate(tested)).size
    assert notes == [
        "class 0 exhausted: 4 train samples used by two clients",
        "class 0 exhausted: 1 test samples used by two clients",
    ]


@pytest.mark.parametrize("kind", [Shards(2), Shards(5), Alpha(0.0), Alpha(0.5), Alpha(1.0)], ids=str)
def test_clients_are_disjoint_and_stratified(kind) -> None:
    split = kind.divide(EVEN, 25, 160, 40, seed=0)
    held = everything(split)
    assert len(np.unique(held)) == len(held)
    assert held.max() >= 5000  # test samples are pooled in
    assert {len(part) for part in split.train} == {160}
    assert {len(part) for part in split.test} == {40}
    test, whole = class_counts(split.test, EVEN), totals(split, EVEN)
    assert (np.abs(test - 0.2 * whole) < 1).all()


@pytest.mark.parametrize(
    ("train", "test", "sizes"), [(160, None, (160, 40)), (None, 20, (80, 20)), (90, 10, (90, 10)), (3, None, (3, 1))]
)
def test_a_missing_size_follows_from_eighty_to_twenty(train, test, sizes) -> None:
    for kind in (Shards(2), Alpha(0.5)):
        split = kind.divide(EVEN, 10, train, test, seed=0)
        assert {(len(a), len(b)) for a, b in zip(split.train, split.test)} == {sizes}


def test_natural_sizes() -> None:
    shards = Shards(2).divide(EVEN, 30, None, None, seed=0)  # 6 shards of 100 per class
    assert {len(a) + len(b) for a, b in zip(shards.train, shards.test)} == {200}
    assert {len(part) for part in shards.test} == {40}
    alpha = Alpha(0.5).divide(EVEN, 30, None, None, seed=0)
    assert {len(a) + len(b) for a, b in zip(alpha.train, alpha.test)} == {200}
    assert len(np.unique(everything(alpha))) == 6000


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 60), held=st.integers(1, 10), seed=st.integers(0, 5))
def test_a_shard_client_holds_equal_parts_of_its_classes(clients, held, seed) -> None:
    split = Shards(held).divide(EVEN, clients, 64, 16, seed)
    counts = totals(split, EVEN)
    assert ((counts > 0).sum(1) == held).all()
    assert set(np.unique(counts)) <= {0, 80 // held, -(-80 // held)}


def test_shards_fit_exactly_when_they_can() -> None:
    split = Shards(2).divide(EVEN, 50, 96, 24, seed=0)  # 10 shards of 60 per class, all taken whole
    assert np.array_equal(np.sort(everything(split)), np.arange(6000))
    assert split.notes == []


def test_shards_are_shared_when_a_hundred_restarts_do_not_help() -> None:
    split = Shards(8).divide(EVEN, 75, None, None, seed=0)  # 60 shards of 10 per class: none to spare
    assert ((totals(split, EVEN) > 0).sum(1) == 8).all()
    assert any("in 100 tries some client found fewer than 8 classes with a free shard" in note for note in split.notes)
    assert any("train samples used by two clients" in note for note in split.notes)
    trained, tested = (np.unique(np.concatenate(parts)) for parts in (split.train, split.test))
    assert not np.intersect1d(trained, tested).size


def test_short_shards_are_topped_up_from_leftovers_of_their_class() -> None:
    """One class each and 3 shards per class: shards of class 1 have 40 samples where 60 are wanted."""
    stock = np.array([500, 122])
    three = _shard_counts(np.array([[1], [0], [1], [1]]), 60, stock, shards=3)
    assert three[:, 1].tolist() == [42, 0, 40, 40]  # the two left over go to the first client
    two = _shard_counts(np.array([[1], [0], [1], [0]]), 60, stock, shards=3)
    assert two.tolist() == [[0, 60], [60, 0], [0, 60], [60, 0]]  # the free shard tops both up


def test_clients_short_of_samples_are_noted_and_keep_their_share_of_tests() -> None:
    labels = stocked([400, 100], [100, 20])
    split = Shards(2).divide(labels, 5, 48, 12, seed=0)  # 24 of class 1 for each, 30 wanted
    assert totals(split, labels).tolist() == [[30, 24]] * 5
    assert {len(part) for part in split.test} == {round(54 * 12 / 60)}
    assert split.notes == ["5 of 5 clients hold up to 6 samples fewer than 60: their classes ran out"]


def test_shards_refuse_what_they_cannot_do() -> None:
    with pytest.raises(UserError, match=r"split.classes_per_client = 11: the set has 10 classes"):
        Shards(11).divide(EVEN, 10, 20, 5, seed=0)
    with pytest.raises(UserError, match=r"split.classes_per_client = 0: must be at least 1"):
        Shards(0)
    with pytest.raises(UserError, match=r"3 samples per client cannot cover split.classes_per_client = 4"):
        Shards(4).divide(EVEN, 10, 2, 1, seed=0)
    with pytest.raises(UserError) as error:
        Shards(2).divide(stocked([50, 2], [10, 1]), 5, 2, 1, seed=0)
    assert str(error.value) == "class 1 has 3 samples for 5 shards (5 clients × 2 classes over 2 classes)"
    with pytest.raises(UserError) as error:
        Shards(2).divide(EVEN, 260, 240, 60, seed=0)
    assert str(error.value) == "260 clients × 300 samples (240 train + 60 test) need 78000, the set has 6000"


def test_alpha_gives_the_main_class_its_part() -> None:
    split = Alpha(0.25).divide(EVEN, 23, 80, 20, seed=0)
    assert split.clusters.tolist() == [i % 10 for i in range(23)]
    assert split.cluster_names[3] == "class 3"
    counts = totals(split, EVEN)
    main = counts[np.arange(23), split.clusters]
    assert (main >= 75).all()
    assert (main <= 75 + 15).all()  # and a few of the 25 that are drawn from all classes
    pure = totals(Alpha(0.0).divide(EVEN, 10, 80, 20, seed=0), EVEN)
    assert np.array_equal(pure, 100 * np.eye(10))


def test_alpha_may_use_the_whole_set() -> None:
    for gamma in (0.0, 0.5, 1.0):
        split = Alpha(gamma).divide(EVEN, 60, 80, 20, seed=0)
        assert np.array_equal(np.sort(everything(split)), np.arange(6000))


def test_alpha_one_is_iid() -> None:
    counts = totals(Alpha(1.0).divide(EVEN, 20, 160, 40, seed=0), EVEN)
    assert np.abs(counts.mean(0) - 20).max() < 5
    assert counts.std() > 2  # drawn, not dealt out evenly


def test_an_exhausted_main_class_gives_way_to_the_next_with_stock() -> None:
    labels = stocked([100, 30, 0, 500], [0, 0, 0, 100])
    split = Alpha(0.0).divide(labels, 6, 80, 20, seed=0)
    counts = totals(split, labels)
    assert counts[1].tolist() == [0, 30, 0, 70]  # class 1 has 30, class 2 none
    assert (counts.sum(1) == 100).all()
    assert split.notes[0] == (
        "main class exhausted for 4 of 6 clients (the first is client 1): 370 samples are of the next class with stock"
    )


@pytest.mark.parametrize(("gamma", "score"), [(0.25, "77.5 %"), (0.5, "55.0 %"), (0.75, "32.5 %")])
def test_the_constant_predictor_is_in_the_notes(gamma: float, score: str) -> None:
    line = constant_predictor_line(gamma)
    assert score in line
    assert Alpha(gamma).divide(EVEN, 10, 80, 20, seed=0).notes == [line]
    assert "75.0 %" in constant_predictor_line(0.5, classes=2)


def test_alpha_refuses_what_it_cannot_do() -> None:
    for wrong in (-0.1, 1.1):
        with pytest.raises(UserError, match=f"split.gamma = {wrong}: must be between 0 and 1"):
            Alpha(wrong)
    with pytest.raises(UserError, match=r"100 clients × 100 samples \(80 train \+ 20 test\) need 10000"):
        Alpha().divide(EVEN, 100, 80, 20, seed=0)
    with pytest.raises(UserError, match="12 samples for 7 clients: each needs 2, to train and to test"):
        Alpha().divide(stocked([5, 5], [1, 1]), 7, None, None, seed=0)


@pytest.mark.parametrize("kind", [Shards, Alpha])
def test_tuning_clients_and_the_rest_are_the_whole_federation_and_share_no_sample(kind) -> None:
    whole = kind().divide(EVEN, 25, 160, 40, seed=3)
    some = kind(part="tuning").divide(EVEN, 5, 160, 40, seed=3)
    rest = kind(part="rest").divide(EVEN, 20, 160, 40, seed=3)
    chosen = tuning_clients(25, seed=3)
    others = [row for row in range(25) if row not in chosen]
    for part, rows in ((some, chosen), (rest, others)):
        for found, all_of_them in ((part.train, whole.train), (part.test, whole.test)):
            assert [one.tolist() for one in found] == [all_of_them[row].tolist() for row in rows]
        if kind is Alpha:
            assert part.clusters.tolist() == [row % 10 for row in rows]
    assert not np.intersect1d(everything(some), everything(rest)).size
    assert some.notes == [*whole.notes, "these 5 of 25 clients are for choosing settings"]
    assert rest.notes[-1] == "these 20 of 25 clients are left when a fifth is kept for choosing settings"


@pytest.mark.parametrize("kind", [Shards(4, part="rest"), Alpha(0.5, part="rest")], ids=["shards", "alpha"])
def test_a_client_of_the_rest_is_like_a_client_of_a_federation_without_tuning_clients(kind) -> None:
    """P4's sizes, CIFAR-10's stock: as many records, and as many of the main class or of every held class."""
    cifar10 = stocked([5000] * 10, [1000] * 10)
    rest = kind.divide(cifar10, 208, 160, 40, seed=0)
    alone = replace(kind, part=None).divide(cifar10, 208, 160, 40, seed=0)
    found, expected = (np.sort(totals(split, cifar10), axis=1) for split in (rest, alone))
    assert (found.sum(1) == 200).all()
    if isinstance(kind, Shards):
        assert np.array_equal(found, expected)
    else:
        assert found[:, -1].mean() == pytest.approx(expected[:, -1].mean(), abs=1)
        assert found[:, -1].std() == pytest.approx(expected[:, -1].std(), rel=0.2)


def test_parts_that_cannot_be_had_say_of_how_many() -> None:
    with pytest.raises(UserError, match=r"data.clients = 6: split.part = 'rest' is four fifths .* a multiple of 4"):
        Alpha(part="rest").divide(EVEN, 6, 160, 40, seed=0)
    with pytest.raises(UserError, match=r"40 clients × 200 samples .* \(split.part = 'tuning': 8 of 40 clients\)"):
        Alpha(part="tuning").divide(EVEN, 8, 160, 40, seed=0)
    with pytest.raises(UserError, match=r"'data.split.part' = 'test': input should be 'tuning' or 'rest'"):
        build(Alpha, {"part": "test"}, "data.split")


def test_an_experiment_of_tuning_clients_has_so_many_in_whatever_engine() -> None:
    split = {"kind": "alpha", "part": "tuning"}
    sections = {"data": {"clients": 4, "train": 20, "test": 5, "split": split}, "run": {"rounds": 2}}
    one = kinfolk.run(tiny_experiment(**sections), out="one")
    several = {**sections, "run": {"rounds": 2, "engine": "sharded", "shards": 3}}
    many = kinfolk.run(tiny_experiment(**several), out="many")
    assert len(one.clients) == 4
    assert [row["cluster"] for row in one.clients] == [row["cluster"] for row in many.clients]
    assert (one.weights() - many.weights()).abs().max() < 1e-5
    rest = kinfolk.config.read(tiny_experiment(data={**sections["data"], "split": {**split, "part": "rest"}}))
    assert rest.about() != one.config.about()  # accounts of the ones are not those of the others
    whole = kinfolk.config.read(tiny_experiment(data={"split": {"kind": "alpha"}}))
    assert "part" not in whole.sections()["data"]["split"]  # runs from before there were parts are found


def test_the_command_shows_the_clients_of_a_part(command: Command) -> None:
    Path("tiny.toml").write_text(tomli_w.dumps(tiny_experiment(data={"clients": 4, "train": 20, "test": 5})))
    shown = command("data", "split", "tiny.toml", "data.split.kind=shards", "data.split.part=tuning", "--json")
    found = json.loads(shown.out)
    assert found["clients"] == len(found["train"]) == 4
    assert found["notes"][-1] == "these 4 of 20 clients are for choosing settings"
