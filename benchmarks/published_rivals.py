"""Do our ToMe and EViT give what the published implementations give?

Both on one small ViT of timm with random weights.

    python -m benchmarks.published_rivals --tome TOME --evit EVIT

TOME and EVIT are checkouts of facebookresearch/ToMe and youweiliang/evit.

Needs timm with its torchvision, and torchprofile, which EViT imports. One JSON line for each
setting: the largest difference of the logits, that of the unmerged model's beside it. Exits with 1
where one is above `CLOSE`.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.eval.perception.rivals import rival_on
from mame_sd.eval.perception.rules import EViT, Rule, ToMe

CLOSE = 1e-5  # of logits of size 5, in fp32
SIZES: dict[str, Any] = {
    "img_size": 28,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 12,
    "num_heads": 2,
    "num_classes": 7,
}
IMAGES = 4


def vit(**overrides: Any) -> torch.nn.Module:
    """A ViT of timm in eval mode, its weights large enough that attention tells tokens apart."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model: torch.nn.Module = VisionTransformer(**SIZES, **overrides).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(0, 0.3) if weight.dim() > 1 else weight.add_(0.1 * torch.randn_like(weight))
    return model


def tome(model: torch.nn.Module, rule: ToMe, pixels: Tensor) -> Tensor:
    """Logits of the published ToMe."""
    published = copy.deepcopy(model)
    importlib.import_module("tome.patch.timm").apply_patch(published, prop_attn=rule.prop_attn)
    published.r = int(rule.r)  # type: ignore[assignment]
    logits: Tensor = published(pixels)
    return logits


def evit(model: torch.nn.Module, rule: EViT, pixels: Tensor) -> Tensor:
    """Logits of the published EViT."""
    rates = [
        rule.keep if block in rule.blocks(SIZES["depth"]) else 1 for block in range(SIZES["depth"])
    ]
    published = (
        importlib.import_module("evit")
        .EViT(**SIZES, keep_rate=tuple(rates), fuse_token=rule.fuse)
        .eval()
    )
    published.load_state_dict(model.state_dict())
    logits: Tensor = published(pixels, rates)
    return logits


def compare(
    model: torch.nn.Module, rule: Rule, pixels: Tensor, published: Tensor, about: str
) -> bool:
    """Prints one line; whether ours is close."""
    unmerged = model(pixels)
    with rival_on(model, rule) as handle:
        ours = model(pixels)
        tokens = handle.report().blocks[-1].tokens_kept
    apart, other = ((published - logits).abs().max().item() for logits in (ours, unmerged))
    print(
        json.dumps(
            {
                "rule": str(rule),
                "model": about,
                "tokens": tokens,
                "apart": apart,
                "unmerged apart": other,
            }
        )
    )
    return apart < CLOSE


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tome", type=Path, required=True, help="checkout of facebookresearch/ToMe"
    )
    parser.add_argument("--evit", type=Path, required=True, help="checkout of youweiliang/evit")
    args = parser.parse_args()
    sys.path[:0] = [str(args.tome), str(args.evit)]
    pixels, close = torch.randn(IMAGES, 3, 28, 28, generator=torch.Generator().manual_seed(0)), []
    for about, overrides in (
        ("class token", {}),
        ("mean of tokens", {"class_token": False, "global_pool": "avg"}),
    ):
        model = vit(**overrides)
        for rule in (ToMe(r, prop_attn) for prop_attn in (True, False) for r in (1, 3, 8, 16)):
            close.append(compare(model, rule, pixels, tome(model, rule, pixels), about))
    model = vit()
    for prune in (EViT(keep, fuse) for fuse in (True, False) for keep in (0.3, 0.5, 0.7, 0.9)):
        close.append(compare(model, prune, pixels, evit(model, prune, pixels), "class token"))
    return 0 if all(close) else 1


if __name__ == "__main__":
    sys.exit(main())
