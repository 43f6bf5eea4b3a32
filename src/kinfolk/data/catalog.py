"""Sets by name: list them, fetch them, load them. `sets.py` says what each one is.

Each set has a folder under the data root ($KINFOLK_DATA, else kinfolk/data in the user's cache folder). It
holds the decoded arrays once they are known (see `store.py`); before that, official files that a user put
there are enough.
"""

import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kinfolk.data import store
from kinfolk.data.archive import unpack
from kinfolk.data.download import Progress
from kinfolk.data.formats import Array, Arrays, Dataset, Samples
from kinfolk.data.sets import CATALOG, Entry, Layout
from kinfolk.data.sources import Source
from kinfolk.data.store import data_root
from kinfolk.errors import UserError, nearest

LOCAL = "files in the data folder"
DOWNLOADS = "download"  # subfolder for files on their way
_KEPT: dict[str, Any] = {}  # the last set that `shared` gave, and the state of its files


@dataclass(frozen=True)
class Row:
    """One line of `kinfolk data ls`. state: 'embedded', 'here', 'not here' or 'loader only: put … in …'."""

    name: str
    samples: int
    classes: int
    shape: tuple[int, ...]
    licence: str
    state: str


def names() -> list[str]:
    """The names `load` and `get` know."""
    return list(CATALOG)


def entry(name: str) -> Entry:
    """What is known about a set: citation, licence, home page, sources."""
    if name not in CATALOG:
        raise UserError(f"unknown data set '{name}': {nearest(name, CATALOG)}")
    return CATALOG[name]


def describe(root: Path | None = None) -> list[Row]:
    """Every set with its state under the data root."""
    folder = data_root(root)
    return [Row(e.name, e.samples, e.classes, e.shape, e.licence, _state(e, folder)) for e in CATALOG.values()]


def load(name: str, root: Path | None = None) -> Dataset:
    """The set `name` from the data root. Images are mapped from disk: nothing is read before it is used.

    Official files that lie in the set's folder are decoded, checked and kept as arrays on the way.
    """
    wanted = entry(name)
    if wanted.embedded:
        return _digits()
    root = data_root(root)
    base = load(wanted.images_of, root) if wanted.images_of else None
    arrays = store.load(root / name)
    if arrays is None:
        arrays = _from_folder(wanted, root / name, base)
    if arrays is None:
        raise UserError(_not_here(wanted, root / name))
    _check(wanted, arrays, base, str(root / name))
    return _dataset(wanted, arrays, base)


def shared(name: str) -> Dataset:
    """What `load` gives, for reading only, kept until another set is asked for or its files change."""
    manifest = data_root() / name / store.MANIFEST
    state = (str(manifest), manifest.stat().st_mtime_ns if manifest.is_file() else 0)
    if not state[1] and not entry(name).embedded:
        return load(name)  # decoded from raw files that nothing tells the state of, or refused
    if _KEPT.get("state") != state:
        dataset = load(name)
        for part in (dataset.train, dataset.test):
            for array in (part.x, part.y, part.user):
                if array is not None:
                    array.flags.writeable = False
        _KEPT.update(state=state, dataset=dataset)
    kept: Dataset = _KEPT["dataset"]
    return kept


def get(name: str, root: Path | None = None, progress: Progress | None = None) -> Path:
    """Obtain the set `name` from the first source that has it, check it, store it; return its folder.

    A set that is stored already is checked in full and fetched again only if it is damaged.
    """
    wanted = entry(name)
    root = data_root(root)
    folder = root / name
    if wanted.embedded:
        return folder
    base = None
    if wanted.images_of:
        get(wanted.images_of, root, progress)
        base = load(wanted.images_of, root)
    try:
        with store.locked(folder):
            here = _is_sound(wanted, folder, base)
            if not here and _from_folder(wanted, folder, base, must_keep=True) is None:
                _fetch(wanted, folder, base, progress)
            shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            folder.rmdir()  # only if there is nothing in it
    return folder


