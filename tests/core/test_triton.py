"""The Triton kernels against PyTorch's operations and the float64 loops, through the very entry
that a card takes.

They run on a CUDA device where there is one, and in Triton's interpreter on any machine. It must be
chosen before Triton is imported, so `test_in_the_interpreter` runs the cases in another process.
The
interpreter is slow: few tokens.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch import Tensor

from mame_sd import MaMeConfig, apply_mame, plan_merge
from mame_sd.config import Study
from mame_sd.core import example, fused
from mame_sd.core.detail import Detail
from mame_sd.core.owners import owners_of
from mame_sd.core.plan import RowPlan
from mame_sd.core.reference import reference_plan
from mame_sd.diffusion.families.keys import GroupedKeys, MergedKeys
from mame_sd.diffusion.layer import Tokens
from tests.builders.settings import nested
from tests.builders.tiny import seeded

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
runs = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
)
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "cut tiles": ((4, 18), {}),
    "cut tiles, some sources preserved": ((9, 10), {"tiles": 8, "keep": 0.6, "merge": "qkv"}),
    "tiles of 8, one destination each": ((16, 8), {"tiles": 8, "stride": (8, 8), "keep": 0.1}),
    "3 x 3 cells, tiles of 12": ((7, 13), {"stride": (3, 3), "keep": 0.2, "tiles": 12}),
    "alternating, 128 destinations": ((16, 16), {"partition": "alternating", "keep": 0.5}),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def tokens(
    size: tuple[int, int], width: int = 20, dtype: torch.dtype = torch.float32, seed: int = 3
) -> Tensor:
    """[2, h * w, width], the halves of whose channels a kernel must not read: another stride than
    their width.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, size[0] * size[1], 2 * width, generator=generator).to(DEVICE, dtype)[
        ..., :width
    ]


def both(
    x: Tensor, config: MaMeConfig, size: tuple[int, int], **more: Any
) -> tuple[RowPlan, RowPlan]:
    """The plan by kernels, and by PyTorch's operations."""
    made = []
    for kernels in (True, False):
        with fused.only(kernels):
            made.append(plan_merge(x, config, size, **more))
    assert all(isinstance(plan, RowPlan) for plan in made)
    return made[0], made[1]  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _kernels() -> Any:
    """Every test asks for kernels itself, and leaves nothing known of the device."""
    fused._found.clear()
    with torch.no_grad():
        yield
    fused._found.clear()


@pytest.mark.skipif(INTERPRETED, reason="runs these cases")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


@runs
@pytest.mark.parametrize("name", CASES)
def test_plans_are_those_of_the_loops(name: str) -> None:
    size, fields = CASES[name]
    x, config, draw = tokens(size), MaMeConfig(**nested(fields)), torch.tensor([37], device=DEVICE)
    plan, plain = both(x, config, size, draw=draw)
    exact = reference_plan(x.cpu().double(), config, size, draw=draw.cpu())
    for of in ("rows", "weights", "counts", "preserved", "kept", "sizes"):
        assert torch.equal(getattr(plan, of), getattr(plain, of)), of
    with fused.only(True):
        y = plan.merge(x)
        with_sample = plan.with_sample(x)
    torch.testing.assert_close(y.cpu().double(), exact.merge(x.cpu().double()), rtol=0, atol=1e-5)
    assert torch.equal(with_sample[:, : plan.tokens_kept], y)
    assert torch.equal(with_sample[:, plan.tokens_kept :], x.index_select(1, plan.positions.sample))
    assert torch.equal(plan.sizes, plain.sizes)


@runs
@DTYPES
def test_any_dtype(dtype: torch.dtype) -> None:
    x, config = tokens((4, 8), 40, dtype), MaMeConfig()
    plan, plain = both(x, config, (4, 8))
    assert torch.equal(plan.rows, plain.rows)
    with fused.only(True):
        for t in (x, x[..., :5]):  # a plan merges tokens of another width
            y = plan.merge(t)
            assert y.dtype == dtype
            exact = reference_plan(x.cpu().double(), config, (4, 8)).merge(t.cpu().double())
            torch.testing.assert_close(y.cpu().double(), exact, rtol=0, atol=TOLERANCE[dtype])


@runs
@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 0.0), (torch.float16, 6e4)], ids=str)
def test_constant_images_stay_as_they_are(dtype: torch.dtype, value: float) -> None:
    x = torch.full((1, 64, 16), value, device=DEVICE).to(dtype)
    with fused.only(True):
        plan = plan_merge(x, MaMeConfig(merge="qkv", keep=0.5), (8, 8))
        y = plan.merge(x)
        whole = plan.restore(y, Detail(x, (8, 8)))
    rtol = max(1e-5, torch.finfo(dtype).eps)  # of a sum of equal tokens
    torch.testing.assert_close(y, x[:, :32], rtol=rtol, atol=0)
    torch.testing.assert_close(whole, x, rtol=rtol, atol=0)


