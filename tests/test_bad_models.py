"""Models of the user's own that are found, and those that cannot be used: one line each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from conftest import Command
from kinfolk.errors import UserError
from kinfolk.experiment import read_result
from kinfolk.runs.folder import RunFolder
from test_bad_input import write

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn

def fine(input_shape, classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GroupNorm(2, width), nn.Linear(width, classes))

def batchnorm(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))

def dropout(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes))

class Functional(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x.flatten(1)), training=self.training)

def functional_dropout(input_shape, classes):
    return Functional(64, classes)

def empty(input_shape, classes):
    return nn.Flatten()

def too_few_classes(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

def image_out(input_shape, classes):
    return nn.Conv2d(1, classes, 3)

class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)), x

def pair(input_shape, classes):
    return Pair(64, classes)

def wrong_input(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3, classes))

def no_module(input_shape, classes):
    return 3

def no_arguments():
    return nn.Linear(64, 10)

def failing(input_shape, classes):
    raise ValueError("not today")

def lazy(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

number = 3
"""

OWN = {
    "batchnorm": ["layer '2' is BatchNorm1d", "nn.GroupNorm"],
    "dropout": ["layer '1' (Dropout)", "vectorised over clients"],
    "functional_dropout": ["random numbers in its forward pass"],
    "empty": ["no trainable parameters"],
    "too_few_classes": ["[1, 3]", "[1, 10]"],
    "image_out": ["[1, 10, 6, 6]", "[1, 10]"],
    "pair": ["a tuple", "[1, 10]"],
    "wrong_input": ["does not accept inputs of shape [1, 8, 8]"],
    "no_module": ["returned a int, not an nn.Module"],
    "no_arguments": ["could not be made from (input_shape, classes)"],
    "failing": ["could not be made", "not today"],
    "lazy": ["layer '1' (LazyLinear) has no size yet", "how many inputs"],
    "number": ["is not callable", "(input_shape, classes) -> nn.Module"],
}


@pytest.fixture
def _models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write("tiny.toml")
    write("my_models.py", MODELS)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)


@pytest.mark.usefixtures("_models")
def test_a_model_of_the_users_own_is_found_in_this_folder_and_takes_options(command: Command) -> None:
    ended = command("run", "tiny.toml", "model.name=my_models:fine", "model.width=6", "--out", "here")
    assert ended.code == 0
    assert RunFolder.open(Path("here")).config()["model"] == {"name": "my_models:fine", "width": 6}


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(("factory", "words"), OWN.items(), ids=OWN.keys())
def test_a_model_that_cannot_be_used_is_one_line(command: Command, factory: str, words: list[str]) -> None:
    ended = command("run", "tiny.toml", f"model.name=my_models:{factory}")
    assert ended.code == 2
    for word in words:
        assert word in ended.message


@pytest.mark.usefixtures("_models")
def test_a_net_without_sizes_is_refused_before_a_method_adds_to_it(command: Command) -> None:
    assert "has no size yet" in command("run", "tiny.toml", "model.name=my_models:lazy", "method.name=fedcg").message
    with pytest.raises(UserError, match=r"layer '' \(LazyLinear\) has no size yet"):
        read_result(Path(command("run", "tiny.toml", "--json").json["folder"])).load_into(nn.LazyLinear(10), 0)
