"""Estimate what merging gains on cards that nobody has measured, without a card.

    python -m benchmarks.gpu                                    # all of docs/gpu.md: minutes
    python -m benchmarks.gpu --model "SDXL at 1024" --card H100

Every operation of one forward is counted at its real size (`benchmarks/launches.py`). A card is
busy with an operation for the longest of three times: that of the smallest kernel, its bytes at the
memory's speed, its products at the units' speed. *Graph* is that alone, as in a CUDA graph. *Eager*
lets products and attention reach three quarters of their peaks, so that less is to be saved, and
each kernel take the time in which Python launched one on an H200. Cells say how many times as fast
as unmerged a forward is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from benchmarks import parser_of
from benchmarks.attention import without_bias
from benchmarks.launches import META, Work, counted, on_card, pretended
from mame_sd import apply_mame
from mame_sd.eval.tables import markdown_table

On = Callable[[Any], AbstractContextManager[Any]]
HALF, BRAIN = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A model at one size, and its arguments.

    Attributes:
        shapes: Shapes of the call's tensors by name, without the batch.
        batch: Samples; 2 is one guided image.
        repeats: Blocks that stand for as many, by their path: transformers are cut in depth.
        ids: Further arguments whose values are read, as they are.
    """

    model: str
    config: Mapping[str, Any]
    shapes: Mapping[str, Any]
    dtype: torch.dtype = BRAIN
    batch: int = 1
    repeats: Mapping[str, int] = field(default_factory=dict)
    ids: Mapping[str, Tensor] = field(default_factory=dict)

    def build(self, device: torch.device) -> nn.Module:
        """Make the model with seeded random weights, in `dtype` on `device`."""
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with device:
                model: nn.Module = getattr(diffusers, self.model).from_config(dict(self.config))
                # without diffusers' notice of what it would rather keep in fp32
                return nn.Module.to(model.eval(), self.dtype)
        finally:
            torch.set_default_dtype(before)

    def inputs(self, model: nn.Module) -> tuple[dict[str, Any], dict[int, Tensor]]:
        """Make the arguments of a call on the model's device.

        Returns:
            Zeros and `ids`, and the values of `ids` by the tensors' id.
        """
        device = next(model.parameters()).device

        def made(shape: Any) -> Any:
            if isinstance(shape, Mapping):
                return {name: made(part) for name, part in shape.items()}
            return torch.zeros(self.batch, *shape, device=device, dtype=self.dtype)

        ids = {name: value.to(device) for name, value in self.ids.items()}
        known = {id(ids[name]): value for name, value in self.ids.items()}
        return {**made(self.shapes), **ids}, known


