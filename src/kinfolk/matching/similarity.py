"""How alike two clients are: losses of one's model on the other's data, or the angle between their updates.

All similarities are float64, larger means more alike, and NaN means not observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kinfolk.cohort.pairs import matrix, same
from kinfolk.cohort.room import SMALL
from kinfolk.cohort.workers import side_by_side
from kinfolk.kernels import dispatch

LARGEST_GRAM = 2048  # peers up to which all pairs may be one matrix product; of more only the wanted pairs are computed
CROWD = 60  # peers for each wanted one up to which a GPU is faster at all pairs, which its matrix units multiply
DENSE = 4  # peers for each wanted one up to which a CPU is faster with all pairs at once than with the wanted ones
BLOCK = 8192  # columns that one thread takes at a time
NEAR = 2**17  # numbers of peers from which a CPU takes wanted pairs at a time: they should stay in the nearest cache
NARROWEST = 256  # columns, and no fewer, multiplied in the run's own precision before they are added up in float64
SMALLEST_LOSS, LARGEST_LOSS = 1e-8, 1e8  # the same caps for all peers, so that ties at a cap are broken by id
SMALLEST_NORM = 1e-12
HELD = 2**23  # products of pairs that may lie in memory until they are added up

Parts = tuple[Tensor, Tensor, Tensor]  # products of pairs and squared lengths, of some columns


def inverse_loss(losses: Tensor) -> Tensor:
    """1 / F, as PANM prints it; an infinite loss is similarity 0."""
    return losses.clamp(min=SMALLEST_LOSS).reciprocal()


def log_loss(losses: Tensor) -> Tensor:
    """-log F: the same order as 1 / F, but it does not blow up as the training loss goes to zero.

    Finite for an infinite loss too: one diverged peer must not spoil the means of all.
    """
    return -losses.clamp(SMALLEST_LOSS, LARGEST_LOSS).log()


def cosines(mine: Tensor, theirs: Tensor, rows: Tensor, origin: Tensor | None = None) -> Tensor:
    """Cosine of the angle between my vector and each wanted peer's, seen from `origin`.

    mine: [m, d]; theirs: [p, d]; rows: [m, c] into `theirs`, -1 for none; origin: [d] -> [m, c]. A vector without
    length has cosine 0 with everything.
    """
    if not theirs.shape[0] or not rows.shape[1]:  # nobody answered anybody of this cohort, or nobody was asked
        return torch.full(rows.shape, torch.nan, dtype=torch.float64, device=mine.device)
    m, p, c = mine.shape[0], theirs.shape[0], rows.shape[1]
    among = same(mine, theirs)
    if dispatch.fused(mine):
        if among and mine.dtype == torch.float32 and p <= min(LARGEST_GRAM, CROWD * c):
            from kinfolk.kernels.gram import cosines as of_all

            return of_all(mine, rows, origin, SMALLEST_NORM)
        from kinfolk.kernels.cosines import cosines as fused

        return fused(mine, theirs, rows, origin, SMALLEST_NORM)
    wanted = rows.clamp(min=0)
    everybody = p <= (LARGEST_GRAM if mine.is_cuda else min(LARGEST_GRAM, DENSE * c))
    if everybody and mine.is_cuda:
        return _finish(*_at_once(mine, theirs, origin), rows)
    multiply, width = (_all, BLOCK) if everybody else _some(wanted, p, mine)
    products = torch.zeros((m, p if everybody else c), dtype=torch.float64, device=mine.device)
    my_squares = torch.zeros(m, dtype=torch.float64, device=mine.device)
    their_squares = torch.zeros(p, dtype=torch.float64, device=mine.device)

    def seen(models: Tensor, columns: slice) -> Tensor:
        return models[:, columns].contiguous() if origin is None else models[:, columns] - origin[columns]

    def work(columns: slice) -> Parts:
        found, mine_too, theirs_too = (torch.zeros_like(each) for each in (products, my_squares, their_squares))
        for first in range(columns.start, columns.stop, width):
            some = slice(first, min(first + width, columns.stop))
            a = seen(mine, some)
            b = a if among else seen(theirs, some)
            found += multiply(a, b)
            mine_too += _squares(a)
            if not among:
                theirs_too += _squares(b)
        return found, mine_too, mine_too if among else theirs_too

    for found, mine_too, theirs_too in _by_blocks(work, mine.shape[1], products.numel(), mine.numel()):
        products += found
        my_squares += mine_too
        their_squares += theirs_too
    return _finish(products, my_squares, their_squares, rows, everybody)


def _finish(
    products: Tensor, my_squares: Tensor, their_squares: Tensor, rows: Tensor, everybody: bool = True
) -> Tensor:
    """Cosines [m, c] from products of all pairs [m, p], or of the wanted ones [m, c], and squared lengths [m], [p]."""
    wanted = rows.clamp(min=0)
    if everybody:
        products = products.gather(1, wanted)
    my_lengths, their_lengths = my_squares.sqrt()[:, None], their_squares.sqrt()[wanted]
    known = (my_lengths > SMALLEST_NORM) & (their_lengths > SMALLEST_NORM)
    cosine = torch.where(known, products / (my_lengths * their_lengths), 0.0).clamp(-1.0, 1.0)
    return torch.where(rows >= 0, cosine, torch.nan)


def _at_once(mine: Tensor, theirs: Tensor, origin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The same sums block by block, as one batched product: a GPU is faster at few large steps than at many."""
    a = mine if origin is None else mine - origin
    b = a if theirs is mine else theirs if origin is None else theirs - origin
    d = a.shape[1]
    whole = d // BLOCK * BLOCK
    products = torch.zeros((a.shape[0], b.shape[0]), dtype=torch.float64, device=a.device)
    for first, last, width in ((0, whole, BLOCK), (whole, d, d - whole)):
        if first < last:
            x, y = (v[:, first:last].reshape(v.shape[0], -1, width) for v in (a, b))  # [m, blocks, width]
            products += torch.bmm(x.transpose(0, 1), y.permute(1, 2, 0)).sum(dim=0, dtype=torch.float64)
    squares = [torch.linalg.vector_norm(v, dim=1, dtype=torch.float64).square() for v in ([a] if b is a else [a, b])]
    return products, squares[0], squares[-1]