@runs
@pytest.mark.parametrize(
    ("scale", "dtype"), [(1e-30, torch.bfloat16), (1e30, torch.float32)], ids=str
)
def test_scale_does_not_matter(scale: float, dtype: torch.dtype) -> None:
    x, config = tokens((8, 8), dtype=dtype), MaMeConfig()
    power = 2.0 ** round(math.log2(scale))  # exact
    with fused.only(True):
        assert torch.equal(
            owners_of(plan_merge(x * power, config, (8, 8))),
            owners_of(plan_merge(x, config, (8, 8))),
        )


@runs
@pytest.mark.parametrize(("bad", "position"), [(math.nan, 0), (math.inf, 1), (math.nan, 5)])
def test_what_is_not_finite_stays_in_its_group(bad: float, position: int) -> None:
    x = tokens((8, 8)).clone()
    x[0, position, 5] = bad
    plan, plain = both(x, MaMeConfig(), (8, 8))
    assert torch.equal(plan.rows, plain.rows)
    with fused.only(True):
        got = plan.merge(x)
    with fused.only(False):
        want = plain.merge(x)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert (~got.isfinite()).sum() == 1


@runs
def test_special_tokens_leading_dimensions_and_leaders() -> None:
    x, config = tokens((8, 8), 16).reshape(2, 1, 64, 16), MaMeConfig(keep=0.6, merge="qkv")
    x = torch.cat([x[..., :1, :] + 1, x], -2)
    plan, plain = both(x, config, (8, 8), special=1, leader=torch.tensor([1, 1], device=DEVICE))
    assert torch.equal(plan.rows, plain.rows)
    assert torch.equal(plan.rows[0], plan.rows[1])
    with fused.only(True):
        y = plan.merge(x)
        restored = plan.restore(y)
    with fused.only(False):
        torch.testing.assert_close(y, plain.merge(x))
        torch.testing.assert_close(restored, plain.restore(y))


@runs
@pytest.mark.parametrize(("keep", "dtype"), [(0.25, torch.float32), (0.6, torch.float16)])
def test_detail_is_that_of_the_loops(keep: float, dtype: torch.dtype) -> None:
    size = 3, 18
    x, config = (
        tokens(size, 24, dtype),
        MaMeConfig(keep=keep, merge="qkv", study=Study(stride=(2, 2))),
    )
    plan, plain = both(x, config, size)
    with fused.only(False):
        y = plain.merge(x[..., 3:23] * 2)
    with fused.only(True):
        found = plan.restore(y, Detail(x, size))
    wide = x.cpu().double()
    exact = reference_plan(wide, config, size).restore(y.cpu().double(), Detail(wide, size))
    torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=20 * TOLERANCE[dtype])
    assert (found - plain.restore(y)).abs().max() > 20 * (
        found.cpu().double() - exact
    ).abs().max()  # it is no copy


def calls(
    size: tuple[int, ...], dtype: torch.dtype, width: int = 12, text: int = 0
) -> dict[str, Any]:
    """The arguments of attention over an image's or video's tokens and text after them; values are
    wider than keys.
    """
    generator = torch.Generator().manual_seed(1)
    shape = 2, 2, math.prod(size) + text
    made = [
        torch.randn(*shape, w, generator=generator).to(DEVICE, dtype)
        for w in (width, width, width + 5)
    ]
    return dict(zip(("query", "key", "value"), made, strict=True))


@runs
@pytest.mark.parametrize(
    ("size", "text", "keep", "dtype"),
    [
        ((2, 4, 6), 3, 0.25, torch.float32),
        ((4, 16), 5, 0.6, torch.float16),
        ((4, 16), 0, 0.25, torch.bfloat16),
        ((8, 40), 0, 0.25, torch.float32),
    ],
    ids=str,
)
def test_keys_and_values_and_their_correction(
    size: tuple[int, ...],
    text: int,
    keep: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mame_sd.core import triton_moments

    # the last case has three chunks of means and two of the sample, of which one is empty
    monkeypatch.setattr(triton_moments, "_ROWS", 30)
    lie, call = Tokens(size), calls(size, dtype, text=text)
    assert lie.plane is not None
    x = tokens(lie.plane, 24, dtype)
    plan, plain = both(x, MaMeConfig(keep=keep, study=Study(stride=(2, 2)), merge="kv"), lie.plane)
    shape, attention = (2, lie.count + text), F.scaled_dot_product_attention
    for first in {0, text}:  # text after the image, or before it
        with fused.only(True):
            found = MergedKeys(plan, lie, shape, first, True, True).attend(attention, dict(call))
        wide = {name: t.float() for name, t in call.items()}
        with fused.only(False):
            exact = MergedKeys(plain, lie, shape, first, True, True).attend(attention, wide)
            alone = MergedKeys(plain, lie, shape, first, False, True).attend(attention, wide)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), exact, rtol=0, atol=4 * TOLERANCE[dtype])
        assert (exact - alone).abs().max() > 0.01  # there is something to correct


