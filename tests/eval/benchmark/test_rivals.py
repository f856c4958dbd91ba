"""Rivals do what their publications say, compared with plain loops.

They leave no trace, and give the same pixels when resumed.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.core.restore import cells_and_count, choose_tokens
from mame_sd.diffusion.apply_denoiser import hooks_on
from mame_sd.embedded.pipeline import embedded_pipeline
from mame_sd.errors import UserError
from mame_sd.eval.benchmark.gates import sensitivity
from mame_sd.eval.benchmark.rows import NAMED, chosen_rows, row_named
from mame_sd.eval.results import schema
from mame_sd.eval.results.schema import Value
from mame_sd.eval.rivals.copied import choose_copied
from mame_sd.eval.rivals.method import Rival
from mame_sd.eval.rivals.plans import mean_attention, random_keys, second_frames, todo
from mame_sd.eval.rivals.toma import ToMA, facilities
from mame_sd.eval.rivals.tomesd import ToMeSD
from mame_sd.runs.generate import generate
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.merging import InstalledMerging, NotApplicable
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.sampling import sample
from tests.builders.benchmarks import LIKE_SDXL, PROMPTS, SETTINGS, rivals, tiny
from tests.builders.layers import attention
from tests.builders.run_folders import snapshot
from tests.builders.tiny import run_unet, save_tiny_pipeline, tiny_unet
from tests.matrix import transformers

every_size = pytest.mark.parametrize("size", [(7, 11), (12, 10), (1, 5)], ids=str)


def draw(count: int, device: torch.device) -> Tensor:
    return torch.rand(count, device=device)


def tokens(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, size[0] * size[1], 16, generator=torch.Generator().manual_seed(1))


def cells(size: tuple[int, int], cell: tuple[int, int]) -> list[list[int]]:
    """Return the places of the tokens of each cell, by loops."""
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
def test_random_keys_are_a_share_of_all(size: tuple[int, int]) -> None:
    x = tokens(size)
    drawn = [random_keys(x, size, draw, 0.25).kept.tolist() for _ in range(200)]
    count = round(0.25 * x.shape[1]) or 1
    assert all(len(set(kept)) == len(kept) == count for kept in drawn)
    assert {p for kept in drawn for p in kept} == set(range(x.shape[1])), "each one's turn"


def test_facility_location_takes_what_adds_most_in_turn() -> None:
    x = F.normalize(tokens((3, 4)).double(), dim=-1)[0]
    s = (x @ x.T).tolist()
    chosen: list[int] = []
    for _ in range(4):
        covered = [
            sum(max([-1.0, *(row[j] for j in [*chosen, new])]) for row in s) for new in range(12)
        ]
        chosen.append(max((j for j in range(12) if j not in chosen), key=lambda j: covered[j]))
    assert facilities(torch.tensor(s), 4).tolist() == chosen


@pytest.mark.parametrize("size", [(8, 8), (6, 8)], ids=str)
def test_toma_is_a_linear_map_and_its_transpose_in_each_tile(size: tuple[int, int]) -> None:
    x = tokens(size).double()
    make = ToMA(0.25, 4, temperature=0.2)
    plan = make(x, size, draw)
    groups = cells(size, tuple(4 if n % 4 == 0 else n for n in size))
    k = plan.tokens_kept // len(groups)
    y = torch.randn(2, plan.tokens_kept, 16, generator=torch.Generator().manual_seed(3)).double()
    merged, back = plan.merge(x), plan.restore(y)
    for b, (t, group) in itertools.product(range(2), enumerate(groups)):
        unit, own = F.normalize(x[b], dim=-1), slice(t * k, (t + 1) * k)
        mine = [group[n] for n in facilities((unit[group] @ unit[group].T).float(), k)]
        shares = torch.stack([torch.softmax(unit[mine] @ unit[p] / 0.2, 0) for p in group], 1)
        mean = (shares @ x[b, group]) / shares.sum(1, keepdim=True)
        torch.testing.assert_close(merged[b, own], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(back[b, group], shares.T @ y[b, own], rtol=1e-4, atol=1e-5)
    plans = [plan, *(make(x.flip(1), size, draw) for _ in range(5))]
    assert [one is plan for one in plans] == [True] * 5 + [False], "A is kept for five steps"


def test_toma_is_refused_where_attention_gets_positions() -> None:
    flux = next(row for row in transformers.ROWS if row.name == "Flux")
    rival = Rival("toma", ToMA, {"share": 0.5, "side": 4}, merge="qkv", min_tokens=60)
    model = flux.build()
    with rival.on(model), pytest.raises(NotApplicable, match="got one with rotary positions"):
        flux.run(model)


def test_mean_attention_and_keys_alone_in_a_layer() -> None:
    attn, x = attention(), tokens((8, 8))
    everyone = Rival("mean attention", mean_attention, merge="qkv", min_tokens=16)
    keys = Rival("todo", todo, {"factor": 2}, min_tokens=16)
    with torch.no_grad():
        plain = attn(x)
        with everyone.on(attn):
            torch.testing.assert_close(attn(x), plain.mean(1, keepdim=True).expand_as(plain))
        assert torch.equal(attn(x), plain)
        with keys.on(attn):
            want = attn(x, encoder_hidden_states=x[:, [cell[0] for cell in cells((8, 8), (2, 2))]])
            torch.testing.assert_close(attn(x), want)


@pytest.mark.parametrize(
    "method",
    [
        method
        for method in (row_named(name).method for name in NAMED)
        if isinstance(method, Rival) and not method.frames
    ],
    ids=lambda method: method.name,
)
def test_every_method_merges_a_unet_and_leaves_no_trace(method: Rival) -> None:
    unet = tiny_unet()
    plain = run_unet(unet, height=32, width=32)
    with method.on(unet):
        merged = run_unet(unet, height=32, width=32)
        assert run_unet(unet, height=8, width=8).isfinite().all(), "small layers are left alone"
    assert merged.isfinite().all()
    assert not torch.allclose(merged, plain)
    assert not hooks_on(unet)
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
    row = next(row for row in transformers.ROWS if row.name == "Flux")
    model = row.build()
    plain = row.run(model)
    with rival.on(model) as handle:
        merged = row.run(model)
        assert all(layer.merged for layer in handle.report().layers)
    with rival.on(model, seed=1):
        assert torch.equal(row.run(model), merged) == (rival.merge == "qkv"), "the seed's draw"
    assert not torch.allclose(merged, plain)
    with Rival("all keys, in another order", random_keys, {"share": 1.0}, min_tokens=60).on(model):
        torch.testing.assert_close(row.run(model), plain, rtol=1e-4, atol=1e-5)
    assert torch.equal(row.run(model), plain)


def test_every_second_frame_keeps_its_keys_in_videos_alone() -> None:
    row = next(row for row in transformers.ROWS if row.name == "Wan (video)")
    rival = Rival("second frames", second_frames, merge="kv", min_tokens=16, frames=True)
    model = row.build()
    plain = row.run(model)
    with rival.on(model) as handle:
        assert not torch.allclose(row.run(model), plain)
        (level,) = InstalledMerging(handle).levels()
    kept = second_frames(tokens((9, 4)), (3, 3, 4), draw).kept
    assert kept.tolist() == [*range(12), *range(24, 36)]
    assert level["tokens_in"] / 2 <= level["tokens_kept"] < level["tokens_in"]
    unet = tiny_unet()
    with rival.on(unet) as handle, pytest.warns(UserWarning, match="no frames"):
        run_unet(unet, height=32, width=32)
    with pytest.raises(UserError, match="no frames"):
        InstalledMerging(handle).levels()


@pytest.mark.parametrize(
    "method",
    [
        Rival("random", random_keys, {"share": 0.25}, min_tokens=16),
        pytest.param(ToMeSD(0.5), marks=rivals),
    ],
    ids=["ours", "tomesd"],
)
def test_a_rival_leaves_no_trace_and_resumes_to_the_same_pixels(
    model: LoadedModel, tmp_path: Path, method: Any
) -> None:
    prompts = PROMPTS[:2]
    levels = generate(model, prompts, SETTINGS, method, tmp_path / "rival").levels
    assert (levels[0]["level"], levels[0]["tokens_in"]) == (0, 256)
    shares = [level["tokens_kept"] / level["tokens_in"] for level in levels]
    assert shares == ([0.5, 1] if isinstance(method, ToMeSD) else [0.25] * 2)
    assert not any(hasattr(module, "_tome_info") for module in model.pipe.unet.modules())
    whole = snapshot(tmp_path / "rival")
    (tmp_path / "rival" / "images" / "p00002_0.png").unlink()
    torch.manual_seed(99)
    assert generate(model, prompts, SETTINGS, method, tmp_path / "rival").made == 1
    assert snapshot(tmp_path / "rival") == whole
    with pytest.raises(UserError, match=r"rival\..*: .* there, .* here"):
        generate(model, prompts, SETTINGS, tiny("todo-2").method, tmp_path / "rival")


@rivals
def test_tomesd_says_where_it_can_do_nothing(tmp_path: Path) -> None:
    folder = save_tiny_pipeline(tmp_path / "like-sdxl", **LIKE_SDXL)
    like_sdxl = load_model(ModelChoice(model=str(folder), device="cpu"))
    with pytest.raises(NotApplicable, match="only at the largest level"):
        generate(like_sdxl, PROMPTS[:1], SETTINGS, ToMeSD(0.5), tmp_path / "run")


@pytest.mark.parametrize(
    ("floor", "verdict"),
    [
        (Value(mean=0.3, low=0.3, high=0.3), "methods? Yes. floor has an LPIPS of 0.3000 (needs"),
        (Value(mean=0.002, low=0.002, high=0.002), "methods? NO. "),
        (Value(mean=0.09, low=0.07, high=0.11), "NO with so few prompts; take more (--num)."),
        (Value(mean=0.09), "methods? NO with so few prompts; take more (--num)."),
        (None, "Not measured: no LPIPS of floor."),
    ],
)
def test_an_instrument_that_cannot_tell_says_so(floor: Value | None, verdict: str) -> None:
    values = {} if floor is None else {"lpips": floor}
    row = schema.MethodResult(name="floor", family="floor", label="floor", values=values)
    assert verdict in sensitivity([row], "floor")


def test_copies_are_of_the_nearest_computed_token() -> None:
    x = tokens((8, 8))
    cells, count = cells_and_count((8, 8), 0.25, 0, x.device)
    chosen = choose_copied(x, cells, count)
    assert torch.equal(chosen.at, choose_tokens(x, cells, count).at)
    found = chosen.restore(chosen.take(x))
    for number in range(2):
        computed = x[number, chosen.at[number]]
        for token, copy in zip(x[number], found[number], strict=True):
            nearest = (computed - token).norm(dim=1).argmin()
            assert torch.equal(copy, computed[nearest])


def test_copied_rows_run_where_something_is_restored() -> None:
    pipe = embedded_pipeline("transformer")
    model = LoadedModel(pipe=pipe, identity={"name": "x", "device": "cpu"}, guidance=2.5)
    (row,) = chosen_rows("copied-0.125")[1:]
    installed = row.method.install(model)
    jobs = jobs_of(PROMPTS[:1], GenerateSettings(steps=1))
    sample(model, GenerateSettings(steps=1), jobs)
    kinds = {level["kind"]: level for level in installed.levels()}
    assert kinds["mlp"]["tokens_kept"] == 128
    installed.remove()
    assert not hooks_on(pipe.transformer)
    other = LoadedModel(pipe=torch.nn.Linear(2, 2), identity={"name": "x"}, guidance=None)
    with pytest.raises(NotApplicable, match="copied: "):
        row.method.install(other)
