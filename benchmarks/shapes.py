"""Attention and whole blocks at the shapes of published transformers, random weights, on the path
that users get.

`benchmarks.attention --shape NAME` prints what is here. It calls diffusers' own model of one or two
blocks up to the layer that is meant. So rotary positions and text come as the model makes them.
Then that layer, or its whole block, is timed alone on tokens of its own, under our hooks, a
rival's, or none. Shapes and token counts decide what merging costs and saves, weights do not.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks import methods
from benchmarks.peak_memory import peak_bytes
from benchmarks.timing import captured, interleaved
from mame_sd import MaMeConfig
from mame_sd.diffusion.apply_denoiser import mame
from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.eval.rivals.plans import means, random_cells, random_keys, strided, todo

SHARES = (0.5, 0.25)
WITHOUT = "no attention"
CELLS = {0.5: (1, 2), 0.25: (2, 2)}
On = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Shape:
    """One layer of a published model.

    Attributes:
        model: diffusers' class.
        config: its configuration but for the number of heads, which `heads` is.
        size: (h, w) of an image's tokens or (t, h, w) of a video's.
        text: tokens of text.
        inputs: makes a call's arguments, but for what all have.
        block: path of the block; `layer` that of its self-attention in it.
        width: configuration that follows from the width of a token.
        about: for the table.
    """

    model: str
    config: Mapping[str, Any]
    heads: int
    head: int
    size: tuple[int, ...]
    text: int
    inputs: Callable[[Shape], dict[str, Any]]
    block: str = "transformer_blocks.0"
    layer: str = "attn"
    width: Callable[[int], dict[str, Any]] = lambda width: {}
    about: str = ""

    @property
    def tokens(self) -> int:
        return math.prod(self.size)

    @property
    def dim(self) -> int:
        return self.heads * self.head

    def cut(self, tokens: int) -> Shape:
        """The shape with about so many image tokens: fewer frames of a video, a smaller square of
        an image.
        """
        *times, h, w = self.size
        if times and tokens >= h * w:
            return replace(self, size=(max(1, round(tokens / (h * w))), h, w))
        side = max(2, round(math.sqrt(tokens)))
        return replace(self, size=(*[1 for _ in times], side, side))

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model, seeded random weights, made in `dtype` on `device`."""
        config = {
            **self.config,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head,
            **self.width(self.dim),
        }
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                model: nn.Module = getattr(diffusers, self.model)(**config).eval()
        finally:
            torch.set_default_dtype(before)
        return model.to(dtype)


def _flux(shape: Shape) -> dict[str, Any]:
    h, w = shape.size
    ids = torch.zeros(h, w, 3)
    ids[..., 1], ids[..., 2] = torch.arange(h).unsqueeze(1), torch.arange(w)
    return {
        "hidden_states": torch.zeros(1, h * w, 64),
        "img_ids": ids.flatten(0, 1),
        "txt_ids": torch.zeros(shape.text, 3),
        "encoder_hidden_states": torch.zeros(1, shape.text, 4096),
        "pooled_projections": torch.zeros(1, 768),
    }


def _qwen(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_states": torch.zeros(1, shape.tokens, 64),
        "encoder_hidden_states": torch.zeros(1, shape.text, 3584),
        "encoder_hidden_states_mask": torch.ones(1, shape.text, dtype=torch.long),
        "img_shapes": [[(1, *shape.size)]],
    }


def _sd3(shape: Shape) -> dict[str, Any]:
    h, w = shape.size
    return {
        "hidden_states": torch.zeros(1, 16, 2 * h, 2 * w),
        "encoder_hidden_states": torch.zeros(1, shape.text, 4096),
        "pooled_projections": torch.zeros(1, 2048),
    }


def _wan(shape: Shape) -> dict[str, Any]:
    t, h, w = shape.size
    return {
        "hidden_states": torch.zeros(1, 16, t, 2 * h, 2 * w),
        "encoder_hidden_states": torch.zeros(1, shape.text, 4096),
    }


