"""Use a model that kinfolk trained where there is no kinfolk: this file needs torch and safetensors only.

    kinfolk run digits method.name=fedcg --out my-run
    kinfolk export my-run --to model.safetensors        # add --client 7 for a client's own model
    python examples/use_exported.py model.safetensors

Called without a file it first does the first two steps by itself, with a short run.
"""

import json
import subprocess
import sys

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

LAYERS = ("Conv2d", "Linear", "GroupNorm", "MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "Flatten", "ReLU", "Tanh")


class Branches(nn.Module):
    """A layer with one set of filters for each domain, and one for all: samples weigh them by `share` [b, branches]."""

    def __init__(self, kind: str, options: dict, branches: int) -> None:
        super().__init__()
        self.kind, self.options = kind, options
        layer = getattr(nn, kind)(**options)
        self.weight = nn.Parameter(torch.zeros(branches, *layer.weight.shape))
        self.bias = nn.Parameter(torch.zeros(branches, len(layer.weight))) if options["bias"] else None

    def forward(self, z: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.flatten(0, 1), None if self.bias is None else self.bias.flatten()
        if self.kind == "Linear":
            out = F.linear(z, weight, bias)
        else:
            out = F.conv2d(z, weight, bias, *(self.options[name] for name in ("stride", "padding", "dilation")))
        out = out.view(len(z), *self.weight.shape[:2], *out.shape[2:])
        return torch.einsum("bd,bd...->b...", share, out)


class DomainModel(nn.Module):
    """FedCG: the student says how much a sample belongs to each domain, and the layers follow."""

    def __init__(self, net: dict) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(**layer) for layer in net["layers"])
        self.student = nn.Sequential(*(make(**layer) for layer in net["student"]))
        self.soft = net["soft"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.student(x)
        omega = scores.softmax(1) if self.soft else F.one_hot(scores.argmax(1), scores.shape[1]).to(scores)
        share = torch.cat([torch.ones_like(omega[:, :1]), omega], dim=1)
        for layer in self.layers:
            x = layer(x, share) if isinstance(layer, Branches) else layer(x)
        return x


def make(kind: str, options: dict, branches: int = 0) -> nn.Module:
    if kind not in LAYERS:
        raise ValueError(f"unknown layer {kind}")
    return Branches(kind, options, branches) if branches else getattr(nn, kind)(**options)


def load(path: str) -> tuple[nn.Module, dict]:
    """The module, ready for use, and what the file says of itself."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["kinfolk"])
        numbers = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    net = about["net"]
    if net is None or ("student" in net and net["student"] is None):
        raise SystemExit("this example builds nets of known layers whose domains a student finds: build yours yourself")
    module = DomainModel(net) if "student" in net else nn.Sequential(*(make(**layer) for layer in net["layers"]))
    module.to(next(iter(numbers.values())).dtype).load_state_dict(numbers)
    return module.eval(), about


def as_the_model_sees(pixels: torch.Tensor, about: dict) -> torch.Tensor:
    """Bytes [b, C, H, W] in 0..255, brought to the scale of the training images."""
    if about["inputs"]["shift"] is None:
        raise SystemExit(f"this model sees {about['inputs']['features'] or 'inputs of your own'}: scale them yourself")
    if about["inputs"]["projection"]:
        raise SystemExit("this model sees projections: kinfolk.exporting.read_model makes them")
    shift, spread = (torch.tensor(about["inputs"][name]).view(-1, 1, 1) for name in ("shift", "spread"))
    scaled = (pixels.float() - shift) / spread
    return F.normalize(scaled.flatten(1)) if about["inputs"]["length_one"] else scaled


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "model.safetensors"
    if len(sys.argv) < 2:
        steps = 'kinfolk.run("digits", ["method.name=fedcg", "run.rounds=3"], out="my-run")'
        subprocess.run(
            [sys.executable, "-c", f'import kinfolk; {steps}; kinfolk.export("my-run", "{path}")'], check=True
        )
    module, about = load(path)
    blank = torch.zeros(1, *about["input_shape"])
    with torch.no_grad():
        answer = module(as_the_model_sees(blank, about)).argmax().item()
    print(f"{about['method']}, trained on {about['data']} for {about['round']} rounds: a blank image is a {answer}")
