"""A file of settings by layer in the node: diffusers' names of layers are the engine's blocks."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from mame_sd import apply_mame
from tests.comfyui.interface import (
    Model,
    SpatialTransformer,
    applied,
    attention_pytorch,
    network,
    optimized_attention,
)

# By model: what the engine's detection gives of it, and diffusers' config.
SD = {"res": [2] * 4, "depths": [1] * 6 + [0] * 2, "out": [1] * 9 + [0] * 3, "middle": 1}
XL = {
    "res": [2] * 3,
    "depths": [0, 0, 2, 2, 10, 10],
    "out": [0] * 3 + [2] * 3 + [10] * 3,
    "middle": 10,
}
OF_XL = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "transformer_layers_per_block": [1, 2, 10],
    "cross_attention_dim": 2048,
}
ONE = {"res": [1] * 4, "depths": [1] * 3 + [0], "out": [1] * 6 + [0] * 2, "middle": 1}
UNETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SD 1.5": (SD, {}),
    "SDXL": (XL, OF_XL),
    "one ResNet each": (ONE, {"layers_per_block": 1}),
}
# By diffusers' class: the engine's class, the numbers of its blocks by attribute, and the config.
TWO = {"double_blocks": 2, "single_blocks": 3}
OF_TWO = {"num_layers": 2, "num_single_layers": 3}
OF_ONE = {"num_layers": 2}
QWEN, WAN, SD3 = "QwenImageTransformer2DModel", "WanModel", "OpenAISignatureMMDITWrapper"
OF_SD3 = {"num_layers": 3, "dual_attention_layers": (0, 1)}
OF_AURAFLOW = {"num_mmdit_layers": 2, "num_single_dit_layers": 3}
TRANSFORMERS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "FluxTransformer2DModel": ("Flux", TWO, OF_TWO),
    "Flux2Transformer2DModel": ("Flux", TWO, OF_TWO),
    "LongCatImageTransformer2DModel": ("Flux", TWO, OF_TWO),
    "ChromaTransformer2DModel": ("Chroma", TWO, OF_TWO),
    "HunyuanVideoTransformer3DModel": ("HunyuanVideo", TWO, OF_TWO),
    "HunyuanVideo15Transformer3DModel": ("HunyuanVideo", {"double_blocks": 2}, OF_ONE),
    "HunyuanImageTransformer2DModel": ("HunyuanVideo", TWO, OF_TWO),
    "QwenImageTransformer2DModel": (QWEN, {"transformer_blocks": 2}, OF_ONE),
    "WanTransformer3DModel": (WAN, {"blocks": 2}, OF_ONE),
    "SD3Transformer2DModel": (SD3, {"joint_blocks": 3}, OF_SD3),
    "AuraFlowTransformer2DModel": ("MMDiT", {"double_layers": 2, "single_layers": 3}, OF_AURAFLOW),
}


class UNetModel(nn.Module):
    """The engine's UNet, as it builds one of these numbers: where it has transformer layers."""

    def __init__(self, res: list[int], depths: list[int], out: list[int], middle: int) -> None:
        super().__init__()
        left, self.num_res_blocks = list(depths), res
        self.input_blocks = nn.ModuleList([nn.Identity()])
        for resnets in res:
            self.input_blocks.extend(layers(left.pop(0)) for _ in range(resnets))
            self.input_blocks.append(nn.Identity())  # a downsampler
        self.input_blocks = self.input_blocks[:-1]
        self.middle_block = layers(middle)
        self.output_blocks = nn.ModuleList(map(layers, reversed(out)))


def layers(count: int) -> nn.Module:
    return SpatialTransformer(*(nn.Identity() for _ in range(count))) if count else nn.Identity()


def engine_model(kind: str, counts: dict[str, int], twice: int = 0) -> nn.Module:
    """Make a transformer's blocks; those in `twice` have a second attention over the image."""
    blocks = {
        name: [
            SimpleNamespace(x_block=SimpleNamespace(x_block_self_attn=i < twice)) for i in range(n)
        ]
        for name, n in counts.items()
    }
    return network(kind, patch_size=2, **blocks)


def of_diffusers(kind: str, config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return apply_mame(getattr(diffusers, kind)(**config))


def named(package: Any, model: nn.Module) -> Any:
    models = importlib.import_module(f"{package.__name__}.comfyui.models")
    return models.layout_of(model)[1]


@pytest.mark.parametrize("name", [*UNETS, *TRANSFORMERS])
def test_layers_are_those_of_diffusers(package: Any, name: str) -> None:
    if name in UNETS:
        numbers, config = UNETS[name]
        kind, model = "UNet2DConditionModel", UNetModel(**numbers)
    else:
        ours, counts, config = TRANSFORMERS[name]
        kind = name
        model = engine_model(ours, counts, len(config.get("dual_attention_layers", ())))
    found, handle = named(package, model), of_diffusers(kind, config)
    assert list(found.names.values()) == [stats.name for stats in handle.report().layers]
    assert kind in found.models
    assert f"{kind} with {len(found.names)} self-attentions" == handle.described


def written(folder: Path, **values: Any) -> str:
    path = folder / "settings.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


def lengths(model: Model, blocks: list[dict[str, Any]], *counts: int) -> list[int]:
    """Return the number of keys in each block's attention, of `counts` tokens or 7 + 96."""
    seen: list[int] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, heads: int, **kwargs: Any) -> Tensor:
        seen.append(k.shape[2])
        return attention_pytorch(q, k, v, heads, **kwargs)

    q, k, v = torch.randn(3, 2, 2, 103, 32, generator=torch.Generator().manual_seed(0)).unbind()

    def attend(given: dict[str, Any]) -> None:
        for block, count in zip(blocks, counts or [103] * len(blocks), strict=True):
            how: Any = {"skip_reshape": True, "transformer_options": {**given, **block}}
            these = (t[:, :, -count:] for t in (q, k, v))
            optimized_attention(*these, 2, function=noted, **how)

    model.sample(
        lambda run: run.apply_model(
            torch.zeros(2, 16, 16, 24), 0.5, attend, context=torch.zeros(2, 7, 24)
        )
    )
    return seen


