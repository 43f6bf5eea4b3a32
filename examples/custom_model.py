"""Bring your own model: any nn.Module that maps a batch of inputs to [batch, classes].

From a file this is `[model] name = "my_module:make_net"`; from Python the factory is passed directly.
Run it with: python examples/custom_model.py
"""

import torch
from torch import nn

import kinfolk


class ResidualNet(nn.Module):
    """A small net with a skip connection. GroupNorm instead of BatchNorm, which cannot be kept per client."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16 * 4 * 4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.norm(self.second(x)) + x)
        x = nn.functional.adaptive_avg_pool2d(x, 4)
        return self.head(x.flatten(1))


def make_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return ResidualNet(input_shape[0], classes)


if __name__ == "__main__":
    result = kinfolk.run("digits", ["method.name=oracle", "run.rounds=10", "training.lr=0.05"], model=make_net)
    print(f"accuracy after 10 rounds: {100 * result.accuracy:.1f} %, kept in {result.folder}")

    # Every client has a model of its own: take client 7's and use it anywhere.
    module = result.load_into(make_net((1, 8, 8), 10), client=7)
    print("client 7 predicts", module(torch.zeros(1, 1, 8, 8)).argmax().item(), "for a blank image")