def _ltx(shape: Shape) -> dict[str, Any]:
    t, h, w = shape.size
    return {
        "hidden_states": torch.zeros(1, shape.tokens, 128),
        "encoder_hidden_states": torch.zeros(1, shape.text, 4096),
        "encoder_attention_mask": torch.ones(1, shape.text),
        "num_frames": t,
        "height": h,
        "width": w,
    }


# transformer/config.json of the models named, cut to the blocks that are needed
_SD35 = Shape(
    "SD3Transformer2DModel",
    {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 2,  # the last block gives no text
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
        "qk_norm": "rms_norm",
        "pos_embed_max_size": 192,
    },
    38,
    64,
    (64, 64),
    333,
    _sd3,
    width=lambda width: {"caption_projection_dim": width},
    about="Stable Diffusion 3.5 large at 1024 px",
)
_AXES = (16, 56, 56)  # rotary positions of heads of 128
SHAPES = {
    "flux": Shape(
        "FluxTransformer2DModel",
        {"num_layers": 1, "num_single_layers": 0, "axes_dims_rope": _AXES},
        24,
        128,
        (64, 64),
        512,
        _flux,
        about="FLUX.1 at 1024 px, double block",
    ),
    "qwen": Shape(
        "QwenImageTransformer2DModel",
        {"num_layers": 1, "axes_dims_rope": _AXES},
        24,
        128,
        (64, 64),
        256,
        _qwen,
        about="Qwen-Image at 1024 px",
    ),
    "sd3.5-medium": replace(
        _SD35,
        config={**_SD35.config, "pos_embed_max_size": 384, "dual_attention_layers": (0, 1)},
        heads=24,
        about="Stable Diffusion 3.5 medium at 1024 px; its block has a second attention",
    ),
    "sd3.5-large": _SD35,
    "wan": Shape(
        "WanTransformer3DModel",
        {"num_layers": 1, "ffn_dim": 8960},
        12,
        128,
        (21, 30, 52),
        512,
        _wan,
        "blocks.0",
        "attn1",
        about="Wan 2.1 1.3B, 81 frames at 480p",
    ),
    "ltx": Shape(
        "LTXVideoTransformer3DModel",
        {"num_layers": 1},
        32,
        64,
        (16, 16, 24),
        128,
        _ltx,
        layer="attn1",
        width=lambda width: {"cross_attention_dim": width},
        about="LTX-Video, 121 frames at 768 x 512",
    ),
}


class _Reached(Exception):
    """The layer was reached: nothing behind it needs to run."""


