"""Group normalisation of plain operations."""

import torch
from torch import Tensor, nn


class GroupNorm(nn.GroupNorm):
    """The same numbers as torch's. That one cannot be repeated over clients behind a layer that differs by domain."""

    def forward(self, z: Tensor) -> Tensor:
        groups = z.reshape(z.shape[0], self.num_groups, -1)
        variance, mean = torch.var_mean(groups, dim=2, unbiased=False, keepdim=True)
        normed = ((groups - mean) * (variance + self.eps).rsqrt()).reshape(z.shape)
        shape = (-1,) + (1,) * (z.dim() - 2)
        return normed * self.weight.view(shape) + self.bias.view(shape) if self.affine else normed