def _by_blocks(work: Callable[[slice], Parts], d: int, pairs: int, numbers: int) -> Iterator[Parts]:
    """work(columns) for the d columns a block at a time, in their order: memory is bounded by some blocks.

    Each block is worked on by one thread, as many at a time as there are: then it matters to no bit how many.
    """
    blocks = [slice(first, min(first + BLOCK, d)) for first in range(0, d, BLOCK)]
    threads = torch.get_num_threads() if 4 * numbers >= SMALL else 1
    held = max(threads, HELD // max(1, pairs))
    for first in range(0, len(blocks), held):
        yield from side_by_side(work, blocks[first : first + held], threads)


def _squares(block: Tensor) -> Tensor:
    """Squared lengths of rows: [m] float64."""
    lengths: Tensor = torch.linalg.vector_norm(block, dim=1)
    return lengths.to(torch.float64).square_()


def _all(a: Tensor, b: Tensor) -> Tensor:
    """Products of all pairs: [m, p]."""
    return a @ b.T


def _some(wanted: Tensor, p: int, like: Tensor) -> tuple[Callable[[Tensor, Tensor], Tensor], int]:
    """How to multiply the wanted [m, c] of all pairs only, to [m, c], and how many columns at a time.

    On a CPU nothing is gathered: rows are read where they lie, many times each, so few enough columns are taken that
    those of all peers stay in the cache.
    """
    if like.is_cuda:
        return partial(_gathered, wanted=wanted), BLOCK
    m, c = wanted.shape
    pattern = matrix(torch.full((m,), c), wanted.reshape(-1), like.new_zeros(m * c), p)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = torch.sparse.sampled_addmm(pattern, a, b.T, beta=0.0).values()
        return found.view(m, c)

    return multiply, max(NARROWEST, 2 ** (max(1, NEAR // p).bit_length() - 1))


def _gathered(a: Tensor, b: Tensor, wanted: Tensor) -> Tensor:
    """The same with a copy of one peer for everybody at a time."""
    return torch.stack([(a * b[peer]).sum(dim=1, dtype=torch.float64) for peer in wanted.unbind(dim=1)], dim=1)
