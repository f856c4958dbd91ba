"""Every rival does what its publication says, by plain loops, on the path that ours takes too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.diffusion.apply_denoiser import has_hooks
from mame_sd.eval.benchmark.rows import chosen_rows, rival_rows
from mame_sd.eval.benchmark.sensitivity import sensitivity
from mame_sd.eval.results.schema import Row, Value
from mame_sd.eval.rivals.layers import Run, rival_on
from mame_sd.eval.rivals.plans import (
    constant,
    means,
    random_cells,
    random_keys,
    strided,
    todo,
)
from mame_sd.eval.rivals.toma import ToMA, facilities
from mame_sd.report import NothingMergedError
from tests.builders.layers import attention
from tests.builders.tiny import run_unet, tiny_unet
from tests.matrix.transformers import ROWS

SIZES = [(7, 11), (12, 10), (1, 5)]
every_size = pytest.mark.parametrize("size", SIZES, ids=str)
RUN = Run()


def tokens(size: tuple[int, int], batch: int = 2, channels: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(
        batch, size[0] * size[1], channels, generator=torch.Generator().manual_seed(seed)
    )


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
        assert torch.equal(todo(factor)(x, size, RUN).merge(x), want)
        if all(n % factor == 0 for n in size):
            first = [x[:, cell[0]] for cell in cells(size, (factor, factor))]
            assert torch.equal(want, torch.stack(first, 1))


@every_size
@pytest.mark.parametrize("cell", [(1, 2), (2, 2), (4, 4)], ids=str)
def test_strides_and_means_of_cells_equal_the_loops(
    size: tuple[int, int], cell: tuple[int, int]
) -> None:
    x, grouped = tokens(size), cells(size, cell)
    first = torch.stack([x[:, group[0]] for group in grouped], 1)
    mean = torch.stack([x[:, group].mean(1) for group in grouped], 1)
    for make, want in ((strided(cell), first), (means(cell), mean)):
        plan = make(x, size, RUN)
        merged, back = plan.merge(x), plan.restore(want)
        torch.testing.assert_close(merged, want)
        assert merged.is_contiguous(), "as fused attention wants it"
        assert plan.kept.tolist() == [group[0] for group in grouped]
        for i, group in enumerate(grouped):
            assert all(torch.equal(back[:, p], want[:, i]) for p in group)


@every_size
def test_random_keys_are_a_share_of_all_or_one_of_each_cell(size: tuple[int, int]) -> None:
    x, grouped = tokens(size), cells(size, (2, 2))
    for make, fields, count in (
        (random_keys, {"share": 0.25}, round(0.25 * x.shape[1]) or 1),
        (random_cells, {"cell": (2, 2)}, len(grouped)),
    ):
        anew, once, twin = (make(redraw=redraw, **fields) for redraw in (True, False, False))
        drawn = [anew(x, size, RUN).kept.tolist() for _ in range(200)]
        assert all(len(set(kept)) == len(kept) == count for kept in drawn)
        assert {p for kept in drawn for p in kept} == set(range(x.shape[1])), "each one's turn"
        plan = once(x, size, RUN)
        assert len({tuple(once(x, size, RUN).kept.tolist()) for _ in range(5)}) == 1
        assert torch.equal(plan.kept, twin(x, size, RUN).kept), "one draw for all layers"
        assert torch.equal(plan.merge(x), x[:, plan.kept])
        for kept in drawn if make is random_cells else ():
            assert all(p in group for p, group in zip(kept, grouped, strict=True))


def test_facility_location_takes_what_adds_most_in_turn() -> None:
    x = F.normalize(tokens((3, 4), 1, 5).double(), dim=-1)[0]
    s = (x @ x.T).tolist()
    chosen: list[int] = []
    for _ in range(4):
        covered = [
            sum(max([-1.0, *(row[j] for j in [*chosen, new])]) for row in s) for new in range(12)
        ]
        chosen.append(max((j for j in range(12) if j not in chosen), key=lambda j: covered[j]))
    assert facilities(torch.tensor(s), 4).tolist() == chosen


@pytest.mark.parametrize(("size", "side"), [((8, 8), 4), ((6, 8), 4)], ids=str)
def test_toma_is_a_linear_map_and_its_transpose_in_each_tile(
    size: tuple[int, int], side: int
) -> None:
    x = tokens(size).double()
    plan = ToMA(0.25, side, temperature=0.2)(x, size, RUN)
    groups = cells(
        size, (side if size[0] % side == 0 else size[0], side if size[1] % side == 0 else size[1])
    )
    k = plan.tokens_kept // len(groups)
    merged, y = plan.merge(x), tokens((1, plan.tokens_kept), seed=3).double()
    back = plan.restore(y)
    for b in range(2):
        for t, group in enumerate(groups):
            mine = plan.kept[b, t * k : (t + 1) * k].tolist()
            assert set(mine) <= set(group)
            unit = F.normalize(x[b], dim=-1)
            shares = torch.stack(
                [torch.softmax(unit[mine] @ unit[p] / 0.2, 0) for p in group], 1
            )  # [k, s]
            mean = (shares @ x[b, group]) / shares.sum(1, keepdim=True)
            torch.testing.assert_close(merged[b, t * k : (t + 1) * k], mean, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                back[b, group], shares.T @ y[b, t * k : (t + 1) * k], rtol=1e-4, atol=1e-5
            )


def test_toma_keeps_shares_for_five_steps_and_destinations_for_ten() -> None:
    run, make, size = Run(), ToMA(0.25, 4), (8, 8)

    def at(timestep: int, seed: int) -> Any:
        run.note(torch.nn.Identity(), (None, torch.tensor(timestep)), {})
        return make(tokens(size, seed=seed), size, run)

    plans = [at(1000 - 50 * i, seed=i) for i in range(12)]
    assert [plans[i] is plans[0] for i in range(5)] == [True] * 5
    assert plans[5] is not plans[0]
    assert torch.equal(plans[5].kept, plans[0].kept)
    assert not torch.equal(plans[10].kept, plans[0].kept)
    assert plans[11] is plans[10]
    assert torch.equal(at(1000, seed=0).kept, plans[0].kept), "a new image starts anew"


@pytest.mark.parametrize("times", [(999, 500, 20), (0.0, 0.5, 1.0)], ids=["down", "up"])
def test_steps_are_counted_whichever_way_timesteps_go(times: tuple[float, ...]) -> None:
    run = Run()

    def step(timestep: float) -> int:
        run.note(torch.nn.Identity(), (), {"timestep": torch.tensor(timestep)})
        return run.step

    for _ in range(2):
        assert [step(times[i]) for i in (0, 0, 1, 2, 2)] == [0, 0, 1, 2, 2]


def test_toma_leaves_batches_alone_whose_positions_are_given_once() -> None:
    row = next(row for row in ROWS if row.name == "Lumina-Next")
    model = row.build()
    plain = row.run(model)
    with rival_on(model, lambda: ToMA(0.25, 4), "qkv", 16) as handle:
        torch.testing.assert_close(row.run(model), plain)
        with pytest.raises(NothingMergedError, match="each sample keeps tokens of its own"):
            handle.report()


def test_mean_and_zero_attention() -> None:
    attn, x = attention(), tokens((8, 8))
    with torch.no_grad():
        plain = attn(x)
        with rival_on(attn, lambda: constant(1.0), "qkv", 16):
            torch.testing.assert_close(attn(x), plain.mean(1, keepdim=True).expand_as(plain))
        with rival_on(attn, lambda: constant(0.0), "qkv", 16):
            assert not attn(x).any()
        assert torch.equal(attn(x), plain)
        with rival_on(attn, lambda: strided((2, 2)), "kv", 16):
            want = attn(x, encoder_hidden_states=x[:, [cell[0] for cell in cells((8, 8), (2, 2))]])
            torch.testing.assert_close(attn(x), want)


@pytest.mark.parametrize(
    "row",
    chosen_rows("random-fitted-0.25," + ",".join(row.name for row in rival_rows()))[1:],
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
    ("make", "merge"),
    [
        (partial(random_keys, share=0.25, redraw=True), "kv"),
        (partial(ToMA, share=0.25, side=4), "kv"),
        (partial(constant, scale=1.0), "qkv"),
    ],
    ids=["random", "toma", "constant"],
)
def test_rivals_run_in_joint_attention_too(make: Any, merge: str) -> None:
    row = next(row for row in ROWS if row.name == "Flux")
    model = row.build()
    plain = row.run(model)
    with rival_on(model, make, merge, 60) as handle:
        merged = row.run(model)
        assert all(layer.merged for layer in handle.report().layers)
    assert not torch.allclose(merged, plain)
    assert torch.equal(row.run(model), plain)


def point(name: str, lpips: float, retrieval: float | None, width: float | None = 0.0) -> Row:
    values = {"lpips": Value(mean=lpips), "retrieval": Value(mean=retrieval)}
    if width is not None:
        values["lpips"] = Value(mean=lpips, low=lpips - width, high=lpips)
    return Row(name=name, family="rival", label=name, values=values)


def test_an_instrument_that_cannot_tell_says_so() -> None:
    base, floor, rival = (
        point("baseline", 0, 1),
        point("mean attention", 0.3, 0.5),
        point("tomesd 0.5", 0.02, 1, 0.001),
    )

    def line(*rows: Row) -> str:
        return sensitivity(rows, "mean attention", "tomesd 0.5")

    assert "instrument: PASSES." in line(base, floor, rival)
    for rows, verdict in (
        ((point("mean attention", 0.002, 0.5), rival), "FAILS: it can't tell"),
        ((point("mean attention", 0.3, 0.95), rival), "FAILS: it can't tell"),
        ((floor, point("tomesd 0.5", 0.001, 1, 0.00001)), "FAILS: it can't tell"),
        ((floor, point("tomesd 0.5", 0.02, 1, 0.01)), "too few prompts for small ones"),
    ):
        found = line(base, *rows)
        assert verdict in found
        assert found.count("MISSED") == 1
    assert "not measured (needs mean attention)" in line(base)
    assert "not measured (needs mean attention)" in line(base, replace(floor, values={}))
    assert "passes as far as measured" in line(base, floor)
    assert "tomesd 0.5: not measured" in line(base, floor)
    unsure = point("tomesd 0.5", 0.02, 1, None)
    assert "the interval of tomesd 0.5: not measured" in line(base, floor, unsure)
    # a model whose prompts have no truth
    elsewhere = [point("baseline", 0, None), point("mean attention", 0.3, None)]
    assert "passes as far as measured" in line(*elsewhere, rival)
    assert "retrieval" not in line(*elsewhere, rival)
    assert "too few prompts" in line(*elsewhere, point("tomesd 0.5", 0.02, None, 0.01))
