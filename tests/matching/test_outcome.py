"""What a matching leaves of the lists, against a plain loop over clients."""

import math

import torch

from kinfolk.matching.outcome import COUNTED, outcome, uncounted

KNOWN, STRANGERS, COUNT = 4, 3, 2


def plainly(
    looked_at: list[int], scores: list[float], kin: list[bool], skipped: bool, listed: list[int]
) -> tuple[set[int], set[int]]:
    """Of one client: who is kin, and who is left of the list."""
    same = {j for j, yes in zip(looked_at, kin) if yes}
    rest = {j for j in listed if j >= 0 and (skipped or j not in looked_at[:KNOWN])}
    if not same and not rest:
        seen = [(-score, j) for j, score in zip(looked_at, scores) if j >= 0 and not math.isnan(score)]
        mine = [pair for pair in seen if pair[1] in looked_at[:KNOWN]]
        same = {j for _, j in sorted(mine or seen)[:COUNT]}
    return same, rest


def test_kin_stay_and_so_do_those_not_looked_at() -> None:
    generator = torch.Generator().manual_seed(0)
    m = 300
    order = torch.rand(m, 30, generator=generator).argsort(dim=1)
    listed = order[:, :6].clone()
    listed[torch.rand(m, 6, generator=generator) < 0.6] = -1
    looked_at = torch.cat([listed[:, :KNOWN], order[:, 10 : 10 + STRANGERS]], dim=1)
    looked_at[torch.rand(looked_at.shape, generator=generator) < 0.2] = -1
    scores = torch.randn(looked_at.shape, generator=generator, dtype=torch.float64).round(decimals=1)
    scores[(looked_at < 0) | (torch.rand(scores.shape, generator=generator) < 0.3)] = torch.nan
    skipped = scores.isnan().all(dim=1) | (torch.rand(m, generator=generator) < 0.1)
    kin = (torch.rand(scores.shape, generator=generator) < 0.2) & ~scores.isnan() & ~skipped[:, None]
    cases = torch.randint(128, (m,), generator=generator)
    before = torch.randint(9, (m, len(COUNTED)), generator=generator, dtype=torch.int32)
    same, rest, counts = outcome(looked_at, scores, kin, skipped, listed, KNOWN, COUNT, cases, before)
    assert same.shape == looked_at.shape
    assert rest.shape == listed.shape
    alone = 0
    for i in range(m):
        client = (x[i].tolist() for x in (looked_at, scores, kin, skipped, listed))
        expected = plainly(*client)
        assert ({j for j in same[i].tolist() if j >= 0}, {j for j in rest[i].tolist() if j >= 0}) == expected
        left = not kin[i].any() and not expected[1]
        emptied = left and not skipped[i]
        now = [int(cases[i]) >> bit & 1 for bit in range(len(COUNTED) - 1)] + [int(emptied)]
        assert counts[i].tolist() == [a + b for a, b in zip(before[i].tolist(), now)]
        alone += emptied
    assert alone > 20
    *_, of_skipped = outcome(looked_at, scores, kin, skipped, listed, KNOWN, COUNT, None, uncounted(m, cases.device))
    assert torch.equal(of_skipped[:, 0], skipped.to(torch.int32))
    assert torch.equal(of_skipped[:, -1], counts[:, -1] - before[:, -1])
    assert not of_skipped[:, 1:-1].any()


def test_more_than_were_looked_at_cannot_stay() -> None:
    looked_at, nobody = torch.tensor([[3, 8]]), torch.tensor([[-1]])
    scores, no = torch.tensor([[0.1, 0.2]], dtype=torch.float64), torch.tensor([[False, False]])
    rest = no[:, 0], nobody, 1, 9, None, uncounted(1, no.device)
    assert outcome(looked_at, scores, no, *rest)[0].tolist() == [[3, -1]]  # of the list first
    scores[0, 0] = torch.nan
    assert outcome(looked_at, scores, no, *rest)[0].tolist() == [[8, -1]]
