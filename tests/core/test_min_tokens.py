"""Test which attention kernel would run, and from how many tokens on layers merge."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mame_sd import apply_mame
from mame_sd.core import min_tokens
from mame_sd.core.min_tokens import (
    MIN_TOKENS,
    Machine,
    head_width,
    kernel_of,
    kernel_on,
    too_little_work,
)
from tests.builders.tiny import one_level_unet, run_unet, tiny_unet

ROOT = Path(__file__).parents[2]
NEW, OLD = (2, 13), (2, 12)
# For each machine: PyTorch's answers, a head's width, the number of tokens from which layers merge.
MACHINES: dict[str, tuple[Machine, int, int]] = {
    "CPU": (Machine("cpu", None, NEW, True), 64, 1024),
    "CPU, math kernel": (Machine("cpu", None, NEW, False), 64, 576),
    "A100": (Machine("cuda", (8, 0), NEW, True), 64, 16384),
    "3090": (Machine("cuda", (8, 6), NEW, True, "NVIDIA GeForce RTX 3090"), 64, 16384),
    "A40": (Machine("cuda", (8, 6), NEW, True, "NVIDIA A40"), 64, 16384),
    "4090": (Machine("cuda", (8, 9), NEW, True), 64, 16384),
    "H100": (Machine("cuda", (9, 0), NEW, True), 128, 24576),
    "a card in fp64": (Machine("cuda", (8, 6), NEW, False), 64, 4096),
    "ROCm with AOTriton": (Machine("cuda", None, NEW, True), 64, 16384),
    "ROCm without fused kernels": (Machine("cuda", None, NEW, False), 64, 4096),
    "MPS, torch 2.12": (Machine("mps", None, OLD, None), 64, 1024),
    "MPS, torch 2.13": (Machine("mps", None, NEW, None), 64, 4096),
    "MPS, torch 2.13, SD 1.5's heads": (Machine("mps", None, NEW, None), 40, 1024),
    "another device": (Machine("xpu", None, NEW, True), 64, 16384),
    "a device that nobody can ask": (Machine("privateuseone", None, NEW, None), 64, 16384),
}


@pytest.mark.parametrize(("machine", "width", "least"), MACHINES.values(), ids=MACHINES)
def test_the_kernel_that_would_run_decides(machine: Machine, width: int, least: int) -> None:
    assert kernel_on(machine, width).least == least


def test_the_page_has_these_numbers() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([\d,]+) \| ([\d,]+) \|$", page, re.M)
    told = [int(number.replace(",", "")) for row in rows for number in row]
    same = ("cuda, GeForce of capability 8.6", "other")
    assert told == [MIN_TOKENS[key] for key in MIN_TOKENS if key[0] not in same]
    for kernel in ("fused", "unfused"):
        assert {MIN_TOKENS[device, kernel] for device in same} == {MIN_TOKENS["cuda", kernel]}


def test_pytorch_is_asked_as_it_is_set_now() -> None:
    cpu = torch.device("cpu")
    assert kernel_of(cpu, torch.bfloat16, 40) == ("cpu", "fused")
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_of(cpu, torch.bfloat16, 40) == ("cpu", "unfused")
    assert kernel_of(cpu, torch.bfloat16, 40) == ("cpu", "fused")
    # a card that this machine lacks, as benchmarks/launches.py pretends
    assert kernel_of(torch.device("cuda", 99)) == ("cuda", "fused")


@pytest.mark.parametrize(
    ("name", "batch", "channels", "restores"),
    [
        ("A100", 2, 2432, True),
        ("A100", 64, 640, False),  # as much work, but no gain on any card
        ("H100", 64, 1536, False),
        ("3090", 2, 640, True),  # SDXL's at 1,024 pixels
        ("3090", 2, 320, False),
        ("A40", 2, 640, False),
        ("4090", 2, 640, False),
        ("H100", 4, 3072, True),
        ("CPU", 1, 256, True),
    ],
)
def test_mlps_are_restored_by_default_where_they_are_wide_and_have_work_enough(
    name: str, batch: int, channels: int, restores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(min_tokens, "asked", lambda *_: MACHINES[name][0])
    x = torch.empty(batch, 4096, channels, dtype=torch.bfloat16, device="meta")
    reason = too_little_work(x)
    assert (reason == "") is restores
    assert restores or f"4,096 tokens of {channels:,} channels gain nothing on this card" in reason


def test_a_layer_merges_from_fewer_tokens_on_under_the_unfused_kernel() -> None:
    unet = one_level_unet()
    handle = apply_mame(unet)
    with pytest.warns(UserWarning, match="no layer merges"):
        run_unet(unet, height=24, width=24)
    report = handle.report()  # raised NothingMergedError before
    assert {layer.reason for layer in report.layers if layer.kind == "attention"} == {
        "not merged by default: fewer than 1,024 tokens by fused attention gain nothing on this CPU"
    }
    assert str(report).splitlines()[-1].endswith("min_tokens=576 merges the largest anyway")
    handle.reset()
    with sdpa_kernel(SDPBackend.MATH):
        run_unet(unet, height=24, width=24)
    report = handle.report()
    assert {layer.share for layer in report.layers if layer.kind == "attention"} == {0.25}


def test_mlps_of_few_tokens_are_not_restored_by_default() -> None:
    """SD 1.5's lower levels at 512 pixels are enough work for a CPU, but too few tokens."""
    levels = {tokens: torch.empty(2, tokens, 1280) for tokens in (64, 256, 1024)}
    few = {
        tokens for tokens, x in levels.items() if "a fit needs 1,024" in too_little_work(x, tokens)
    }
    assert few == {64, 256}
    assert too_little_work(levels[1024]) == ""


def test_the_width_of_a_head_is_read_off_the_module() -> None:
    attn = tiny_unet().down_blocks[0].attentions[0].transformer_blocks[0].attn1
    assert head_width(attn) == attn.inner_dim // attn.heads
    assert head_width(nn.Identity()) == 64
