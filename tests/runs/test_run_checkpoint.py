import json
import os
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import FAULTS, REMOVALS, FaultyDisk, strike_everywhere, temporaries
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kinfolk.errors import UserError
from kinfolk.runs import checkpoint, files
from processes import finished

DTYPES = list(checkpoint._DTYPES)


def state(round: int, size: int = 1000) -> dict[str, Tensor]:
    return {"weights": torch.full((size,), float(round)), "seen": torch.tensor([round, -1])}


def assert_is(loaded: checkpoint.Checkpoint, round: int) -> None:
    assert loaded.round == round
    assert loaded.facts == {"config": "abc"}
    assert torch.equal(loaded.tensors["weights"], torch.full((1000,), float(round)))
    assert torch.equal(loaded.tensors["seen"], torch.tensor([round, -1]))


def save(folder: Path, round: int) -> Path:
    return checkpoint.save(folder, round, state(round), {"config": "abc"})


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any type and shape, as itself or as a view: transposed, strided, expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dice = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    raw = torch.randint(0, 256, [*shape, 8], dtype=torch.uint8, generator=dice)
    tensor = raw[..., 0] % 2 == 0 if dtype is torch.bool else raw.view(dtype)[..., 0]
    view = draw(st.sampled_from(["itself", "transposed", "strided", "expanded"]))
    if view == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if view == "strided" and tensor.dim():
        return tensor[::2]
    if view == "expanded":
        return tensor.expand(2, *tensor.shape)
    return tensor


