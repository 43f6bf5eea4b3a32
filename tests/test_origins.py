"""Runs are gone on with, compared and taken out with the data and the net that they were made with, or not at all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kinfolk
from conftest import make_federation, tiny_experiment
from kinfolk import Federation, UserError
from kinfolk.runs.folder import RunFolder

OWN = make_federation([10] * 4, clusters=[0, 0, 1, 1])
OTHERS = {
    "other samples": (make_federation([11, 9, 10, 10], clusters=[0, 0, 1, 1]), "not the same samples or labels"),
    "other inputs": (make_federation([10] * 4, shape=(5,)), r"inputs of shape \[6\], .* inputs of shape \[5\]"),
    "more clients": (make_federation([10] * 5), "4 clients, those given have 5 clients"),
    "fewer clients": (make_federation([10] * 3), "4 clients, those given have 3 clients"),
    "more classes": (make_federation([10] * 4, classes=4), "3 classes, those given have 4 classes"),
}


def sections(**changes: Any) -> dict[str, Any]:
    return tiny_experiment(run={"rounds": 2}, **changes)


def content(folder: str) -> dict[str, bytes]:
    """All files, by name."""
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def forget_fingerprint(folder: str) -> None:
    """As a version left it that kept no fingerprint."""
    path = Path(folder) / "config.toml"
    text, found = re.subn(r"\[kinfolk\.data\]\n(?:\w+ = .*\n|    .*\n|\]\n)+", "", path.read_text(encoding="utf-8"))
    assert found == 1
    path.write_text(text, encoding="utf-8")
    assert "data" not in RunFolder.open(Path(folder)).facts()


class Stop(kinfolk.Observer):
    def round(self, t: int, row: dict[str, Any] | None) -> None:
        raise KeyboardInterrupt


# -- data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "words"), OTHERS.values(), ids=OTHERS.keys())
def test_a_run_is_not_gone_on_with_on_other_data(data: Federation, words: str) -> None:
    kinfolk.run(sections(), data=OWN, out="own")
    before = content("own")
    with pytest.raises(UserError, match=words) as error:
        kinfolk.resume("own", rounds=3, data=data)
    assert "\n" not in str(error.value)
    assert content("own") == before
    assert kinfolk.resume("own", rounds=3, data=OWN).summary["round"] == 3


def test_a_run_of_a_version_without_fingerprints_goes_on_where_clients_and_shapes_agree() -> None:
    kinfolk.run(sections(), data=OWN, out="own")
    forget_fingerprint("own")
    before = content("own")
    few_tests = make_federation([10] * 4, tests=6)
    for data, words in [
        (OTHERS["more clients"][0], "4 clients, those given have 5 clients"),
        (OTHERS["other inputs"][0], "the models in own have 163 numbers, the net given 147"),
        (few_tests, "other numbers of test samples"),
    ]:
        with pytest.raises(UserError, match=words):
            kinfolk.resume("own", rounds=3, data=data)
        assert content("own") == before
    assert kinfolk.resume("own", rounds=3, data=OWN).summary["round"] == 3


def test_own_data_and_models_are_not_given_to_a_run_that_has_none() -> None:
    kinfolk.run(sections(), out="plain")
    with pytest.raises(UserError, match="plain was run with the data 'digits', not with your own"):
        kinfolk.resume("plain", rounds=3, data=OWN)
    with pytest.raises(UserError, match="plain was run with the model 'mlp', not with your own"):
        kinfolk.resume("plain", rounds=3, model=lambda shape, classes: nn.Linear(64, classes))


def test_a_comparison_on_own_data_takes_only_runs_of_the_same_settings_and_data() -> None:
    first = kinfolk.compare(sections(), ["random"], data=OWN, out="c")
    again = kinfolk.compare(sections(data={"split": {"kind": "iid"}}), ["random"], data=OWN, out="c")
    assert again.rows == first.rows  # how a named set would be split is nothing to own data
    before = content("c")
    with pytest.raises(UserError, match="c/local-seed0 holds another experiment"):
        kinfolk.compare(sections(training={"lr": 0.3}), ["random"], data=OWN, out="c")
    with pytest.raises(UserError, match="c/local-seed0 was run with other data"):
        kinfolk.compare(sections(), ["random"], data=OTHERS["other samples"][0], out="c")
    assert content("c") == before


# -- nets --------------------------------------------------------------------------------------------------------


def net(*widths: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *(nn.Linear(a, b) for a, b in pairwise(widths)))


def factory(*widths: int) -> Callable[..., nn.Module]:
    return lambda shape, classes: net(64, *widths, classes)


def test_a_run_is_not_gone_on_with_with_another_net() -> None:
    kinfolk.run(sections(), model=factory(4, 7), out="own")
    before = content("own")
    with pytest.raises(UserError, match=r"'1.weight' .* in own is \[4, 64\], '1.weight' .* given \[1, 64\]"):
        kinfolk.resume("own", rounds=3, model=factory(1, 25))
    with pytest.raises(UserError, match="the models in own have 375 numbers, the net given 1,210"):
        kinfolk.resume("own", rounds=3, model=factory(16))
    assert content("own") == before
    assert kinfolk.resume("own", rounds=3, model=factory(4, 7)).summary["round"] == 3


def test_a_comparison_on_an_own_model_takes_only_runs_of_that_net() -> None:
    first = kinfolk.compare(sections(), ["random"], model=factory(4, 7), out="c")
    assert kinfolk.compare(sections(), ["random"], model=factory(4, 7), out="c").rows == first.rows
    before = content("c")
    with pytest.raises(UserError, match=r"models in c/local-seed0 is \[4, 64\].*: choose another --out"):
        kinfolk.compare(sections(), ["random"], model=factory(1, 25), out="c")
    with pytest.raises(UserError, match="c/local-seed0 was run with model of your own"):
        kinfolk.compare(sections(), ["random"], out="c")
    assert content("c") == before


def test_only_the_runs_own_data_and_model_are_exported_with_it(tmp_path: Path) -> None:
    kinfolk.run(sections(), data=OWN, out="own")
    to = tmp_path / "model.safetensors"
    with pytest.raises(UserError, match=r"own was run with data of your own: call kinfolk\.export\("):
        kinfolk.export("own", to, client=0)
    with pytest.raises(UserError, match="own was run with other data: as many clients, but not the same samples"):
        kinfolk.export("own", to, client=0, data=OTHERS["other samples"][0])
    assert not to.exists()
    kinfolk.export("own", to, client=0, data=OWN)


def test_a_model_is_not_taken_out_into_a_net_of_another_kind() -> None:
    result = kinfolk.run(sections(), out="a")
    for module in (nn.Linear(64, 10), net(64, 16, 10, 10)):
        before = [parameter.clone() for parameter in module.parameters()]
        with pytest.raises(UserError, match="a module of the same kind is needed"):
            result.load_into(module, 0)
        assert all(torch.equal(old, new) for old, new in zip(before, module.parameters()))


def test_a_net_of_the_right_size_and_other_shapes_is_refused() -> None:
    result = kinfolk.run(sections(), model=factory(4, 7), out="a")
    with pytest.raises(UserError, match=r"'1.weight' of the models in a is \[4, 64\], '1.weight' of the net given"):
        result.load_into(net(64, 1, 25, 10), 0)


@pytest.mark.parametrize("client", [8, -1])
def test_a_model_of_a_client_that_is_not_there_is_refused(client: int) -> None:
    result = kinfolk.run(sections(), out="a")
    with pytest.raises(UserError, match=f"client {client}: a has clients 0 to 7"):
        result.load_into(net(64, 16, 10), client)


def test_a_net_that_the_method_has_wrapped_is_pointed_to_the_export() -> None:
    result = kinfolk.run(sections(method={"name": "fedcg"}), out="a")
    with pytest.raises(UserError, match="fedcg adds layers to yours: `kinfolk export a` knows them"):
        result.load_into(net(64, 16, 10), 0)


# -- without a checkpoint ----------------------------------------------------------------------------------------


def test_a_finished_run_without_a_checkpoint_is_not_started_anew() -> None:
    result = kinfolk.run(sections(), out="a")
    shutil.rmtree("a/checkpoint")
    before = content("a")
    with pytest.raises(UserError, match="a is finished and has no checkpoint: it can be shown but not made longer"):
        kinfolk.resume("a", rounds=4)
    assert content("a") == before
    assert kinfolk.resume("a").summary == result.summary
    with pytest.raises(UserError, match="a holds no models"):
        result.load_into(net(64, 16, 10), 0)


def test_an_unfinished_run_without_a_checkpoint_starts_anew() -> None:
    with pytest.raises(KeyboardInterrupt):
        kinfolk.run(sections(), out="a", observer=Stop())
    assert kinfolk.resume("a", rounds=3).summary["round"] == 3


def test_models_are_read_without_the_table_of_clients() -> None:
    kinfolk.run(sections(), data=OWN, out="own")
    models = kinfolk.experiment.read_result(Path("own")).weights()
    Path("own/clients.csv").unlink()
    assert torch.equal(kinfolk.experiment.read_result(Path("own")).weights(), models)
    kinfolk.run(sections(method={"name": "fedavg"}), data=OWN, out="one")
    assert kinfolk.experiment.read_result(Path("one")).weights().shape[0] == 4


def test_a_comparison_of_finished_runs_needs_none_of_their_checkpoints() -> None:
    def net(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Linear(shape[0], classes)

    made = kinfolk.compare(sections(), ["random"], data=OWN, model=net, out="c")
    for path in Path("c/random-seed0/checkpoint").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes() + b"x")
    said: list[str] = []

    class Listener(kinfolk.Observer):
        def notice(self, text: str) -> None:
            said.append(text)

    again = kinfolk.compare(sections(), ["random"], data=OWN, model=net, out="c", observer=Listener())
    assert again.as_dict()["rows"] == made.as_dict()["rows"]
    assert any("c/random-seed0 was run with this net is not known: " in text for text in said)


@pytest.mark.parametrize("three", [np.int64(3), np.int32(3), torch.tensor(3), 3])
def test_numbers_of_classes_of_every_type_go_into_a_run_and_out_again(three: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(9, 6, generator=generator), torch.arange(9) % 3) for _ in range(3)]
    data = Federation.from_arrays(pairs, pairs, classes=three)
    assert type(data.classes) is int
    kinfolk.run(sections(method={"name": "fedavg"}), data=data, out="own")
    kinfolk.export("own", "model.safetensors", data=data)
    assert RunFolder.open(Path("own")).facts()["data"]["classes"] == 3


@pytest.mark.parametrize("classes", [0, -1, 2.0, "3", True])
def test_numbers_of_classes_that_are_none_are_one_line(classes: Any) -> None:
    pairs = [(torch.zeros(2, 6), torch.tensor([0, 1]))]
    with pytest.raises(UserError, match=r"classes = .*: a whole number from 1 on is needed"):
        Federation.from_arrays(pairs, pairs, classes=classes)
