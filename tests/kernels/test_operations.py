"""How much is launched in a round beside training and judging, and that a round of programs is a round of plain torch.

On a GPU every operation is a launch from Python, some microseconds each whatever its size: hundreds of them take longer
than training a small model. The bounds keep their number from creeping up again.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interpreted import DEVICE, take_over
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from conftest import make_federation
from kinfolk import Training, engines
from kinfolk.cohort.cohort import Cohort, initial_model
from kinfolk.methods.panm import PANM
from kinfolk.methods.registry import find
from kinfolk.parcel import Parcel
from kinfolk.peers.faults import Faults

N, STAGE_ONE, ROUNDS = 5, 2, 4
VIEWS = {"aten::detach", "aten::alias", "aten::_unsafe_view", "aten::lift_fresh"}
EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
STAGED = {"discover_rounds": STAGE_ONE, "neighbors": 2, "candidates": 2}
PANMS = [
    {"name": "panm", "similarity": similarity, "preset": preset, **STAGED}
    for similarity in ("gradient", "loss")
    for preset in ("paper", "robust")
]
OTHERS = [{"name": "pens", **STAGED}, *({"name": name, "neighbors": 2} for name in ("random", "gossip", "oracle"))]
MOST = {"panm": 40, "pens": 22, "random": 15, "gossip": 18, "oracle": 30}  # in a round


class Count(TorchDispatchMode):
    """Counts operations that compute something; views and empty tensors launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        view = any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns)
        if not view and schema.name not in VIEWS | EMPTY:
            self.names[schema.name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Operations and programs by name, without those of training, judging and testing."""
    count = Count()

    def apart(function: Callable[..., Any], program: bool) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if program and torch.utils._python_dispatch._get_current_dispatch_mode() is count:
                count.names[args[0].fn.__name__] += 1
            with _disable_current_modes():
                return function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for kind in (JITFunction, InterpretedFunction):
            patch.setattr(kind, "run", apart(kind.run, True))
        for name in ("trained", "losses", "evaluate"):
            patch.setattr(Cohort, name, apart(getattr(Cohort, name), False))
        with count:
            yield count.names


def engine_of(method: dict[str, Any]) -> engines.Engine:
    settings = {
        "training": Training(epochs=1, batch_size=5, lr=0.1),
        "seed": 4,
        "device": DEVICE,
        "precision": "float64",
    }
    options = {key: value for key, value in method.items() if key != "name"}
    parts = engines.Parts(
        make_federation([8 + i % 3 for i in range(N)], clusters=[i % 3 for i in range(N)]),
        lambda: initial_model(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), 4),
        find(method["name"])(**options),
        Faults(),
        settings,
    )
    return engines.InProcessEngine(parts)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    """The programs take over, and lists keep room to spare."""
    take_over(monkeypatch, used)
    monkeypatch.setattr(
        PANM, "_room", lambda self, t, cohort, listed: min(cohort.n - 1, listed.shape[1] + self.candidates)
    )


def rounds(
    method: dict[str, Any], monkeypatch: pytest.MonkeyPatch, used: bool
) -> tuple[engines.Engine, list[Counter[str]]]:
    """All rounds, and what each launches."""
    as_on_a_gpu(monkeypatch, used)
    engine = engine_of(method)
    found = []
    for t in range(1, ROUNDS + 1):
        with counting(monkeypatch) as names:
            engine.step(t, False)
        found.append(names)
    return engine, found


@pytest.mark.parametrize("method", [*PANMS, *OTHERS], ids=lambda method: "-".join(map(str, method.values())))
def test_rounds_of_programs_are_those_of_plain_torch_and_few(
    method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = rounds(method, monkeypatch, False)
    fused, launched = rounds(method, monkeypatch, True)
    right, ours = engines.snapshot(plain), engines.snapshot(fused)
    assert right.keys() == ours.keys()
    for name, tensor in right.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-9, equal_nan=True)
        else:
            assert torch.equal(ours[name], tensor), name
    for (_, a), (_, b) in zip(*(engines.edges(each, Parcel())() for each in (plain, fused)), strict=True):
        assert a.client.tolist() == b.client.tolist()
        assert a.neighbor.tolist() == b.neighbor.tolist()
    for t, names in enumerate(launched, start=1):
        if t == 1 or (method["name"] == "pens" and t == STAGE_ONE):  # what is made once in a run
            continue
        assert sum(names.values()) <= MOST[method["name"]], (t, names)
