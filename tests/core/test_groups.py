"""Test cells, draws and groups, at every border and of every size."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from mame_sd.core import reference
from mame_sd.core.cells import DRAWS, plane_of
from mame_sd.core.groups import Groups, group_tokens, make_cells
from mame_sd.core.guidance import guidance_leaders, partition_index
from tests import oracle
from tests.builders.tokens import tokens

SIZES = [(16, 16), (33, 33), (17, 19), (3, 40), (1, 50), (31, 7), (13, 53), (23, 1), (2, 5, 7)]
SHARES = [0.5, 0.375, 0.25, 0.125]


def groups_of(
    x: torch.Tensor,
    size: tuple[int, ...],
    keep: float,
    tile_size: int = 16,
    stay: int = 0,
    **more: object,
) -> Groups:
    """Return the groups of tokens x [B, L, d]."""
    cells = make_cells(size, keep, tile_size)
    return group_tokens(x.index_select(1, cells.order), cells, stay=stay, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", SHARES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_cell_has_about_as_many_tokens_everywhere(size: tuple[int, ...], keep: float) -> None:
    """Cells in the last rows and columns are no exception, whatever the sides are divisible by."""
    cells, count = make_cells(size, keep), math.prod(size)
    assert cells.tokens == count
    assert abs(math.log(cells.kept / count / keep)) <= math.log(1.5)
    tiles = Counter(oracle.tiles_of(size, 16))
    assert len(tiles) == cells.tiles
    rows, columns = plane_of(size)
    assert max(tiles.values()) - min(tiles.values()) <= max(rows, columns)
    # Over all draws each token is a destination equally often, at the border too.
    at = cells.order[cells.dst]
    often = torch.zeros(count).index_add(0, at.flatten(), torch.ones(at.numel())) / DRAWS
    frames = often.view(size).transpose(0, 1) if len(size) == 3 else often
    plane = frames.reshape(rows, columns)
    share = cells.kept / count
    for lines in (plane.mean(0), plane.mean(1)):
        assert float(lines.max()) <= 2.1 * share + 0.02
        assert float(lines.min()) >= share / 2.1 - 0.02


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_draw_takes_one_token_of_each_cell(size: tuple[int, ...]) -> None:
    cells = make_cells(size, 0.25)
    real = torch.ones(len(cells.order)).bool() if cells.pad is None else ~cells.pad
    assert sorted(cells.order[real].tolist()) == list(range(cells.tokens))
    assert torch.equal(cells.order[cells.slot], torch.arange(cells.tokens))
    for dst in cells.dst[:5]:
        assert len(set(dst.tolist())) == cells.kept
        assert real[dst].all()
        of_tile = (dst // cells.width).tolist()
        assert Counter(of_tile) == dict.fromkeys(range(cells.tiles), cells.m)
    for queries in cells.queries[:5]:
        assert len(set(queries.tolist())) == len(queries) == min(cells.tokens, 512)
    assert cells.kept == cells.tokens or not torch.equal(cells.dst[0], cells.dst[1])


@pytest.mark.parametrize(
    ("size", "tiles", "width"),
    [((64, 64), 4, 1024), ((72, 56), 4, 1008), ((32, 32), 1, 1024), ((85, 48), 5, 816)],
)
def test_strips_are_tokens_in_their_own_order(
    size: tuple[int, int], tiles: int, width: int
) -> None:
    cells = make_cells(size, 1 / 16, 32, strips=True)
    assert (cells.tiles, cells.width, cells.pad, cells.in_order) == (tiles, width, None, True)
    numbers = torch.arange(cells.tokens)
    assert torch.equal(cells.order, numbers)
    assert torch.equal(cells.slot, numbers)
    x = torch.randn(1, cells.tokens, 3)
    assert cells.to_slots(x) is x
    assert cells.from_slots(x) is x


@pytest.mark.parametrize("size", [(47, 64), (3, 32, 32)])
def test_other_rows_and_videos_are_cut_into_squares(size: tuple[int, ...]) -> None:
    strips, squares = (make_cells(size, 1 / 16, 32, strips=strips) for strips in (True, False))
    assert torch.equal(strips.order, squares.order)
    assert not strips.in_order


def test_draws_follow_their_seed_alone() -> None:
    state = torch.get_rng_state()
    first, second, none = (make_cells((9, 11), 0.25, seed=seed) for seed in (1, 2, None))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first.dst, second.dst)
    assert torch.equal(first.dst, make_cells((9, 11), 0.25, seed=1).dst)
    assert len(none.dst) == 1
    with torch.inference_mode():
        made = make_cells((9, 13), 0.25)
    assert not made.dst.is_inference()


def test_a_timestep_says_which_draw_and_few_come_twice() -> None:
    steps = [torch.linspace(999, 0, n) for n in (4, 10, 30)]
    for times in steps:
        draws = [int(partition_index(t)) for t in times]
        assert len(set(draws)) >= 0.7 * len(draws)
        assert all(0 <= draw < DRAWS for draw in draws)
    assert int(partition_index(500)) == int(partition_index(torch.tensor([0.0, 500.0])))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("stay", [0, 9])
@pytest.mark.parametrize("tile_size", [16, 4, 0])
@pytest.mark.parametrize("size", [(9, 11), (40,), (2, 5, 7)], ids=str)
def test_groups_are_those_of_loops(size: tuple[int, ...], tile_size: int, stay: int) -> None:
    x = tokens(2, math.prod(size), 6, dtype=torch.float64)
    found = groups_of(x, size, 0.25, tile_size, stay, draw=torch.tensor([5]))
    cells = found.cells
    dst, tile = cells.order[cells.dst[5]], oracle.tiles_of(size, tile_size)
    kept = len(dst) + stay
    assert found.tokens_kept == kept
    tiles = [torch.tensor([p for p, at in enumerate(tile) if at == one]) for one in {*tile}]
    drawn = [dst[torch.isin(dst, tokens)] for tokens in tiles]
    for sample in range(2):
        want = reference.group_tokens(x[sample], tiles, drawn, kept)
        # The groups are the same, but ordered by the tokens that they formed around.
        order = want[found.kept[sample]]
        assert torch.equal(order[found.groups[sample]], want)
        means, sizes = oracle.means(x[sample], want.tolist())
        torch.testing.assert_close(found.merge(x)[sample], means[order])
        assert torch.equal(found.sizes[sample], sizes[order])
    restored = found.restore(found.merge(x))
    for sample in range(2):
        assert torch.equal(restored[sample, found.kept[sample]], found.merge(x)[sample])


@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("leader", [[1, 1], [0, 1], [1, 0], [2, 3, 2, 3]], ids=str)
def test_each_sample_joins_as_its_leader_does(
    leader: list[int], compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = tokens(len(leader), 54, 6, dtype=torch.float64)
    alone = groups_of(x, (6, 9), 0.25)
    if compiling:  # as in a graph, where values are unknown
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    led = groups_of(x, (6, 9), 0.25, leader=torch.tensor(leader), stay=3)
    monkeypatch.undo()
    by_itself = groups_of(x, (6, 9), 0.25, stay=3)
    assert torch.equal(led.groups, by_itself.groups[leader])
    assert torch.equal(led.kept, by_itself.kept[leader])
    # Frames of a video in the batch have no leaders.
    few = groups_of(x[:1].repeat(3, 1, 1), (6, 9), 0.25, leader=torch.tensor(leader))
    assert torch.equal(few.groups, alone.groups[:1].expand(3, -1))


def test_grids_of_one_token_and_shares_below_the_largest_cells() -> None:
    x = tokens(2, 1, 4)
    found = groups_of(x, (1, 1), 0.25)
    assert torch.equal(found.restore(found.merge(x)), x)
    assert groups_of(tokens(1, 400, 4), (20, 20), 0.0001).tokens_kept <= 4


@pytest.mark.usefixtures("both_ways")
def test_zero_tiny_huge_and_broken_tokens() -> None:
    x = tokens(2, 64, 6)
    want = groups_of(x, (8, 8), 0.25).groups
    for scale in (1e-15, 1e15):
        assert torch.equal(groups_of(x * scale, (8, 8), 0.25).groups, want)
    x[0, 5] = float("nan")
    found = groups_of(x, (8, 8), 0.25)
    assert torch.equal(found.groups[1], want[1])
    assert found.merge(x)[1].isfinite().all()
    large = torch.full((1, 64, 2), 60000.0, dtype=torch.float16)
    assert groups_of(large, (8, 8), 0.25).merge(large).isfinite().all()
    zeros = torch.zeros(1, 64, 4)
    found = groups_of(zeros, (8, 8), 0.25)
    assert int(found.sizes.sum()) == 64
    assert torch.equal(found.merge(zeros), torch.zeros(1, found.tokens_kept, 4))


def test_cells_are_looked_up_and_no_graph_is_kept() -> None:
    size = (8, 8)
    assert make_cells(size, 0.25) is make_cells(torch.Size(size), 0.25)
    x = tokens(1, 64, 4).requires_grad_()
    found = groups_of(x, size, 0.25)
    assert not found.row.requires_grad
    assert found.merge(x).requires_grad


def test_unguided_chunks_follow_the_first_guided_one() -> None:
    for unguided, expected in (
        ([True, False], [2, 3, 2, 3]),
        ([False, True], [0, 1, 0, 1]),
        ([False, False], [0, 1, 2, 3]),
        ([True, True], [0, 1, 2, 3]),
        ([True, False, False, False], [1, 1, 2, 3]),
        ([True, False, False], [0, 1, 2, 3]),  # a batch of four has no three chunks
        ([], [0, 1, 2, 3]),
    ):
        assert guidance_leaders(torch.ones(4, 4, 8, 8), unguided).tolist() == expected, unguided
    odd = torch.ones(3, 4, 8, 8)  # has no two halves
    assert guidance_leaders(odd).tolist() == [0, 1, 2]


@pytest.mark.parametrize("where", [(0, 0, 0, 0), (1, 3, 7, 7)], ids=str)
def test_a_chunk_of_another_input_leads_itself(where: tuple[int, ...]) -> None:
    twice = tokens(2, 4, 64).view(2, 4, 8, 8).repeat(2, 1, 1, 1)
    assert guidance_leaders(twice).tolist() == [2, 3, 2, 3]
    twice[where] += 1
    assert guidance_leaders(twice).tolist() == [0, 1, 2, 3]
    # Three prompts for areas and a negative one that covers the second prompt's area.
    x, unguided = torch.randn(3, 4, 8, 8), [True, False, False, False]
    assert guidance_leaders(torch.cat([x[1:2], x]), unguided).tolist() == [0, 1, 2, 3]
    assert guidance_leaders(torch.cat([x[:1], x]), unguided).tolist() == [1, 1, 2, 3]


def test_groups_are_the_same_whatever_the_default_device_is() -> None:
    x = tokens(2, 64, 6)
    want = groups_of(x, (8, 8), 0.25).merge(x)
    with torch.device("meta"):
        assert torch.equal(groups_of(x, (8, 8), 0.25).merge(x), want)
