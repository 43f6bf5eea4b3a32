"""Channels brought to one scale: all clients at once against one client after another."""

import pytest
import torch
from torch import Tensor

from conftest import make_federation
from kinfolk import Federation, UserError
from kinfolk.data import normalization
from kinfolk.data.federation import Part
from kinfolk.data.normalization import grouped, per_client


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that clients are cut by the edges of what is done at a time."""
    monkeypatch.setattr(normalization, "ROWS", 4)


def client(part: Part, i: int) -> Tensor:
    start, size = int(part.starts[i]), int(part.sizes[i])
    return part.x[start : start + size].double()


def images(sizes: list[int], channels: int = 5) -> Federation:
    data = make_federation(sizes, shape=(channels, 3, 2))
    data.train.x.mul_(torch.arange(1, channels + 1).view(-1, 1, 1)).add_(40)
    return data


def test_every_client_has_its_own_scale() -> None:
    data = images([1, 9, 4, 13])
    found = per_client(data)
    for i in range(4):
        train = client(data.train, i)
        mean, variance = train.mean((0, 2, 3), keepdim=True), train.var((0, 2, 3), unbiased=False, keepdim=True)
        for before, after in ((data.train, found.train), (data.test, found.test)):
            expected = (client(before, i) - mean) / (variance + 1e-5).sqrt()
            assert (client(after, i) - expected).abs().max() < 1e-4
        assert client(found.train, i).mean((0, 2, 3)).abs().max() < 1e-4


def test_the_data_given_stay_as_they_are() -> None:
    data = images([3, 5])
    before = data.train.x.clone()
    per_client(data)
    assert torch.equal(data.train.x, before)


def test_a_constant_channel_becomes_zero_for_its_client_only() -> None:
    data = images([7, 6, 5])
    data.train.x[7:13, 2] = 0.1  # its mean over 36 values is not exactly 0.1
    found = per_client(data)
    assert (client(found.train, 1)[:, 2] == 0).all()
    assert (client(found.test, 1)[:, 2] == 0).all()
    assert (client(found.test, 0)[:, 2] != 0).any()
    assert (client(found.test, 1)[:, 3] != 0).any()


def test_one_different_pixel_is_not_constant() -> None:
    data = images([6, 6])
    data.train.x[:6, 1] = 2.0
    data.train.x[3, 1, 2, 1] = 2.5
    found = client(per_client(data).train, 0)[:, 1]
    assert (found != 0).all()


def test_groups_look_at_one_sample_at_a_time() -> None:
    data = make_federation([5, 8], shape=(54, 2, 3))
    found = grouped(data)
    x = data.train.x.double()
    for sample in range(13):
        for group in range(27):
            part = x[sample, 2 * group : 2 * group + 2]
            expected = (part - part.mean()) / (part.var(unbiased=False) + 1e-5).sqrt()
            assert (found.train.x[sample, 2 * group : 2 * group + 2] - expected).abs().max() < 1e-5
    alone = grouped(data.select(torch.tensor([1])))
    assert torch.allclose(alone.train.x, found.train.x[5:], atol=1e-6)


def test_a_common_test_is_for_groups_only() -> None:
    x, y = torch.randn(4, 27, 2, 2), torch.tensor([0, 1, 0, 1])
    data = Federation.from_arrays([(x, y)], [(x, y)], common=(x, y))
    found = grouped(data)
    assert found.common is not None
    assert torch.equal(found.common.x, found.train.x)
    with pytest.raises(UserError, match="belong to nobody"):
        per_client(data)


@pytest.mark.parametrize("change", [per_client, grouped])
def test_flat_samples_are_refused(change) -> None:
    with pytest.raises(UserError, match=r"data\.norm needs images or features"):
        change(make_federation([3, 4]))


def test_channels_must_divide() -> None:
    with pytest.raises(UserError, match="27 groups of channels, which 30 channels"):
        grouped(make_federation([3], shape=(30, 2, 2)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_scales_the_same() -> None:
    data = images([4, 9])
    there = per_client(data.to(torch.device("cuda"), torch.float32))
    assert torch.allclose(there.train.x.cpu(), per_client(data).train.x, atol=1e-4)