class Layer:
    """A layer (or its block) inside of its model.

    Args:
        whole: the block and not the self-attention alone.
    """

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, whole: bool = False
    ) -> None:
        self.shape, self.model, self.whole = shape, shape.build(device, dtype), whole
        made = {**shape.inputs(shape), "timestep": torch.ones(1)}
        self._inputs = {
            name: (
                value.to(device, dtype if value.is_floating_point() and "ids" not in name else None)
                if isinstance(value, Tensor)
                else value
            )
            for name, value in made.items()
        }
        block = self.model.get_submodule(shape.block)
        self.attention = block.get_submodule(shape.layer)
        self.module = block if whole else self.attention
        self._call: dict[str, Any] = {}
        self.reach()

    def reach(self) -> None:
        """Calls the model up to the attention: hooks learn how the tokens lie."""

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
            more = bound.pop("kwargs", {})
            given: dict[str, Any] = {**bound, **more}
            self._call = {name: value for name, value in given.items() if name != "self"}

        def stop(*_: Any) -> None:
            raise _Reached

        hooks = [
            self.module.register_forward_pre_hook(note, with_kwargs=True),
            self.attention.register_forward_pre_hook(stop),
        ]
        try:
            self.model(**self._inputs)
        except _Reached:
            pass
        finally:
            for hook in hooks:
                hook.remove()

    def tokens(self, seed: int) -> Tensor:
        """Tokens [1, L, C] of the layer's input: neighbours in a row, a column and time are alike,
        as in a picture.
        """
        like: Tensor = self._call["hidden_states"]
        generator = torch.Generator(like.device).manual_seed(seed)
        noise = torch.randn(like.shape, generator=generator, device=like.device)
        *times, _, w = self.shape.size
        rolls = [1, w, *([self.shape.tokens // times[0]] if times else [])]
        return sum((noise.roll(n, 1) for n in rolls), noise).to(like.dtype)

    def __call__(self, tokens: Tensor) -> Any:
        return self.module(**{**self._call, "hidden_states": tokens})


class NoAttention(TorchFunctionMode):
    """Attention over `length` keys or more gives its queries back: what is left is the layer
    without it.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key = (
                kwargs[name] if name in kwargs else args[i]
                for i, name in enumerate(("query", "key"))
            )
            if key.shape[-2] == query.shape[-2] >= self._length:
                return query
        return func(*args, **kwargs)


class FreeKeys(TorchFunctionMode):
    """The bound: attention over `tokens` keys or more reads the first share of the image's alone,
    as if merging cost nothing.
    """

    def __init__(self, tokens: int, share: float) -> None:
        super().__init__()
        self._tokens, self._dropped = tokens, tokens - round(share * tokens)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = {**dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)), **kwargs}
        kept = call["key"].shape[-2] - self._dropped
        if call["key"].shape[-2] == call["query"].shape[-2] >= self._tokens:
            call["key"], call["value"] = (
                call[name].narrow(-2, 0, kept) for name in ("key", "value")
            )
            mask = call.get("attn_mask")
            if mask is not None and mask.shape[-1] > 1:
                call["attn_mask"] = mask.narrow(-1, 0, kept)
        return func(call.pop("query"), call.pop("key"), call.pop("value"), **call)


def _free(model: nn.Module, tokens: int, share: float) -> FreeKeys:
    return FreeKeys(tokens, share)


def _without(model: nn.Module, tokens: int) -> NoAttention:
    return NoAttention(tokens)


def shape_methods(shape: Shape) -> dict[str, tuple[float, str, On]]:
    """(share of the image's keys kept, name of its free bound, how to apply it) by name."""
    none: On = lambda model: nullcontext()  # noqa: E731
    found: dict[str, tuple[float, str, On]] = {
        "sdpa": (1.0, "", none),
        "sdpa again": (1.0, "", none),
    }
    found[WITHOUT] = (0.0, "", partial(_without, tokens=shape.tokens))
    for share in SHARES:
        found[f"free {share:.2f}"] = (share, "", partial(_free, tokens=shape.tokens, share=share))
    for share in (0.625, 0.5, 0.25):  # whole tokens: projections shrink too, another bound
        on: On = partial(mame, config=MaMeConfig(keep=share, merge="qkv", min_tokens=1))
        found[f"mame qkv {share:g}"] = (share, "", on)
    for share in SHARES:
        bound, cell = f"free {share:.2f}", CELLS[share]
        ours: dict[str, dict[str, Any]] = {
            "mame kv": {"keep": share},
            "mame kv, pick": {"keep": share, "weights": "pick"},
        }
        for name, fields in ours.items():
            found[f"{name} {share:.2f}"] = (
                share,
                bound,
                partial(mame, config=MaMeConfig.from_dict({**fields, "min_tokens": 1})),
            )
        rivals = {
            "random keys": methods.rival(
                "random", random_keys, min_tokens=1, share=share, redraw=True
            ),
            "random of cells": methods.rival(
                "random", random_cells, min_tokens=1, cell=cell, redraw=True
            ),
            "stride": methods.rival("stride-kv", strided, min_tokens=1, cell=cell),
            "means": methods.rival("pool-kv", means, min_tokens=1, cell=cell),
        }
        if share == 0.25:
            rivals["todo"] = methods.rival("todo", todo, min_tokens=1, factor=2)
        found.update(
            {f"{name} {share:.2f}": (share, bound, method.on) for name, method in rivals.items()}
        )
        found[f"tomesd's form {share:.2f}"] = (
            share,
            "",
            methods.tomesd_form(share).on,
        )  # queries merge too: another bound
    return found


@torch.no_grad()
def measure_shape(
    layer: Layer, chosen: Mapping[str, tuple[float, str, On]], rounds: int, device: torch.device
) -> dict[str, Any]:
    """Figures of the `chosen` methods, by name: times, peak memory and the captured share of the
    free bound.
    """
    kept = {name: _checked(layer, name, on) for name, (_, _, on) in chosen.items()}
    seeds = count(1)

    @contextmanager
    def around(name: str) -> Iterator[None]:
        with chosen[name][2](layer.model):
            layer.reach()
            yield

    times = interleaved(
        dict.fromkeys(chosen, layer),
        lambda: layer.tokens(next(seeds)),
        rounds,
        device,
        around=around,
    )
    plain, rows = times["sdpa"].median, {}
    rest = times[WITHOUT].median
    for name, (share, bound, _) in chosen.items():
        tokens = layer.tokens(0)
        with around(name):
            memory = peak_bytes(partial(layer, tokens), device)
        rows[name] = {
            "share": share,
            "kept": kept[name],
            **times[name].to_dict(),
            "text": str(times[name]),
            "times_faster": plain / times[name].median,
            "attention_times_faster": (
                None if name == WITHOUT else (plain - rest) / (times[name].median - rest)
            ),
            "captured": (
                captured(plain, times[name].median, times[bound].median) if bound in times else None
            ),
            "peak_mib": memory / 2**20,
        }
    return rows


def _checked(layer: Layer, name: str, on: On) -> float | None:
    """The share of the tokens that a method's report tells; a first call has to be finite and, if
    it merges, to merge.
    """
    with on(layer.model) as handle:
        layer.reach()
        output = layer(layer.tokens(0))
        output = output if isinstance(output, Tensor) else output[0]
        if not bool(output.isfinite().all()):
            raise SystemExit(f"error: expected a finite output from {name}; nothing was timed")
        if not isinstance(handle, MaMeHandle):
            return None
        ran = [found for found in handle.report().layers if found.calls]
        notes = "; ".join(
            found.reason
            for found in ran
            if found.reason and "queries merge too" not in found.reason
        )
        if not ran or not all(found.merged for found in ran) or notes:
            raise SystemExit(
                f"error: expected {name} to merge in every layer, got {notes or ran}; nothing was"
                " timed"
            )
        return sum(found.share for found in ran) / len(ran)


def shape_table(shape: Shape, rows: Mapping[str, Any], whole: bool, dtype: str) -> str:
    """The figures of `measure_shape` as Markdown."""
    lines = [
        (
            f"{shape.about or shape.model}: {'x'.join(map(str, shape.size))} = {shape.tokens:,}"
            f" tokens, {shape.text} of text, d {shape.dim}, {shape.heads} heads, {dtype},"
            f" {'whole block' if whole else 'self-attention with its projections'}"
        ),
        "",
        (
            "| method | keys kept | median (quartiles), ms | times faster | attention alone |"
            " captured | peak, MiB |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        share, alone = (
            "" if row[key] is None else f"{row[key]:.2f}"
            for key in ("captured", "attention_times_faster")
        )
        kept = row["share"] if row["kept"] is None else row["kept"]
        lines.append(
            f"| {name} | {kept:.2f} | {row['text']} | {row['times_faster']:.2f} | {alone} | {share}"
            f" | {row['peak_mib']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def cost_rule(config: MaMeConfig) -> float:
    """From how many tokens on merged keys and values pay by the paper's cost condition, its
    similarity in tiles.

    Multiplications are alpha (1 - alpha) T^2 / L for merging and beta for attention, of 1. They pay
    where the sum is below 1, that is from L = alpha (1 - alpha) T^2 / (1 - beta) on. Here alpha and
    beta are the shares of destinations and of keys kept, T a tile's side.
    """
    assert config.keep is not None
    alpha = 1 / math.prod(config.stride)
    beta = max(alpha, config.keep)
    return alpha * (1 - alpha) * config.tiles**2 / (1 - beta) if config.tiles else 0.0


def measured_from(sweep: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> int | None:
    """The fewest swept tokens from which on `name` is faster than sdpa beyond the quartiles of
    both; None: nowhere.
    """
    paying: int | None = None
    for tokens, rows in sorted(sweep, key=lambda found: -found[0]):
        if rows[name]["quartiles_s"][1] >= rows["sdpa"]["quartiles_s"][0]:
            break
        paying = tokens
    return paying
