"""Trained models as files: the same answers outside as in the run, from files that need nothing but torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk
from conftest import Command, make_federation, tiny_experiment
from kinfolk import UserError
from kinfolk.cohort.cohort import initial_model
from kinfolk.cohort.layout import Layout
from kinfolk.exporting import read_file, read_model
from kinfolk.models import find as find_net
from kinfolk.models import make
from kinfolk.runs import checkpoint

NETS = {
    "mlp": {"name": "mlp", "hidden": 16, "layers": 2},
    "cnn": {"name": "cnn4", "padding": 2, "hidden": 16},
    "groups": {"name": "cnn-celeba"},
}


@pytest.fixture(scope="module")
def outside() -> ModuleType:
    """The example, which knows nothing of kinfolk."""
    path = Path(__file__).parents[1] / "examples" / "use_exported.py"
    assert "\nimport kinfolk" not in path.read_text()
    spec = importlib.util.spec_from_file_location("use_exported", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fedcg(net: str = "mlp", **settings: Any) -> kinfolk.Result:
    method = {"name": "fedcg", "domains": 3, **settings}
    # Where 8×8 pixels have become 1×1, normalisation makes rounding large: that net is compared in double precision.
    precision = "float64" if net == "groups" else "float32"
    run = {"rounds": 2, "evaluate_every": 2, "precision": precision}
    changes: dict[str, Any] = {"data": {"new_clients": 3}, "run": run}
    experiment = tiny_experiment(method=method, **changes)
    experiment["model"] = NETS[net]
    return kinfolk.run(experiment, out="run")


def in_run(result: kinfolk.Result, part: str = "newcomers") -> tuple[Tensor, Tensor]:
    """Pixels of a part, and the scores that the run's own module gives them as its method arranges them."""
    config, data = result.config, kinfolk.load_federation(result.config)
    shape = data.input_shape

    def build() -> nn.Module:
        net = make(find_net(config.model), shape, data.classes, config.model_options)
        return config.method.wrap(net, shape) if hasattr(config.method, "wrap") else net

    module = initial_model(build, config.run.seed).eval().to(result.weights().dtype)
    Layout.of(module).load(result.weights()[0], module)
    arranged = config.method.arrange(data) if hasattr(config.method, "arrange") else data
    with torch.no_grad():
        x, rows = (some.parts()[part].x.to(result.weights().dtype) for some in (data, arranged))
        return x, module(rows)


@pytest.mark.parametrize(
    ("net", "settings"),
    [
        ("mlp", {"preset": "paper"}),
        ("mlp", {"preset": "robust", "layers": "whole"}),
        ("cnn", {"preset": "paper", "graph_layers": 2, "assignment": "hard"}),
        ("cnn", {"preset": "robust", "layers": "last"}),
        ("groups", {"preset": "paper", "agnostic": False}),
        ("groups", {"preset": "robust", "assignment": "hard"}),
    ],
)
def test_an_exported_fedcg_says_what_the_run_said(net: str, settings: dict[str, Any], outside: ModuleType) -> None:
    result = fedcg(net, **{"layers": "all", **settings})
    path = kinfolk.export("run", "model.safetensors")
    x, expected = in_run(result)
    module, about = outside.load(str(path))
    with torch.no_grad():
        assert torch.allclose(module(x), expected, rtol=0, atol=1e-6)
        assert torch.allclose(read_model(path)(x), expected, rtol=0, atol=1e-6)
    right = (module(x).argmax(1) == kinfolk.load_federation(result.config).newcomers.y).double().mean()
    assert result.summary["new_accuracy"] == pytest.approx(float(right))
    assert about["net"]["domains"] == 3
    assert not any("graph" in name or "teacher" in name or "projection" in name for name in module.state_dict())


def test_one_domain_becomes_an_ordinary_stack_of_layers(outside: ModuleType) -> None:
    result = fedcg("cnn", domains=1)
    path = kinfolk.export("run", "model.safetensors")
    module, about = outside.load(str(path))
    assert [type(layer) for layer in module] == [
        type(layer) for layer in make(find_net("cnn4"), (1, 8, 8), 10, {"padding": 2, "hidden": 16})
    ]
    x, expected = in_run(result)
    assert torch.allclose(module(x), expected, rtol=0, atol=1e-6)
    assert "domains" not in about["net"]


def test_domains_that_were_given_have_to_be_given_again() -> None:
    result = fedcg("mlp", source="random", agnostic=False)
    path = kinfolk.export("run", "model.safetensors")
    x, expected = in_run(result)
    rows = result.config.method.arrange(kinfolk.load_federation(result.config)).newcomers.x
    module = read_model(path)
    assert torch.allclose(module(x, rows[:, -3:]), expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"pass omega \[b, 3\]"):
        module(x)


@pytest.mark.parametrize("method", ["random", "fedavg", "p4", "dispfl", "ifca", "ditto"])
def test_any_methods_models_are_those_the_clients_use(method: str, outside: ModuleType) -> None:
    result = kinfolk.run(tiny_experiment(method={"name": method}), out="run")
    path = kinfolk.export("run", "model.safetensors", client=5)
    module, about = outside.load(str(path))
    row = torch.cat([tensor.flatten() for tensor in module.state_dict().values()])
    assert torch.equal(row, result.weights()[5])
    assert about["client"] == 5
    promised = result.summary.get("privacy", {}).get("statement")
    assert about["privacy"] == promised
    assert (promised is not None) == (method == "p4")


