"""Features of a whole set: computed once, kept in pieces, taken up again after a stop."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kinfolk
from conftest import Command, tiny_experiment
from kinfolk.config import read
from kinfolk.data import catalog, feature_cache, store
from kinfolk.data.feature_cache import cached
from kinfolk.data.formats import Dataset, Samples
from kinfolk.data.scattering import scattered, standardised
from kinfolk.errors import UserError

ROW = 243 * 2 * 2 * 2  # bytes of one sample of the toy set in half precision


@pytest.fixture
def toy() -> Dataset:
    """20 + 7 colour images of 8×8 pixels."""
    random = np.random.default_rng(3)

    def samples(count: int) -> Samples:
        pixels = random.integers(0, 256, (count, 3, 8, 8), dtype=np.uint8)
        return Samples(pixels, random.integers(0, 2, count), random.integers(0, 5, count))

    return Dataset("toy", samples(20), samples(7), 2)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "PIECE_BYTES", 3 * ROW)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces that are computed from now on."""
    sizes: list[int] = []

    def counting(x: torch.Tensor, scales: int, angles: int) -> torch.Tensor:
        sizes.append(len(x))
        return scattered(x, scales, angles)

    monkeypatch.setattr(feature_cache, "scattered", counting)
    return sizes


def direct(samples: Samples) -> np.ndarray:
    return scattered(standardised(torch.from_numpy(samples.x).float() / 255)).numpy()


def folder(root: Path) -> Path:
    (found,) = (root / "features").iterdir()
    return found


def test_features_stand_in_for_pixels(toy: Dataset, tmp_path: Path) -> None:
    features = cached(toy, root=tmp_path)
    assert features.shape == (243, 2, 2)
    assert features.train.x.dtype == np.float16
    for kept, pixels in ((features.train, toy.train), (features.test, toy.test)):
        assert np.abs(kept.x - direct(pixels)).max() < 2e-3
        assert np.array_equal(kept.y, pixels.y)
        assert kept.user is not None
        assert np.array_equal(kept.user, pixels.user)


def test_full_precision_is_kept_beside_half(toy: Dataset, tmp_path: Path) -> None:
    half, full = cached(toy, root=tmp_path), cached(toy, precision="float32", root=tmp_path)
    assert full.train.x.dtype == np.float32
    assert np.abs(full.test.x - direct(toy.test)).max() < 1e-6
    assert np.array_equal(full.train.x.astype(np.float16), half.train.x)
    assert len(list((tmp_path / "features").iterdir())) == 2


def test_the_second_time_nothing_is_computed(toy: Dataset, tmp_path: Path, computed: list[int]) -> None:
    assert not feature_cache.is_cached(toy, tmp_path)
    first = cached(toy, root=tmp_path)
    assert computed == [3] * 6 + [2] + [3, 3, 1]
    assert feature_cache.is_cached(toy, tmp_path)
    assert feature_cache.place(toy, tmp_path) == folder(tmp_path)
    assert np.array_equal(cached(toy, root=tmp_path, verify=True).test.x, first.test.x)
    assert len(computed) == 10


def test_other_pixels_scales_or_angles_are_other_features(toy: Dataset, tmp_path: Path) -> None:
    pixels = toy.test.x.copy()
    pixels[0, 0, 0, 0] ^= 1
    cached(toy, root=tmp_path)
    cached(Dataset("toy", toy.train, Samples(pixels, toy.test.y), 2), root=tmp_path)
    cached(toy, scales=1, root=tmp_path)
    cached(toy, angles=4, root=tmp_path)
    assert len(list((tmp_path / "features").iterdir())) == 4


@pytest.mark.parametrize("after", [1, 3, 7, 8, 10])
def test_goes_on_after_an_interruption(toy: Dataset, tmp_path: Path, computed: list[int], after: int) -> None:
    def stop(label: str, done: int, total: int | None) -> None:
        if len(computed) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(toy, root=tmp_path, progress=stop)
    assert not feature_cache.is_cached(toy, tmp_path)
    resumed = cached(toy, root=tmp_path)
    assert len(computed) == 10
    whole = cached(toy, root=tmp_path / "other")
    assert np.array_equal(resumed.train.x, whole.train.x)
    assert np.array_equal(resumed.test.x, whole.test.x)
    for part in ("train.npy", "test.npy", "train.sums", "test.sums"):
        assert (folder(tmp_path) / part).read_bytes() == (folder(tmp_path / "other") / part).read_bytes()


def test_half_a_piece_and_half_a_line_are_written_again(toy: Dataset, tmp_path: Path, computed: list[int]) -> None:
    """As after a power cut: no manifest, a piece of which only some bytes came, a sum that was cut off."""
    whole = cached(toy, root=tmp_path).train.x.copy()
    place = folder(tmp_path)
    (place / store.MANIFEST).unlink()
    data, sums = (place / "train.npy").read_bytes(), (place / "train.sums").read_bytes()
    (place / "train.npy").write_bytes(data[: 128 + 4 * 3 * ROW + ROW])
    (place / "train.sums").write_bytes(sums[: 4 * 65 + 30])
    del computed[:]
    assert np.array_equal(cached(toy, root=tmp_path).train.x, whole)
    assert computed == [3, 3, 2]
    assert (place / "train.npy").read_bytes() == data


