"""Tensors that travel together come out as they went in."""

import pytest
import torch
from torch import Tensor

from kinfolk import findings
from kinfolk.parcel import Parcel, pack, unpack

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def some(dtype: torch.dtype) -> list[Tensor]:
    """Of many shapes, one after another in memory or not, with what is not finite."""
    numbers = torch.tensor([[0.0, 1.0, 3.5], [2.0, 1e-3, 250.0]]).to(dtype)
    if dtype.is_floating_point:
        numbers[0, :2] = torch.tensor([torch.nan, -torch.inf])
    return [numbers, numbers.T, numbers[:, 1], numbers[:, :0], numbers[0, 0], numbers[:1].expand(4, -1)]


def test_what_is_packed_comes_out_as_it_was() -> None:
    tensors = [tensor for dtype in DTYPES for tensor in some(dtype)]
    flat = pack(tensors)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        found = unpack(part, tensor.dtype, tensor.shape)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.nan_to_num(7), tensor.nan_to_num(7))


def test_what_becomes_of_a_tensor_after_sending_does_not_reach_a_packed_parcel() -> None:
    tensor, parcel = torch.arange(3), Parcel(packed=True)
    place = parcel.add(tensor)
    parcel.send()
    tensor += 1
    assert parcel.arrived
    assert parcel[place].tolist() == [0, 1, 2]


def test_on_a_cpu_a_parcel_that_is_not_packed_copies_nothing() -> None:
    tensor, parcel = torch.arange(3), Parcel()
    place = parcel.add(tensor)
    parcel.send()
    assert parcel[place] is tensor


@pytest.mark.parametrize("packed", [False, True])
def test_edges_that_travel_together_are_those_of_each_round(packed: bool) -> None:
    shares = torch.tensor([[0.5, 0.0], [0.25, 0.25], [0.0, torch.nan]], dtype=torch.float64)
    first = (torch.tensor([4, 5, 6]), torch.tensor([[1, 2], [3, 0], [8, 9]]), shares)
    nobody = (torch.arange(3), torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0, dtype=torch.float64))
    parcel = Parcel(packed)
    later = findings.edges([(7, [first, nobody]), (8, []), (9, [first, first])], parcel)
    parcel.send()
    rows = {t: list(zip(edges.client.tolist(), edges.neighbor.tolist(), edges.weight.tolist())) for t, edges in later()}
    once = [(4, 1, 0.5), (5, 3, 0.25), (5, 0, 0.25)]
    assert rows == {7: once, 8: [], 9: once + once}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_parcel_comes_from_a_gpu_without_anybody_waiting() -> None:
    tensors = [tensor.cuda() for dtype in DTYPES for tensor in some(dtype)]
    work = torch.rand(8192, 8192, device="cuda")

    def sent(work: torch.Tensor, times: int) -> tuple[Parcel, list[int]]:
        for _ in range(times):
            work = (work @ work).clamp(max=1)
        parcel = Parcel(packed=True)
        places = [parcel.add(tensor) for tensor in tensors]
        parcel.send()
        return parcel, places

    sent(work, 1)  # programs are loaded when they are first wanted, and a GPU finishes its work before
    torch.cuda.synchronize()
    parcel, places = sent(work, 20)  # a tenth of a second or more
    assert not parcel.arrived
    for tensor in tensors:
        tensor.zero_()
    found = [parcel[place] for place in places]
    assert parcel.arrived
    for tensor, right in zip(found, (tensor for dtype in DTYPES for tensor in some(dtype)), strict=True):
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor.nan_to_num(7), right.nan_to_num(7))
