"""Test `mame_sd.core.restore` against the reference, in every precision, size and share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mame_sd.core import reference, restore
from mame_sd.core.cells import DRAWS
from mame_sd.core.restore import ChosenOfImages, cells_and_count, choose_tokens, restored
from tests import oracle
from tests.builders.tokens import tokens as drawn_tokens

tokens = partial(drawn_tokens, dtype=torch.float64)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}
# Shares by which one drawn token and one other, a few, and nearly all tokens are chosen.
CASES = [
    ((5, 7), 0.25, 32),
    ((33, 31), 0.02, 32),
    ((40, 56), 0.02, 32),
    ((12, 16), 0.25, 5),
    ((11, 13), 0.9, 4),
    ((11, 25), 0.9, 4),  # squares, some of which are padded
    ((3, 6, 9), 0.125, 32),
    ((3, 6, 9), 0.25, 8),
    ((1, 50), 0.25, 4),
    ((37,), 0.25, 3),
    ((2, 1), 0.5, 32),
    ((6, 6), 0.99, 32),
    ((7, 9), 1e-6, 0),
]


def mlp(dtype: torch.dtype = torch.float64, channels: int = 6) -> Callable[[Tensor], Tensor]:
    """Return a function of tokens [.., C] to [.., 3]."""
    generator = torch.Generator().manual_seed(1)
    up, down = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) / shape[0] ** 0.5
        for shape in ((channels, 8), (8, 3))
    )
    return lambda t: torch.nn.functional.gelu(t @ up) @ down


def tiles_of(size: tuple[int, ...], tile_size: int) -> list[list[int]]:
    """Return the positions of each tile's tokens: strips of whole rows if their size is near."""
    if len(size) == 2 and tile_size:
        (h, w), square = size, tile_size**2
        heights = [rows for rows in range(1, h + 1) if h % rows == 0]
        near = [rows for rows in heights if square <= 1.5 * rows * w <= 2.25 * square]
        if near:
            rows = min(near, key=lambda rows: abs(math.log(rows * w / square)))
            return [list(range(start * w, (start + rows) * w)) for start in range(0, h, rows)]
    tiles: dict[tuple[int, int], list[int]] = {}
    for token, tile in enumerate(oracle.tiles_of(size, tile_size)):
        tiles.setdefault(tile, []).append(token)
    return [tiles[tile] for tile in sorted(tiles)]


def by_loop(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    size: tuple[int, ...],
    keep: float,
    tile_size: int = 32,
    draw: int = 0,
    seed: int = 0,
    leader: list[int] | None = None,
) -> tuple[Tensor, list[list[int]]]:
    """Return the reference's output for the image's tokens x [B, L, C], and the chosen tokens."""
    cells, count = cells_and_count(size, keep, seed, x.device, tile_size)
    drawn = cells.order[cells.dst[draw]].view(cells.tiles, cells.m)
    tiles = tiles_of(size, tile_size)
    where = {token: number for number, tile in enumerate(tiles) for token in tile}
    # In the library's order.
    parts = [torch.tensor(tiles[where[int(own[0])]]) for own in drawn]
    assert sorted(torch.cat(parts).tolist()) == list(range(math.prod(size)))
    x = x.double()
    by = x if leader is None else x[leader]
    pairs = [
        reference.restored(fn, one, parts, list(drawn), count, chooser)
        for one, chooser in zip(x, by, strict=True)
    ]
    return torch.stack([y for y, _ in pairs]), [at.tolist() for _, at in pairs]


