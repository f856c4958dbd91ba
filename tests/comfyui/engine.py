"""The real engine, if MAME_COMFYUI names a checkout of ComfyUI with its requirements installed.

Tiny models of its own classes have their sizes in `tiny.json`: those of "tiny" merge, and those of
"hidden" pass their attention to no node.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mame_sd import embedded_model_path

CHECKOUT = os.environ.get("MAME_COMFYUI", "")
needs_engine = pytest.mark.skipif(not CHECKOUT, reason="MAME_COMFYUI names no checkout of ComfyUI")


def engine() -> Any:
    """Import the package `comfy` of the checkout, on the CPU."""
    if CHECKOUT not in sys.path:
        sys.path.append(str(Path(CHECKOUT)))
    from comfy.cli_args import args

    args.cpu = True
    args.use_pytorch_cross_attention = True  # as diffusers does
    import comfy.model_base
    import comfy.model_patcher
    import comfy.sample
    import comfy.samplers
    import comfy.supported_models

    return comfy


@dataclass(frozen=True)
class Tiny:
    """A tiny model: its names in the engine, its size, the arguments of a call, and its samples."""

    config: str
    size: dict[str, Any]
    base: str = ""
    latent: tuple[int, ...] = (16, 16, 24)
    context: tuple[int, int] = (7, 24)
    extra: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    batch: int = 2


def _tensors(value: Any) -> Any:
    """Return a JSON value with {"ones": SHAPE} and {"zeros": SHAPE} as tensors."""
    if isinstance(value, list):
        return [_tensors(one) for one in value]
    if not isinstance(value, dict):
        return value
    shape: Any = value.get("ones")
    return torch.zeros(value["zeros"], dtype=torch.long) if shape is None else torch.ones(shape)


def _tiny(constants: Mapping[str, Any] | None = None, **fields: Any) -> Tiny:
    made = {name: _tensors(value) for name, value in (constants or {}).items()}
    return Tiny(constants=made, **fields)


TABLES = json.loads(Path(__file__).with_name("tiny.json").read_text(encoding="utf-8"))
TINY, HIDDEN = ({n: _tiny(**row) for n, row in TABLES[kind].items()} for kind in ("tiny", "hidden"))
# What 0.3.64, the oldest engine that the node runs in, does otherwise than 0.33.0 has it recorded.
OLDEST = "0.3.64"
OTHER_CALLS = {
    "OmniGen 2": "repeats the heads of keys",
    "Z-Image": "pads no image",
}
OTHER_MODELS = {
    "PixArt": "draws on CUDA",
    "Qwen-Image Layered": "has one layer",
    "Wan S2V": "lets no node change its attention",
    "Z-Image, longer contexts than the image": "takes no references",
    "Z-Image, references": "takes no references",
}


def skip_other(name: str, others: dict[str, str]) -> None:
    """Skip a test of what the oldest engine does otherwise, by `OTHER_CALLS` or `OTHER_MODELS`."""
    engine()
    from comfyui_version import __version__ as version

    if version == OLDEST and name in others:
        pytest.skip(f"{name} of {version} {others[name]}")


def patcher(name: str, **size: Any) -> Any:
    """ComfyUI's ModelPatcher around a tiny model of `TINY` or `HIDDEN`, with seeded weights."""
    comfy, tiny = engine(), (TINY | HIDDEN)[name]
    torch.manual_seed(0)
    model = _made(comfy, tiny, {**tiny.size, **size, "dtype": torch.float32})
    for key, tensor in model.diffusion_model.state_dict().items():
        if tensor.is_floating_point() and not key.startswith("__"):
            torch.nn.init.normal_(tensor, std=0.3)
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def _made(comfy: Any, tiny: Tiny, size: dict[str, Any]) -> Any:
    """Make the model without the arguments of `size` that an older engine doesn't know."""
    config = getattr(comfy.supported_models, tiny.config)(size)
    config.unet_config |= size  # over what the engine adds
    config.custom_operations = comfy.ops.disable_weight_init
    try:
        return getattr(comfy.model_base, tiny.base or tiny.config)(config, device="cpu")
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        return _made(comfy, tiny, {key: value for key, value in size.items() if key != unknown[1]})


