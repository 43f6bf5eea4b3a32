"""Finished runs in one small file: a zip of `RUN/FILE` without checkpoints, to be carried to another machine.

A pack may come from anybody, so its names are checked before anything is read and only known files are unpacked. A
folder of run folders is read in the same way.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import tomli_w

from kinfolk.errors import UserError
from kinfolk.runs.files import explained, remove, sweep, sync_folder, temporary_for, write_atomically, write_synced
from kinfolk.runs.folder import AWAY, CLIENTS, CONFIG, DOMAINS, METRICS, NEW_CLIENTS, REACHABLE, SUMMARY
from kinfolk.runs.graph import MERGED
from kinfolk.runs.rounds import FILE as ROUNDS
from kinfolk.runs.similarity import FILE as SIMILARITY

ALWAYS = (CONFIG, METRICS, CLIENTS, NEW_CLIENTS, SUMMARY, REACHABLE, AWAY, ROUNDS)
KNOWN = (*ALWAYS, MERGED, SIMILARITY, DOMAINS)
PLACES = ("--out", "--cells", "--pack")  # options whose values mean nothing on another machine
LARGEST = 2**30  # bytes of one file, unpacked
EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip can hold
_PLAIN = re.compile(r"(?P<run>[\w=+-][\w.=+-]*)/(?P<file>[\w.=+-]*[\w=+-])")

T = TypeVar("T")
Content = dict[str, Callable[[], bytes]]  # name -> what reads it


class Pack:
    """What a zip or a folder holds: names at once, content when it is asked for."""

    def __init__(self, path: Path, names: Iterable[str], read: Callable[[str], bytes]) -> None:
        self.path = path
        self.names = dict.fromkeys(names)
        self.odd = [name for name in self.names if not _PLAIN.fullmatch(name)]
        self._read = read

    @property
    def runs(self) -> list[str]:
        """Those with plain names only."""
        refused = {name.partition("/")[0] for name in self.odd}
        found = dict.fromkeys(name.partition("/")[0] for name in self.names)
        return [name for name in found if name not in refused]

    def files(self, run: str) -> list[str]:
        """The names of a run's files that this version knows."""
        return [file for file in KNOWN if f"{run}/{file}" in self.names]

    def read(self, name: str) -> bytes:
        """The content of `RUN/FILE`."""
        try:
            return self._read(name)
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: encrypted
            raise UserError(f"{self.path}: {name} cannot be read: {error}") from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Pack]:
    """A pack, or a folder of runs (or one with such a folder `cells` in it), to read from."""
    if path.is_dir():
        home = path / "cells" if (path / "cells").is_dir() else path
        names = [f"{found.parent.name}/{found.name}" for file in KNOWN for found in sorted(home.glob(f"*/{file}"))]
        yield Pack(path, [name for name in names if _PLAIN.fullmatch(name)], lambda name: (home / name).read_bytes())
        return
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: a zip written by --pack is needed, or a folder of runs") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as a zip: {error}") from None
    with archive:
        yield Pack(path, archive.namelist(), partial(_member, archive))