@pytest.mark.parametrize("directions", [3000, 20])
def test_inputs_of_length_one_and_projected_ones_go_along(directions: int, outside: ModuleType) -> None:
    result = kinfolk.run(tiny_experiment(method={"name": "p4", "projection": directions}), out="run")
    path = str(kinfolk.export("run", "model.safetensors", client=5))
    test = kinfolk.load_federation(result.config).test
    first = int(test.sizes[:5].sum())
    x, y = (rows[first : first + int(test.sizes[5])] for rows in (test.x, test.y))
    inside = read_model(path)
    assert float((inside(x).argmax(1) == y).float().mean()) == pytest.approx(result.clients[5]["accuracy"])
    pixels = torch.rand(9, *test.x.shape[1:]) * 255
    net, about = outside.load(path)
    if directions < 64:
        with pytest.raises(SystemExit, match="projections"):
            outside.as_the_model_sees(pixels, about)
    else:
        shift, spread = (torch.tensor(about["inputs"][name]).view(-1, 1, 1) for name in ("shift", "spread"))
        assert torch.allclose(net(outside.as_the_model_sees(pixels, about)), inside((pixels - shift) / spread))


def test_the_pixels_scale_goes_along(outside: ModuleType) -> None:
    from kinfolk.data import catalog

    for scale in ("unit", "standardize"):
        result = kinfolk.run(tiny_experiment(method={"name": "fedavg"}, data={"scale": scale}), out=scale)
        _, about = outside.load(str(kinfolk.export(scale, f"{scale}.safetensors")))
        images = torch.from_numpy(catalog.load("digits").train.x[:50])
        data = kinfolk.load_federation(result.config)
        seen = outside.as_the_model_sees(images, about).flatten(1)
        plain = data.train.x[: int(data.train.sizes[0])].flatten(1)  # client 0 stands upright
        assert (torch.cdist(plain, seen).amin(dim=1) < 1e-4).any()


def test_lean_runs_and_unfinished_ones_have_models_too() -> None:
    changes = {"rounds": 4, "resident": "round", "checkpoint_every": 2}
    kinfolk.run(tiny_experiment(method={"name": "fedavg", "participation": 0.3}, run=changes), out="run")
    shared, own = (read_file(kinfolk.export("run", f"{client}.st", client))[1] for client in (None, 3))
    assert all(torch.equal(shared[name], own[name]) for name in shared)
    kept = sorted(Path("run/checkpoint").glob("round-*"))
    for folder in kept[1:]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    assert read_file(kinfolk.export("run", "earlier.st"))[0]["round"] == checkpoint.rounds(Path("run/checkpoint"))[0]


def test_nets_of_ones_own_are_exported_under_their_names() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)
            self.again = self.inner  # tied

        def forward(self, x: Tensor) -> Tensor:
            return self.again(x).tanh()

    data = make_federation([8, 8])
    experiment = tiny_experiment(method={"name": "fedavg"}, run={"rounds": 1})
    result = kinfolk.run(experiment, data=data, model=lambda shape, classes: Own(), out="run")
    with pytest.raises(UserError, match="run with data of your own"):
        kinfolk.export("run", "model.st")
    path = kinfolk.export("run", "model.st", data=data, model=lambda shape, classes: Own())
    about, numbers = read_file(path)
    assert about["net"] is None
    assert about["inputs"]["shift"] is None
    module = Own()
    module.load_state_dict(numbers)
    assert torch.equal(Layout.of(module).flatten(module), result.weights()[0])
    with pytest.raises(UserError, match="no row of known layers"):
        read_model(path)
    with pytest.raises(UserError, match="not the same net"):
        kinfolk.export("run", "b.st", data=data, model=lambda shape, classes: nn.Sequential(nn.Linear(6, 4)))


def test_what_is_wrong_is_one_line_and_leaves_nothing(command: Command) -> None:
    kinfolk.run(tiny_experiment(), out="run")
    for words, expected in (
        (["run", "--to", "a.st"], "say whose is wanted, --client N"),
        (["run", "--to", "a.st", "--client", "8"], "--client 8: the run has clients 0 to 7"),
        (["nowhere", "--to", "a.st", "--client", "0"], "nowhere"),
        (["run", "--to", "run/config.toml", "--client", "0"], "exists already"),
        (["run", "--client", "0"], "--to"),
    ):
        ended = command("export", *words)
        assert ended.code == 2
        assert expected in ended.message
    assert not Path("a.st").exists()
    Path("other.st").write_bytes(b"no safetensors")
    with pytest.raises(UserError, match="cannot be read as an exported model"):
        read_model("other.st")


def test_the_command_says_what_it_wrote(command: Command) -> None:
    kinfolk.run(tiny_experiment(method={"name": "fedavg"}), out="run")
    said = command("export", "run", "--to", "deep/a.st")
    assert said.code == 0
    assert "deep/a.st: the model that all share after round 4, 1,210 numbers" in said.out
    about = command("export", "run", "--to", "b.st", "--client", "2", "--json").json
    assert (about["file"], about["client"], about["method"]) == ("b.st", 2, "fedavg")