def inputs(name: str, batch: int | None = None, seed: int = 1) -> dict[str, Any]:
    """Return the arguments of `apply_model`."""
    tiny, generator = (TINY | HIDDEN)[name], torch.Generator().manual_seed(seed)
    batch = tiny.batch if batch is None else batch
    values: dict[str, Any] = {
        "x": torch.randn(batch, *tiny.latent, generator=generator),
        "t": torch.full((batch,), 0.7),
        "c_crossattn": torch.randn(batch, *tiny.context, generator=generator),
    }
    extra = {
        key: None if shape is None else torch.randn(batch, *shape, generator=generator)
        for key, shape in tiny.extra.items()
    }
    return values | extra | tiny.constants


@torch.no_grad()
def call(model: Any, name: str, options: dict[str, Any] | None = None, **changes: Any) -> Tensor:
    """One call of the model with the options and wrappers that a sampler would give it."""
    comfy = engine()
    wrappers = {
        kind: {key: list(found) for key, found in keys.items()}
        for kind, keys in model.wrappers.items()
    }
    given = comfy.model_patcher.create_model_options_clone(model.model_options)[
        "transformer_options"
    ]
    values = inputs(name) | changes
    chunks = [0, 1][: len(values["x"])]
    given |= {"sigmas": values["t"], "cond_or_uncond": chunks, "wrappers": wrappers}
    given |= options or {}
    model.patch_model(load_weights=False)  # object patches, as where a sampler loads it
    try:
        result: Tensor = model.model.apply_model(**values, transformer_options=given)
    finally:
        model.unpatch_model(unpatch_weights=False)
    return result


def sampled(
    model: Any, name: str = "SD 1.5", steps: int = 3, cfg: float = 7.0, latent: tuple[int, ...] = ()
) -> Tensor:
    """Run the engine's own sampler on seeded noise."""
    comfy, tiny = engine(), TINY[name]
    noise = torch.randn(1, *(latent or tiny.latent), generator=torch.Generator().manual_seed(2))
    text = torch.randn(2, 1, *tiny.context, generator=torch.Generator().manual_seed(3))
    pooled = {"pooled_output": torch.zeros(1, 48)} if "y" in tiny.extra else {}
    positive, negative = ([[one, dict(pooled)]] for one in text)
    with torch.no_grad():
        result: Tensor = comfy.sample.sample(
            model,
            noise,
            steps,
            cfg,
            "euler",
            "normal",
            positive,
            negative,
            torch.zeros_like(noise),
            seed=0,
        )
    return result


def embedded_transformer() -> Any:
    """Load the embedded transformer's weights into ComfyUI's SD3, by the engine's names."""
    comfy, path = engine(), Path(embedded_model_path("transformer")) / "transformer"
    weights = comfy.utils.load_torch_file(str(path / "diffusion_pytorch_model.safetensors"))
    texts, last = weights["context_embedder.weight"].shape, 5
    linear = {"in_features": texts[1], "out_features": texts[0]}
    size = {"depth": 4, "num_blocks": last + 1, "in_channels": 4, "num_patches": 32 * 32}
    size |= {"pos_embed_max_size": 32, "out_channels": 4}
    size["context_embedder_config"] = {"target": "torch.nn.Linear", "params": linear}
    size["adm_in_channels"] = weights["time_text_embed.text_embedder.linear_1.weight"].shape[1]
    model = patcher("SD3", **size, qk_norm="rms", x_block_self_attn_layers=[])
    names = comfy.utils.mmdit_to_diffusers(size)
    swap = next(to[2] for to in names.values() if isinstance(to, tuple) and len(to) == 3)
    for end in ("weight", "bias"):  # the table takes the block of number `depth` for the last
        for i in range(last + 1):
            to = f"joint_blocks.{i}.context_block.adaLN_modulation.1.{end}"
            theirs = f"transformer_blocks.{i}.norm1_context.linear.{end}"
            names[theirs] = (to, None, swap) if i == last else to
    _load(model, weights, names)
    return model


def _load(model: Any, weights: dict[str, Tensor], names: dict[str, Any]) -> None:
    """Fill the model with all of `weights` by the engine's names, parts and changes of them."""
    ours, left = dict(model.model.diffusion_model.state_dict()), set(weights)
    for theirs in left & set(names):
        entry = names[theirs]
        name, part, change = (*(entry if isinstance(entry, tuple) else (entry,)), None, None)[:3]
        value = weights[theirs].float()
        value = value if change is None else change(value)
        target = ours[name] if part is None else ours[name].narrow(*part)
        target.copy_(value.reshape(target.shape))
        left.remove(theirs)
    assert not left, sorted(left)
