"""Where a merging layer's launches come from: each operation that merging adds to one layer, by the
function of the library that asks for it. Bytes stand in the last line. All are counted on tensors
that have sizes alone.

    python -m benchmarks.layer_launches --layer unet --merge qkv            # PyTorch's operations
    python -m benchmarks.layer_launches --layer sd3 --merge qkv --kernels   # our own where they run

`tests/diffusion/test_launches.py` holds the counts.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel
from torch import nn

from benchmarks.launches import counted, on_card, pretended
from mame_sd import MaMeConfig, apply_mame
from mame_sd.core.cards import Work

Built = tuple[nn.Module, dict[str, Any], str]
HALF: Any = {"dtype": torch.float16, "device": "meta"}


def unet() -> Built:
    """The largest level of SD 1.5 at 512, its inputs, and one of its self-attentions."""
    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=64,
            block_out_channels=(320,),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
            mid_block_type=None,
            cross_attention_dim=768,
            attention_head_dim=8,
        ).half()
    inputs = {
        "sample": torch.empty(2, 4, 64, 64, **HALF),
        "timestep": torch.empty(2, device="meta"),
        "encoder_hidden_states": torch.empty(2, 77, 768, **HALF),
    }
    return model, inputs, "down_blocks.0.attentions.0.transformer_blocks.0.attn1"


def sd3() -> Built:
    """A block of SD 3.5 medium at 1024."""
    with torch.device("meta"):
        model = SD3Transformer2DModel(
            num_layers=2,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=192,
            qk_norm="rms_norm",
        ).half()
    inputs = {
        "hidden_states": torch.empty(2, 16, 128, 128, **HALF),
        "timestep": torch.empty(2, device="meta"),
        "encoder_hidden_states": torch.empty(2, 333, 4096, **HALF),
        "pooled_projections": torch.empty(2, 2048, **HALF),
    }
    return model, inputs, "transformer_blocks.0.attn"


def work_of(
    build: Callable[[], Built],
    fields: Mapping[str, Any] | None,
    kernels: bool = True,
    callers: list[str] | None = None,
) -> list[Work]:
    """What a card is asked in one layer's second call, unmerged where there are no `fields`.

    Args:
        build: gives a model, its inputs, and the layer's path.
        fields: of the settings, by one flat name each.
        kernels: our own run; else PyTorch's operations alone.
        callers: see `benchmarks.launches.counted`.
    """
    found: list[list[Work]] = []
    with pretended(kernels=kernels):
        model, inputs, path = build()
        model = on_card(model)
        if fields is not None:
            apply_mame(model, MaMeConfig.from_dict(dict(fields)))
        model(**inputs)
        layer: Any = model.get_submodule(path)
        forward = layer.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            output: list[Any] = []
            found.append(counted(lambda: output.append(forward(*args, **kwargs)), callers=callers))
            return output[0]

        layer.forward = counting
        model(**inputs)
    return found[0]


def added(
    build: Callable[[], Built], fields: Mapping[str, Any], kernels: bool
) -> dict[str, Counter[str]]:
    """The launches that merging adds to a layer, by the function that asks for them and by
    operation; those of the model's own operations under "".
    """
    callers: list[str] = []
    found: dict[str, Counter[str]] = {}
    for work, caller in zip(work_of(build, fields, kernels, callers), callers, strict=True):
        found.setdefault(caller, Counter())[work.name] += work.launches
    own = found.setdefault("", Counter())
    for work in work_of(build, None):
        own[work.name] -= work.launches
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layer", choices=("unet", "sd3"), default="unet", help="default unet")
    parser.add_argument("--merge", choices=("qkv", "kv"), default="qkv", help="default qkv")
    parser.add_argument("--keep", type=float, help="default .5 of a UNet, .625 of SD3")
    parser.add_argument("--kernels", action="store_true", help="our own kernels where they run")
    args = parser.parse_args(argv)
    build = unet if args.layer == "unet" else sd3
    keep = args.keep or (0.5 if args.layer == "unet" else 0.625)
    fields = {"keep": keep, "merge": args.merge}
    found = added(build, fields, args.kernels)
    print("| function | launches | operations |\n|---|---|---|")
    for caller, operations in found.items():
        names = [f"{name} {n}" if n != 1 else name for name, n in operations.items() if n]
        if names:
            where = f"`{caller}`" if caller else "the layer's own operations, more or fewer"
            print(f"| {where} | {operations.total()} | {', '.join(names)} |")
    plain, merged = work_of(build, None), work_of(build, fields, args.kernels)
    more, own = (
        sum(work.bytes for work in merged) - sum(work.bytes for work in plain),
        sum(work.bytes for work in plain if work.name == "attention"),
    )
    print(
        f"\n{sum(one.total() for one in found.values())} launches and {more / 1e6:.0f} MB more than"
        f" unmerged, whose attention reads and writes {own / 1e6:.0f} MB."
    )


if __name__ == "__main__":
    main()