def test_verifying_finds_a_flipped_bit_and_mends_it(toy: Dataset, tmp_path: Path, computed: list[int]) -> None:
    whole = cached(toy, root=tmp_path).train.x.copy()
    path, sums = folder(tmp_path) / "train.npy", folder(tmp_path) / "train.sums"
    data, noted = bytearray(path.read_bytes()), sums.read_bytes()
    data[128 + 5 * 3 * ROW + 11] ^= 4
    path.write_bytes(data)
    del computed[:]
    assert np.array_equal(cached(toy, root=tmp_path, verify=True).train.x, whole)
    assert computed == [3, 2]
    assert sums.read_bytes() == noted


def test_progress_counts_bytes_to_the_end(toy: Dataset, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    cached(toy, root=tmp_path, progress=lambda *row: told.append(row))
    assert [done for label, done, _ in told if label == "features of toy test"] == [3 * ROW, 6 * ROW, 7 * ROW]
    assert {total for _, _, total in told} == {20 * ROW, 7 * ROW}


def test_what_cannot_be_used_is_said_in_one_line(toy: Dataset, tmp_path: Path) -> None:
    cached(toy, root=tmp_path)
    place = folder(tmp_path)
    (place / "test.npy").write_bytes((place / "test.npy").read_bytes()[:100])
    with pytest.raises(UserError, match=r"test\.npy: damaged .* delete .* to compute the features again"):
        cached(toy, root=tmp_path)
    noted = json.loads((place / store.MANIFEST).read_bytes())
    noted["key"]["angles"] = 4
    (place / store.MANIFEST).write_text(json.dumps(noted))
    with pytest.raises(UserError, match="it describes other features"):
        cached(toy, root=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="features cannot be kept: Not a directory"):
        cached(toy, root=tmp_path / "file")
    with pytest.raises(UserError, match="float16 or float32, not int8"):
        cached(toy, precision="int8", root=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="scales >= 1"):
        cached(toy, scales=0, root=tmp_path)
    with pytest.raises(UserError, match="at least 9×9 pixels, these have 8×8"):
        cached(toy, scales=3, root=tmp_path)


# ------------------------------------------------------------------------------------ in an experiment


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """The embedded digits, with an empty data folder for their features."""
    monkeypatch.setenv("KINFOLK_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(feature_cache, "PIECE_BYTES", 2**20)
    return catalog.load("digits")


def settings(**data: str) -> dict:
    return tiny_experiment(data={"split": {"kind": "iid"}, "features": "scattering", **data})


def test_an_experiment_takes_features(digits: Dataset, command: Command) -> None:
    outcome = command("data", "features", "digits")
    assert outcome.code == 0
    assert outcome.out.startswith("digits: 81×2×2 features of each sample")
    data = kinfolk.load_federation(read(settings()))
    assert data.input_shape == (81, 2, 2)
    assert data.train.x.dtype == torch.float32
    pixels = kinfolk.load_federation(read(tiny_experiment(data={"split": {"kind": "iid"}, "scale": "unit"})))
    assert torch.equal(data.train.y, pixels.train.y)
    assert (data.train.x - scattered(pixels.train.x)).abs().max() < 2e-3


def test_the_wait_is_announced_once(digits: Dataset, tmp_path: Path) -> None:
    told: list[str] = []

    class Listener(kinfolk.Observer):
        def notice(self, text: str) -> None:
            told.append(text)

    for norm in ("group", "per-client"):
        result = kinfolk.run(settings(norm=norm), observer=Listener())
        assert result.accuracy > 0.3
    assert [text for text in told if "features" in text] == [
        "computing the features of digits, this once (`kinfolk data features digits` shows how far it is)"
    ]


APART = ("data.split.kind=iid", "data.clients=10", "data.train=20", "data.test=5")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "cannot be used with a split that turns them"),
        ([*APART, "data.norm=per-client", "data.global_test=20"], "leave out data.global_test"),
        ([*APART, "data.norm=per-client", "data.new_clients=2"], "leave out data.new_clients"),
    ],
)
def test_what_is_refused_is_refused_before_the_wait_is_announced(
    digits: Dataset, command: Command, more: list[str], message: str
) -> None:
    ended = command("run", "digits", "data.features=scattering", *more)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert message in ended.message


def test_pixels_by_default_and_earlier_runs_are_the_same_experiment() -> None:
    config = read(tiny_experiment())
    assert config.data.features is None
    assert not {"features", "norm"} & set(config.sections()["data"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"split": {"kind": "rotation", "clusters": 2}}, "cannot be used with a split that turns them"),
        ({"scale": "unit"}, "is of pixels: leave it out"),
        ({"norm": "per-client", "global_test": 20}, "leave out data.global_test"),
        ({"features": "none", "norm": "group"}, "27 groups of channels, which 1 channels cannot"),
    ],
)
def test_settings_that_do_not_go_together(digits: Dataset, data: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kinfolk.load_federation(read(settings(**data)))
