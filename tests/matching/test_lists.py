"""Lists of peers for many clients at once."""

import torch

from kinfolk.matching.lists import (
    ahead,
    best,
    choose,
    choose_more,
    columns,
    contains,
    look_up,
    pack,
    packed,
    without,
)

CLIENTS = torch.tensor([3, 7, 9])
LISTS = torch.tensor([[5, 2, 8, 11, 4], [1, -1, 6, -1, -1], [-1, -1, -1, -1, -1]])


def test_choose_takes_different_members_and_all_if_they_are_few() -> None:
    chosen = choose(0, "test", 1, CLIENTS, LISTS, 3)
    assert chosen.shape == (3, 3)
    first = chosen[0].tolist()
    assert len(set(first)) == 3
    assert set(first) <= {5, 2, 8, 11, 4}
    assert set(chosen[1].tolist()) == {1, 6, -1}
    assert chosen[1, 2] == -1  # padding comes last
    assert chosen[2].tolist() == [-1, -1, -1]


def test_choose_does_not_depend_on_order_padding_or_shard() -> None:
    chosen = choose(0, "test", 1, CLIENTS, LISTS, 3)
    shuffled = torch.nn.functional.pad(LISTS[:, [4, 2, 0, 1, 3]], (2, 3), value=-1)
    assert torch.equal(choose(0, "test", 1, CLIENTS, shuffled, 3), chosen)
    assert torch.equal(choose(0, "test", 1, CLIENTS[1:], LISTS[1:], 3), chosen[1:])


def test_choose_is_uniform_over_members_and_new_in_every_round_and_for_every_purpose() -> None:
    clients = torch.arange(6000)
    chosen = choose(4, "test", 2, clients, LISTS[:1].expand(6000, 5), 2)
    share = torch.bincount(chosen.flatten(), minlength=12)[LISTS[0]] / 6000
    assert (share - 2 / 5).abs().max() < 0.03
    pairs = {frozenset(pair) for pair in chosen.tolist()}
    assert len(pairs) == 10  # every pair of the five
    other = [choose(4, "test", 3, clients, LISTS[:1].expand(6000, 5), 2)]
    other.append(choose(4, "else", 2, clients, LISTS[:1].expand(6000, 5), 2))
    other.append(choose(5, "test", 2, clients, LISTS[:1].expand(6000, 5), 2))
    assert all((chosen[:, 0] == draw[:, 0]).float().mean() < 0.25 for draw in other)


def test_choose_from_lists_of_no_width_gives_nobody() -> None:
    assert choose(0, "test", 1, CLIENTS, LISTS[:, :0], 2).tolist() == [[-1, -1]] * 3


def test_best_sorts_by_score_then_by_id_and_never_takes_what_was_not_observed() -> None:
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[0.5, 0.9, 0.5, nan, 0.5], [-inf, 9.0, nan, 9.0, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    assert best(LISTS, scores, 3).tolist() == [[2, 4, 5], [1, -1, -1], [-1, -1, -1]]
    assert best(LISTS, scores, 7).tolist()[0] == [2, 4, 5, 8, -1, -1, -1]
    unseen_first = torch.tensor([[7, 9, 8]])
    assert best(unseen_first, torch.tensor([[nan, -inf, -inf]]), 2).tolist() == [[8, 9]]  # infinite loss, but seen


def test_pack_moves_what_is_kept_to_the_left_and_trims() -> None:
    mask = torch.tensor([[False, True, False, True, False], [True, False, False, False, False], [False] * 5])
    assert pack(mask, LISTS).tolist() == [[2, 11], [1, -1], [-1, -1]]
    assert pack(torch.zeros_like(mask), LISTS).shape == (3, 0)
    assert pack(mask[:0], LISTS[:0]).shape == (0, 0)


def test_contains_looks_in_the_list_of_the_same_row() -> None:
    ids = torch.tensor([[11, 1, 5, -1], [6, 5, -1, 1], [1, -1, 2, 3]])
    expected = [[True, False, True, False], [True, False, False, True], [False] * 4]
    assert contains(LISTS, ids).tolist() == expected
    assert not contains(LISTS[:, :0], ids).any()


def test_look_up_falls_back_where_a_client_is_unknown() -> None:
    wanted, ids, values = torch.tensor([4, 0, 9, 5]), torch.tensor([0, 4, 5]), torch.tensor([7, 8, 9])
    assert look_up(wanted, ids, values, torch.tensor([1, 2, 3, 4])).tolist() == [8, 7, 3, 9]
    assert look_up(wanted, ids[:0], values[:0], torch.tensor([1, 2, 3, 4])).tolist() == [1, 2, 3, 4]


def test_packing_into_a_given_room_is_the_same_list_padded() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(30, generator=generator)[:9] for _ in range(6)])
    mask = torch.rand(6, 9, generator=generator) < 0.5
    exact = pack(mask, ids)
    for room in (exact.shape[1], 9, 12):
        roomy = pack(mask, ids, room)
        assert roomy.shape == (6, room)
        assert torch.equal(roomy[:, : exact.shape[1]], exact)
        assert (roomy[:, exact.shape[1] :] == -1).all()
    assert torch.equal(pack(mask, ids, 2), exact[:, :2])  # what finds no room is left out


def test_choose_more_takes_of_the_others_only_what_is_missing() -> None:
    others = torch.tensor([[20, 21, 22], [20, 21, 22], [20, -1, -1]])
    found = choose_more(0, ("test", "more"), 1, CLIENTS, LISTS, others, 4)
    first, then = (choose(0, purpose, 1, CLIENTS, some, 4) for purpose, some in (("test", LISTS), ("more", others)))
    for row, mine, more in zip(found.tolist(), first.tolist(), then.tolist()):
        both = [j for j in mine if j >= 0] + [j for j in more if j >= 0]
        assert row == (both + [-1] * 4)[:4]
    assert torch.equal(choose_more(0, ("test", "more"), 1, CLIENTS, LISTS, others[:, :0], 4), first)


def test_without_leaves_gaps_and_packed_closes_them() -> None:
    left = without(LISTS, torch.tensor([[8, 5, -1], [-1, -1, -1], [3, 4, 5]]))
    assert left.tolist() == [[-1, 2, -1, 11, 4], [1, -1, 6, -1, -1], [-1] * 5]
    assert without(LISTS, LISTS[:, :0]).tolist() == LISTS.tolist()
    assert packed(left).tolist() == [[2, 11, 4], [1, 6, -1], [-1, -1, -1]]
    assert packed(left, 2).tolist() == [[2, 11], [1, 6], [-1, -1]]
    assert packed(left, 7).tolist() == [[2, 11, 4, -1, -1, -1, -1], [1, 6, *[-1] * 5], [-1] * 7]


def test_the_first_columns_are_marked_and_put_ahead() -> None:
    device = torch.device("cpu")
    assert columns(4, 1, device).tolist() == [True, False, False, False]
    scores = torch.tensor([[torch.nan, -1.0, 0.5, torch.nan]], dtype=torch.float64)
    lifted = scores + ahead(4, 2, device)
    assert lifted[0, 1:3].tolist() == [torch.inf, 0.5]
    assert lifted.isnan().tolist() == scores.isnan().tolist()  # who was not seen is not lifted