# unet/config.json of stable-diffusion-v1-5 and of stable-diffusion-xl-base-1.0, where it differs
# from diffusers' defaults
SD15: dict[str, Any] = {"cross_attention_dim": 768}
SDXL: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def unet(config: Mapping[str, Any], side: int, dtype: torch.dtype = HALF, **changed: Any) -> Case:
    """Return a UNet for one guided image of `side` pixels; `changed` updates `config`."""
    config = {**config, **changed}
    shapes: dict[str, Any] = {
        "sample": (config.get("in_channels", 4), side // 8, side // 8),
        "timestep": (),
        "encoder_hidden_states": (77, config["cross_attention_dim"]),
    }
    if config.get("addition_embed_type"):
        shapes["added_cond_kwargs"] = {"text_embeds": (1280,), "time_ids": (6,)}
    return Case("UNet2DConditionModel", config, shapes, dtype, batch=2)


def flux(
    size: tuple[int, int],
    heads: int = 24,
    text: int = 512,
    layers: tuple[int, int] = (2, 2),
    references: int = 0,
    **more: Any,
) -> Case:
    """Return FLUX.1 with an image of (h, w) tokens, and reference images of as many.

    The second of its `layers` stands for all but one of 19 double blocks and of 38 single ones.
    """
    h, w = size
    ids = torch.zeros(1 + references, h, w, 3)
    ids[..., 0] = torch.arange(1 + references).view(-1, 1, 1)
    ids[..., 1], ids[..., 2] = torch.arange(h).unsqueeze(1), torch.arange(w)
    ids = ids.flatten(0, 2)
    shapes = {
        "hidden_states": (len(ids), 64),
        "encoder_hidden_states": (text, 4096),
        "pooled_projections": (768,),
        "timestep": (),
    }
    return Case(
        "FluxTransformer2DModel",
        {"num_layers": layers[0], "num_single_layers": layers[1], "num_attention_heads": heads},
        shapes,
        repeats={"transformer_blocks.1": 18, "single_transformer_blocks.1": 37},
        ids={"img_ids": ids, "txt_ids": torch.zeros(text, 3)},
        **more,
    )


def sd3(
    size: tuple[int, int], heads: int = 38, text: int = 333, layers: int = 3, **more: Any
) -> Case:
    """Return SD 3.5 large with a guided image of (h, w) tokens.

    The second of three blocks stands for 36 of 38, and the last one returns no text.
    """
    config = {
        "num_layers": layers,
        "num_attention_heads": heads,
        "caption_projection_dim": 64 * heads,
        "qk_norm": "rms_norm",
        "pos_embed_max_size": 192,
    }
    shapes = {
        "hidden_states": (16, 2 * size[0], 2 * size[1]),
        "encoder_hidden_states": (text, 4096),
        "pooled_projections": (2048,),
        "timestep": (),
    }
    repeats = {"transformer_blocks.1": 36}
    return Case("SD3Transformer2DModel", config, shapes, batch=2, repeats=repeats, **more)


def wan(
    size: tuple[int, int, int],
    heads: int = 40,
    text: int = 512,
    layers: int = 2,
    ffn_dim: int = 13824,
    repeats: int = 39,
    **more: Any,
) -> Case:
    """Return Wan of 14 B with a video of (t, h, w) tokens.

    The second of its `layers` stands for `repeats`.
    """
    t, h, w = size
    config = {"num_layers": layers, "num_attention_heads": heads, "ffn_dim": ffn_dim}
    shapes = {
        "hidden_states": (16, t, 2 * h, 2 * w),
        "encoder_hidden_states": (text, 4096),
        "timestep": (),
    }
    return Case("WanTransformer3DModel", config, shapes, repeats={"blocks.1": repeats}, **more)


# What makes each case; it takes other sizes too.
CASES: dict[str, partial[Case]] = {
    "SD 1.5 at 512": partial(unet, SD15, side=512),
    "SD 1.5 at 1024": partial(unet, SD15, side=1024),
    "SDXL at 1024": partial(unet, SDXL, side=1024),
    "SD 3.5 large at 1024": partial(sd3, size=(64, 64)),
    "FLUX.1 at 1024": partial(flux, size=(64, 64)),
    "FLUX.1 Kontext at 1024": partial(flux, size=(64, 64), references=1),
    "FLUX.1 at 2048": partial(flux, size=(128, 128)),
    "Wan 2.1 14B, 480p": partial(wan, size=(21, 30, 52)),
    "Wan 2.2 14B, 720p": partial(wan, size=(21, 45, 80)),
}


# What is estimated of a case. The default depends on the card; all other rows merge or restore each
# large layer. No row has tau, which keeps a number of tokens that depends on the picture.
LARGE = partial(apply_mame, min_tokens=1024)
ROWS: dict[str, On] = {
    "unmerged": lambda model: nullcontext(),
    "default": apply_mame,
    "default, kernel without bias": partial(apply_mame, kernel=without_bias),
    "keys, a quarter": partial(LARGE, keep=0.25),
    "MLPs on an eighth": partial(LARGE, keep=1, mlp_keep=0.125),
    "blocks on a quarter": partial(LARGE, keep=1, block_keep=0.25),
    "blocks and keys on a quarter": partial(LARGE, keep=0.25, block_keep=0.25),
}


SMALLEST = 2.5e-6  # seconds: no kernel takes less
LAUNCH = 31e-6  # seconds in which one kernel is launched from Python, measured on an H200
# Seconds that a chain of small kernels takes on any card, by the largest number of matrices: as
# measured on an H200, up to 8 of 128 x 128 each, above 8 in layers that merge keys.
CHAINS = {
    "linalg_cholesky_ex": {1: 44e-6, 4: 97e-6, 8: 101e-6, math.inf: 80e-6},
    "linalg_solve_triangular": {1: 42e-6, 4: 151e-6, 8: 295e-6, math.inf: 100e-6},
}
MEMORY = 0.8  # share of the printed bandwidth that a kernel sees
RESTORING_MEMORY = 0.27  # that of kernels which choose or restore tokens, as in a prototype
RESTORING_LAUNCH = 0.8  # the share of LAUNCH in which one of these is launched
SINGLE = 0.65  # share of the peak that products of fp32 reach
MASKED = 0.65  # of the speed of attention: that of attention with a mask


@dataclass(frozen=True)
class Card:
    """Hold what one kind of card does per second by its maker, and which shares are reached.

    Attributes:
        name: Name in tables and in `--card`.
        bandwidth: Bytes of its memory.
        half: Products of fp16 and bf16 with sums in fp32, FLOPs.
        single: Products in fp32, FLOPs.
        products: The share of `half` that products and convolutions reach.
        attention: The share of `half` that attention reaches.
        capability: Compute capability, on which the default depends (`core/min_tokens.py`).
    """

    name: str
    bandwidth: float
    half: float
    single: float
    products: float
    attention: float
    capability: tuple[int, int] = (8, 0)

    @property
    def harsh(self) -> Card:
        """Return the same card with attention and products at three quarters of their peaks."""
        return replace(self, products=0.75, attention=0.75)

    def seconds(self, work: Work) -> float:
        """Return how long the card is busy with one operation."""
        least = work.launches * SMALLEST
        if work.name in CHAINS:
            least = next(took for most, took in CHAINS[work.name].items() if work.matrices <= most)
        memory = (RESTORING_MEMORY if work.restores else MEMORY) * self.bandwidth
        return max(least, work.bytes / memory, work.flops / self.speed(work))

    def eager(self, work: Iterable[Work], launch: float) -> float:
        """Return how long operations take if Python launches each kernel.

        Python may run ahead of the card.

        Args:
            work: The operations.
            launch: Seconds for each kernel; 0 in a CUDA graph.
        """
        asked = done = 0.0
        for one in work:
            asked += one.launches * launch * (RESTORING_LAUNCH if one.restores else 1)
            done = max(done, asked) + self.seconds(one)
        return done

    def speed(self, work: Work) -> float:
        """Return the FLOPs per second that an operation of this kind reaches.

        Raises:
            ValueError: For attention or a convolution in fp32, which no model here has.
        """
        halves = work.dtype in (torch.float16, torch.bfloat16)
        if not halves and work.kind not in ("product", "other"):
            raise ValueError(f"expected {work.kind} in 16 bits, got {work.dtype}; cast the model")
        if "attention" not in work.kind:
            return self.products * self.half if halves else SINGLE * self.single
        used = work.width / (-(-work.width // 32) * 32)  # heads are padded to multiples of 32
        return self.attention * self.half * used * (MASKED if "masked" in work.kind else 1)


# Peaks are their makers', for sums in fp32. Shares of them are assumed to fit published times: what
# diffusers' documentation measured of Stable Diffusion 1.5 on the 3090, the 4090 and the A100.
# Those of the H100 fit what was measured on an H200. A 3060 is taken for a smaller 3090.
CARDS = {
    card.name: card
    for card in (
        Card("3060", 0.36e12, 25.5e12, 12.7e12, 0.77, 0.8, (8, 6)),
        Card("3090", 0.936e12, 71e12, 35.6e12, 0.77, 0.8, (8, 6)),
        Card("4090", 1.008e12, 165e12, 82.6e12, 0.77, 0.8, (8, 9)),
        Card("A100", 1.555e12, 312e12, 19.5e12, 0.38, 0.55, (8, 0)),
        Card("H100", 3.35e12, 989e12, 67e12, 0.6, 0.6, (9, 0)),
    )
}

# by row and card the launches, and the seconds as a CUDA graph and eager at harsh assumptions
Rows = dict[str, dict[str, tuple[int, tuple[float, float]]]]


def count(case: Case, on: On, capability: tuple[int, int] = (8, 0)) -> list[Work]:
    """Count the kernels of one forward of a case.

    Args:
        case: The case.
        on: Merges a model for a `with` block.
        capability: Compute capability of the card.
    """
    model = on_card(case.build(META))
    with on(model):
        with pretended():
            named, known = case.inputs(model)
        repeats = {model.get_submodule(path): times for path, times in case.repeats.items()}
        with pretended(known, capability):
            return counted(lambda: model(**named), repeats)


def estimate(case: Case, cards: Sequence[Card]) -> Rows:
    """Estimate launches and seconds of each row, by card."""
    estimates: Rows = {}
    works: dict[tuple[str, tuple[int, int] | None], list[Work]] = {}
    for card in cards:
        for row, on in ROWS.items():
            key = row, card.capability if row.startswith("default") else None
            if key not in works:
                works[key] = count(case, on, card.capability)
            launches = sum(one.launches for one in works[key])
            seconds = card.eager(works[key], 0), card.harsh.eager(works[key], LAUNCH)
            estimates.setdefault(row, {})[card.name] = launches, seconds
    return estimates


def table(row: str, estimates: Mapping[str, Rows]) -> str:
    """Format one row of all cases: times as fast as unmerged, and milliseconds of unmerged."""
    lines, cards = [], []
    for name, rows in estimates.items():
        counts = sorted({count for count, _ in rows[row].values()})
        cells = [name, " to ".join(f"{count:,}" for count in counts)]
        for card, (_, own) in rows[row].items():
            pairs = zip(rows["unmerged"][card][1], own, strict=True)
            gains = "/".join(f"{plain / took:.2f}" for plain, took in pairs)
            cells.append(f"{1e3 * own[0]:,.1f} ms" if row == "unmerged" else gains)
        lines.append(cells)
        cards = list(rows[row])
    return markdown_table([row, "launches", *cards], lines) + "\n"


@torch.no_grad()
def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", choices=CASES, default=CASES, metavar="NAME")
    parser.add_argument("--card", nargs="+", choices=CARDS, default=CARDS, metavar="NAME")
    args = parser.parse_args()
    estimates = {}
    for name in args.model:
        print(f"counting {name}", file=sys.stderr)
        estimates[name] = estimate(CASES[name](), [CARDS[card] for card in args.card])
    for row in ROWS:
        print(table(row, estimates))
    print("Estimated from counted kernels, not measured on a card.")


if __name__ == "__main__":
    main()
