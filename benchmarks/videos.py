"""Video transformers at real size, random weights: what merging takes off their FLOPs and their
time, beside ToMe.

    python -m benchmarks.videos --flops                     # on the meta device: no weights
    python -m benchmarks.videos --model VideoMAE-B --rounds 2
    python -m benchmarks.videos --device cuda --rounds 10

A clip is 16 frames of 224 x 224 (ViViT: 32). FLOPs are multiply-adds for one clip. ToMe's r are
those that the paper prints for VideoMAE. Times are of the processor on a CPU, one clip a call,
methods interleaved. Each is the median, beside the unmerged model in the same round. Attention is
PyTorch's fused one (SDPA) but where eager is said; clips a second are of processor seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import (
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    VivitConfig,
    VivitForVideoClassification,
)

from benchmarks.timing import machine
from mame_sd.eval.perception.methods import Merged, Method, Rival, Unmerged
from mame_sd.eval.perception.rules import ToMe

SIDE = 224
_B: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_L: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {  # frames of a clip, what makes the model
    "VideoMAE-B": (
        16,
        lambda: VideoMAEForVideoClassification(VideoMAEConfig(**_B, num_labels=400)),
    ),
    "VideoMAE-L": (
        16,
        lambda: VideoMAEForVideoClassification(VideoMAEConfig(**_L, num_labels=400)),
    ),
    "ViViT-B": (32, lambda: VivitForVideoClassification(VivitConfig(**_B, num_labels=400))),
}


class Eager(Unmerged):
    """The model as it is, its attention in plain products instead of PyTorch's fused one."""

    def on(self, model: nn.Module) -> AbstractContextManager[Any]:
        return _eager(model)


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


METHODS: dict[str, Method] = {
    "unmerged": Unmerged(),
    "unmerged, eager attention": Eager(),
    "MaMe default": Merged(None),
    "MaMe, paper, halved at a quarter, half and three quarters": Merged("quarters", {"tau": -1.0}),
    "ToMe r 32": Rival(ToMe(32)),
    "ToMe r 96": Rival(ToMe(96)),
    "ToMe r 128": Rival(ToMe(128)),
}


@torch.no_grad()
def flops(name: str) -> dict[str, tuple[float, float]]:
    """Multiply-adds of one clip and tokens left at the end, by method."""
    frames, make = MODELS[name]
    with torch.device("meta"):
        model, clip = make().eval(), torch.empty(1, frames, 3, SIDE, SIDE)
        found = {}
        for label, method in METHODS.items():
            with method.counted(model) as handle:
                model(clip)
                report = handle.report()
            found[label] = report.flops, report.blocks[-1].tokens_kept
    return found


def flops_table(names: list[str]) -> str:
    """Markdown: FLOPs of every method."""
    lines = ["| model | method | GFLOPs | of the unmerged | tokens left |", "|---|---|---|---|---|"]
    for name in names:
        found = flops(name)
        for label, (count, tokens) in found.items():
            share = count / found["unmerged"][0]
            lines.append(f"| {name} | {label} | {count / 1e9:.1f} | {share:.0%} | {tokens:.0f} |")
    return "\n".join(lines)


@torch.no_grad()
def speed(name: str, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of one clip by method, one a round: the processor's on a CPU."""
    frames, make = MODELS[name]
    torch.manual_seed(0)
    model, clip = make().eval().to(device), torch.randn(1, frames, 3, SIDE, SIDE, device=device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    found: dict[str, list[float]] = {label: [] for label in METHODS}
    for number in range(rounds + 1):
        for label, method in METHODS.items():
            with method.on(model):
                start = clock()
                model(clip)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            if number:  # the first round warms up
                found[label].append(clock() - start)
    return found


def speed_table(name: str, seconds: dict[str, list[float]]) -> str:
    """Markdown: the median time in that of the unmerged model, round by round."""
    lines = ["| model | method | times as fast, rounds | clips a second |", "|---|---|---|---|"]
    for label, values in seconds.items():
        ratios = [whole / own for whole, own in zip(seconds["unmerged"], values, strict=True)]
        lines.append(
            f"| {name} | {label} | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
            f" {1 / median(values):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.videos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--flops", action="store_true", help="the table of FLOPs alone")
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, default=list(MODELS), help="default all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    print(flops_table(args.model), flush=True)
    if args.flops:
        return
    device = torch.device(args.device)
    print(f"\n{json.dumps(machine(device))}, {args.rounds} rounds")
    for name in args.model:
        print(f"\n{speed_table(name, speed(name, args.rounds, device))}", flush=True)


if __name__ == "__main__":
    main()