def unpack(pack: Pack, run: str, path: Path, check: Callable[[Path], T]) -> T:
    """Write a run of `pack` to `path`, which must be new, if `check` accepts the folder; what it returned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, path.name)
    temporary = temporary_for(path)
    with contextlib.ExitStack() as undo:
        undo.callback(remove, temporary)
        temporary.mkdir()
        for file in pack.files(run):
            write_synced(temporary / file, pack.read(f"{run}/{file}"))
        checked = check(temporary)
        sync_folder(temporary)
        os.rename(temporary, path)
        sync_folder(path.parent)
        undo.pop_all()
    return checked


def check_target(path: Path) -> None:
    """Refuse now what `add` would refuse: a file that is there and is no pack."""
    with _present(path):
        pass


def add(path: Path, folders: Sequence[Path], more: Sequence[str] = ()) -> tuple[int, list[str]]:
    """Add finished runs, with the files `more`, to the pack at `path`: how many it holds now, and who lacks `more`.

    The runs that are in it stay as they are; one that lacks files which the same run still has gets them. Equal
    content makes equal bytes, and the old pack is there until the new one is complete.
    """
    with explained(lambda error: UserError(f"{path} cannot be written: {error.strerror}")), _present(path) as old:
        content: Content = {} if old is None else {name: partial(old.read, name) for name in old.names}
        before = len(content)
        names = dict[Path, str]()
        for folder in folders:  # one by one: the same run may be among them under two names
            names[folder] = _name(content, folder)
            content = _with(content, folder, names[folder], (*ALWAYS, *more))
        if old is None or len(content) > before:
            path.parent.mkdir(parents=True, exist_ok=True)
            sweep(path.parent, path.name)
            write_atomically(path, partial(_write, content=content))
    lacking = [f.name for f in folders if any((f / m).is_file() and f"{names[f]}/{m}" not in content for m in more)]
    return len({name.partition("/")[0] for name in content}), lacking


def _name(content: Content, folder: Path) -> str:
    """What the run in `folder` is called in a pack: a version that knows more settings calls the same run otherwise."""
    if f"{folder.name}/{SUMMARY}" in content or not (folder / SUMMARY).is_file():
        return folder.name
    words = folder.name.rpartition("-")[0]
    runs = (run for run, _, file in (name.partition("/") for name in content) if file == SUMMARY)
    alike = (run for run in runs if run.rpartition("-")[0] == words)
    return next((run for run in alike if _same(content, run, folder)), folder.name)


def _same(content: Content, run: str, folder: Path) -> bool:
    """Whether `run` of a pack is the run in `folder`: two of one experiment may end alike, and take as long."""
    config = content.get(f"{run}/{CONFIG}")
    alike = content[f"{run}/{SUMMARY}"]() == (folder / SUMMARY).read_bytes()
    return alike and config is not None and _created(config()) == _created((folder / CONFIG).read_bytes())


def _created(config: bytes) -> object:
    """When the run of this config began; None if it does not tell."""
    try:
        return tomllib.loads(config.decode())["kinfolk"]["created"]
    except (ValueError, KeyError, TypeError):  # not written by us
        return None


def _with(content: Content, folder: Path, name: str, files: Iterable[str]) -> Content:
    """What a pack holds once `folder` is in it as the run `name`."""
    own: Content = {f"{name}/{file}": partial(_own, folder / file) for file in files if (folder / file).is_file()}
    summary = f"{name}/{SUMMARY}"
    if summary in content and (own.keys() <= content.keys() or not _same(content, name, folder)):
        return content  # nothing to add, or another run of the same experiment: files of the two must not mix
    return {**own, **content} if summary in content else {**content, **own}


def _own(path: Path) -> bytes:
    """A file of a run as it goes into a pack."""
    return _without_places(path.read_bytes()) if path.name == CONFIG else path.read_bytes()


def _without_places(config: bytes) -> bytes:
    """A config whose recorded command does not tell where on its machine the run was written."""
    document = tomllib.loads(config.decode())
    try:
        words = shlex.split(document["kinfolk"]["command"])
    except ValueError:  # not written by us
        return config
    kept = [
        word
        for before, word in zip(["", *words], words)
        if word not in PLACES and before not in PLACES and word.partition("=")[0] not in PLACES
    ]
    document["kinfolk"]["command"] = shlex.join(kept)
    return tomli_w.dumps(document).encode() if kept != words else config


@contextlib.contextmanager
def _present(path: Path) -> Iterator[Pack | None]:
    """The pack at `path`, if there is one, with nothing else in it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: --pack needs the name of a file")
    if not path.exists():
        yield None
        return
    with opened(path) as pack:
        if pack.odd:
            raise UserError(f"{path} holds '{pack.odd[0]}', which is no file of a run: choose another file")
        yield pack


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size  # no more than this is ever unpacked
    if size > LARGEST:
        raise zipfile.BadZipFile(f"{size} bytes are more than a run has")
    return archive.read(name)


def _write(file: BinaryIO, content: Content) -> None:
    """A zip that depends on nothing but names and content."""
    with zipfile.ZipFile(file, "w") as archive:
        for name in sorted(content):
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            packed = name.endswith(".npz")  # is itself a zip
            entry.compress_type = zipfile.ZIP_STORED if packed else zipfile.ZIP_DEFLATED
            archive.writestr(entry, content[name](), compresslevel=None if packed else 9)
