"""All programs compiled for an H200, an older, a smaller and a newer GPU, of which none is needed: a compiler accepts
less than an interpreter. In a process of its own, because here Triton may be set to interpret.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

KINDS = {torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.int8: "*i8", torch.bfloat16: "*bf16",
         torch.float32: "*fp32", torch.float64: "*fp64", torch.bool: "*i1"}  # fmt: skip
# Compute capability × 10 -> bytes of shared memory that a program can have there.
SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")  # not imported: others decide how it runs
@pytest.mark.parametrize("capability", SHARED)
def test_every_program_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    settings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    settings["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, __file__, str(capability)]
    found = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert int(found.stdout.split()[-1]) >= 45


def compile_all(capability: int) -> int:
    """How many programs were compiled, each for the arguments its own wrapper gives it.

    With what Triton knows of them when a program is launched: of that hangs what is loaded ahead, into shared memory.
    """
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from kinfolk.kernels import gram

    seen = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        given = dict(zip(self.arg_names, args)) | {
            name: options.pop(name) for name in self.arg_names if name in options
        }
        constants = {p.name: given[p.name] for p in self.params if p.is_constexpr}
        fixed = [p.name for p in self.params if p.do_not_specialize]
        constants |= {
            name: 1 for name, value in given.items() if type(value) is int and value == 1 and name not in fixed
        }
        signature = {name: "constexpr" if name in constants else _kind(value) for name, value in given.items()}
        even = [name for name in signature if name not in [*constants, *fixed] and _even(given[name])]
        key = (self.fn.__name__, *signature.items(), *constants.items(), *even)
        if key not in seen:
            seen.add(key)
            known = {(self.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
            source = ASTSource(self, signature, constants, known)
            program = compiled(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert program.metadata.shared <= SHARED[capability], (self.fn.__name__, constants, program.metadata.shared)

    JITFunction.run = run
    gram.shared_memory = lambda where: SHARED[capability]
    gram.newer = lambda where: capability >= 100
    _call_all()
    _convolve()
    _linear()
    return len(seen)


def _even(value: Any) -> bool:
    """Whether a number, or an address, is known to be a multiple of 16."""
    return (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return KINDS[value.dtype]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _call_all() -> None:
    from kinfolk.kernels import (
        blend,
        company,
        cosines,
        descent,
        drawing,
        evidence,
        gram,
        hashing,
        lists,
        mixing,
        mixture,
        rows,
    )  # fmt: skip
    from kinfolk.matching.outcome import uncounted

    key, m, w = 2**40, 4, 90
    clients, ids, known = (
        torch.zeros(m, dtype=torch.int64),
        torch.zeros((m, 20), dtype=torch.int64),
        torch.ones(m, w).long(),
    )
    scores, mask, each = torch.zeros(m, 20, dtype=torch.float64), torch.zeros(m, 20).bool(), torch.zeros(m).bool()
    for unit in (False, True):
        hashing.bits(key, clients[:, None], ids, unit)
    hashing.positions(key, clients, clients, 5)
    drawing.draw(key, clients, clients, clients, known, w, 5)
    drawing.place(clients, w)
    drawing.rows(clients, ids, mask, each)
    drawing.rows(clients, ids, mask, each, ids.view(4, -1), 1, 1, 2**33)
    lists.choose(key, clients, known, 5)
    lists.choose(key, clients, ids, 5, key, known)
    lists.best(ids, scores, 5)
    lists.best(ids, scores.float(), 5)
    lists.pack(None, ids, 5)
    lists.pack(mask, ids, 5)
    for drop in (False, True):
        lists.contains(ids, known, drop)
    for cases in (None, clients):
        lists.outcome(ids, scores, mask, each, known, 10, 5, cases, uncounted(m, ids.device))
    for kind in (torch.float32, torch.float64):
        models = torch.zeros(m, 9000, dtype=kind)
        blend.blend(models.float(), models.float(), ids, scores.float(), scores[:, 0].float())
        for first in (True, False):
            descent.descend(models.float(), models.float(), models.float(), scores[:, 0].float(), 0.9, 1e-4, first)
            narrow = models.float()[:, 10:600]
            descent.descend(narrow, narrow, narrow, scores[:, 0].float(), 0.9, 0.0, first)
        for origin in (None, models[0]):
            cosines.cosines(models, models, ids, origin, 1e-12)
            gram.cosines(models.float(), ids, None if origin is None else origin.float(), 1e-12)
        for count in (1, 150):
            gram.cosines(torch.zeros(count, 70), ids[:1] if count == 1 else ids, None, 1e-12)
            gram.cosines(torch.zeros(count, 5000), ids[:1] if count == 1 else ids, None, 1e-12)
        rows.copied(models, ids[:, 0])
        mixing.mix(models, models, ids, None, 1.0, each)
        mixing.mix(models, models, ids, scores, scores[:, 0], each)
    constants = (1.5, 0.2, 0.4, 30.0, 0.98, 1e-12)
    for columns in (10, 20):
        evidence.look(scores[:, :columns], mask[:, :columns], 3.0, constants)
        mixture.match(scores[:, :columns], mask[:, :columns], 5, 100, 1e-24, 1e-2, 1e-12)
    evidence.look(scores, mask, 3.0, constants, ids, torch.zeros(m, w), scores[:, 0].contiguous(), 0.3)
    met = torch.zeros(m, w, dtype=torch.int32)
    for columns in (10, 20):
        company.met(met, clients, ids[:, :columns], 7)
        company.kept(met.to(torch.uint8), met.to(torch.uint8), ids[:, :columns], mask[:, :columns], 0.5)


def _convolve() -> None:
    """Layers like those of the nets we ship, and a wide one, there and back in every precision."""
    from kinfolk.kernels.convolution import Convolution

    layers = [(3, 32, 3, 0, (12, 12), True), (32, 64, 5, 0, (10, 10), False), (128, 128, 3, 1, (6, 6), False),
              (3, 128, 3, 0, (12, 12), True)]  # fmt: skip
    for precision in ("bf16", "tf32", "float32"):
        for channels, filters, kernel, padding, size, first in layers:
            conv = Convolution(channels, filters, kernel, padding, 2, size, first)
            images, index = torch.zeros(4, channels, *size), torch.zeros(2, 2, dtype=torch.int64)
            x = conv.samples(images, precision)
            weight, bias = torch.zeros(2, filters, channels, kernel, kernel), torch.zeros(2, filters)
            wide = conv.widened(weight, precision)
            if not first:
                x = x.view(2, 2, *x.shape[1:])
            conv.forward(x, index, wide, bias, False, precision)
            out, winner = conv.forward(x, index, wide, bias, True, precision)
            assert winner is not None
            conv.backward(x, index, weight, wide, winner, out, not first, precision)


def _linear() -> None:
    """Linear layers of every kind, all tiles, in every precision."""
    from kinfolk.kernels import dense, entropy

    rows = torch.zeros(2, 30 * 20 + 20)
    weight, bias = rows[:, :600].view(2, 20, 30), rows[:, 600:]
    for precision in dense.DOTS:
        for batch in (5, 20, 50, 130):
            index = torch.zeros(2, batch, dtype=torch.int64)
            for gather, relu, own in ((True, True, bias), (False, False, bias), (False, True, None)):
                x = torch.zeros(9, 30) if gather else torch.zeros(2, batch, 30)
                out = dense.forward(x, index, weight, own, relu, gather, precision)
                dense.weights_backward(x, index, out, out, weight, own, relu, gather, precision)
    for classes in (2, 10, 100):
        logits, labels = torch.zeros(2, 20, classes), torch.zeros(2, 20, dtype=torch.int64)
        for share in (None, torch.zeros(2, 20, dtype=torch.float64)):
            entropy.entropy(logits, labels, share)


if __name__ == "__main__":
    print("programs compiled:", compile_all(int(sys.argv[1])))
