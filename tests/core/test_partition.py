"""Positions of destinations and sources: any size, any partition, any tiles."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mame_sd.config import MaMeConfig
from mame_sd.core.partition import DRAWS, Positions, draw_at, positions, square

PARTITIONS = ("alternating", "sequential", "random", "grid", "random-grid")
SIZES = [
    (1, 1),
    (1, 2),
    (3, 1),
    (1, 5),
    (7, 1),
    (5, 10),
    (1, 197),
    (16, 16),
    (7, 11),
    (2, 2),
    (9, 8),
]
TILES = [0, 2, 3, 4, 8]


def config(partition: str = "alternating", **fields: object) -> MaMeConfig:
    return MaMeConfig.from_dict(
        {"tau": 0.8, "partition": partition, "tiles": 0, "redraw": False, **fields}
    )


PAIRWISE = [  # each partition at each size, and in two of the tiles there
    pytest.param(size, partition, TILES[(n + m + more) % len(TILES)])
    for n, size in enumerate(SIZES)
    for m, partition in enumerate(PARTITIONS)
    for more in (0, 2)
]


@pytest.mark.parametrize(("size", "partition", "tiles"), PAIRWISE, ids=str)
def test_every_position_is_a_destination_or_a_source_once(
    size: tuple[int, int], partition: str, tiles: int
) -> None:
    tokens = size[0] * size[1]
    pos = positions(tokens, config(partition, tiles=tiles), size)
    check(pos, tokens)
    if "random" in partition:
        anew = config(partition, tiles=tiles, redraw=True)
        drawn = [
            positions(tokens, anew, size, draw=torch.tensor([i])) for i in (0, 1, 2, DRAWS - 1)
        ]
        assert torch.equal(drawn[0].slots, pos.slots), "the first draw is the one without draws"
        for other in drawn:
            check(other, tokens)
            assert (other.M, other.N, other.blocks, other.m, other.n) == (
                pos.M,
                pos.N,
                pos.blocks,
                pos.m,
                pos.n,
            )
            for mask in ("dst_pad", "src_pad", "dst_real"):
                assert getattr(other, mask) is getattr(pos, mask)


def check(pos: Positions, tokens: int) -> None:
    assert sorted(pos.dst.tolist() + pos.src.tolist()) == list(range(tokens))
    assert (pos.dst.numel(), pos.src.numel()) == (pos.M, pos.N)
    assert pos.M >= 1
    assert pos.src.tolist() == sorted(pos.src.tolist())
    assert pos.dst_slots.numel() == pos.blocks * pos.m
    assert pos.src_slots.numel() == pos.blocks * pos.n
    real = (
        pos.dst_slots.flatten() if pos.dst_real is None else pos.dst_slots.flatten()[pos.dst_real]
    )
    assert real.tolist() == pos.dst.tolist()
    assert pos.src_slots.flatten()[pos.src_real].tolist() == pos.src.tolist()
    rows = torch.cat([pos.dst, pos.src_slots.flatten()])
    assert rows[pos.gather].tolist() == list(range(tokens))


def destinations_by_loops(h: int, w: int, cfg: MaMeConfig, generator: torch.Generator) -> list[int]:
    """Ascending row-major places of the destinations in one tile of h x w tokens."""
    half = (h * w + 1) // 2
    if cfg.partition == "alternating":
        return list(range(0, h * w, 2))
    if cfg.partition == "sequential":
        return list(range(half))
    if cfg.partition == "random":
        return sorted(torch.randperm(h * w, generator=generator)[:half].tolist())
    sh, sw = cfg.stride
    found = []
    for row, column in itertools.product(range(0, h, sh), range(0, w, sw)):
        if cfg.partition == "random-grid":
            y, x = torch.rand(2, generator=generator).tolist()
            row, column = row + int(y * min(sh, h - row)), column + int(x * min(sw, w - column))
        found.append(row * w + column)
    return sorted(found)


@pytest.mark.parametrize("tiles", [0, 2, 3, 8])
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_every_tensor_is_that_of_plain_loops(
    size: tuple[int, int], partition: str, tiles: int
) -> None:
    (h, w), stride = size, (3, 2) if tiles == 3 else (2, 2)
    cfg, generator = (
        config(partition, tiles=tiles, seed=5, stride=stride),
        torch.Generator().manual_seed(5),
    )
    dst, src = [], []  # positions, tile by tile
    for top, left in itertools.product(range(0, h, tiles or h), range(0, w, tiles or w)):
        th, tw = min(tiles or h, h - top), min(tiles or w, w - left)
        tile = [(top + row) * w + left + column for row in range(th) for column in range(tw)]
        chosen = destinations_by_loops(th, tw, cfg, generator)
        dst.append([tile[i] for i in chosen])
        src.append([p for i, p in enumerate(tile) if i not in chosen])
    m, n = max(map(len, dst)), max(map(len, src))
    flat = [p for block in dst for p in block]
    slot = {p: t * n + i for t, block in enumerate(src) for i, p in enumerate(block)}
    pos = positions(h * w, cfg, size)
    assert pos.dst.tolist() == flat
    assert pos.src.tolist() == sorted(slot)
    padded = [
        d + d[:1] * (m - len(d)) + s + d[:1] * (n - len(s)) for d, s in zip(dst, src, strict=True)
    ]
    assert pos.slots.tolist() == padded
    assert pos.src_real.tolist() == [slot[p] for p in sorted(slot)]
    assert pos.source.tolist() == [slot.get(p, 0) for p in range(h * w)]
    assert pos.gather.tolist() == [
        flat.index(p) if p in flat else len(flat) + slot[p] for p in range(h * w)
    ]
    for blocks, width, mask in ((dst, m, pos.dst_pad), (src, n, pos.src_pad)):
        pad = [[i >= len(block) for i in range(width)] for block in blocks]
        assert (mask is not None and mask.tolist() == pad) or (
            mask is None and not any(map(any, pad))
        )
    assert (pos.dst_real is None) == (pos.dst_pad is None)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 50, 197, 256])
def test_alternating_and_sequential_take_half_rounded_up(tokens: int) -> None:
    half = (tokens + 1) // 2
    assert positions(tokens, config()).dst.tolist() == list(range(0, tokens, 2))
    assert positions(tokens, config("sequential")).dst.tolist() == list(range(half))
    assert half == positions(tokens, config("random")).M


def test_grid_takes_the_top_left_of_each_cell() -> None:
    assert positions(15, config("grid"), (3, 5)).dst.tolist() == [0, 2, 4, 10, 12, 14]
    assert positions(15, config("grid", stride=(3, 2)), (3, 5)).dst.tolist() == [0, 2, 4]
    assert positions(16, config("grid", stride=(9, 9))).dst.tolist() == [0]


def test_random_grid_draws_one_of_each_cell_cut_cells_too() -> None:
    found = set()
    for seed in range(20):
        dst = positions(35, config("random-grid", seed=seed, stride=(2, 3)), (5, 7)).dst.tolist()
        assert sorted((p // 7 // 2, p % 7 // 3) for p in dst) == [
            (i, j) for i in range(3) for j in range(3)
        ]
        found.update(dst)
    assert found == set(range(35))
    assert (
        positions(35, config("random-grid", seed=1), (5, 7)).dst.tolist()
        != positions(35, config("grid"), (5, 7)).dst.tolist()
    )


def test_random_has_its_own_seed_and_leaves_the_global_one_alone() -> None:
    state = torch.random.get_rng_state()
    first = positions(50, config("random", seed=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    assert positions(50, config("random", seed=1)).dst.tolist() == first.dst.tolist()
    assert positions(50, config("random", seed=2)).dst.tolist() != first.dst.tolist()


def test_draws_differ_follow_the_seed_and_need_redraw() -> None:
    draw = [torch.tensor([i]) for i in range(DRAWS)]
    seeds = [
        [
            tuple(
                positions(256, config("random-grid", seed=seed, redraw=True), draw=i).dst.tolist()
            )
            for i in draw
        ]
        for seed in (0, 1)
    ]
    assert len({*seeds[0], *seeds[1]}) == 2 * DRAWS
    same = positions(256, config("random-grid", redraw=False), draw=draw[3])
    assert tuple(same.dst.tolist()) == seeds[0][0]


def test_a_timestep_says_which_draw_and_few_come_twice() -> None:
    for count in (10, 20, 25, 50):
        steps = [round(999 - 1000 / count * i) for i in range(count)]
        for times in (steps, [t / 1000 for t in steps]):  # flow models count time from 0 to 1
            found = [int(draw_at(t)) for t in times]
            assert len(set(found)) >= 0.7 * count, "few draws come twice"
            assert sum(a == b for a, b in itertools.pairwise(found)) <= count / 5
            assert set(found) <= set(range(DRAWS))
    of_tokens = [
        torch.tensor([[0, 0, 500]]),
        torch.tensor([500, 20]),
    ]  # the largest: a known first frame has none
    forms = [
        torch.tensor(500),
        torch.tensor([[500.0]]),
        torch.tensor(500, dtype=torch.half),
        500,
        *of_tokens,
    ]
    assert {int(draw_at(form)) for form in forms} == {int(draw_at(500.0))}
    assert draw_at(500).shape == (1,)


def test_large_planes_have_fewer_draws() -> None:
    drawn = config("random-grid", redraw=True, stride=(4, 4))
    found = [
        tuple(positions(2**16, drawn, draw=torch.tensor([i])).dst.tolist()) for i in range(DRAWS)
    ]
    assert len(set(found)) == 8
    assert all(a != b for a, b in itertools.pairwise([*found, found[0]])), (
        "neighbouring layers differ"
    )


def test_tables_of_an_export_are_real() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):  # as torch.export has it
        found = positions(63, config("random-grid", redraw=True), (7, 9), draw=torch.tensor([1]))
    assert found.M == 20
    later = positions(63, config("random-grid", redraw=True), (7, 9), draw=torch.tensor([1]))
    check(later, 63)


def test_tiles_count_inside_each_tile() -> None:
    pos = positions(16, config("alternating", tiles=2), (4, 4))  # each 2 x 2 tile: its left column
    assert pos.blocks == 4
    assert pos.dst.tolist() == [0, 4, 2, 6, 8, 12, 10, 14]
    assert pos.dst_pad is None
    assert pos.src_pad is None
    ragged = positions(15, config("grid", tiles=2), (3, 5))
    assert ragged.blocks == 6
    assert ragged.n == 3
    assert ragged.src_pad is not None
    assert int((~ragged.src_pad).sum()) == ragged.N


def test_aligned_tiles_have_the_destinations_of_the_whole_grid() -> None:
    whole, tiled = (positions(64, config("grid", tiles=tiles)) for tiles in (0, 4))
    assert sorted(tiled.dst.tolist()) == whole.dst.tolist()


def test_positions_are_computed_once_and_serve_autograd_after_inference_mode() -> None:
    with torch.inference_mode():
        first = positions(49, config("grid", stride=(2, 3)))
    assert positions(49, config("grid", stride=(2, 3), min_tokens=1)).dst is first.dst
    x = torch.randn(1, 49, 2, requires_grad=True)
    x.index_select(1, first.dst).sum().backward()
    assert x.grad is not None


def test_size_is_asked_for_where_it_is_needed() -> None:
    assert square(49) == (7, 7)
    assert square(50) is None
    assert positions(50, config()).M == 25
    with pytest.raises(ValueError, match=r"size: partition 'grid'.*50 tokens.*give size=\(h, w\)"):
        positions(50, config("grid"))
    with pytest.raises(ValueError, match="tiles=4"):
        positions(50, config("alternating", tiles=4))
    with pytest.raises(ValueError, match=r"h \* w = 50 tokens, got \(7, 7\)"):
        positions(50, config("grid"), (7, 7))
    with pytest.raises(ValueError, match="at least 1 token"):
        positions(0, config())


def test_a_graph_that_autograd_compiles_reads_tables_of_several_sizes() -> None:
    """Inductor takes graphs as aot_eager does; a backend that only runs them accepts what these
    refuse.
    """
    config = MaMeConfig(keep=0.25)

    class Levels(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, draw: Tensor) -> list[Tensor]:
            sizes = (16, 24), (8, 12), (16, 24)
            return [
                positions(h * w, config, (h, w), draw=draw).gather * self.scale for h, w in sizes
            ]

    levels = Levels()
    compiled = torch.compile(levels, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for draw in (torch.tensor([0]), torch.tensor([5])):
            for got, expected in zip(compiled(draw), levels(draw), strict=True):
                assert torch.equal(got, expected)
