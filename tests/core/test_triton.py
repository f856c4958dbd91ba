"""The Triton kernels against PyTorch's operations and the float64 loops.

They run on a CUDA device where there is one, and in Triton's interpreter on any machine: it must be chosen before Triton is
imported, so the cases run again in a process of their own (`test_in_the_interpreter`).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention

from mame_sd import MachineError, MaMeConfig, apply_mame, plan_merge
from mame_sd.core.owners import owners_of
from mame_sd.core.reference import reference_plan
from mame_sd.core.triton_plan import TORCH_INSTEAD, kernel_note
from tests.builders.tiny import seeded, tiny_unet, unet_inputs

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
runs = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device")
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "default": ((16, 16), {}),
    "cut tiles": ((20, 36), {}),
    "cut tiles, some sources preserved": ((11, 13), {"tiles": 8, "keep": 0.6, "merge": "qkv"}),
    "tau": ((8, 16), {"tau": 0.1, "weights": "best", "tiles": 8}),
    "tiles of 8": ((16, 8), {"tiles": 8}),
    "3 x 3 cells, tiles of 12": ((12, 24), {"stride": (3, 3), "keep": 0.1, "tiles": 12}),
    "alternating": ((16, 16), {"partition": "alternating", "keep": 0.5}),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tokens(size: tuple[int, int], width: int = 80, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, size[0] * size[1], width, generator=generator).to(DEVICE, dtype)


def forward(unet: Any) -> torch.Tensor:
    sample: torch.Tensor = unet(**{name: value.to(DEVICE) for name, value in unet_inputs(unet).items()}).sample
    return sample


@pytest.mark.skipif(INTERPRETED, reason="runs these cases")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


@runs
@pytest.mark.parametrize("name", CASES)
def test_plans_are_those_of_the_loops(name: str) -> None:
    size, fields = CASES[name]
    x, config, draw = tokens(size), MaMeConfig(kernel="triton", **fields), torch.tensor([3])
    plan, plain = plan_merge(x, config, size, draw=draw), plan_merge(x, config.replace(kernel=None), size, draw=draw)
    exact = reference_plan(x.cpu().double(), config, size, draw=draw)
    assert plan.by_kernel
    for of in ("weights", "counts", "preserved", "kept"):
        assert torch.equal(getattr(plan, of), getattr(plain, of)), of
    assert torch.equal(owners_of(plan), owners_of(plain))
    y = plan.merge(x)
    torch.testing.assert_close(y.cpu().double(), exact.merge(x.cpu().double()), rtol=0, atol=1e-5)
    assert torch.equal(plan.restore(y), plain.restore(y))


@runs
def test_samples_follow_their_leader() -> None:
    leader = torch.tensor([1, 1])
    x = tokens((6, 6))
    plan, plain = (plan_merge(x, MaMeConfig(kernel=k), (6, 6), leader=leader.to(x.device)) for k in ("triton", None))
    assert torch.equal(owners_of(plan), owners_of(plain))
    assert torch.equal(*owners_of(plan))


@runs
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [16, 144])
def test_any_dtype_and_width(dtype: torch.dtype, width: int) -> None:
    x, config = tokens((8, 16), width, dtype), MaMeConfig(kernel="triton")
    wide = x.cpu().double()
    plan, exact = plan_merge(x, config, (8, 16)), reference_plan(wide, config, (8, 16))
    assert torch.equal(plan.weights, plan_merge(x, config.replace(kernel=None), (8, 16)).weights)
    y = plan.merge(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.cpu().double(), exact.merge(wide), rtol=0, atol=TOLERANCE[dtype])
    other = x[..., :8].contiguous()  # a plan merges tokens of another width
    torch.testing.assert_close(
        plan.merge(other).cpu().double(), exact.merge(wide[..., :8]), rtol=0, atol=TOLERANCE[dtype]
    )


@runs
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("value", [0.0, 0.1, 6e4])
def test_constant_images_stay_as_they_are(dtype: torch.dtype, value: float) -> None:
    x = torch.full((1, 64, 32), value, device=DEVICE).to(dtype)
    plan = plan_merge(x, MaMeConfig(kernel="triton"), (8, 8))
    y = plan.merge(x)
    rtol = max(1e-5, torch.finfo(dtype).eps)  # of a sum of up to 49 equal tokens
    torch.testing.assert_close(y, x[:, :16], rtol=rtol, atol=0)
    torch.testing.assert_close(plan.restore(y), x, rtol=rtol, atol=0)


@runs
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(scale: float) -> None:
    x, config = tokens((8, 8)), MaMeConfig(kernel="triton")
    assert torch.equal(owners_of(plan_merge(x * scale, config, (8, 8))), owners_of(plan_merge(x, config, (8, 8))))


@runs
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 1], ids=["destination", "source"])
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_sample(bad: float, position: int) -> None:
    x, config = tokens((8, 16)), MaMeConfig(kernel="triton")
    x[0, position, 5] = bad
    plan, plain = plan_merge(x, config, (8, 16)), plan_merge(x, config.replace(kernel=None), (8, 16))
    assert torch.equal(owners_of(plan), owners_of(plain))
    got, want = plan.merge(x), plain.merge(x)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert not got[0].isfinite().all()
    assert got[1].isfinite().all()


@runs
def test_special_tokens_and_leading_dimensions() -> None:
    x, config = tokens((8, 8), 16).view(2, 1, 64, 16), MaMeConfig(kernel="triton", keep=0.5, merge="qkv")
    x = torch.cat([x[..., :1, :] + 1, x], -2)
    plan, plain = (plan_merge(x, c, (8, 8), special=1) for c in (config, config.replace(kernel=None)))
    y = plan.merge(x)
    torch.testing.assert_close(y, plain.merge(x))
    assert torch.equal(plan.restore(y), plain.restore(y))


@runs
def test_gradients_and_float64_are_pytorchs_and_the_report_says_so() -> None:
    config = MaMeConfig(kernel="triton")
    x = tokens((8, 8))
    for served in (x.double(), x.clone().requires_grad_()):
        plan = plan_merge(served, config, (8, 8))
        assert not plan.by_kernel
        assert kernel_note(config, plan) == TORCH_INSTEAD
    plan, wanted = plan_merge(x, config, (8, 8)), x.clone().requires_grad_()
    plan.restore(plan.merge(wanted)).sum().backward()
    again = x.clone().requires_grad_()
    plain = plan_merge(x, config.replace(kernel=None), (8, 8))
    plain.restore(plain.merge(again)).sum().backward()
    assert wanted.grad is not None
    torch.testing.assert_close(wanted.grad, again.grad)
    unet = tiny_unet().to(DEVICE)
    handle = apply_mame(unet, config, min_tokens=60)
    forward(unet)
    assert {layer.reason for layer in handle.report().layers if layer.merged} == {TORCH_INSTEAD}


@runs
@torch.no_grad()
def test_a_compiled_layer_is_one_graph_with_the_kernels_in_it() -> None:
    attn = seeded(Attention, 0, 32, heads=2, dim_head=16).to(DEVICE)
    x = tokens((16, 16), 32)
    handle = apply_mame(attn, min_tokens=60)
    expected = attn(x)
    handle.set(kernel="triton")
    torch.testing.assert_close(attn(x), expected, rtol=1e-4, atol=1e-4)
    assert [(layer.merged, layer.reason) for layer in handle.report().layers] == [(True, "")]
    compiled = torch.compile(attn, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)


@runs
@torch.no_grad()
def test_a_count_that_depends_on_the_data_compiles_too() -> None:
    torch._dynamo.reset()
    config = MaMeConfig(tau=0.1, weights="best", kernel="triton", tiles=4)

    def layer(x: torch.Tensor) -> torch.Tensor:
        plan = plan_merge(x, config, (8, 8))
        return plan.restore(plan.merge(x) * 2)

    x = tokens((8, 8), 16)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


@pytest.mark.skipif(INTERPRETED, reason="compiles them")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernels_compile_for_a_gpu_without_one() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from mame_sd.core import triton_kernels as kernels

    types = {"x": "*bf16", "slots": "*i64", "row": "*i32", "best": "*fp32"}
    launched = kernels.launch_sizes(64, 192)  # the default's tiles
    warps = {"num_warps": launched["num_warps"]}
    blocks = {name: side for name, side in launched.items() if name.startswith("BLOCK")}
    kernel = kernels.best_kernel
    signature = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(blocks, "constexpr")
    made = compile(ASTSource(kernel, signature, blocks), target=GPUTarget("cuda", 80, 32), options=warps)
    assert len(made.asm["cubin"]) > 0
    assert made.metadata.shared <= 48 * 1024, "what every device gives a program without asking"


def test_a_cpu_is_refused_and_so_are_other_settings() -> None:
    if not INTERPRETED:
        with pytest.raises(MachineError, match="expected tokens on a CUDA device for kernel='triton', got cpu"):
            plan_merge(torch.ones(1, 64, 16), MaMeConfig(kernel="triton"), (8, 8))
    for fields in ({"weights": "average"}, {"metric": "dot"}, {"tiles": 0}, {"tiles": 32}, {"preset": "plain"}):
        with pytest.raises(ValueError, match="knows only weights='best', metric='cosine' and tiles from 2 to 16"):
            MaMeConfig(kernel="triton", **fields)  # type: ignore[arg-type]