# ------------------------------------------------------------------------------------ from source to store


def _fetch(wanted: Entry, folder: Path, base: Dataset | None, progress: Progress | None) -> None:
    """Try the sources in turn; keep what the first good one gave."""
    if not wanted.sources:
        raise UserError(_not_here(wanted, folder))
    reasons = []
    for source in wanted.sources:
        try:
            arrays = _from_source(wanted, source, folder, base, progress)
        except UserError as error:
            reason = str(error).removeprefix(f"{source.label}: ")
            reasons.append(reason if reason.startswith(source.label) else f"{source.label}: {reason}")
            continue
        store.save(folder, arrays, _sums(arrays), source.label)
        return
    tried = "; ".join(reasons)
    raise UserError(f"{wanted.name}: no source worked: {tried}; or put {wanted.put} into {folder}")


def _from_source(
    wanted: Entry, source: Source, folder: Path, base: Dataset | None, progress: Progress | None
) -> Arrays:
    with tempfile.TemporaryDirectory(prefix="kinfolk-") as temporary:
        place = folder / DOWNLOADS if source.resumes else Path(temporary)
        place.mkdir(exist_ok=True)
        try:
            source.fetch(place, progress)
        except UserError:
            with suppress(OSError):
                place.rmdir()  # an unreachable host leaves nothing; a broken transfer leaves what it has
            raise
        try:
            arrays = _decode(wanted, place)
            if arrays is None:
                raise UserError(f"brought none of the files of {wanted.name}")
            _check(wanted, arrays, base, source.label)
            _check_sums(wanted, arrays, source.label)
            return arrays
        finally:
            shutil.rmtree(place, ignore_errors=True)  # decoded, or not worth keeping


def _from_folder(wanted: Entry, folder: Path, base: Dataset | None, must_keep: bool = False) -> Arrays | None:
    """Arrays from raw files that the user put into `folder`, kept for the next time; None if there are none.

    Files that are there but wrong are the user's to mend: they are reported, neither skipped nor deleted.
    """
    arrays = _decode(wanted, folder)
    if arrays is None:
        if wanted.refuse:
            wanted.refuse(folder)
        return None
    _check(wanted, arrays, base, str(folder))
    _check_sums(wanted, arrays, str(folder))
    try:
        store.save(folder, arrays, _sums(arrays), LOCAL)
    except OSError:
        if must_keep:
            raise
        # A data folder that may only be read still serves: decoding again the next time is the whole cost.
    return arrays


def _decode(wanted: Entry, folder: Path) -> Arrays | None:
    """Arrays from the raw files or archives in `folder`; None when there are none."""
    for layout in wanted.layouts:
        if place := layout.find(folder):
            return layout.read(place)
    for layout in wanted.layouts:
        for pattern in layout.archives:
            for archive in sorted(folder.glob(pattern)):
                return _decode_archive(layout, archive)
    return None


def _decode_archive(layout: Layout, archive: Path) -> Arrays:
    with tempfile.TemporaryDirectory(prefix="kinfolk-") as temporary:
        place = Path(temporary)
        unpack(archive, [*layout.files, *(f"{name}.gz" for name in layout.files)], place)
        if missing := layout.missing(place):
            raise UserError(f"{archive}: does not hold {', '.join(missing)}")
        return layout.read(place)


# ------------------------------------------------------------------------------------ checks


def _check(wanted: Entry, arrays: Arrays, base: Dataset | None, where: str) -> None:
    """Names, shapes and, for a set that adds users to another, the labels. Cheap: no image is read."""
    if missing := [key for key in wanted.keys if key not in arrays]:
        raise UserError(f"{where}: {wanted.name} has no {', '.join(missing)}")
    for part, count in (("train", wanted.train), ("test", wanted.test)):
        y = arrays[f"{part}_y"]
        if base:
            labels = (base.train if part == "train" else base.test).y
            _check_labels_agree(y, labels, f"{where}: {part}", base.name)
        count = len(y) if count is None else count
        for key in (key for key in wanted.keys if key.startswith(f"{part}_")):
            expected = (count, *wanted.shape) if key.endswith("_x") else (count,)
            if arrays[key].shape != expected:
                found = arrays[key].shape
                raise UserError(f"{where}: {key} of {wanted.name} is {found}, expected {expected}")


