"""Every rival does what its publication says, by plain loops, on the path that ours takes too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.diffusion.apply_denoiser import has_hooks
from mame_sd.eval.benchmark.rows import ROWS as METHODS
from mame_sd.eval.benchmark.rows import chosen_rows
from mame_sd.eval.benchmark.sensitivity import sensitivity
from mame_sd.eval.results.schema import Row, Value
from mame_sd.eval.rivals.method import Rival
from mame_sd.eval.rivals.plans import (
    mean_attention,
    means,
    random_cells,
    random_keys,
    strided,
    todo,
)
from tests.builders.layers import attention
from tests.builders.tiny import run_unet, tiny_unet
from tests.matrix.transformers import ROWS

every_size = pytest.mark.parametrize("size", [(7, 11), (12, 10), (1, 5)], ids=str)


def draw(count: int, device: torch.device) -> Tensor:
    return torch.rand(count, device=device)


def tokens(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, size[0] * size[1], 16, generator=torch.Generator().manual_seed(1))


def cells(size: tuple[int, int], cell: tuple[int, int]) -> list[list[int]]:
    """Positions of the tokens of each cell, by loops."""
    (h, w), (rows, columns) = size, cell
    found = []
    for top, left in itertools.product(range(0, h, rows), range(0, w, columns)):
        inside = itertools.product(
            range(top, min(h, top + rows)), range(left, min(w, left + columns))
        )
        found.append([row * w + column for row, column in inside])
    return found


@every_size
def test_todo_is_nearest_neighbour_downsampling(size: tuple[int, int]) -> None:
    x = tokens(size)
    for factor in (2, 4):
        small = [max(n // factor, 1) for n in size]
        image = x.transpose(1, 2).unflatten(2, size)
        want = F.interpolate(image, size=small, mode="nearest").flatten(2).transpose(1, 2)
        assert torch.equal(todo(x, size, draw, factor).merge(x), want)


@every_size
@pytest.mark.parametrize("cell", [(1, 2), (4, 4)], ids=str)
def test_strides_and_means_of_cells_equal_the_loops(
    size: tuple[int, int], cell: tuple[int, int]
) -> None:
    x, grouped = tokens(size), cells(size, cell)
    first = torch.stack([x[:, group[0]] for group in grouped], 1)
    mean = torch.stack([x[:, group].mean(1) for group in grouped], 1)
    for make, want in ((strided, first), (means, mean)):
        plan = make(x, size, draw, cell)
        torch.testing.assert_close(plan.merge(x), want)
        assert plan.merge(x).is_contiguous(), "as fused attention wants it"
        assert (plan.tokens_in, plan.tokens_kept) == (x.shape[1], len(grouped))


@every_size
def test_random_keys_are_a_share_of_all_or_one_of_each_cell(size: tuple[int, int]) -> None:
    x, grouped = tokens(size), cells(size, (2, 2))
    for make, how, count in (
        (random_keys, 0.25, round(0.25 * x.shape[1]) or 1),
        (random_cells, (2, 2), len(grouped)),
    ):
        drawn = [make(x, size, draw, how).kept.tolist() for _ in range(200)]
        assert all(len(set(kept)) == len(kept) == count for kept in drawn)
        assert {p for kept in drawn for p in kept} == set(range(x.shape[1])), "each one's turn"
        for kept in drawn if make is random_cells else ():
            assert all(p in group for p, group in zip(kept, grouped, strict=True))


def test_mean_attention_and_keys_alone_in_a_layer() -> None:
    attn, x = attention(), tokens((8, 8))
    everyone = Rival("mean attention", mean_attention, merge="qkv", min_tokens=16)
    keys = Rival("strided", strided, {"cell": (2, 2)}, min_tokens=16)
    with torch.no_grad():
        plain = attn(x)
        with everyone.on(attn):
            torch.testing.assert_close(attn(x), plain.mean(1, keepdim=True).expand_as(plain))
        assert torch.equal(attn(x), plain)
        with keys.on(attn):
            want = attn(x, encoder_hidden_states=x[:, [cell[0] for cell in cells((8, 8), (2, 2))]])
            torch.testing.assert_close(attn(x), want)


@pytest.mark.parametrize(
    "row",
    [
        *(row for row in METHODS.values() if isinstance(row.method, Rival)),
        chosen_rows("random-fitted-0.25")[1],
    ],
    ids=lambda row: row.name,
)
def test_every_method_merges_a_unet_and_leaves_no_trace(row: Any) -> None:
    unet = tiny_unet()
    plain = run_unet(unet, height=32, width=32)
    with row.method.on(unet):
        merged = run_unet(unet, height=32, width=32)
        assert run_unet(unet, height=8, width=8).isfinite().all(), "small layers are left alone"
    assert merged.isfinite().all()
    assert not torch.allclose(merged, plain)
    assert not has_hooks(unet)
    assert torch.equal(run_unet(unet, height=32, width=32), plain)


@pytest.mark.parametrize(
    "rival",
    [
        Rival("random", random_keys, {"share": 0.25}, min_tokens=60),
        Rival("mean attention", mean_attention, merge="qkv", min_tokens=60),
    ],
    ids=lambda rival: rival.name,
)
def test_rivals_run_in_joint_attention_too(rival: Rival) -> None:
    row = next(row for row in ROWS if row.name == "Flux")
    model = row.build()
    plain = row.run(model)
    with rival.on(model) as handle:
        merged = row.run(model)
        assert all(layer.merged for layer in handle.report().layers)
    with rival.on(model, seed=1):
        assert torch.equal(row.run(model), merged) == (rival.merge == "qkv"), "the seed's draw"
    assert not torch.allclose(merged, plain)
    assert torch.equal(row.run(model), plain)


def point(name: str, lpips: float, width: float | None = 0.0) -> Row:
    value = Value(mean=lpips)
    if width is not None:
        value = Value(mean=lpips, low=lpips - width, high=lpips + width)
    return Row(name=name, family="rival", label=name, values={"lpips": value})


def test_an_instrument_that_cannot_tell_says_so() -> None:
    base, floor, rival = point("baseline", 0), point("floor", 0.3), point("tomesd", 0.02, 0.0005)

    def line(*rows: Row) -> str:
        return sensitivity((base, *rows), "floor", "tomesd")

    assert "instrument: PASSES." in line(floor, rival)
    alone, more = "FAILS: it can't tell these methods apart.", "take more (--num)."
    for rows, verdict in (
        ((point("floor", 0.002), rival), alone),
        ((floor, point("tomesd", 0.001, 0.00001)), alone),
        ((point("floor", 0.09, 0.02), rival), f"apart by so few prompts; {more}"),
        ((point("floor", 0.09, None), rival), f"apart by so few prompts; {more}"),
        ((floor, point("tomesd", 0.02, 0.01)), f"too few prompts for small ones; {more}"),
    ):
        found = line(*rows)
        assert verdict in found
        assert found.count("MISSED") == 1
    assert "not measured (needs floor)" in line()
    assert "not measured (needs floor)" in line(replace(floor, values={}))
    assert "passes as far as measured" in line(floor)
    assert "tomesd: not measured" in line(floor)
    assert "the interval of tomesd: not measured" in line(floor, point("tomesd", 0.02, None))
