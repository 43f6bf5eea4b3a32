"""A data set is read once for many runs, and again when it has changed."""

import os
from pathlib import Path

import numpy as np
import pytest

from kinfolk.assembly import load_federation
from kinfolk.config import read
from kinfolk.data import catalog, store
from kinfolk.reproduce import reproduce
from tiny_study import write_files


def test_the_last_data_set_is_kept_and_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    write_files()
    loaded: list[str] = []
    load = catalog.load
    monkeypatch.setattr(catalog, "load", lambda name, root=None: loaded.append(name) or load(name, root))
    monkeypatch.setattr(catalog, "_KEPT", {})
    reproduce("mine.toml", rows=["Gossip"])
    assert loaded == ["digits"]
    with pytest.raises(ValueError, match="read-only"):
        catalog.shared("digits").train.x[0] = 1
    config = read("tiny.toml")
    mine = load_federation(config)
    before = mine.train.x.clone()
    mine.train.x.zero_()  # a user's copy, not the one that is kept
    assert (load_federation(config).train.x == before).all()


def test_a_data_set_that_changed_on_the_disk_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digits = catalog.load("digits")
    monkeypatch.setenv("KINFOLK_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(catalog, "_KEPT", {})
    monkeypatch.setattr(catalog, "_check", lambda *rest: None)

    def put(value: int) -> None:
        x, y = np.full((4, 1, 28, 28), value, np.uint8), np.arange(4)
        arrays = {"train_x": x, "train_y": y, "test_x": x, "test_y": y}
        store.save(tmp_path / "data" / "mnist", arrays, dict.fromkeys(arrays, ""), "a test")
        stamp = 1_000_000_000 * (1_700_000_000 + value)
        os.utime(tmp_path / "data" / "mnist" / store.MANIFEST, ns=(stamp, stamp))

    put(1)
    assert catalog.shared("mnist").train.x.max() == 1
    assert catalog.shared("mnist") is catalog.shared("mnist")
    put(2)
    assert catalog.shared("mnist").train.x.max() == 2
    assert len(catalog.shared("digits").train) == len(digits.train)
