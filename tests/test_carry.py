"""Finished cells in one file: what a pack holds, what is taken from it, and what is not trusted."""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinfolk.errors import UserError
from kinfolk.reproduce import Reproduction, look, reproduce
from kinfolk.runs import pack as packs
from tiny_study import Ran, cells, one, write_files, write_study


@pytest.fixture(autouse=True)
def _files() -> None:
    write_files()


def packed(path: str = "cells.zip", **options: Any) -> list[str]:
    """Run one cell elsewhere and pack it; the names in the pack."""
    reproduce("mine.toml", **{"rows": ["Oracle"], "seeds": 1, "out": "there", **options}, pack=path)
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def rewritten(changes: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    """Change what is in the pack, as somebody with other tools could."""
    with zipfile.ZipFile("cells.zip") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile("cells.zip", "w") as archive:
        for name, data in changes(content).items():
            archive.writestr(name, data)


def taken(*cells: str) -> tuple[Reproduction, list[str]]:
    """What a study makes of packs, with nothing run, and the notices."""
    ran = Ran()
    found = reproduce("mine.toml", cells=cells or ["cells.zip"], run=False, observer=ran)
    assert ran.cells == []
    return found, ran.notices


def test_a_pack_carries_cells_to_another_machine() -> None:
    there = reproduce("mine.toml", out="there", pack="cells.zip")
    here, notices = taken()
    assert (len(here.results), notices, here.tables()) == (8, [], there.tables())
    with zipfile.ZipFile("cells.zip") as archive:
        names = archive.namelist()
        assert {name.partition("/")[2] for name in names} == {
            "config.toml",
            "metrics.jsonl",
            "clients.csv",
            "summary.json",
        }
        for name in names:
            assert Path("runs/reproduce/cells", name).read_bytes() == archive.read(name)
    before = Path("cells.zip").read_bytes()
    reproduce("mine.toml", pack="again.zip", run=False)
    assert Path("again.zip").read_bytes() == before  # nothing of time or machine in it
    ran = Ran()
    reproduce("mine.toml", cells=["cells.zip"], pack="cells.zip", observer=ran)
    assert (ran.cells, Path("cells.zip").read_bytes()) == ([], before)


def test_a_folder_of_cells_is_as_good_as_a_pack() -> None:
    packed()
    assert len(taken("there/cells")[0].results) == 1
    shutil.rmtree("runs")
    assert len(taken("there")[0].results) == 1


def test_a_pack_grows_and_keeps_what_it_has() -> None:
    first = packed()
    with zipfile.ZipFile("cells.zip") as archive:
        kept = {name: archive.read(name) for name in first}
    shutil.rmtree("there")
    names = packed(rows=["Oracle", "Gossip"], columns=["two"])  # Oracle anew, with other seconds
    assert len(names) == 8
    assert names == sorted(names)
    with zipfile.ZipFile("cells.zip") as archive:
        assert {name: archive.read(name) for name in first} == kept


@pytest.mark.parametrize("moment", ["writing", "replacing"])
def test_a_stop_while_packing_leaves_the_old_pack(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed()
    before = Path("cells.zip").read_bytes()

    def stop(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        if moment == "writing":
            broken.setattr(zipfile.ZipFile, "writestr", stop)
        else:
            replace = os.replace
            broken.setattr(os, "replace", lambda old, new: stop() if new.suffix == ".zip" else replace(old, new))
        with pytest.raises(KeyboardInterrupt):
            reproduce("mine.toml", rows=["Gossip"], seeds=1, out="there", pack="cells.zip")
    assert Path("cells.zip").read_bytes() == before
    assert not list(Path().glob(".cells.zip*"))
    assert len(packed(rows=["Gossip"])) == 12


def test_what_is_no_pack_is_refused_before_anything_runs() -> None:
    Path("notes.zip").write_text("not a zip", encoding="utf-8")
    with zipfile.ZipFile("photos.zip", "w") as archive:
        archive.writestr("photos/2024/cat.png", b"")
    for path, message in (
        ("notes.zip", "notes.zip cannot be read as a zip: File is not a zip file"),
        ("photos.zip", "photos.zip holds 'photos/2024/cat.png', which is no file of a run: choose another file"),
        (".", ". is a folder: --pack needs the name of a file"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            reproduce("mine.toml", pack=path)
    with pytest.raises(UserError, match=r"^no.zip does not exist: a zip written by --pack is needed, or a folder"):
        reproduce("mine.toml", cells=["no.zip"])
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "bad", ["{}/../../escaped", "../escaped", "/escaped", "{}/a/b", "{}\\..\\escaped", "{}/..", "{}/"]
)
def test_names_that_lead_elsewhere_are_never_unpacked(bad: str) -> None:
    cell = packed()[0].partition("/")[0]
    name = bad.format(cell)
    rewritten(lambda content: {**content, name: b"boo"})
    before = {path for path in Path().rglob("*") if "runs" not in path.parts}
    found, notices = taken()
    # A name that belongs to no cell at all spoils no cell.
    assert len(found.results) == (0 if name.startswith(f"{cell}/") else 1)
    assert notices == [
        f"cells.zip: '{name}' is not the plain name of a cell's file: such cells are left out",
    ]
    assert {path for path in Path().rglob("*") if "runs" not in path.parts} == before
    assert not list(Path("runs").rglob("*escaped*"))


def without(file: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda content: {name: data for name, data in content.items() if not name.endswith(file)}


def changed(file: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    def change(content: dict[str, bytes]) -> dict[str, bytes]:
        assert any(name.endswith(file) and old in data for name, data in content.items())
        return {name: data.replace(old, new) if name.endswith(file) else data for name, data in content.items()}

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("config.toml"), "it has no config.toml"),
        (without("summary.json"), "it is not finished"),
        (without("clients.csv"), ""),  # accuracy alone does not need it
        (changed("config.toml", b"clusters = 2", b"clusters = 4"), "its config is that of another experiment"),
        (changed("config.toml", b"rounds = 2", b"rounds = 3"), "its config is that of another experiment"),
        (changed("config.toml", b'name = "mlp"', b'name = "evil:net"'), "its config is that of another experiment"),
        (changed("config.toml", b"lr = ", b"speed = "), "unknown key 'training.speed'"),
        (changed("config.toml", b"[run]", b"[run"), "its config.toml cannot be read"),
        (changed("config.toml", b"created = ", b"made = "), "it has no created, which is needed here"),
        (changed("summary.json", b'"round": 2', b'"round": 1'), "it ended after 1 of 2 rounds"),
        (changed("summary.json", b'"accuracy": ', b'"accuracy": "high", "x": '), "its files are damaged: ValueError"),
        (changed("summary.json", b"{", b"[{"), "is damaged"),
        (changed("metrics.jsonl", b"{", b"("), "metrics.jsonl is damaged in line 1"),
    ],
)
def test_a_cell_that_does_not_hold_up_is_missing(change: Any, reason: str) -> None:
    cell = packed()[0].partition("/")[0]
    Path("evil.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    rewritten(change)
    found, notices = taken()
    assert len(found.results) == (0 if reason else 1)
    if reason:
        assert (len(notices), len(cells()) if Path("runs/reproduce/cells").exists() else 0) == (1, 0)
        assert notices[0].startswith(f"cells.zip: {cell} is left out: ")
        assert reason in notices[0]


def test_a_damaged_pack_is_noticed() -> None:
    packed()
    rewritten(lambda content: content)  # stored, so that a byte can be changed
    data = Path("cells.zip").read_bytes()
    Path("cells.zip").write_bytes(data.replace(b'"accuracy"', b'"accurate"', 1))
    found, notices = taken()
    assert (len(found.results), len(notices)) == (0, 1)
    assert "Bad CRC-32" in notices[0]


def test_a_cell_under_a_former_name_is_taken_by_what_it_is() -> None:
    packed()
    rewritten(lambda content: {re.sub(r"-\w{10}/", "-0123456789/", name): data for name, data in content.items()})
    found, notices = taken()
    assert (len(found.results), notices) == (1, [])
    assert cells() == [path.name for path in Path("there/cells").iterdir()]


def test_a_run_that_is_in_a_pack_under_a_former_name_is_not_added_again() -> None:
    packed()
    rewritten(lambda content: {re.sub(r"-\w{10}/", "-0123456789/", name): data for name, data in content.items()})
    former = packed()
    assert all("-0123456789/" in name for name in former)
    write_study(figure={"kind": "mixing"})
    ran = Ran()
    more = set(packed(observer=ran)) - set(former)
    assert len(more) == 1
    assert more.pop().endswith("-0123456789/graph.npz")  # of the same run
    assert ran.notices == []


def test_a_run_that_is_there_under_two_names_is_added_once() -> None:
    packed()
    (folder,) = Path("there/cells").iterdir()
    former = folder.with_name(re.sub(r"-\w{10}$", "-0123456789", folder.name))
    shutil.copytree(folder, former)
    count, lacking = packs.add(Path("both.zip"), [former, folder])
    assert (count, lacking) == (1, [])
    with zipfile.ZipFile("both.zip") as archive:
        assert {name.partition("/")[0] for name in archive.namelist()} == {former.name}


def test_a_run_anew_is_added_beside_one_under_a_former_name_even_if_it_ended_alike() -> None:
    packed()
    rewritten(lambda content: {re.sub(r"-\w{10}/", "-0123456789/", name): data for name, data in content.items()})
    former = set(packed())
    (config,) = Path("there/cells").glob("*/config.toml")  # its summary stays as it is, seconds and all
    written = config.read_text(encoding="utf-8")
    config.write_text(re.sub(r'created = "\d+', 'created = "2001', written), encoding="utf-8")
    more = set(packed()) - former
    assert {name.partition("/")[2] for name in more} == {name.partition("/")[2] for name in former}


def test_a_cell_from_before_what_its_preset_turns_on_is_not_taken() -> None:
    write_study(rows={"P": ["method.name=panm", "method.preset=robust"]}, columns={"two": []}, published={})
    reproduce("mine.toml", seeds=1)
    source = Path("elsewhere")
    Path("runs/reproduce/cells").rename(source)
    (config,) = source.glob("*/config.toml")
    config.write_text(config.read_text(encoding="utf-8").replace("mingle = true\n", ""), encoding="utf-8")
    notices: list[str] = []
    look("mine.toml").take(source, notices.append)
    assert [text.partition("left out: ")[2] for text in notices] == [
        "it is from before method.mingle, which its preset turns on now"
    ]


@pytest.mark.parametrize(("preset", "again"), [("robust", True), ("paper", False)])
def test_a_run_from_before_a_setting_that_its_preset_turns_on_is_another(preset: str, again: bool) -> None:
    write_study(rows={"P": ["method.name=panm", f"method.preset={preset}"]}, columns={"two": []}, published={})
    reproduce("mine.toml", seeds=1)
    (name,) = cells()
    former = Path("runs/reproduce/cells", name).rename(f"runs/reproduce/cells/{name[:-10]}0123456789")
    written = (former / "config.toml").read_text(encoding="utf-8")
    assert (f"mingle = {'true' if again else 'false'}\n") in written
    (former / "config.toml").write_text(re.sub(r"mingle = \w+\n", "", written), encoding="utf-8")
    ran = Ran()
    reproduce("mine.toml", seeds=1, observer=ran)
    assert len(ran.cells) == again


def test_what_is_here_is_never_written_over() -> None:
    packed()
    shutil.copytree("there/cells", "runs/reproduce/cells")
    (summary,) = Path("runs/reproduce/cells").glob("*/summary.json")
    summary.unlink()
    found, notices = taken()
    assert (len(found.results), len(notices)) == (0, 1)
    assert "is there and unfinished; remove it to take this one instead" in notices[0]
    assert not summary.exists()


def test_the_graph_travels_where_the_picture_reads_it() -> None:
    assert not any(name.endswith("graph.npz") for name in packed())
    write_study(figure={"kind": "mixing"})
    assert sum(name.endswith("graph.npz") for name in packed()) == 1  # added to the run that is there
    found, notices = taken()
    assert (notices, Path("runs/reproduce/mine.png").is_file()) == ([], True)
    rewritten(without("graph.npz"))
    shutil.rmtree("runs")
    found, notices = taken()
    assert (len(found.results), len(notices)) == (0, 1)
    assert notices[0].endswith("it has no graph.npz, which is needed here")
    write_study()
    taken()  # the table does not need it
    write_study(figure={"kind": "mixing"})
    found, notices = taken()
    assert (len(found.results), Path("runs/reproduce/mine.png").exists()) == (1, False)
    assert "has no graph.npz; remove the folder to run it again" in notices[0]


def test_files_of_two_runs_never_mix() -> None:
    before = packed()
    rewritten(changed("summary.json", b'"seconds": ', b'"seconds": 1'))  # of two runs, never the same to the digit
    shutil.rmtree("there")
    write_study(figure={"kind": "mixing"})
    ran = Ran()
    assert packed(observer=ran) == before
    assert ran.notices == [
        f"cells.zip: {before[0].partition('/')[0]} is another run of the same cell, "
        "without what the picture reads; it is kept"
    ]


def test_a_pack_does_not_tell_where_a_run_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["kinfolk", "reproduce", "mine.toml", "--out", "/secret/place", "--cells=/secret/zip", "--rows", "Oracle"]
    monkeypatch.setattr(sys, "argv", words)
    packed()
    with zipfile.ZipFile("cells.zip") as archive:
        (config,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("config.toml")]
    assert 'command = "kinfolk reproduce mine.toml --rows Oracle"' in config


def test_without_running_the_table_is_written_of_what_is_there() -> None:
    Path("empty").mkdir()
    found, notices = taken("empty")
    assert (len(found.results), notices) == (0, [])
    assert (one("Gossip", "two")["seeds"], one("Gossip", "two")["ours"]) == ("0", "")
    assert not Path("runs/reproduce/cells").exists()
    assert "| Oracle |" in Path("runs/reproduce/mine.md").read_text(encoding="utf-8")