def test_each_layer_merges_as_the_file_says(node: Any, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    path = written(
        tmp_path,
        keep=0.5,
        min_tokens=64,
        layers={"transformer_blocks.0": False, "single_transformer_blocks.[12]": {"keep": 0.25}},
        calibrated_for="FluxTransformer2DModel with 5 self-attentions",
        about={"model": "a tiny one"},
    )
    model = applied(node, Model(engine_model("Flux", TWO)), settings=path)
    every = [("double", 0), ("double", 1), ("single", 0), ("single", 1), ("single", 2)]
    kept = dict(zip(every, (103, 7 + 48, 7 + 48, 7 + 24, 7 + 24), strict=True))
    for order in (every, every[::-1], every[2:]):
        blocks = [{"block_type": kind, "block_index": i} for kind, i in order]
        assert lengths(model, blocks) == [kept[key] for key in order]
    assert caplog.messages[0] == ("MaMe merged 96 -> 24 keys at 8 x 12, 96 -> 48 keys at 8 x 12")
    assert lengths(applied(node, model), [{}]) == [7 + 24]  # the file is off again


def test_the_second_attention_of_a_block_has_settings_of_its_own(node: Any, tmp_path: Path) -> None:
    rules = {"transformer_blocks.0.attn": {"keep": 0.5}, "transformer_blocks.0.attn2": False}
    network = engine_model(SD3, {"joint_blocks": 1}, twice=1)
    model = applied(node, Model(network), settings=written(tmp_path, min_tokens=64, layers=rules))
    block = {"block_type": "double", "block_index": 0}
    assert lengths(model, [block, block], 103, 96) == [7 + 48, 96]


def test_an_engine_that_names_no_block_is_a_warning(node: Any, tmp_path: Path, caplog: Any) -> None:
    path = written(tmp_path, min_tokens=64, layers={"transformer_blocks.0.attn": {"keep": 0.5}})
    model = applied(node, Model(engine_model("Flux", TWO)), settings=path)
    assert lengths(model, [{}, {}]) == [103, 103]
    assert caplog.messages == [
        "MaMe merged nothing: the engine does not say which of its blocks attends; update ComfyUI"
    ]


FLUX = "FluxTransformer2DModel with 5 self-attentions"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (
            "Flux",
            '{"calibrated_for": "FluxTransformer2DModel with 57 self-attentions"}',
            f"calibrated_for: expected settings that were found for {FLUX} or .* with 57 self",
        ),
        ("Flux", '{"layers": {"blocks.7": false}}', "expected patterns .* of Flux .*'blocks.7'"),
        ("Flux", '{"layers": {"*": {"kep": 1}}}', r"layers: \*: unknown setting 'kep'; did you me"),
        ("Flux", None, "settings: .*settings.json: expected a .json file of settings"),
        ("Flux", '{"layers": {"*": {"tau": 0.8}}}', "tau: expected mode keep for Flux, in which"),
        ("Flux", '{"references": 0.5}', "settings: references: expected none of refer"),
        ("NextDiT", '{"layers": {"layers.0": false}}', "Lumina 2 or Z-Image has no map from diff"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(
    node: Any, tmp_path: Path, kind: str, text: str | None, message: str
) -> None:
    path = tmp_path / "settings.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    model = Model(engine_model(kind, TWO))
    with pytest.raises(ValueError, match=message) as raised:
        applied(node, model, settings=str(path))
    assert "\n" not in str(raised.value)


def test_the_editor_says_what_is_wrong_with_a_file(
    package: Any, node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(node)
    folder = SimpleNamespace(get_input_directory=lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "folder_paths", folder)
    path = written(tmp_path, keep=0.5)
    assert kind.VALIDATE_INPUTS() is True
    assert kind.VALIDATE_INPUTS(settings="settings.json") is True
    assert kind.VALIDATE_INPUTS(settings=path) is True
    said = kind.VALIDATE_INPUTS(settings="other.json")
    assert said.startswith(f"settings: {tmp_path / 'other.json'}: expected a .json file")
    before = kind.IS_CHANGED(settings="settings.json", keep=0.25)
    os.utime(path, (1, 1))
    assert before != kind.IS_CHANGED(settings="settings.json", keep=0.25) == 1.0
    assert kind.IS_CHANGED() == kind.IS_CHANGED(settings="")