@pytest.mark.parametrize(("size", "keep", "tile_size"), CASES, ids=str)
def test_values_and_choice_equal_the_loop(
    size: tuple[int, ...], keep: float, tile_size: int
) -> None:
    x, fn = tokens(2, math.prod(size), 6), mlp()
    want, places = by_loop(fn, x, size, keep, tile_size)
    found = restored(fn, x, size, keep, tile_size=tile_size)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    cells, count = cells_and_count(size, keep, 0, x.device, tile_size)
    chosen = choose_tokens(x, cells, count)
    at = chosen.at.tolist()
    assert [sorted({*row}) for row in at] == [sorted(row) for row in places]
    # A tile with fewer tokens than are chosen repeats some.
    assert cells.pad is not None or len({*at[0]}) == chosen.tokens_kept
    torch.testing.assert_close(chosen.take(found), fn(chosen.take(x)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("before", "after"), [(3, 4), (0, 2)])
def test_every_dtype_equals_the_loop_around_text(
    dtype: torch.dtype, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype.itemsize < 4:  # weights are limited instead of results, and here none is so large
        monkeypatch.setattr(reference, "bounded", lambda fit, values: fit)
    size, keep = (9, 14), 0.25
    x, fn = tokens(2, before + 126 + after, 6, dtype=dtype, seed=1), mlp(dtype)  # no near ties
    found = restored(fn, x, size, keep, before, after, tile_size=7)
    assert found.dtype == dtype
    image = slice(before, before + 126)
    want = fn(x).double()
    want[:, image], _ = by_loop(mlp(), x[:, image], size, keep, 7)
    torch.testing.assert_close(found.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    text = torch.cat([t[:, n] for t in (x,) for n in (slice(before), slice(image.stop, None))], 1)
    torch.testing.assert_close(torch.cat([found[:, :before], found[:, image.stop :]], 1), fn(text))


def test_gradients_reach_the_function_alone() -> None:
    """Gradients equal those of the loop: the choice and the weights of the fit have none."""
    x = tokens(2, 63, 6).requires_grad_()
    scale = torch.ones(6, dtype=torch.float64, requires_grad=True)
    fn = mlp()
    upstream = tokens(2, 63, 3, seed=2)
    outputs = (
        restored(lambda t: fn(t * scale), x, (7, 9), 0.25),
        by_loop(lambda t: fn(t * scale), x, (7, 9), 0.25)[0],
    )
    found, want = (torch.autograd.grad((y * upstream).sum(), (x, scale)) for y in outputs)
    torch.testing.assert_close(found, want)
    assert int(found[0].any(-1).sum()) == 2 * round(0.25 * 63)


def test_draws_seeds_and_leaders_choose_as_the_loop_does() -> None:
    x, fn, size = tokens(2, 63, 6), mlp(), (7, 9)
    plain = restored(fn, x, size, 0.25)
    for how in ({"draw": 7}, {"draw": DRAWS - 1, "seed": 3}):
        given: dict[str, Any] = {**how, "draw": torch.tensor([how["draw"]])}
        found = restored(fn, x, size, 0.25, **given)
        torch.testing.assert_close(found, by_loop(fn, x, size, 0.25, **how)[0])
        assert not torch.allclose(found, plain)
    cells, count = cells_and_count(size, 0.25, 0, x.device)
    chosen = choose_tokens(x, cells, count, leader=torch.tensor([1, 1]))
    assert torch.equal(chosen.at[0], chosen.at[1])
    want, _ = by_loop(fn, x, size, 0.25, leader=[1, 1])
    torch.testing.assert_close(chosen.restore(fn(chosen.take(x))), want)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_tile(bad: float) -> None:
    x, fn = tokens(2, 256, 6, dtype=torch.float32), mlp(torch.float32)
    want = restored(fn, x, (16, 16), tile_size=8)
    x[0, 3] = bad
    found = restored(fn, x, (16, 16), tile_size=8)
    torch.testing.assert_close(found[1], want[1])
    tile = torch.zeros(16, 16).bool()
    tile[:4] = True  # a strip of as many tokens as a tile
    torch.testing.assert_close(found[0][~tile.flatten()], want[0][~tile.flatten()])
    assert not found[0, 3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 1e-5, 1e-3])
def test_equal_and_nearly_equal_tokens_stay_bounded(
    noise: float, offset: float, dtype: torch.dtype
) -> None:
    """A constant image has a constant output, however its distances are rounded."""
    x = offset + noise * tokens(1, 1024, 64)
    fn = mlp(torch.float64, 64)
    exact = fn(x)
    found = restored(lambda t: fn(t.double()).to(dtype), x.to(dtype), (32, 32)).double()
    least = 4 * torch.finfo(dtype).eps * (1 + exact.abs().amax())
    apart = (fn(x.to(dtype).double()) - exact.mean(1, keepdim=True)).abs().amax()
    assert (found - exact).abs().amax() <= least + 6 * apart


def test_weights_stay_bounded_where_half_of_the_tokens_are_equal() -> None:
    x = tokens(2, 1024, 16, dtype=torch.float32)
    x[:, 512:] = x[:, :1]
    cells, count = cells_and_count((32, 32), 0.25, 0, x.device)
    weights = choose_tokens(x, cells, count).weights(torch.float32)
    assert weights.isfinite().all()
    assert weights.abs().sum(-1).amax() < 15
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))