def raw_bytes(tensor: Tensor) -> list[int]:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten()).view(torch.uint8).tolist()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.text().filter(lambda name: name != "__metadata__"), tensors(), max_size=5),
    st.dictionaries(st.text(), json_values, max_size=4),
    st.integers(0, 10**9),
)
def test_tensors_and_facts_come_back_bit_for_bit(saved: dict[str, Tensor], facts: dict[str, Any], round: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        checkpoint.save(Path(place) / "checkpoint", round, saved, facts)
        loaded = checkpoint.load(Path(place) / "checkpoint")
    assert loaded.round == round
    assert loaded.notices == []
    assert json.dumps(loaded.facts) == json.dumps(facts)  # as text: NaN is not equal to itself
    assert loaded.tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        other = loaded.tensors[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert raw_bytes(other) == raw_bytes(tensor)


def test_views_of_one_storage_and_parameters_are_stored_in_full(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4).requires_grad_()
    checkpoint.save(tmp_path / "c", 1, {"all": matrix, "row": matrix[1], "column": matrix[:, 2]}, {})
    loaded = checkpoint.load(tmp_path / "c").tensors
    loaded["all"].zero_()
    assert loaded["row"].tolist() == [4, 5, 6, 7]
    assert loaded["column"].tolist() == [2, 6, 10]


def test_single_elements_with_an_odd_stride_come_back(tmp_path: Path) -> None:
    """A cohort of one client is full of them; torch calls them contiguous whatever their stride."""
    row = torch.arange(6.0).reshape(2, 3)
    checkpoint.save(tmp_path / "c", 1, {"strided": row[0, :1:2], "column": row[1:, 1], "scalar": row[1, 2]}, {})
    loaded = checkpoint.load(tmp_path / "c").tensors
    assert [loaded[name].tolist() for name in ("strided", "column", "scalar")] == [[0.0], [4.0], 5.0]


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "c", 1)
    loaded = checkpoint.load(tmp_path / "c")
    with open(path / checkpoint.TENSORS, "r+b") as file:
        file.write(b"\xff" * os.path.getsize(path / checkpoint.TENSORS))
    assert_is(loaded, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    matrix = torch.randn(100, 100, device="cuda")
    checkpoint.save(tmp_path / "c", 1, {"matrix": matrix.T}, {})
    assert torch.equal(checkpoint.load(tmp_path / "c").tensors["matrix"], matrix.T.cpu())


def test_a_type_that_cannot_be_stored_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'waves' of type torch\.complex64"):
        checkpoint.save(tmp_path / "c", 1, {"waves": torch.zeros(2, dtype=torch.complex64)}, {})
    assert os.listdir(tmp_path / "c") == []


def test_two_generations_are_kept(tmp_path: Path) -> None:
    for round in (1, 5, 10, 100_000_000):
        save(tmp_path / "c", round)
    assert sorted(os.listdir(tmp_path / "c")) == ["round-00000010", "round-100000000"]
    assert checkpoint.rounds(tmp_path / "c") == [10, 100_000_000]
    assert_is(checkpoint.load(tmp_path / "c"), 100_000_000)


def test_a_round_can_be_saved_again_and_the_last_save_wins(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    for value in range(12):  # past ten: names must not be compared as text
        checkpoint.save(tmp_path / "c", 2, {"value": torch.tensor(value)}, {})
        assert checkpoint.load(tmp_path / "c").tensors["value"].item() == value
        assert len(os.listdir(tmp_path / "c")) == 2
    assert checkpoint.rounds(tmp_path / "c") == [1, 2]


def test_saving_an_earlier_round_drops_the_later_ones(tmp_path: Path) -> None:
    for round in (10, 20):
        save(tmp_path / "c", round)
    save(tmp_path / "c", 15)
    assert checkpoint.rounds(tmp_path / "c") == [10, 15]


def test_no_checkpoint_is_an_error_for_the_user(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="holds no checkpoint"):
            checkpoint.load(folder)
    assert checkpoint.rounds(tmp_path / "missing") == []


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.MANIFEST])
def test_a_changed_byte_is_always_noticed(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "c", 3) / name
    whole = path.read_bytes()
    dice = random.Random(7)
    for position in [0, len(whole) - 1, *(dice.randrange(len(whole)) for _ in range(400))]:
        damaged = bytearray(whole)
        damaged[position] ^= dice.randrange(1, 256)
        path.write_bytes(damaged)
        with pytest.raises(UserError) as caught:
            checkpoint.load(tmp_path / "c")
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    for other in (whole + b" ", whole[:-1], b"", whole[: len(whole) // 2]):
        path.write_bytes(other)
        with pytest.raises(UserError):
            checkpoint.load(tmp_path / "c")
    path.write_bytes(whole)
    assert_is(checkpoint.load(tmp_path / "c"), 3)


def truncate_tensors(path: Path) -> None:
    os.truncate(path / checkpoint.TENSORS, 100)


def lose_tensors(path: Path) -> None:
    (path / checkpoint.TENSORS).unlink()


def flip_tensors(path: Path) -> None:
    data = bytearray((path / checkpoint.TENSORS).read_bytes())
    data[-1] ^= 1
    (path / checkpoint.TENSORS).write_bytes(data)


def lose_manifest(path: Path) -> None:
    (path / checkpoint.MANIFEST).unlink()


def cut_manifest(path: Path) -> None:
    os.truncate(path / checkpoint.MANIFEST, 40)


def foreign_manifest(path: Path) -> None:
    (path / checkpoint.MANIFEST).write_text('{"weights": [1, 2]}')


def edit_manifest(path: Path) -> None:
    text = (path / checkpoint.MANIFEST).read_text()
    (path / checkpoint.MANIFEST).write_text(text.replace('"abc"', '"abd"'))


def rename_generation(path: Path) -> None:
    path.rename(path.with_name("round-00000009"))


DAMAGES = [
    (truncate_tensors, r"tensors.safetensors is truncated: 100 bytes, expected 4\d\d\d"),
    (lose_tensors, "tensors.safetensors is missing"),
    (flip_tensors, "tensors.safetensors is damaged: SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}"),
    (lose_manifest, "manifest.json is missing"),
    (cut_manifest, "manifest.json is damaged: not JSON, or cut off"),
    (foreign_manifest, "manifest.json is not a kinfolk checkpoint"),
    (edit_manifest, "manifest.json is damaged: its content does not agree with its sum"),
    (rename_generation, "manifest.json is of round 2: the folder was renamed"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_of_the_newest_falls_back_with_a_notice(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    save(tmp_path / "c", 1)
    damage(save(tmp_path / "c", 2))
    loaded = checkpoint.load(tmp_path / "c")
    assert_is(loaded, 1)
    (notice,) = loaded.notices
    assert re.search(message, notice)
    save(tmp_path / "c", 2)  # the resumed run comes to the same round
    again = checkpoint.load(tmp_path / "c")
    assert_is(again, 2)
    assert again.notices == []


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_of_the_only_one_is_said_in_one_line(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(save(tmp_path / "c", 2))
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load(tmp_path / "c")
    assert "\n" not in str(caught.value)


def test_a_newer_format_stops_and_does_not_fall_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", 1)
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    save(tmp_path / "c", 2)
    assert_is(checkpoint.load(tmp_path / "c"), 2)
    monkeypatch.setattr(checkpoint, "VERSION", 1)
    with pytest.raises(UserError, match="newer kinfolk: format version 2, this one reads up to 1"):
        checkpoint.load(tmp_path / "c")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    assert_is(checkpoint.load(tmp_path / "c", expect={"config": "abc"}), 1)
    with pytest.raises(UserError, match=r"belongs to another run: config is 'abc' in .*, expected 'xyz'"):
        checkpoint.load(tmp_path / "c", expect={"config": "xyz"})
    with pytest.raises(UserError, match="belongs to another run: seed is not recorded"):
        checkpoint.load(tmp_path / "c", expect={"seed": 0})


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("third", [2, 3])
def test_fault_anywhere_leaves_the_old_or_the_new_round(
    tmp_path: Path, fault: str, third: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write, fsync, rename and removal of a save; `third` = 2 is the round that is there already."""

    def prepare(at: int) -> Path:
        monkeypatch.undo()
        folder = tmp_path / str(at) / "checkpoint"
        save(folder, 1)
        save(folder, 2)
        return folder

    rounds = set()
    for folder, struck in strike_everywhere(fault, prepare, lambda folder: save(folder, third)):
        loaded = checkpoint.load(folder)
        assert_is(loaded, loaded.round)
        assert loaded.round in (2, third)
        assert loaded.notices == []
        rounds.add(loaded.round)
        if fault in ("full", "broken"):
            assert temporaries(folder) == [] or struck in REMOVALS
        monkeypatch.setattr(files, "_TOKEN", "0badcafe")  # as if started again
        save(folder, 4)
        assert_is(checkpoint.load(folder), 4)
        assert temporaries(folder) == []
        assert len(os.listdir(folder)) == 2
    assert rounds == {2, third}


@pytest.mark.parametrize("fault", ["full", "broken"])
def test_fault_in_the_first_save_leaves_an_empty_folder(tmp_path: Path, fault: str) -> None:
    def prepare(at: int) -> Path:
        return tmp_path / str(at) / "checkpoint"

    for folder, _ in strike_everywhere(fault, prepare, lambda folder: save(folder, 1)):
        assert temporaries(folder) == []
        save(folder, 1)
        assert_is(checkpoint.load(folder), 1)


def test_full_disk_says_what_is_safe_and_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run / "checkpoint", 10)
    with FaultyDisk(3, "full"), pytest.raises(UserError) as caught:
        save(run / "checkpoint", 20)
    assert str(caught.value) == (
        f"disk is full while writing {run}/checkpoint/round-00000020; the run is safe up to round 10; "
        f"free space and `kinfolk resume {run}`"
    )
    with (
        FaultyDisk(3, "broken"),
        pytest.raises(UserError, match=r"input/output error while writing .* round 10;"),
    ):
        save(run / "checkpoint", 20)
    with FaultyDisk(3, "full"), pytest.raises(UserError, match="no round is saved yet; free space and start"):
        save(tmp_path / "other" / "checkpoint", 20)


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from kinfolk.runs import checkpoint
torch.set_num_threads(1)
folder, dice, inside = Path(sys.argv[1]) / "checkpoint", random.Random(3), 0

def state(round):
    return {"weights": torch.full((200_000,), float(round))}

begin = time.perf_counter()
checkpoint.save(folder, 1, state(1), {})
duration = time.perf_counter() - begin
done = 1
for kill in range(20):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for round in range(done + 1, 10**6):
                checkpoint.save(folder, round, state(round), {})
                os.write(write, round.to_bytes(4, "big"))
        finally:
            os._exit(1)
    os.close(write)
    answers = os.read(read, 4)  # one save at least, however slow this machine is today
    time.sleep(dice.uniform(0, 3 * duration))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while block := os.read(read, 65536):
        answers += block
    os.close(read)
    done = int.from_bytes(answers[-4:], "big")
    inside += any(path.name.startswith(".") for path in folder.iterdir())
    loaded = checkpoint.load(folder)
    assert loaded.round in (done, done + 1), (loaded.round, done)
    assert loaded.notices == [], loaded.notices
    assert torch.equal(loaded.tensors["weights"], state(loaded.round)["weights"])
    done = loaded.round
checkpoint.save(folder, done + 1, state(done + 1), {})
assert len(os.listdir(folder)) == 2, os.listdir(folder)
print(done, inside)
"""


def test_twenty_kills_lose_no_round_that_was_saved(tmp_path: Path) -> None:
    """One process that has torch already forks the savers: twenty imports would take half a minute."""
    program = tmp_path / "killer.py"
    program.write_text(KILLER, encoding="utf-8")
    result = finished(program, str(tmp_path / "saved"), timeout=120)
    assert result.code == 0, result.err
    saves, inside = map(int, result.out.split())
    assert saves > 20
    assert inside >= 3, "too few kills came in the middle of a save to prove anything"
