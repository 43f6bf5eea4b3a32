"""What the tests on a GPU compare coarse training with."""

import pytest
import torch
from coarse import _rounded, rounded_operands
from torch.nn import functional


@pytest.mark.parametrize(
    ("precision", "value", "kept"),
    [
        ("tf32", 1 + 2**-10, 1 + 2**-10),
        ("tf32", 1 + 2**-11 + 2**-12, 1.0),  # cut, not rounded
        ("tf32", -3.9999, -(4 - 2**-9)),
        ("bf16", 1 + 2**-7, 1 + 2**-7),
        ("bf16", 1 + 2**-8 + 2**-12, 1 + 2**-7),
        ("bf16", 0.0, 0.0),
    ],
)
def test_numbers_keep_the_bits_of_their_precision(precision: str, value: float, kept: float) -> None:
    assert float(_rounded(torch.tensor(value, dtype=torch.float64), precision)) == kept


def test_bf16_is_that_of_torch() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(_rounded(values, "bf16"), values.bfloat16().double())


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_products_are_of_rounded_numbers_there_and_back(precision: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    x.requires_grad_()
    w.requires_grad_()
    with rounded_operands(precision):
        found = functional.linear(x, w)
    found.backward(g)
    a, b, c = (_rounded(v.detach(), precision) for v in (x, w, g))
    torch.testing.assert_close(found.detach(), a @ b.T)
    assert x.grad is not None
    assert w.grad is not None
    torch.testing.assert_close(x.grad, c @ b)
    torch.testing.assert_close(w.grad, c.T @ a)
    assert not torch.equal(found.detach(), (x @ w.T).detach())