def test_what_all_tokens_have_in_common_hides_no_distance() -> None:
    x, fn = 3000 + tokens(1, 256, 6), mlp()
    want, _ = by_loop(lambda t: fn(t - 3000), x, (16, 16), 0.25)
    found = restored(lambda t: fn(t.double() - 3000), x.float(), (16, 16), 0.25)
    torch.testing.assert_close(found, want, rtol=0.02, atol=0.02)


def test_no_token_is_chosen_twice() -> None:
    """If all tokens are equal, no token is farther away than those that are already chosen."""
    cells, count = cells_and_count((16, 16), 0.5, 0, torch.device("cpu"))
    at = choose_tokens(torch.ones(1, 256, 4), cells, count).at
    assert len({*at[0].tolist()}) == at.shape[1] == 128


def test_large_halves_do_not_overflow() -> None:
    x = (3e4 * tokens(2, 256, 64).clamp(-2, 2)).half()
    found = restored(lambda t: t, x, (16, 16), 0.25)
    assert found.isfinite().all()
    assert found.abs().amax() > 3e4


def test_fewer_tokens_than_are_drawn_are_all_computed() -> None:
    for size in ((1, 1), (1, 2), (2,), (1, 1, 3)):
        x, fn = tokens(2, math.prod(size), 6), mlp()
        torch.testing.assert_close(restored(fn, x, size, 0.99), fn(x))
    assert restored(mlp(), tokens(0, 63, 6), (7, 9)).shape == (0, 63, 3)


def test_all_tokens_are_computed_at_a_keep_of_1() -> None:
    x, fn = tokens(2, 63, 6), mlp()
    assert torch.equal(restored(fn, x, (7, 9), 1), fn(x))