def _check_labels_agree(y: Array, base: Array, where: str, name: str) -> None:
    if len(y) != len(base):
        raise UserError(f"{where} has {len(y)} rows, {name} has {len(base)}")
    if len(different := np.flatnonzero(y != base)):
        row = different[0]
        raise UserError(
            f"{where} classes differ from the labels of {name} in {len(different)} of {len(y)} rows "
            f"(first in row {row}: {y[row]}, {name} has {base[row]}): the rows are not in its order"
        )


def _check_sums(wanted: Entry, arrays: Arrays, where: str) -> None:
    for key, expected in wanted.sums.items():
        if (found := store.digest(arrays[key])) != expected:
            raise UserError(
                f"{where}: {key} of {wanted.name} has SHA-256 {found}, expected {expected}: "
                "these are not the official data"
            )


def _sums(arrays: Arrays) -> dict[str, str]:
    return {key: store.digest(array) for key, array in arrays.items()}


def _is_sound(wanted: Entry, folder: Path, base: Dataset | None) -> bool:
    """Whether the stored arrays are whole: every byte is read."""
    try:
        arrays = store.load(folder)
        noted = store.manifest(folder)
        if arrays is None or noted is None:
            return False
        _check(wanted, arrays, base, str(folder))
        _check_sums(wanted, arrays, str(folder))
    except UserError:
        return False
    return all(store.digest(array) == noted["arrays"][key]["sha256"] for key, array in arrays.items())


# ------------------------------------------------------------------------------------ results


def _dataset(wanted: Entry, arrays: Arrays, base: Dataset | None) -> Dataset:
    parts = []
    for part in ("train", "test"):
        if base:
            x = (base.train if part == "train" else base.test).x
        else:
            x = arrays[f"{part}_x"]
        user = arrays[f"{part}_user"].astype(np.int64) if wanted.users else None
        parts.append(Samples(x, arrays[f"{part}_y"].astype(np.int64), user, arrays.get(f"{part}_domain")))
    return Dataset(wanted.name, parts[0], parts[1], wanted.classes)


def _digits() -> Dataset:
    """scikit-learn's digits, spread from 0..16 to 0..255; every fourth sample of a class is for testing."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = np.rint(raw.images * (255 / 16)).astype(np.uint8)[:, None]
    y = raw.target.astype(np.int64)
    test = np.zeros(len(y), bool)
    for label in range(10):
        test[np.flatnonzero(y == label)[3::4]] = True
    return Dataset("digits", Samples(x[~test], y[~test]), Samples(x[test], y[test]), 10)


def _state(wanted: Entry, root: Path) -> str:
    if wanted.embedded:
        return "embedded"
    if _is_here(wanted, root):
        return "here"
    return "not here" if wanted.sources else f"loader only: put the official files in {root / wanted.name}"


def _is_here(wanted: Entry, root: Path) -> bool:
    if wanted.images_of and not _is_here(CATALOG[wanted.images_of], root):
        return False
    folder = root / wanted.name
    if (folder / store.MANIFEST).is_file():
        return True
    return any(
        layout.find(folder) or any(any(folder.glob(pattern)) for pattern in layout.archives)
        for layout in wanted.layouts
    )


def _not_here(wanted: Entry, folder: Path) -> str:
    if wanted.sources:
        return f"{wanted.name} is not in {folder}: run 'kinfolk data get {wanted.name}'"
    return f"kinfolk cannot download {wanted.name}: put {wanted.put} into {folder} (see {wanted.home})"
