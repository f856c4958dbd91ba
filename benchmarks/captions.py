"""What fewer visual tokens save at the widths of LLaVA-1.5-7B: time to the first token, the size of
the cache, multiply-adds.

    python -m benchmarks.captions

The language model has 4 of its 32 layers, the tower all 24; weights and image are random. Times are
seconds of CPU over those of the unmerged model, the median of rounds in which forms take turns.
Multiply-adds and bytes are reckoned for all 32 layers from the tokens that were counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from mame_sd import apply_mame, remove_mame
from mame_sd.eval.tables import markdown_table

LAYERS, OF = 4, 32
TEXT = 40  # tokens of the prompt beside the image
IMAGE = 31_999
FORMS: dict[str, dict[str, Any] | None] = {
    "unmerged": None,
    "keep .5": {"keep": 0.5},
    "keep .25": {"keep": 0.25},
    "keep .11": {"keep": 0.11},
}


def make_model() -> LlavaForConditionalGeneration:
    """LLaVA-1.5-7B with fewer layers, of random weights."""
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    text = LlamaConfig(num_hidden_layers=LAYERS)  # its widths are Llama-2-7B's
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval()


def language_adds(config: LlamaConfig, tokens: float) -> float:
    """Multiply-adds of all 32 layers reading so many tokens at once."""
    width, inner = config.hidden_size, config.intermediate_size
    each = 4 * width * width + 3 * width * inner
    return OF * (tokens * each + 2 * width * tokens * tokens / 2)


def cache_bytes(config: LlamaConfig, tokens: float) -> float:
    """Bytes of keys and values of all 32 layers in 16 bits."""
    return OF * 2 * 2 * config.hidden_size * tokens


def flat(side: int = 336) -> torch.Tensor:
    """A picture of flat areas with noise, [1, 3, side, side]."""
    coarse = torch.randn(1, 3, 6, 6).repeat_interleave(side // 6, 2)
    return coarse.repeat_interleave(side // 6, 3) + 0.1 * torch.randn(1, 3, side, side)


@torch.inference_mode()
def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    model = make_model()
    ids = torch.randint(3, 31_000, (1, TEXT + 576))
    ids[0, 5:581] = IMAGE
    inputs = {"input_ids": ids, "pixel_values": flat()}
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    visual = {"unmerged": 576.0}
    counting: Any = apply_mame(model.model.vision_tower, keep=1.0)
    model.model.vision_tower(inputs["pixel_values"])
    tower = counting.report().flops_before
    counting.remove()
    for _ in range(rounds):
        for name, form in FORMS.items():
            handle: Any = None if form is None else apply_mame(model, **form)
            start = time.process_time()
            model(**inputs, logits_to_keep=1)
            seconds[name].append(time.process_time() - start)
            if handle is not None:
                visual[name] = handle.report().visual_after
            remove_mame(model)
    text = model.config.text_config
    base = statistics.median(seconds["unmerged"])
    heads = "form | visual | tower's GMACs | 32 layers' GMACs | all | cache, MB | first token"
    before = tower + language_adds(text, TEXT + 576)
    rows = []
    for name in FORMS:
        tokens = TEXT + visual[name]
        adds = language_adds(text, tokens)
        rows.append(
            [
                name,
                f"{visual[name]:.0f}",
                f"{tower / 1e9:.0f}",
                f"{adds / 1e9:.0f}",
                f"{(tower + adds) / before:.0%}",
                f"{cache_bytes(text, tokens) / 1e6:.0f}",
                f"{statistics.median(seconds[name]) / base:.2f}",
            ]
        )
    print(markdown_table(heads.split(" | "), rows))


if __name__ == "__main__":
    main()