def test_autocast_leaves_the_fit_in_full_precision() -> None:
    x, fn = tokens(1, 256, 6, dtype=torch.float32), mlp(torch.float32)
    want = restored(fn, x, (16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        found = restored(lambda t: fn(t.double().float()).float(), x, (16, 16))
    torch.testing.assert_close(found.float(), want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_graph_gives_the_same(dtype: torch.dtype) -> None:
    x, fn = tokens(2, 3 + 225, 6, dtype=dtype), mlp(dtype)

    def call(x: Tensor, draw: Tensor) -> Tensor:
        return restored(fn, x, (15, 15), 0.25, 3, draw=draw, tile_size=8)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for number in (0, 5):
        draw = torch.tensor([number])
        torch.testing.assert_close(compiled(x, draw), call(x, draw))


def test_a_graph_of_halves_takes_any_batch() -> None:
    dtype, fn = torch.bfloat16, mlp(torch.bfloat16)
    cells, count = cells_and_count((32, 32), 0.125, 0, torch.device("cpu"))

    def call(x: Tensor, y: Tensor) -> Tensor:
        chosen = choose_tokens(x, cells, count)
        return chosen.add_restored_around_(y * 1, fn(chosen.take(x)), 0)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 5):
        x, y = tokens(batch, 1024, 6, dtype=dtype), tokens(batch, 1024, 3, dtype=dtype)
        for t in (x, y):
            torch._dynamo.mark_dynamic(t, 0)  # a batch that is a constant of the graph is an error
        torch.testing.assert_close(compiled(x, y), call(x, y), rtol=0.02, atol=0.02)


X = torch.zeros(2, 63, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grid": (0, 9)}, "grid, before, after: expected"),
        ({"grid": 63}, "grid, before, after: expected"),
        ({"grid": (1, 1, 7, 9)}, "grid, before, after: expected"),
        ({"before": -1, "after": 1}, "grid, before, after: expected"),
        ({"keep": 0}, "keep: expected a share above 0 and at most 1, got 0"),
        ({"keep": math.nan}, "keep: expected"),
        ({"grid": (7, 8)}, r"x: expected floating-point tokens \[B, 56, C\], got \[2, 63, 4\]"),
        ({"x": X[0]}, "x: expected floating-point tokens"),
        ({"x": X.long()}, "x: expected floating-point tokens"),
        ({"draw": 3}, r"draw: expected a LongTensor \[1\], got 3"),
        ({"draw": torch.tensor([1, 2])}, r"draw: expected a LongTensor \[1\]"),
        ({"tile_size": 1}, "tile_size: expected 0 for no tiles, or a side of 2"),
        ({"seed": -1}, "seed: expected a whole number from 0"),
        ({"fn": lambda t: t[:, :2]}, r"fn: expected \[2, 8, C\] for 8 tokens, got \[2, 2, 4\]"),
        ({"fn": lambda t: None}, r"fn: expected \[2, 8, C\] for 8 tokens, got None"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value[:20],
)
def test_bad_input_is_one_line(given: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"fn": lambda t: t, "x": X, "grid": (7, 9), **given}
    with pytest.raises(ValueError, match=message) as caught:
        restored(**call)
    assert "\n" not in str(caught.value)


def test_a_fit_stays_near_the_range_of_what_was_computed() -> None:
    """Without bounds the fit was 4.4 times as large as the function's largest value."""
    generator = torch.Generator().manual_seed(34)
    for seed in range(8):
        x = torch.randn(1, 1024, 64, generator=generator) + 30 * (seed % 2)
        rough = torch.randn(64, 8, generator=generator)
        y = restored(lambda t, rough=rough: torch.sin(5 * t @ rough), x, (32, 32))
        assert float(y.abs().max()) < 1.51


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_are_limited_in_half_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit acts on single tokens, towards the mean, and leaves all others as they are."""
    x, limit = tokens(2, 1024, 8, dtype=dtype), 3.0
    cells, count = cells_and_count((32, 32), 0.125, 0, x.device)
    free = choose_tokens(x, cells, count).weights(torch.float32)
    monkeypatch.setattr(restore, "LARGEST", limit)
    held = choose_tokens(x, cells, count).weights(torch.float32)
    sums = (free - 1 / count).abs().sum(-1, keepdim=True)
    assert 0.1 < float((sums > limit).double().mean()) < 0.9
    want = torch.where(sums > limit, 1 / count + (free - 1 / count) * limit / sums, free)
    torch.testing.assert_close(held, want)
    assert choose_tokens(x, cells, count).weights(dtype).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(32, 64), (37, 60)], ids=["strips", "squares"])
@pytest.mark.parametrize("estimating", [False, True])
def test_restored_tokens_are_added_in_place(
    dtype: torch.dtype, size: tuple[int, int], estimating: bool
) -> None:
    before, after, fn, found = 3, 2, mlp(dtype), []
    x = tokens(2, before + math.prod(size) + after, 6, dtype=dtype)
    cells, count = cells_and_count(size, 0.125, 0, x.device)
    on_error = (lambda *sums: found.append(sums)) if estimating else None
    chosen = choose_tokens(x[:, before:-after], cells, count, on_error=on_error)
    f = fn(chosen.take_around(x, before))
    y = tokens(2, x.shape[1], f.shape[-1], dtype=dtype, seed=3)
    want = (y + chosen.restore_around(f, before)).double()
    assert chosen.add_restored_around_(y, f, before) is y
    near = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want, rtol=near, atol=near)
    assert len(found) == 2 * estimating


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_images_that_follow_one_another_are_restored_as_each_alone(dtype: torch.dtype) -> None:
    before, sizes, after, fn = 3, ((32, 64), (37, 60), (32, 32)), 2, mlp(dtype)
    counts = [before, *map(math.prod, sizes), after]
    x = tokens(2, sum(counts), 6, dtype=dtype)
    first, *parts, last = x.split(counts, 1)
    chosen = [
        choose_tokens(part, *cells_and_count(size, 0.125, 0, x.device))
        for part, size in zip(parts, sizes, strict=True)
    ]
    alone = [one.restore(fn(one.take(part))) for one, part in zip(chosen, parts, strict=True)]
    want = torch.cat([fn(first), *alone, fn(last)], 1)
    images = ChosenOfImages(chosen)
    assert images.tokens_in == sum(counts[1:-1])
    f = fn(images.take_around(x, before))
    near = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(images.restore_around(f, before), want, rtol=near, atol=near)
    y = tokens(2, x.shape[1], f.shape[-1], dtype=dtype, seed=3).requires_grad_()
    found = images.add_restored_around_(y.clone(), f, before)
    torch.testing.assert_close(found.double(), (y + want).double(), rtol=near, atol=near)
    found.sum().backward()
    assert y.grad is not None
    assert (y.grad == 1).all()
    image = torch.cat(parts, 1)
    taken = image.gather(1, images.at.unsqueeze(-1).expand(-1, -1, 6))
    assert torch.equal(taken, images.take(image))


def left_out_by_loop(x: Tensor, f: Tensor) -> tuple[float, float]:
    """Restore each token of x [K, C] from all others; return squared errors and deviations."""
    apart, y = torch.cdist(x, x).square(), f - f.mean(0)
    kernel = torch.exp(-apart / (reference.BANDWIDTH * apart.mean()))
    errors = 0.0
    for i in range(len(x)):
        rest = torch.arange(len(x)) != i
        gram = kernel[rest][:, rest] + reference.KERNEL_RIDGE * torch.eye(len(x) - 1).to(x)
        errors += float((y[i] - kernel[i, rest] @ torch.linalg.solve(gram, y[rest])).square().sum())
    return errors, float(y.square().sum())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_error_of_tokens_left_out_equals_the_loop(dtype: torch.dtype) -> None:
    x, fn, found = tokens(2, 512, 6).to(dtype), mlp(), []
    cells, count = cells_and_count((16, 32), 0.25, 0, x.device, 16)
    chosen = choose_tokens(x, cells, count, on_error=lambda *sums: found.append(sums))
    f = fn(chosen.take(x).double())
    chosen.restore(f.to(dtype))
    parts = [part.view(-1, count, part.shape[-1]) for part in (chosen.take(x).double(), f)]
    want = [left_out_by_loop(*tile) for tile in zip(*parts, strict=True)]
    assert len(want) == 4
    for sums, wanted in zip(found[0], zip(*want, strict=True), strict=True):
        assert float(sums) == pytest.approx(sum(wanted), rel=max(1e-7, 2 * TOLERANCE[dtype]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_functions_go_through() -> None:
    x, fn = tokens(3, 256, 6, dtype=torch.float32), mlp(torch.float32)

    def call(x: Tensor) -> Tensor:
        return restored(fn, x, (16, 16), 0.25)

    y, moved = torch.func.jvp(call, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(y, call(x))
    assert moved.isfinite().all()
    assert moved.any()
    each = torch.vmap(lambda one: call(one[None])[0])(x)
    torch.testing.assert_close(each, call(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", [0, 0.1, 1])
def test_the_error_of_tokens_left_out_is_near_the_true_one(noise: float) -> None:
    """Noise is what no fit can know, so that it must be part of the estimate."""
    x, fn, found = tokens(1, 1024, 6), mlp(), []
    whole = fn(x)
    generator = torch.Generator().manual_seed(2)
    whole = whole + noise * torch.randn(whole.shape, generator=generator).to(whole)
    cells, count = cells_and_count((32, 32), 0.125, 0, x.device)
    chosen = choose_tokens(x, cells, count, on_error=lambda *sums: found.append(sums))
    missed = (chosen.restore(chosen.take(whole)) - whole).square().sum()
    true = (missed / (whole - whole.mean(1)).square().sum()).sqrt()
    errors, deviations = found[0]
    assert 0.8 < (errors / deviations).sqrt() / true < 1.6