@runs
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_keys_made_of_merged_tokens_and_a_sample(dtype: torch.dtype) -> None:
    size = 4, 20
    x = tokens(size, 24, dtype)
    plan, plain = both(x, MaMeConfig(), size)
    query = x.unflatten(2, (2, 12)).transpose(1, 2)
    outputs = []
    for kernels, made, width in ((True, plan, dtype), (False, plain, torch.float32)):
        with fused.only(kernels):
            grouped = GroupedKeys(made)
            keys = grouped.keys_of(x.to(width)).unflatten(2, (2, 12)).transpose(1, 2)
            call = {"query": query.to(width), "key": keys * 2, "value": keys + 1}
            outputs.append(grouped.attend(F.scaled_dot_product_attention, call).float())
    torch.testing.assert_close(*outputs, rtol=0, atol=4 * TOLERANCE[dtype])


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device is asked, of fewer tokens."""
    monkeypatch.setattr(example, "_PLANE", (2, 18))


@runs
@pytest.mark.usefixtures("few_tokens")
def test_a_device_is_asked_once_and_then_runs_the_kernels() -> None:
    dtype = torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused.on(tokens((4, 4), dtype=dtype))
    assert fused.state() == {f"{DEVICE} {str(dtype).removeprefix('torch.')}": True}


@runs
def test_wrong_numbers_turn_the_kernels_off_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = example.results

    def wrong(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        kernels = fused.on(tokens((4, 4)))
        with fused.only(False):
            found = right(device, dtype)
        found["kv, correction"] += kernels
        return found

    monkeypatch.setattr(example, "results", wrong)
    with pytest.warns(
        RuntimeWarning, match="merging runs by PyTorch's operations on .*correction is .* off"
    ):
        assert not fused.on(tokens((4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not fused.on(tokens((4, 4)))


@runs
def test_a_kernel_that_fails_in_an_image_gives_way_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mame_sd.core import triton_groups

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of resource: shared memory")

    x, config = tokens((8, 8)), MaMeConfig()
    fused._found[str(DEVICE), x.dtype] = True
    monkeypatch.setattr(triton_groups, "group_means", broken)
    plan = plan_merge(x, config, (8, 8))
    with pytest.warns(
        RuntimeWarning, match="RuntimeError: out of resource: shared memory"
    ) as warned:
        merged = [plan.merge(x) for _ in range(2)]
    assert len(warned) == 1
    torch.testing.assert_close(merged[0], both(x, config, (8, 8))[1].merge(x))
    assert torch.equal(*merged)


@runs
def test_gradients_and_float64_are_pytorchs() -> None:
    x, config = tokens((8, 8)), MaMeConfig()
    with fused.only(True):
        assert not fused.on(x.double())
        plan = plan_merge(x, config, (8, 8))
        with torch.enable_grad():
            wanted = x.clone().requires_grad_()
            assert not fused.on(wanted)
            plan.restore(plan.merge(wanted)).square().sum().backward()
    again = x.clone().requires_grad_()
    plain = both(x, config, (8, 8))[1]
    with torch.enable_grad():
        plain.restore(plain.merge(again)).square().sum().backward()
    assert wanted.grad is not None
    torch.testing.assert_close(wanted.grad, again.grad)


@runs
def test_a_compiled_layer_is_one_graph_with_the_kernels_in_it() -> None:
    attn = seeded(Attention, 0, 16, heads=2, dim_head=8).to(DEVICE)
    x = tokens((8, 8), 16)
    apply_mame(attn, min_tokens=60)
    with fused.only(False):
        expected = attn(x)
    fused._found[str(DEVICE), x.dtype] = True  # as a check would leave it
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(attn, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    (graph,) = graphs
    ours = [
        str(node.target) for node in graph.graph.nodes if str(node.target).startswith("mame_sd")
    ]
    assert ours == [
        f"mame_sd.{name}.default"
        for name in ("nearest", "group_means", "partial_moments", "lacking", "add_lacking")
    ]


@pytest.mark.skipif(INTERPRETED, reason="compiles them")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernels_compile_for_a_card_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what a card's driver does: from the arguments of a real call to the card's own
    code.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import JITFunction

    from tests.builders.kernels import every_launch, signature_of

    capability = 86  # of RTX 3060 to 3090, whose programs have the least room of all that know TF32
    launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        JITFunction,
        "run",
        lambda kernel, *args, grid, warmup, **more: launched.append((kernel, args, more)),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
    every_launch(torch.float32)
    made = set()
    for kernel, args, more in launched:
        if kernel.__name__ not in made:  # the interpreter runs the others
            made.add(kernel.__name__)
            options = {name: more[name] for name in ("num_warps", "num_stages") if name in more}
            source = ASTSource(kernel, *signature_of(kernel, args, more))
            code = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert len(code.asm["cubin"]) > 0
            assert code.metadata.shared <= 99 * 1024, (
                f"more than a program may have on a consumer's card: {kernel.__name__}"
            )
    assert len(made) == 11
