"""Bad input gets one clear line and exit code 2: a table of mistakes, each with the words that help."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import torch

from conftest import Command, tiny_experiment
from kinfolk import cli
from kinfolk.experiment import read_result
from kinfolk.runs.folder import RunFolder


def write(name: str, text: str | None = None) -> None:
    sections = tiny_experiment(
        data={"clients": 6, "train": 10, "test": 10}, run={"rounds": 2, "evaluate_every": 1, "checkpoint_every": 1}
    )
    Path(name).write_text(tomli_w.dumps(sections) if text is None else text, encoding="utf-8")


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KINFOLK_DATA", str(tmp_path / "data"))
    write("tiny.toml")


# -- what is typed -----------------------------------------------------------------------------------------------

RUN = {
    "unknown key": ("run.round=3", ["'run.round'", "did you mean 'rounds'?"]),
    "unknown key, nothing near": ("run.zzzz=3", ["'run.zzzz'", "known: ", "rounds"]),
    "unknown section": ("runs.rounds=3", ["unknown section 'runs'", "did you mean 'run'?"]),
    "unknown key of a method": ("method.neighbours=3", ["'method.neighbours'", "did you mean 'neighbors'?"]),
    "unknown key of a split": ("data.split.cluster=3", ["'data.split.cluster'", "did you mean 'clusters'?"]),
    "key of a split without settings": (
        "data.split={kind='iid', foo=1}",
        ["'data.split.foo': what [data.split] names has no settings"],
    ),
    "key of a rule without settings": ("aggregation.foo=1", ["what [aggregation] names has no settings"]),
    "key of a method without settings": ("method={name='local', foo=1}", ["what [method] names has no settings"]),
    "section that is a number": ("run=3", ["'run' = 3", "[run]"]),
    "key below a key": ("run.rounds.x=3", ["'rounds' is not a section"]),
    "wrong type": ("run.rounds=many", ["'run.rounds' = 'many'", "valid integer"]),
    "fraction of a round": ("run.rounds=1.5", ["'run.rounds' = 1.5", "integer"]),
    "out of bounds": ("run.rounds=0", ["'run.rounds' = 0", "at least 1"]),
    "loss of everything": ("faults.loss=1", ["'faults.loss' = 1", "less than 1"]),
    "infinite step size": ("training.lr=inf", ["'training.lr' = inf", "finite"]),
    "step size that is not a number": ("training.lr=nan", ["'training.lr' = nan", "finite"]),
    "one of several words": ("run.engine=ray", ["'run.engine' = 'ray'", "'inprocess' or 'sharded'"]),
    "unknown method": ("method.name=randm", ["unknown method 'randm'", "did you mean 'random'?"]),
    "method that is no text": ("method.name=[1]", ["unknown method '[1]'", "known: "]),
    "unknown data set": ("data.name=minst", ["unknown data set 'minst'", "did you mean 'mnist'?"]),
    "unknown split": ("data.split.kind=rotate", ["unknown split 'rotate'", "did you mean 'rotation'?"]),
    "split that is no text": ("data.split.kind=[1]", ["unknown split '[1]'"]),
    "split without its kind": ("data.split=iid", ["data.split", "kind = "]),
    "unknown model": ("model.name=mpl", ["unknown model 'mpl'", "did you mean 'mlp'?", "package.module:factory"]),
    "unknown model option": ("model.hiden=3", ["'model.hiden'", "did you mean 'hidden'?"]),
    "model option of the wrong type": ("model.hidden=wide", ["'model.hidden' = 'wide'", "valid integer"]),
    "model option out of bounds": ("model.hidden=0", ["hidden = 0", "hidden >= 1"]),
    "model too large for the images": ("model.name=cnn", ["'cnn'", "22×22", "[1, 8, 8]"]),
    "model without its module": ("model.name=:make", ["':make'", "package.module:factory"]),
    "module that is not there": ("model.name=no_such_module:make", ["no module named 'no_such_module'"]),
    "function that is not there": ("model.name=json:make", ["'json' has no 'make'"]),
    "more clients than the data allow": ("data.clients=400", ["200 clients", "10 train samples", "2000", "1352"]),
    "more samples than the data have": ("data.train=900", ["3 clients", "900 train samples", "2700", "1352"]),
    "split that cannot be balanced": ("data.test=450", ["data.test = 450", "45 samples of every class", "class"]),
    "fewer clients than clusters": ("data.clients=1", ["2 clusters", "data.clients = 1"]),
    "users of a set that knows none": ("data.split.kind=by-user", ["by-user", "users"]),
    "data that are not here": ("data.name=mnist", ["mnist is not in", "kinfolk data get mnist"]),
    "data that cannot be downloaded": ("data.name=celeba", ["kinfolk cannot download celeba", "put "]),
    "override without equals": ("rounds", ["override 'rounds'", "section.key=value"]),
    "override without key": ("=3", ["override '=3'", "section.key=value"]),
    "unknown rule": ("aggregation.rule=medain", ["unknown aggregation rule 'medain'", "did you mean 'median'?"]),
    "rule that is no text": ("aggregation.rule=[1]", ["unknown aggregation rule '[1]'", "known: "]),
    "unknown key of a rule": ("aggregation.byzantin=1", ["'aggregation.byzantin'"]),
    "unknown attack": ("faults={attackers=0.2, attack='signflip'}", ["'faults.attack' = 'signflip'", "'sign-flip'"]),
    "attackers who do nothing": ("faults.attackers=0.2", ["[faults]", "'attackers' goes with 'attack'"]),
    "all clients attack": ("faults={attackers=0.99, attack='nan'}", ["of 6 clients none would be honest"]),
    "attacker who is not there": ("faults={attackers=[7], attack='nan'}", ["there is no client 7, only 0 to 5"]),
    "attack with a scale below zero": ("faults.attack_scale=-1", ["'faults.attack_scale' = -1", "greater than 0"]),
    "unknown device": ("run.device=tpu", ["'run.device' = 'tpu'", "auto, cpu, cuda or cuda:N"]),
}


@pytest.mark.parametrize(("override", "words"), RUN.values(), ids=RUN.keys())
def test_a_mistake_in_a_setting_is_one_line(command: Command, override: str, words: list[str]) -> None:
    ended = command("run", "tiny.toml", override)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.count("\n") == 1
    for word in words:
        assert word in ended.message
    assert not Path("runs").exists()


TYPED = {
    "no file": (["run"], ["Missing argument 'FILE'", "kinfolk run --help"]),
    "unknown command": (["rnu", "tiny.toml"], ["No such command 'rnu'", "kinfolk --help"]),
    "unknown option": (["run", "tiny.toml", "--ouf", "x"], ["No such option: --ouf", "kinfolk run --help"]),
    "option without value": (["run", "tiny.toml", "--out"], ["--out", "requires an argument"]),
    "seed that is no number": (["run", "tiny.toml", "--seed", "one"], ["--seed", "integer"]),
    "seed below zero": (["run", "tiny.toml", "--seed", "-1"], ["'run.seed' = -1", "at least 0"]),
    "no seeds": (["compare", "tiny.toml", "--seeds", "0"], ["--seeds", "1"]),
    "no rounds": (["resume", "here", "--rounds", "0"], ["--rounds", "1"]),
    "file that is not there": (["run", "my.toml"], ["no experiment file 'my.toml'", "digits"]),
    "experiment that is not there": (["run", "digit"], ["'digit'", "did you mean 'digits'?"]),
    "folder as a file": (["run", "."], ["'.'", "digits"]),
    "unknown method to compare": (["compare", "tiny.toml", "--methods", "fedagv"], ["did you mean 'fedavg'?"]),
    "oracle to compare without clusters": (
        ["compare", "tiny.toml", "--methods", "oracle", "data.split.kind=iid"],
        ["method 'oracle' needs true clusters"],
    ),
    "oracle without clusters": (
        ["run", "tiny.toml", "method.name=oracle", "data.split.kind=iid"],
        ["method 'oracle' needs true clusters"],
    ),
    "clients that cannot all have enough": (
        ["run", "tiny.toml", "data.split={kind='dirichlet', mode='class-split', alpha=0.001, min_size=200}"],
        ["split.min_size = 200"],
    ),
    "rule that needs more peers": (
        ["run", "tiny.toml", "aggregation.rule=krum", "aggregation.byzantine=2"],
        ["'aggregation.byzantine' = 2: krum then needs 5 models, but a client has 3"],
    ),
    "rule that a method cannot take": (
        ["run", "tiny.toml", "aggregation.rule=ubar", "method.name=fedavg"],
        ["aggregation.rule = 'ubar'", "the server of method 'fedavg' does not have"],
    ),
    "method pattern without a match": (["list", "zz*"], ["no method matches 'zz*'", "known: "]),
    "unknown data set": (["data", "get", "digits", "minst"], ["unknown data set 'minst'", "did you mean 'mnist'?"]),
    "no data set": (["data", "get"], ["Missing argument 'NAME...'", "kinfolk data get --help"]),
    "picture in a folder that is not there": (
        ["data", "split", "tiny.toml", "--png", "no/where.png"],
        ["no/where.png cannot be written", "No such file"],
    ),
    "run that is not there": (["show", "nowhere"], ["nowhere does not exist", "kinfolk run"]),
    "resume of nothing": (["resume", "nowhere"], ["nowhere does not exist"]),
    "folder that is no run": (["show", "."], ["is not a run folder", "config.toml"]),
    "resume of what is no run": (["resume", "."], ["is not a run folder", "config.toml"]),
    "file that is no run": (["show", "tiny.toml"], ["tiny.toml is not a run folder"]),
}


@pytest.mark.parametrize(("typed", "words"), TYPED.values(), ids=TYPED.keys())
def test_a_mistake_in_a_command_is_one_line(command: Command, typed: list[str], words: list[str]) -> None:
    ended = command(*typed)
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    for word in words:
        assert word in ended.message


FILES = {
    "not TOML": ("[run\nrounds = 3", ["is not valid TOML", "line 1"]),
    "not text": ("\x00\x01", ["is not valid TOML"]),
    "unknown key": ("[run]\nround = 3", ["'run.round'", "did you mean 'rounds'?"]),
    "unknown section": ("[trainning]\nlr = 3", ["'trainning'", "did you mean 'training'?"]),
    "key outside a section": ("rounds = 3", ["unknown section 'rounds'"]),
    "name that is a number": ("name = 3", ["'name' = 3", "text"]),
    "wrong type": ('[run]\nrounds = "3"', ["'run.rounds' = '3'", "valid integer"]),
}


@pytest.mark.parametrize(("text", "words"), FILES.values(), ids=FILES.keys())
def test_a_mistake_in_a_file_is_one_line_that_names_the_file(command: Command, text: str, words: list[str]) -> None:
    write("bad.toml", text)
    ended = command("run", "bad.toml")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    for word in ("bad.toml", *words):
        assert word in ended.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device that should be missing")
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_cuda_device_that_is_not_there_is_one_line(command: Command, device: str) -> None:
    ended = command("run", "tiny.toml", "--device", device)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    for word in (f"'run.device' = '{device}'", "no CUDA device", "device=auto or cpu"):
        assert word in ended.message


def test_a_real_process_ends_with_code_2_and_one_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kinfolk", "run", "tiny.toml", "run.round=3"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "kinfolk: unknown key 'run.round': did you mean 'rounds'?\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kinfolk", "list"])
    monkeypatch.setattr("kinfolk.methods.names", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main()


# -- more peers than there are -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["random", "fixed", "oracle"])
def test_more_neighbors_than_peers_are_clipped_with_a_notice(command: Command, method: str) -> None:
    ended = command("run", "tiny.toml", f"method.name={method}", "method.neighbors=9", "--out", "here")
    assert ended.code == 0
    assert "note: method.neighbors = 9, but a client has only 5 peers: using 5" in ended.err
    assert RunFolder.open(Path("here")).config()["method"]["neighbors"] == 5


def test_as_many_neighbors_as_peers_need_no_notice(command: Command) -> None:
    assert "note:" not in command("run", "tiny.toml", "method.neighbors=5").err


def test_a_client_without_any_peer_trains_alone(command: Command) -> None:
    ended = command("run", "tiny.toml", "data.clients=1", "data.split.kind=iid", "--out", "here")
    assert ended.code == 0
    assert "a client has no peer: it trains alone" in ended.err
    assert command("show", "here").code == 0
    assert command("resume", "here", "--rounds", "3").code == 0


# -- folders and checkpoints -------------------------------------------------------------------------------------


@pytest.fixture
def finished(command: Command) -> Path:
    command("run", "tiny.toml", "--out", "here")
    return Path("here")


@pytest.mark.usefixtures("finished")
def test_a_run_folder_that_exists_is_not_touched(command: Command) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path("here").rglob("*")}
    ended = command("run", "tiny.toml", "--out", "here")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "here already holds a run; `kinfolk resume here` goes on with it" in ended.message
    assert {path: path.stat().st_mtime_ns for path in Path("here").rglob("*")} == before


def test_a_folder_with_other_things_is_not_touched(command: Command) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work", encoding="utf-8")
    ended = command("run", "tiny.toml", "--out", "mine")
    assert ended.code == 2
    assert "mine exists and is not empty" in ended.message
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]


def test_a_file_is_no_run_folder(command: Command) -> None:
    ended = command("run", "tiny.toml", "--out", "tiny.toml")
    assert ended.code == 2
    assert "tiny.toml is a file" in ended.message


@pytest.mark.usefixtures("finished")
def test_a_comparison_does_not_go_into_a_run_folder(command: Command) -> None:
    ended = command("compare", "tiny.toml", "--out", "here")
    assert ended.code == 2
    assert "here holds a single run" in ended.message


def test_a_comparison_does_not_take_over_the_runs_of_another_experiment(command: Command) -> None:
    command("compare", "tiny.toml", "--out", "both")
    ended = command("compare", "tiny.toml", "--out", "both", "training.lr=0.5")
    assert ended.code == 2
    assert "both/local-seed0 holds another experiment" in ended.message


@pytest.mark.usefixtures("finished")
def test_a_run_is_not_made_shorter(command: Command) -> None:
    ended = command("resume", "here", "--rounds", "1")
    assert ended.code == 2
    assert "already asks for 2 rounds" in ended.message


def test_a_checkpoint_that_is_damaged_gives_way_to_the_one_before(command: Command, finished: Path) -> None:
    spoil(finished / "checkpoint/round-00000002/tensors.safetensors")
    ended = command("resume", "here", "--rounds", "3", "--json")
    assert ended.code == 0
    assert "checkpoint of round 2 skipped" in ended.err
    assert "going on after round 1" in ended.err
    command("run", "tiny.toml", "run.rounds=3", "--out", "straight")
    assert torch.equal(read_result(finished).weights(), read_result(Path("straight")).weights())


def test_corrupt_checkpoints_are_one_line(command: Command, finished: Path) -> None:
    for generation in (finished / "checkpoint").iterdir():
        spoil(generation / "tensors.safetensors")
    ended = command("resume", "here", "--rounds", "3")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    for word in ("no checkpoint can be used", "tensors.safetensors is damaged", "SHA-256"):
        assert word in ended.message


def test_a_foreign_checkpoint_is_one_line(command: Command, finished: Path) -> None:
    command("run", "tiny.toml", "--seed", "1", "--out", "other")
    shutil.rmtree(finished / "checkpoint")
    shutil.copytree("other/checkpoint", finished / "checkpoint")
    ended = command("resume", "here", "--rounds", "3")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "checkpoint belongs to another run" in ended.message


DAMAGES = {
    "config.toml": ("[run", "is not TOML"),
    "metrics.jsonl": ("{]\n", "is damaged in line 1"),
    "summary.json": ("{]", "is damaged"),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.items(), ids=DAMAGES.keys())
def test_a_damaged_file_of_a_run_is_named(command: Command, finished: Path, name: str, damage: tuple[str, str]) -> None:
    (finished / name).write_text(damage[0], encoding="utf-8")
    ended = command("show", "here", "--json")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert name in ended.message
    assert damage[1] in ended.message


def test_a_damaged_comparison_is_named(command: Command) -> None:
    Path("both").mkdir()
    Path("both/comparison.json").write_text("{]", encoding="utf-8")
    ended = command("show", "both")
    assert ended.code == 2
    assert "both/comparison.json is damaged" in ended.message


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
